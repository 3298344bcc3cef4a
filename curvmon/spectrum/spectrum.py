"""Extremal eigenvalues and trace of the loss Hessian w.r.t. the parameters, and the top Gauss-Newton eigenvalue."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from curvmon.errors import DoubleBackwardError, InputError
from curvmon.graph.arguments import check_budget, check_integer
from curvmon.isolation.freed_memory import return_freed_memory
from curvmon.numerics import norm
from curvmon.operators.batching import Batched, check_batched
from curvmon.operators.derivative import Derivative, Way, note_that_starts_with, with_fallback
from curvmon.operators.gradient_differences import KINDS, DifferenceOperator
from curvmon.operators.parameter_hessian import NOT_SYMMETRIC, ParameterOperator, open_parameters
from curvmon.operators.session import Loss
from curvmon.records import Spectrum
from curvmon.spectrum.eigenvalue_search import TRACE_PROBES, Accuracy, Eigenpairs, EigenvalueSearch
from curvmon.spectrum.findings import Findings
from curvmon.spectrum.parameter_groups import Groups, group_spectrum, off_diagonal_share, resolve_groups
from curvmon.spectrum.search_start import starting_vectors
from curvmon.spectrum.stability_limit import stability_limit
from curvmon.spectrum.trace import FULL, Effort, LayerwiseError, TraceAndStart, layerwise_trace

DIFFERENCES_RTOL = 0.05
"""relative residual that differences can reach: five times the error of a product, and more for small eigenvalues"""


def spectrum(
    model: nn.Module,
    batch: Any,
    *,
    loss: Loss,
    k: int = 5,
    ggn: bool = True,
    trace: bool = True,
    density: bool = False,
    start: Spectrum | Tensor | None = None,
    seed: int = 0,
    optimizer: torch.optim.Optimizer | None = None,
    groups: Groups | None = None,
    more_batches: Sequence[Any] = (),
    rtol: float = 1e-4,
    max_hvps: int = 300,
    verify: bool = True,
    smallest: bool = True,
    batched: Batched = "auto",
    derivative: Derivative = "auto",
    on_product: Callable[[int], None] | None = None,
) -> Spectrum:
    """The k largest eigenvalues of H = d²L/dθ² and the smallest one, its trace, and the top Gauss-Newton eigenvalue.

    Lanczos' method with full reorthogonalisation: one Hessian-vector product (HVP) per step, at most k + 20 vectors of
    the size of the parameters in memory. θ are the parameters that require gradients. The model is measured in eval
    mode, in float32 or better, and left as it was.

    An eigenvalue is `converged` if ‖Hv - λv‖ is below `rtol` |λ| or below 1e-4 of the largest magnitude (the smallest
    eigenvalue: `rtol` of the largest magnitude). Then H has an eigenvalue that close. It does not follow that none is
    missing: a Krylov space contains one copy of a multiple eigenvalue, and an eigenvector nearly orthogonal to its
    start appears late. With `verify`, another random start, orthogonal to the eigenvectors, searches for others until
    one finds nothing. Otherwise a note says so.

    Args:
        model: any module.
        batch: whatever `loss` takes.
        loss: `loss(model, batch)` returns a scalar tensor.
        k: number of eigenvalues, the largest in value (`Spectrum.largest_magnitude` is the largest in magnitude).
        ggn: also the top eigenvalue of the Gauss-Newton part, usually a few HVPs more.
        trace: also the trace: exact for the Gauss-Newton part where the outputs are few, ten random probes for the rest
            (one if the network is piecewise linear: then the rest is zero). If the output of the network is not known,
            exact on the Krylov space, and ten probes for its complement. Where the outputs are few, the same backward
            passes estimate the leading Gauss-Newton eigenvectors as a starting vector: one HVP more, and fewer in the
            search.
        density: also the distribution of all eigenvalues, by stochastic Lanczos quadrature: 80 HVPs more.
        start: warm start: an earlier result for the same parameters, whose eigenvectors are used, or a flat vector. By
            default the estimate of `trace`, or the gradient.
        seed: seed for the random vectors of the search and of the trace.
        optimizer: compare λ_1 with its largest stable sharpness, see `stability_limit`. Adaptive optimizers cost some
            HVPs more, for the eigenvalue of the preconditioned Hessian.
        groups: names or patterns of modules or parameters (["stem", "layer*"]), or a mapping from group names to such:
            also the eigenvalues of each group's diagonal block, and Φ, the share of curvature between the groups. Costs
            as many HVPs per group as for all parameters, but cheaper ones, and ten more for Φ.
        more_batches: others like `batch`; H is then the Hessian of the mean loss over all samples. Each adds a forward
            and a backward pass to every HVP, but no memory.
        rtol: relative residual that counts as converged.
        max_hvps: most HVPs for the eigenvalues; those that have not converged by then are marked.
        verify: search for missing eigenvalues; costs about as much as the first search.
        smallest: continue until the smallest eigenvalue has converged, too; otherwise it is the estimate at that point.
        batched: several HVPs in one launch (True), one by one (False), or "auto": several on accelerators. Then the
            search starts with several vectors and takes more HVPs, in fewer launches.
        derivative: "double": differentiate the gradient. "differences": differences of gradients, for operations that
            cannot be differentiated twice; their error, a few thousandths of an HVP, is part of the residuals. "auto":
            the first where it works, else the second; a note names the operation.
        on_product: called with the number of HVPs as they are made, for a progress bar.

    Raises:
        InputError: if an argument makes no sense.
        LossError: if the loss does not depend on the parameters, or is not deterministic.
        DivergedError: if the loss is not finite.
        DifferencesError: with "differences", if they are not exact enough.
        DoubleBackwardError: if an operation of the loss cannot be differentiated twice, nor do differences replace
            that: they are not exact enough, or gradients jump at kinks.
        NonFiniteError: if an HVP is not finite although the loss is.

    Example:
        >>> import torch, curvmon
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> batch = torch.randn(64, 4), torch.randn(64, 1)
        >>> s = curvmon.spectrum(net, batch, loss=lambda net, b: torch.nn.functional.mse_loss(net(b[0]), b[1]), k=3)
        >>> s.eigenvalues.shape, s.converged.all().item()
        (torch.Size([3]), True)
    """
    check_budget(rtol, max_hvps, seed)
    check_batched(batched)
    for name, value in (("k", k), ("max_hvps", max_hvps)):
        check_integer(name, value)
        if value < 1:
            raise InputError(f"{name} must be at least 1, not {value}")

    def run(way: Way, why: list[str]) -> Spectrum:
        trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad] if why else []
        result = run_spectrum(
            model,
            [batch, *more_batches],
            loss=loss,
            k=k,
            ggn=ggn,
            trace=trace,
            density=density,
            start=start,
            seed=seed,
            optimizer=optimizer,
            groups=groups,
            accuracy=Accuracy.uniform(rtol if way == "double" else max(rtol, DIFFERENCES_RTOL)),
            max_hvps=max_hvps,
            verify=verify,
            smallest=smallest,
            effort=FULL,
            findings=Findings(trained, verdict="" if why else None),  # nothing to compare differences with
            batched=batched,
            kind=KINDS[way],
            on_product=on_product,
        )
        return replace(result, notes=(*why, *result.notes))

    result: Spectrum = with_fallback(run, derivative, note_that_starts_with(NOT_SYMMETRIC))
    return result


def run_spectrum(
    model: nn.Module,
    batches: Sequence[Any],
    *,
    loss: Loss,
    k: int,
    ggn: bool,
    trace: bool,
    density: bool,
    start: Spectrum | Tensor | None,
    seed: int,
    optimizer: torch.optim.Optimizer | None,
    groups: Groups | None,
    accuracy: Accuracy,
    max_hvps: int,
    verify: bool,
    smallest: bool,
    effort: Effort,
    findings: Findings,
    batched: Batched = "auto",
    kind: type[ParameterOperator] = ParameterOperator,
    half_from: float = math.inf,
    on_product: Callable[[int], None] | None,
) -> Spectrum:
    """`spectrum` for a monitor, which says how exact eigenvalues and trace have to be, and keeps `findings`.

    `kind`: how HVPs are computed. `half_from`: number of parameters from which on
    the vectors of the search are stored in half precision.
    """
    began = time.perf_counter()
    notes: list[str] = []
    with open_parameters(model, batches, loss=loss, on_product=on_product, batched=batched, kind=kind) as operator:
        notes.extend(operator.notes)
        findings.prepare(operator)
        members = {} if groups is None else resolve_groups(operator.names, groups)
        gradient_norm = norm(operator.gradient)
        generator = torch.Generator("cpu").manual_seed(seed)
        storage = torch.float16 if operator.dtype == torch.float32 and operator.size >= half_from else None
        search = EigenvalueSearch(operator, k, accuracy, max_hvps, generator, smallest, operator.width, storage)
        estimate: TraceAndStart | None = None
        # with few parameters, the probes of `deflated_trace` may span all directions
        differences = operator if isinstance(operator, DifferenceOperator) else None
        suspect = differences is not None and operator.custom_functions
        if trace and operator.has_ggn and not suspect and operator.size > search.capacity + TRACE_PROBES:
            own = torch.Generator("cpu").manual_seed(seed + 1)  # the search draws the same numbers without a trace
            estimate = layerwise_if_possible(operator, own, k if start is None else 0, effort, findings, notes)
            return_freed_memory(operator.device)
        vector = None if estimate is None else estimate.start
        space = search.krylov_space(starting_vectors(operator, gradient_norm, search, start, vector))
        del vector
        estimate = None if estimate is None else estimate._replace(start=None)
        total = total_stderr = math.nan
        if estimate is not None:
            total, total_stderr = estimate.value, estimate.stderr
        elif trace:
            total, total_stderr = search.deflated_trace(space, effort.probes)
        notes += operator.notes_on_symmetry(space.asymmetry)
        if differences is not None:
            findings.verdict, findings.step = differences.verdict, differences.step
            findings.detaches = differences.detaches
        pairs = search.extract(space)
        del space  # its memory
        pairs, verified = search.verified(pairs, verify)
        required = pairs.converged if smallest else pairs.converged[:k]
        if not required.all():
            notes.append(f"{int((~required).sum())} of {len(required)} values have not converged")
        elif not verified:
            notes.append(
                "not verified: an eigenvalue of multiplicity two may be listed once, and one whose eigenvector is "
                "nearly orthogonal to the starting vector may be missing"
            )
        ggn_eigenvalue = math.nan
        if ggn and operator.has_ggn:
            try:
                ggn_eigenvalue, ggn_converged = search.largest(operator.unchecked_ggn, pairs.vectors[0])
                notes += [] if ggn_converged else [f"ggn_eigenvalue has not converged to {accuracy.others:.0%}"]
            except DoubleBackwardError as error:  # of the loss; H needs no second derivative then
                if differences is None:
                    raise
                notes.append(f"ggn_eigenvalue is NaN: {error}")
        elif ggn:
            notes.append(
                "ggn_eigenvalue is NaN: the output of the network is not known, or part of the loss bypasses it (no "
                "torch loss function was called, or another term is written by hand)"
            )
        limit = ratio = math.nan
        if optimizer is not None:
            limit, ratio, reason = _compare_with_limit(search, operator, optimizer, pairs)
            notes.append(f"stability limit: {reason}")
        distribution = search.density() if density else None
        blocks = {
            name: group_spectrum(
                operator, indices, k=k, accuracy=accuracy, max_hvps=max_hvps, verify=verify, generator=generator
            )
            for name, indices in members.items()
        }
        phi = phi_stderr = math.nan
        if members:
            phi, phi_stderr = off_diagonal_share(operator, list(members.values()), pairs, generator)
        unconverged = [name for name, block in blocks.items() if not block.converged.all()]
        if unconverged:
            notes.append(f"values of the groups {', '.join(unconverged)} have not converged")
        if operator.custom_functions and differences is None:
            notes.append(
                f"custom autograd functions ({', '.join(operator.custom_functions)}): the results are correct only if "
                f"their backward is differentiable"
            )
    top = min(k, len(pairs.values))
    sharpness = pairs.values[0].item()
    return Spectrum(
        eigenvalues=pairs.values[:top],
        smallest=pairs.values[-1].item(),
        residuals=pairs.residuals[:top],
        converged=pairs.converged[:top],
        smallest_residual=pairs.residuals[-1].item(),
        smallest_converged=bool(pairs.converged[-1]),
        eigenvectors=torch.stack(pairs.vectors[:top], dim=1).to(operator.dtype),
        smallest_eigenvector=pairs.vectors[-1].to(operator.dtype, copy=True),
        gradient_norm=gradient_norm,
        ggn_eigenvalue=ggn_eigenvalue,
        ggn_error=abs(sharpness - ggn_eigenvalue) / abs(sharpness) if sharpness else math.nan,
        trace=total,
        trace_stderr=total_stderr,
        density=distribution,
        stability_limit=limit,
        stability_ratio=ratio,
        groups=blocks,
        phi=phi,
        phi_stderr=phi_stderr,
        parameters=operator.names,
        loss=operator.loss,
        hvps=operator.products,
        seconds=time.perf_counter() - began,
        notes=tuple(notes),
    )


def _compare_with_limit(
    search: EigenvalueSearch, operator: ParameterOperator, optimizer: torch.optim.Optimizer, pairs: Eigenpairs
) -> tuple[float, float, str]:
    """The largest stable sharpness, λ_1 / limit, and the formula; with a preconditioner P, λ_1 of P^-1/2 H P^-1/2."""
    rule = stability_limit(optimizer)
    if math.isnan(rule.limit):
        return math.nan, math.nan, rule.reason
    updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if all(id(p) in updated for p in operator.originals) and (rule.preconditioner is None or rule.common):
        rate, decay = rule.common or (1.0, 0.0)
        return rule.limit, rate * (pairs.values[0].item() + decay) / rule.limit, rule.reason
    # a parameter that the optimizer does not update cannot make it unstable
    weights = rule.preconditioner or {p: torch.ones_like(p) for p in operator.originals if id(p) in updated}
    root = operator.flat(weights, math.inf).rsqrt().unsqueeze(1)
    if not root.any():
        return rule.limit, math.nan, "the optimizer updates none of these parameters"
    shift = operator.flat(rule.decay, 0.0).unsqueeze(1)
    first = pairs.vectors[0].unsqueeze(1)
    start = torch.where(root > 0, first / root.clamp_min(torch.finfo(root.dtype).tiny), 0.0)

    def preconditioned(z: Tensor) -> Tensor:
        return root * (operator.unchecked(root * z) + shift * root * z)

    top, converged = search.largest(preconditioned, start.squeeze(1))
    return rule.limit, top / rule.limit, rule.reason + ("" if converged else " (its eigenvalue has not converged)")


def layerwise_if_possible(
    operator: ParameterOperator,
    generator: torch.Generator,
    k: int,
    effort: Effort,
    findings: Findings,
    notes: list[str],
) -> TraceAndStart | None:
    """The trace by layers where that works; `findings` keeps whether it does."""
    estimate: TraceAndStart | None = None
    if findings.layerwise is not False:
        try:
            estimate = layerwise_trace(operator, generator, k, effort, checked=findings.layerwise is True)
            findings.layerwise = estimate is not None
        except LayerwiseError as error:
            findings.layerwise = False
            findings.no_layers = f"trace by probes of the whole Hessian, so with a larger error: {error}"
    notes.extend([findings.no_layers] if findings.no_layers else [])
    return estimate

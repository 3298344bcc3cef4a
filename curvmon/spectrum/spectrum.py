"""The ends of the spectrum of the loss Hessian by the parameters, its trace, and the same for its Gauss-Newton part."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from curvmon.errors import InputError
from curvmon.graph.arguments import check_budget, check_integer
from curvmon.numerics import norm
from curvmon.operators.parameter_hessian import ParameterOperator, open_parameters
from curvmon.operators.session import Loss
from curvmon.records import Spectrum
from curvmon.spectrum.eigenvalue_search import TRACE_PROBES, Found, Search
from curvmon.spectrum.initial_block import Beginning
from curvmon.spectrum.layer_agreement import Agreement
from curvmon.spectrum.parameter_groups import Groups, group_spectrum, off_diagonal_share, resolve_groups
from curvmon.spectrum.stability_limit import stability_limit
from curvmon.spectrum.trace import trace_of_parts

SYMMETRIC = 1e-3
"""relative; rounding is 1e-6 in float32, a wrong double backward off by more"""


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
    on_product: Callable[[int], None] | None = None,
) -> Spectrum:
    """The k largest eigenvalues of d²L/dθ² and the smallest, the top one of its Gauss-Newton part, and the trace.

    By Lanczos' method with full reorthogonalisation: one Hessian-vector product a step, at most k + 20 vectors of the
    size of the parameters in memory. θ are the parameters that require gradients. The model is as before afterwards; it
    is measured in eval mode, in float32 or better.

    An eigenvalue is `converged` if ‖Hv - λv‖ is below `rtol` times its own magnitude, or below 1e-4 of the largest (the
    smallest eigenvalue: `rtol` of the largest): then there is an eigenvalue that close. That none is missing is another
    matter: a Krylov space holds one copy of a multiple eigenvalue, and one to which its start is nearly orthogonal
    comes late. So with `verify` a second random start, orthogonal to what was found, looks for others, until one finds
    nothing; otherwise a note says so.

    Args:
        model: any module.
        batch: whatever `loss` takes.
        loss: `loss(model, batch)` returns a scalar tensor.
        k: how many eigenvalues, counted from the largest in value (`Spectrum.largest_magnitude` is another thing).
        ggn: also the top eigenvalue of the Gauss-Newton part, as a rule a few products more.
        trace: also the trace: that of the Gauss-Newton part, exactly where the outputs are few, and ten random probes
            for the rest (one if the network is piecewise linear: then there is none). Where the output is not known,
            exactly on the Krylov space and by ten probes outside. Where the outputs are few, the same passes tell
            roughly the leading eigenvectors of the Gauss-Newton part, and the search begins there: for one product
            more, a few less in the search.
        density: also the distribution of all eigenvalues, by stochastic Lanczos quadrature: 80 products more.
        start: an earlier result for the same parameters; its eigenvectors are where to begin. Or a flat vector. By
            default, what the trace tells (see there), or the gradient.
        seed: of the start vector and the probes.
        optimizer: whose limit of stability to compare with; see `stability_limit`. Adam and the like cost some products
            more, for the eigenvalue of the preconditioned Hessian.
        groups: names or patterns of modules or parameters (["stem", "layer*"]), or a mapping of group names to such:
            also the eigenvalues of each group's own block, and Φ, the share of curvature between the groups. Costs as
            many products per group as for all parameters, cheaper ones, and ten more for Φ.
        more_batches: others like `batch`; the Hessian is then that of the mean over all their samples. A product takes
            one more forward and backward pass for each of them, but no more memory.
        rtol: relative size of a residual that counts as converged.
        max_hvps: stop before this many products for the eigenvalues; what has not converged by then says so.
        verify: look for eigenvalues that are missing, at about the price of finding them.
        smallest: go on until the smallest one has converged too; otherwise it is reported as far as it is known then.
        on_product: called with 1 after every product, for a progress bar.

    Example:
        >>> import torch, curvmon
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> batch = torch.randn(64, 4), torch.randn(64, 1)
        >>> s = curvmon.spectrum(net, batch, loss=lambda net, b: torch.nn.functional.mse_loss(net(b[0]), b[1]), k=3)
        >>> s.eigenvalues.shape, s.converged.all().item()
        (torch.Size([3]), True)
    """
    began = time.perf_counter()
    check_budget(rtol, max_hvps, seed)
    for name, value in (("k", k), ("max_hvps", max_hvps)):
        check_integer(name, value)
        if value < 1:
            raise InputError(f"{name} must be at least 1, not {value}")
    notes: list[str] = []
    with open_parameters(model, [batch, *more_batches], loss=loss) as operator:
        members = {} if groups is None else resolve_groups(operator.names, groups)
        if on_product is not None:
            operator.on_product = on_product
        generator = torch.Generator("cpu").manual_seed(seed)
        search = Search(operator, k, rtol, max_hvps, generator, smallest)
        # what makes the trace also tells where to begin, so it comes first
        parts, first = _parts(operator, search, generator, k, start is None, notes) if trace else (None, None)
        space = search.ends(_start(operator, start) if first is None else first)
        total, stderr = math.nan, math.nan
        if trace:
            total, stderr = search.trace(space) if parts is None else parts
        if space.asymmetry > SYMMETRIC:
            notes.append(
                f"suspect: products with H are not symmetric (by {space.asymmetry:.2g} of its norm), so some operation "
                f"has a wrong double backward, and no number here is sure"
            )
        found, verified = search.verified(search.extract(space), verify)
        converged = found.settled(rtol, k)
        waited = converged if smallest else converged[:k]
        if not waited.all():
            notes.append(f"{int((~waited).sum())} of {len(waited)} values have not converged to rtol={rtol:g}")
        elif not verified:
            notes.append(
                "not verified: an eigenvalue of multiplicity two may be listed once, and one that the start vector "
                "hardly sees be missed"
            )
        top_ggn = error = math.nan
        if ggn and operator.has_ggn:
            top_ggn, settled = search.top(operator.ggn, found.vectors[0])
            if not settled:
                notes.append(f"ggn_eigenvalue has not converged to rtol={rtol:g}")
            sharpness = found.values[0].item()
            error = abs(sharpness - top_ggn) / abs(sharpness) if sharpness else math.nan
        elif ggn:
            notes.append(
                "ggn_eigenvalue is NaN: the output of the network is not known, or part of the loss does not pass "
                "through it (no torch loss function was seen, or another term is written by hand)"
            )
        limit = ratio = math.nan
        if optimizer is not None:
            limit, ratio, reason = _against_limit(search, operator, optimizer, found)
            notes.append(f"stability limit: {reason}")
        distribution = search.density() if density else None
        blocks = {
            name: group_spectrum(
                operator, inside, k=k, rtol=rtol, max_hvps=max_hvps, verify=verify, generator=generator
            )
            for name, inside in members.items()
        }
        phi = phi_stderr = math.nan
        if members:
            phi, phi_stderr = off_diagonal_share(operator, list(members.values()), found, generator)
        unsettled = [name for name, block in blocks.items() if not block.converged.all()]
        if unsettled:
            notes.append(f"values of the groups {', '.join(unsettled)} have not converged to rtol={rtol:g}")
        if operator.custom_functions:
            notes.append(
                f"custom autograd functions ({', '.join(operator.custom_functions)}): the numbers are right only if "
                f"their backward can be differentiated"
            )
    top = min(k, len(found.values))
    return Spectrum(
        eigenvalues=found.values[:top],
        smallest=found.values[-1].item(),
        residuals=found.residuals[:top],
        converged=converged[:top],
        smallest_converged=bool(converged[-1]),
        eigenvectors=torch.stack(found.vectors[:top], dim=1),
        ggn_eigenvalue=top_ggn,
        ggn_error=error,
        trace=total,
        trace_stderr=stderr,
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


def _parts(
    operator: ParameterOperator, search: Search, generator: torch.Generator, k: int, begins: bool, notes: list[str]
) -> tuple[tuple[float, float] | None, Tensor | None]:
    """The trace by the parts of H and its standard error; and, if wanted, where the search begins.

    None for the trace where these parts are not known, or where the probes of `Search.trace` may be all directions
    there are; for the start where single samples have no gradients of their own.
    """
    if operator.size <= search.capacity + TRACE_PROBES or not operator.has_ggn:
        return None, None
    beginning = Beginning(k, generator) if begins else None
    agreement = Agreement(operator)
    by_probes = "trace by probes of the whole Hessian, so with a larger error: "
    try:
        found = trace_of_parts(agreement.watched(), generator, beginning)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError) as error:
        # the graph by layers runs modules apart from the model: a loss that differentiates by the parameters itself
        # does not find them in it, and a module that relies on its surroundings may not run
        found = None
        reason = (str(error).strip().splitlines() or [""])[0]
        notes.append(f"{by_probes}the layers cannot be looked at apart ({type(error).__name__}: {reason})")
    if found is None:
        return None, None
    total, stderr, spent = found
    operator.spend(spent)
    if not agreement.holds():
        notes.append(
            f"{by_probes}the layers do not make up the network (a parameter acts elsewhere than in its layer, or the "
            f"model computes something else in every forward pass)"
        )
        return None, None
    cotangents = None if beginning is None else beginning.cotangents(operator.batches)
    if cotangents is None:
        return (total, stderr), None
    operator.spend(1)  # a backward pass and the sketches, together less than a product
    return (total, stderr), operator.pullback(cotangents)


def _against_limit(
    search: Search, operator: ParameterOperator, optimizer: torch.optim.Optimizer, found: Found
) -> tuple[float, float, str]:
    """The limit, λ_1 over it, and which limit it is; for a preconditioner P, λ_1 is that of P^-1/2 H P^-1/2."""
    rule = stability_limit(optimizer)
    if math.isnan(rule.limit):
        return math.nan, math.nan, rule.reason
    moved = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if all(id(p) in moved for p in operator.originals) and rule.preconditioner is None:
        return rule.limit, found.values[0].item() / rule.limit, rule.reason
    # a parameter that the optimizer does not move cannot make it unstable
    weights = rule.preconditioner or {p: torch.ones_like(p) for p in operator.originals if id(p) in moved}
    root = operator.flat(weights, math.inf).rsqrt()
    if not root.any():
        return rule.limit, math.nan, "the optimizer moves none of these parameters"
    decay = operator.flat(rule.decay, 0.0)
    start = torch.where(root > 0, found.vectors[0] / root.clamp_min(torch.finfo(root.dtype).tiny), 0.0)
    length = torch.linalg.vector_norm(start).clamp_min(torch.finfo(start.dtype).tiny)

    def preconditioned(z: Tensor) -> Tensor:
        return root * (operator.hessian(root * z) + decay * root * z)

    top, converged = search.top(preconditioned, start / length)
    return rule.limit, top / rule.limit, rule.reason + ("" if converged else " (its eigenvalue has not converged)")


def _start(operator: ParameterOperator, earlier: Spectrum | Tensor | None) -> Tensor | None:
    if earlier is None:
        # the gradient of a trained network lies mostly along the sharpest directions, and is known already
        return operator.gradient if operator.gradient.any() else None
    if isinstance(earlier, Tensor):
        if earlier.shape != (operator.size,):
            raise InputError(f"start= has shape {tuple(earlier.shape)}, the parameters are {operator.size} numbers")
        if not 0 < norm(earlier) < math.inf:
            raise InputError("start= has no direction: it is zero or not finite; leave it out")
        return earlier.to(operator.template)
    if not isinstance(earlier, Spectrum):
        raise InputError(f"start= takes an earlier Spectrum or a flat tensor, not {type(earlier).__name__}")
    if earlier.parameters == operator.names and not earlier.eigenvectors.numel():
        raise InputError("start= has no eigenvectors (they were left out, or lost in to_dict); leave it out")
    if earlier.parameters != operator.names or len(earlier.eigenvectors) != operator.size:
        raise InputError("start= is the spectrum of another model, or of other parameters; leave it out")
    return earlier.start_vector().to(operator.template)

"""What a monitor measures: the pairs of layers, and the spectrum of the Hessian w.r.t. the parameters.

Both take a share of the HVPs of a full measurement, and are independent of ranks and training loops. They raise what
goes wrong; `fallbacks.RESPONSES` says what follows. One fallback is made here: when out of memory, the spectrum is
computed again on halves of the batches, with the same result, as eigenvalues and trace are means over samples.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from curvmon.errors import DifferencesError, DivergedError
from curvmon.metrics.mean_curvature import combined
from curvmon.monitor.batch_samples import first_samples, halves, sample_count
from curvmon.monitor.fallbacks import is_out_of_memory
from curvmon.monitor.settings import Settings
from curvmon.operators.gradient_differences import DifferenceOperator
from curvmon.operators.parameter_hessian import ParameterOperator, open_parameters
from curvmon.pairs.estimator import FOR_NORMS
from curvmon.pairs.measure import run_measurement
from curvmon.records import Measurement, Spectrum
from curvmon.spectrum.eigenvalue_search import Accuracy
from curvmon.spectrum.findings import Findings
from curvmon.spectrum.spectrum import layerwise_if_possible, run_spectrum
from curvmon.spectrum.stability_limit import stability_limit
from curvmon.spectrum.trace import COARSE

Loss = Callable[[Any, Any], Tensor]
OnProduct = Callable[[int], None]
"""called with the number of HVPs that were just computed"""
Result = TypeVar("Result")
ACCURACY = Accuracy(first=0.02, others=0.05, smallest=0.1, smallest_floor=0.1)
"""finer than a curve in a dashboard can show"""
HALF_FROM = 2**20
"""Number of parameters from which on the vectors of the search are stored in half precision: their error is a third of
that of the differences, and with as many vectors as `curvmon.spectrum` keeps, the search restarts rarely."""
MAX_HVPS, MAX_SPECTRUM_HVPS, BEYOND = 150, 55, 12
"""of a measurement, of its search for eigenvalues, and what the trace, Gauss-Newton's eigenvalue and the preconditioned
one may take beyond the limit of the search; eigenvalues that have not converged by then are reported with a note"""
MAX_PAIR_HVPS = FOR_NORMS.limit
FEW_SAMPLES = 4
"""of the first look at a network; see `look_at_few_samples`"""


def measure_pairs(
    settings: Settings,
    model: nn.Module,
    batches: Sequence[Any],
    loss: Loss,
    *,
    max_hvps: float | None = None,
    on_product: OnProduct | None = None,
) -> Measurement:
    """All pairs of layers, combined over batches; `max_hvps` is for all batches together."""
    per_batch = None if max_hvps is None else max(1, round(max_hvps / len(batches)))
    return combined(
        [
            run_measurement(
                model,
                batch,
                loss=loss,
                nodes=settings.nodes,
                output=settings.output,
                batch_dim=0,
                rtol=settings.rtol,
                max_hvps=per_batch,
                seed=settings.seed,
                few_directions=True,
                raise_max_hvps=True,
                on_product=on_product,
            )
            for batch in batches
        ]
    )


def measure_spectrum(
    settings: Settings,
    model: nn.Module,
    batches: Sequence[Any],
    loss: Loss,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    start: Tensor | None = None,
    findings: Findings | None = None,
    share: float = 1.0,
    complete: bool = True,
    pair_hvps: int = MAX_PAIR_HVPS,
    on_product: OnProduct | None = None,
) -> tuple[Spectrum, Tensor]:
    """Extremal eigenvalues and trace over all batches; also where the next searches start, two rows on the CPU.

    The first row is for another spectrum, the second, the leading eigenvector, for the largest eigenvalue alone.

    `complete`: also the trace and Gauss-Newton's eigenvalue.
    `pair_hvps`: what the pairs took, or may take in another process; both together take at most MAX_HVPS.
    `findings`: what earlier measurements found out about the network; is added to. A start vector that does not fit
    (layers were frozen or unfrozen) or has no direction is ignored.
    """
    size = sum(p.numel() for p in model.parameters() if p.requires_grad)
    start = None if start is None else start[0]
    if start is not None and len(start) != size:
        start = None
    if start is not None and not 0 < torch.linalg.vector_norm(start).item() < float("inf"):
        start = None

    only_sharpness = settings.only_sharpness
    if only_sharpness and optimizer is not None:
        rule = stability_limit(optimizer)
        if rule.preconditioner is not None and rule.common is None:
            optimizer = None  # its sharpness is another one, and takes HVPs of its own
    findings = Findings() if findings is None else findings
    findings.belong_to(name for name, parameter in model.named_parameters() if parameter.requires_grad)
    spent = 0
    limit = min(round(share * MAX_SPECTRUM_HVPS), MAX_HVPS - BEYOND - pair_hvps)

    def counted(hvps: int) -> None:
        nonlocal spent
        spent += hvps
        if on_product is not None:
            on_product(hvps)

    def search(parts: Sequence[Any]) -> Spectrum:
        if findings.no_differences is None:
            try:
                if findings.verdict is None or findings.detaches:
                    findings.verdict = None
                    look_at_few_samples(model, parts[0], loss, findings, settings.seed)
                return search_with(DifferenceOperator, parts)
            except DifferencesError as error:
                reason = str(error)
                if error.lasts or findings.differences_failed:
                    findings.no_differences = reason
                findings.differences_failed = True
            except Exception as error:  # second derivatives may work, or raise an error that says more
                if is_out_of_memory(error) or isinstance(error, DivergedError):
                    raise
                reason = findings.no_differences = f"{type(error).__name__}: {error}"
        else:
            reason = findings.no_differences
        result = search_with(ParameterOperator, parts)
        return replace(result, notes=(*result.notes, f"HVPs from second derivatives: {reason}"))

    def search_with(kind: type[ParameterOperator], parts: Sequence[Any]) -> Spectrum:
        return run_spectrum(
            model,
            parts,
            loss=loss,
            k=settings.eigenvalues,
            ggn=complete and not only_sharpness,
            trace=complete and not only_sharpness,
            density=False,
            start=start,
            seed=settings.seed,
            optimizer=optimizer,
            groups=None,
            accuracy=ACCURACY,
            max_hvps=max(settings.eigenvalues + 5, limit - spent),
            verify=False,
            smallest=not only_sharpness,
            effort=COARSE,
            findings=findings,
            kind=kind,
            half_from=HALF_FROM,
            on_product=counted,
        )

    result = _in_parts(list(batches), search)
    if only_sharpness:
        return only_first(result), torch.stack([result.eigenvectors[:, 0].cpu()] * 2)
    if not complete:
        result = replace(result, notes=(*result.notes, "trace and Gauss-Newton eigenvalue skipped to save time"))
    # on the CPU: until the next measurement, training needs the memory of the device
    starts = torch.stack([result.start_vector().cpu(), result.eigenvectors[:, 0].cpu()])
    return result.without_vectors(), starts


def only_first(result: Spectrum) -> Spectrum:
    """λ_1 alone: what the search shows of the smallest eigenvalue is no measurement of it."""
    note = "λ_1 alone was searched: no smallest eigenvalue, trace and Gauss-Newton eigenvalue"
    return replace(
        result.without_vectors(),
        smallest=math.nan,
        smallest_residual=math.nan,
        smallest_converged=False,
        notes=(*result.notes, note),
    )


def look_at_few_samples(model: nn.Module, batch: Any, loss: Loss, findings: Findings, seed: int) -> None:
    """What needs a graph of second derivatives, which takes much memory: once per run, and on a few samples.

    `findings` get to know whether differences of gradients are derivatives of this loss, and whether the trace by
    layers does not work. What does not show here, because the batch cannot be sliced or a step is not exact on so few
    samples, is looked at in the measurement.

    Raises:
        DifferencesError: differences are not derivatives.
    """
    if (sample_count(batch) or 0) <= FEW_SAMPLES:
        return
    few = first_samples(batch, FEW_SAMPLES)
    try:
        with open_parameters(model, [few], loss=loss, kind=DifferenceOperator) as operator:
            assert isinstance(operator, DifferenceOperator)
            operator.compare(operator.gradient)
            findings.verdict = operator.verdict
            if findings.layerwise is None and operator.has_ggn and not operator.custom_functions:
                generator = torch.Generator("cpu").manual_seed(seed)
                layerwise_if_possible(operator, generator, 0, COARSE, findings, [])
                findings.layerwise = None if findings.layerwise else False
    except DifferencesError as error:
        if error.lasts:
            raise
    except Exception:  # the model insists on its number of samples, say
        return


def _in_parts(batches: list[Any], run: Callable[[Sequence[Any]], Result]) -> Result:
    """`run`; when out of memory, again with every batch split in half: the same result from more passes.

    Listed in `fallbacks`, next to the fallbacks between attempts.
    """
    while True:
        try:
            return run(batches)
        except (RuntimeError, MemoryError) as error:
            parts = [halves(batch) for batch in batches] if is_out_of_memory(error) else None
            if parts is None or all(part is None for part in parts):
                raise
        release_memory()
        batches = [piece for batch, part in zip(batches, parts) for piece in (part or (batch,))]


def release_memory() -> None:
    """Tensors of a failed attempt may still be in reference cycles."""
    gc.collect()
    torch.cuda.empty_cache()  # does nothing without a device

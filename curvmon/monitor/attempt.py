"""One attempt at a measurement by all ranks together: all of them get the same result, or the same error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from curvmon.isolation.collectives import secluded
from curvmon.monitor.fallbacks import ErrorKind, classify, describe
from curvmon.monitor.process_group import Ranks, same_buffers
from curvmon.monitor.quantities import (
    Loss,
    OnProduct,
    Settings,
    measure_pairs,
    measure_spectrum,
    release_memory,
)
from curvmon.records import Measurement, Spectrum

Part = Literal["pairs", "spectrum"]
MAX_START_ENTRIES = 2**24
"""of a start vector that goes to other ranks and into checkpoints: 64 MiB"""


@dataclass(frozen=True)
class Target:
    """What is measured: a model under a loss."""

    model: nn.Module
    loss: Loss
    device: torch.device
    optimizer: torch.optim.Optimizer | None = None
    """its stability limit is compared with the sharpness"""
    isolation: Callable[[], AbstractContextManager[None]] = nullcontext
    """keeps what belongs to the training loop (loggers, learning rates, …) unchanged while the loss is computed"""


@dataclass(frozen=True)
class Request:
    """How much of a target is measured, and on which samples."""

    settings: Settings
    parts: frozenset[Part]
    batches: Sequence[Any]
    share: float = 1.0
    """of the HVPs of a full measurement"""
    full_hvps: int | None = None
    """that the pairs took in the last full measurement"""
    start: Tensor | None = None
    """of the eigenvalue search"""
    on_product: OnProduct | None = None

    @property
    def max_hvps(self) -> float | None:
        """For the pairs; None: as many as a full measurement takes."""
        return None if self.share >= 1 or self.full_hvps is None else self.share * self.full_hvps


@dataclass(frozen=True)
class Outcome:
    """What was measured, or why not.

    Attributes:
        measurement: of the pairs of layers.
        spectrum: without eigenvectors.
        error: class and message of what went wrong.
        kind: of the error; None without one.
        part: where the error is.
        start: start vector for the next eigenvalue search; None if there is no new one.
    """

    measurement: Measurement | None = None
    spectrum: Spectrum | None = None
    error: str | None = None
    kind: ErrorKind | None = None
    part: Part = "pairs"
    start: Tensor | None = None

    @property
    def succeeded(self) -> bool:
        """There is something to report: everything, or the pairs although the eigenvalue search failed."""
        return self.error is None or self.measurement is not None


def attempt(target: Target, request: Request, ranks: Ranks) -> Outcome:
    """Pairs on rank 0, eigenvalues on the last rank at the same time; the outcome on all of them."""
    own, measurement, start = Outcome(), None, None
    part: Part = "pairs"
    try:
        with ExitStack() as stack:
            stack.enter_context(same_buffers(ranks, target.model))
            stack.enter_context(target.isolation())
            # Trainer(detect_anomaly=True) would print tracebacks of passes that fail on purpose
            stack.enter_context(torch.autograd.set_detect_anomaly(False))
            stack.enter_context(secluded(ranks.world_size))
            if "pairs" in request.parts and ranks.measures_pairs:
                measurement = measure_pairs(
                    request.settings,
                    target.model,
                    request.batches,
                    target.loss,
                    max_hvps=request.max_hvps,
                    on_product=request.on_product,
                )
            spectrum, part = None, "spectrum"
            if "spectrum" in request.parts and ranks.measures_spectrum:
                spectrum, start = measure_spectrum(
                    request.settings,
                    target.model,
                    request.batches,
                    target.loss,
                    optimizer=target.optimizer,
                    start=request.start,
                    share=request.share,
                    on_product=request.on_product,
                )
        own = Outcome(measurement, spectrum)
    except Exception as error:
        own = Outcome(measurement, error=describe(error), kind=classify(error), part=part)
    if own.kind == "memory":
        release_memory()
    outcome = merge(ranks.gather(own))
    if outcome.succeeded and "spectrum" in request.parts:
        start = _shared(start, ranks)
    return replace(outcome, start=start)


def merge(outcomes: Sequence[Outcome]) -> Outcome:
    """One outcome from those of all ranks. An error that will not go away counts before a transient one."""
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    measurement = next((o.measurement for o in outcomes if o.measurement is not None), None)
    spectrum = next((o.spectrum for o in outcomes if o.spectrum is not None), None)
    if not failed:
        return Outcome(measurement, spectrum)
    worst = min(failed, key=lambda outcome: outcome.kind == "transient")
    only_spectrum = all(outcome.part == "spectrum" for outcome in failed)
    return replace(worst, measurement=measurement if only_spectrum else None)


def storable(start: Tensor | None) -> Tensor | None:
    """On the CPU; None if too large for a checkpoint."""
    return None if start is None or len(start) > MAX_START_ENTRIES else start.cpu()


def _shared(start: Tensor | None, ranks: Ranks) -> Tensor | None:
    """Also on the ranks that did not search: rank 0 writes checkpoints."""
    if ranks.world_size == 1:
        return start
    received: Tensor | None = ranks.broadcast(storable(start), source=ranks.spectrum_rank)
    return start if ranks.measures_spectrum else received

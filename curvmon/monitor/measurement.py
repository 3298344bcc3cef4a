"""One measurement of a monitor: attempts, with fallbacks between them, until one succeeds or none is left.

All ranks attempt together, and all of them get the same result or the same error.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from curvmon.alerts.context import Source
from curvmon.monitor.fallbacks import RESPONSES, Failure, Part, classify, describe
from curvmon.monitor.pairs_and_spectrum import (
    MAX_PAIR_HVPS,
    OnProduct,
    measure_pairs,
    measure_spectrum,
    release_memory,
)
from curvmon.monitor.probe_batch import Choice, ProbeBatch
from curvmon.monitor.process_group import Ranks, RemoteError, same_buffers
from curvmon.monitor.settings import Settings
from curvmon.monitor.target import Target, undisturbed
from curvmon.monitor.vital_signs import Taken, VitalSignsTaker
from curvmon.records import Measurement, Spectrum, VitalSigns
from curvmon.spectrum.findings import Findings

MAX_START_ENTRIES = 2**25
"""largest start that goes to other ranks and into checkpoints: 128 MiB"""


@dataclass(frozen=True)
class Request:
    """How much of a target is measured, and on which samples."""

    settings: Settings
    parts: frozenset[Part]
    batches: Sequence[Any]
    share: float = 1.0
    """fraction of the HVPs of a full measurement"""
    full_hvps: int | None = None
    """number of HVPs that the pairs took in the last full measurement"""
    start: Tensor | None = None
    """where eigenvalue searches start: two rows, see `measure_spectrum`"""
    findings: Findings | None = None
    """what earlier measurements found out about the network"""
    on_product: OnProduct | None = None
    is_first: bool = False
    """has everything in it, although from fewer HVPs"""

    @property
    def max_hvps(self) -> float | None:
        """Limit for the pairs; None: as many as a full measurement takes."""
        return None if self.share >= 1 else self.share * (self.full_hvps or MAX_PAIR_HVPS)


@dataclass(frozen=True)
class Outcome:
    """What was measured, or why not.

    Attributes:
        measurement: the pairs of layers.
        spectrum: the eigenvalues, without eigenvectors.
        failure: the error; None without one.
        start: where the next eigenvalue searches start; None if there is nothing new.
    """

    measurement: Measurement | None = None
    spectrum: Spectrum | None = None
    failure: Failure | None = None
    start: Tensor | None = None

    @property
    def succeeded(self) -> bool:
        """There is something to report: everything, or the pairs although the eigenvalue search failed."""
        return self.failure is None or self.measurement is not None


def attempt(target: Target, request: Request, ranks: Ranks) -> Outcome:
    """Pairs on rank 0, eigenvalues on the last rank at the same time; the outcome on all of them."""
    own, measurement, start = Outcome(), None, None
    part: Part = "pairs"
    try:
        with _with_same_buffers(target, ranks):
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
                elsewhere = MAX_PAIR_HVPS if "pairs" in request.parts else 0
                pair_hvps = elsewhere if measurement is None else measurement.hvps
                spectrum, start = measure_spectrum(
                    request.settings,
                    target.model,
                    request.batches,
                    target.loss,
                    optimizer=target.optimizer,
                    start=request.start,
                    findings=request.findings,
                    share=request.share,
                    complete=request.share >= 1 or request.is_first,
                    pair_hvps=pair_hvps,
                    on_product=request.on_product,
                )
        own = Outcome(measurement, spectrum)
    except Exception as error:
        own = Outcome(measurement, failure=Failure(classify(error), describe(error), part))
    if own.failure is not None and own.failure.kind == "memory":
        release_memory()
    outcome = merge(ranks.gather(own))
    if outcome.succeeded and "spectrum" in request.parts:
        start = _shared(start, ranks)
    return replace(outcome, start=start)


@contextmanager
def _with_same_buffers(target: Target, ranks: Ranks) -> Iterator[None]:
    """Every rank enters; inside the context it computes by itself, with the buffers of rank 0."""
    with ExitStack() as stack:
        stack.enter_context(same_buffers(ranks, target.model))
        stack.enter_context(undisturbed(target, ranks.world_size))
        yield


def merge(outcomes: Sequence[Outcome]) -> Outcome:
    """One outcome from those of all ranks. An error that will not go away counts before a transient one."""
    failures = [outcome.failure for outcome in outcomes if outcome.failure is not None]
    measurement = next((o.measurement for o in outcomes if o.measurement is not None), None)
    spectrum = next((o.spectrum for o in outcomes if o.spectrum is not None), None)
    if not failures:
        return Outcome(measurement, spectrum)
    worst = min(failures, key=lambda failure: failure.kind == "transient")
    only_spectrum = all(failure.part == "spectrum" for failure in failures)
    return Outcome(measurement if only_spectrum else None, failure=worst)


def storable(start: Tensor | None) -> Tensor | None:
    """On the CPU; None if too large for a checkpoint."""
    return None if start is None or start.numel() > MAX_START_ENTRIES else start.cpu()


def _shared(start: Tensor | None, ranks: Ranks) -> Tensor | None:
    """Also on the ranks that did not search: rank 0 writes checkpoints."""
    if ranks.world_size == 1:
        return start
    received: Tensor | None = ranks.broadcast(storable(start), source=ranks.spectrum_rank)
    return start if ranks.measures_spectrum else received


Warn = Callable[..., None]
"""warn(message, key=None): once for each key"""
Attempt = Callable[[Target, Request, Ranks], Outcome]


@dataclass(frozen=True)
class _Progress:
    """What fallbacks have changed since the measurement began."""

    parts: frozenset[Part]
    batch_failure: Failure | None = None
    """why the validation batch was replaced"""
    part_failure: Failure | None = None
    """why a part was dropped"""


class MeasurementRunner:
    """Measures a model on the probe batch; `fallbacks.RESPONSES` says what happens after each kind of error.

    Args:
        settings: what to measure.
        probe: the batch to measure on.
        attempt: makes one attempt; replaced in tests.

    Attributes:
        settings: what to measure; never changed.
        probe: the batch to measure on.
        parts: what is measured: "pairs", "spectrum" or both. A part that can never work is dropped for the run.
        norms: of all parameters and buffers at the last vital signs (`TensorNorms.look`).
    """

    def __init__(self, settings: Settings, probe: ProbeBatch, attempt: Attempt = attempt) -> None:
        self.settings = settings
        self.probe = probe
        wanted: dict[Part, bool] = {"pairs": settings.pairs, "spectrum": settings.eigenvalues > 0}
        self.parts = frozenset(part for part, on in wanted.items() if on)
        self._attempt = attempt
        self._start: Tensor | None = None
        self._findings = Findings()
        self._taker = VitalSignsTaker()
        self.norms: Mapping[Source, float] = {}
        self._full_hvps: int | None = None

    def run(
        self,
        target: Target,
        ranks: Ranks,
        *,
        warn: Warn,
        share: float = 1.0,
        is_first: bool = False,
        on_product: OnProduct | None = None,
    ) -> Outcome:
        """Called by all ranks together; the same outcome on all of them.

        Args:
            target: the model and its loss.
            ranks: of the run.
            warn: for whatever the user should know although the measurement succeeds.
            share: of the HVPs of a full measurement.
            is_first: no measurement of this run has succeeded yet, so that the probe batch may still be replaced.
            on_product: called with the number of HVPs that were just computed.
        """
        original, progress = self.probe.choice(), _Progress(self.parts)
        while True:
            earlier = self._full_hvps, self._start, self._findings
            request = Request(self.settings, progress.parts, (), share, *earlier, on_product, is_first)
            outcome = self._try(target, request, ranks, warn)
            failure = outcome.failure
            if failure is None or outcome.succeeded:
                break
            following = self._fall_back(failure, progress, original, ranks, is_first)
            if following is None:
                self.probe.restore(original)
                return outcome
            progress = following
        if failure is not None:
            if RESPONSES[failure.kind].retry_later:
                warn(
                    f"eigenvalues not measured: {failure.message}. The pairs of layers are; "
                    "the next validation measures them again",
                    f"eigenvalues {failure.kind}",
                )
            else:
                progress = replace(progress, parts=progress.parts - {"spectrum"}, part_failure=failure)
                outcome = Outcome(outcome.measurement)
        return self._finish(outcome, progress, share, warn)

    def vital_signs(
        self, target: Target, ranks: Ranks, *, warn: Warn, with_loss: bool, with_sharpness: bool = False
    ) -> VitalSigns:
        """Called by all ranks together; taken by the one that has the eigenvectors, the same on all of them.

        `with_loss`: False if a measurement follows.
        """
        batches: Sequence[Any] = ()
        if with_loss:
            with suppress(RemoteError):
                batches = self.probe.batches(ranks, target.device, warn) or ()
        start = self._start if with_sharpness and self.settings.eigenvalues else None
        own = Taken(VitalSigns(), {})
        with suppress(Exception), _with_same_buffers(target, ranks):  # the other ranks wait
            if ranks.measures_spectrum:
                own = self._taker.take(
                    target.model, batches, target.loss, None if start is None else start[1], self._findings
                )
        vector = own.eigenvector
        signs, self.norms = ranks.broadcast((own.signs, own.norms), source=ranks.spectrum_rank)
        if signs.hvps:
            fresh = None if vector is None or start is None else torch.stack([start[0], vector])
            self._start = _shared(fresh, ranks)
        result: VitalSigns = signs
        return result

    def _try(self, target: Target, request: Request, ranks: Ranks, warn: Warn) -> Outcome:
        try:
            batches = self.probe.batches(ranks, target.device, warn)
        except RemoteError as error:
            return Outcome(failure=Failure("input", f"the batch cannot be shared among processes ({error})"))
        if batches is None:
            reason = self.probe.capture_error
            text = "no batch has been seen yet" if reason is None else f"the batches cannot be copied ({reason})"
            return Outcome(failure=Failure("transient", text))
        return self._attempt(target, replace(request, batches=batches), ranks)

    def _fall_back(
        self, failure: Failure, progress: _Progress, original: Choice, ranks: Ranks, is_first: bool
    ) -> _Progress | None:
        """Prepares the next attempt; None if there is nothing left to try."""
        for fallback in RESPONSES[failure.kind].fallbacks:
            if fallback == "half the samples" and self.probe.halve():
                return progress
            if fallback == "training batch" and is_first and self.probe.use_training_batch(ranks):
                return replace(progress, batch_failure=failure)
            if fallback == "without the failed part" and {failure.part} < progress.parts:
                self.probe.restore(original)  # the other part may work on it
                return _Progress(progress.parts - {failure.part}, part_failure=failure)
        return None

    def _finish(self, outcome: Outcome, progress: _Progress, share: float, warn: Warn) -> Outcome:
        self.parts = progress.parts
        self.probe.finalize()
        self._start = self._start if outcome.start is None else outcome.start
        if progress.batch_failure is not None:
            warn(f"measured on the first training batch, not on a validation batch: {progress.batch_failure.message}")
        if progress.part_failure is not None:
            part = "pairs of layers" if progress.part_failure.part == "pairs" else "eigenvalues"
            warn(f"{part} are not measured in this run: {progress.part_failure.message}")
        measurement = outcome.measurement
        if measurement is not None:
            if share >= 1:
                self._full_hvps = measurement.hvps
            notes = [*self.probe.notes, *measurement.notes]
            notes += [] if outcome.failure is None else [f"no eigenvalues: {outcome.failure.message}"]
            measurement = replace(measurement, notes=tuple(notes))
        return replace(outcome, measurement=measurement, start=None)

    def state_dict(self) -> dict[str, Any]:
        return {
            "probe": self.probe.state_dict(),
            "start": storable(self._start),
            "full_hvps": self._full_hvps,
            "findings": asdict(self._findings),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """All of the state, or, if it raises, none of it."""
        probe = copy.copy(self.probe)
        probe.load_state_dict(state["probe"])
        findings = Findings(**state["findings"])
        self._start, self._full_hvps, self.probe = state["start"], state["full_hvps"], probe
        self._findings = findings

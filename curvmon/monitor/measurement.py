"""The measurement of a monitor: attempts, with fallbacks between them, until one succeeds or none is left."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from curvmon.monitor.attempt import Outcome, Part, Request, Target, attempt, storable
from curvmon.monitor.fallbacks import RESPONSES
from curvmon.monitor.probe_batch import Choice, ProbeBatch
from curvmon.monitor.process_group import Ranks, RemoteError
from curvmon.monitor.quantities import OnProduct, Settings

Warn = Callable[..., None]
"""warn(message, key=None): once for each key"""
Attempt = Callable[[Target, Request, Ranks], Outcome]


@dataclass(frozen=True)
class _Progress:
    """What fallbacks have changed since the measurement began."""

    parts: frozenset[Part]
    batch_error: str | None = None
    """why the validation batch was replaced"""
    part_error: Outcome | None = None
    """why a part was dropped"""


class MeasurementRunner:
    """Measures a model on the probe batch; `fallbacks.RESPONSES` says what happens after each kind of error.

    Args:
        settings: what to measure.
        probe: the batch to measure on.
        attempt: makes one attempt; replaced in tests.

    Attributes:
        settings: as passed; never changed.
        probe: as passed.
        parts: what is measured: "pairs", "spectrum" or both. A part that can never work is dropped for the run.
    """

    def __init__(self, settings: Settings, probe: ProbeBatch, attempt: Attempt = attempt) -> None:
        self.settings = settings
        self.probe = probe
        wanted: dict[Part, bool] = {"pairs": settings.pairs, "spectrum": settings.eigenvalues > 0}
        self.parts = frozenset(part for part, on in wanted.items() if on)
        self._attempt = attempt
        self._start: Tensor | None = None
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
            request = Request(self.settings, progress.parts, (), share, self._full_hvps, self._start, on_product)
            outcome = self._try(target, request, ranks, warn)
            if outcome.succeeded:
                break
            following = self._fall_back(outcome, progress, original, ranks, is_first)
            if following is None:
                self.probe.restore(original)
                return outcome
            progress = following
        if outcome.error is not None and outcome.kind is not None:
            if RESPONSES[outcome.kind].retry_later:
                warn(
                    f"eigenvalues not measured: {outcome.error}. The pairs of layers are; "
                    "the next validation measures them again",
                    f"eigenvalues {outcome.kind}",
                )
            else:
                progress = replace(progress, parts=progress.parts - {"spectrum"}, part_error=outcome)
                outcome = Outcome(outcome.measurement)
        return self._finish(outcome, progress, share, warn)

    def _try(self, target: Target, request: Request, ranks: Ranks, warn: Warn) -> Outcome:
        try:
            batches = self.probe.batches(ranks, target.device, warn)
        except RemoteError as error:
            return Outcome(error=f"the batch cannot be shared among processes ({error})", kind="input")
        if batches is None:
            reason = self.probe.capture_error
            text = "no batch has been seen yet" if reason is None else f"the batches cannot be copied ({reason})"
            return Outcome(error=text, kind="transient")
        return self._attempt(target, replace(request, batches=batches), ranks)

    def _fall_back(
        self, outcome: Outcome, progress: _Progress, original: Choice, ranks: Ranks, is_first: bool
    ) -> _Progress | None:
        """Prepares the next attempt; None if there is nothing left to try."""
        assert outcome.kind is not None
        for fallback in RESPONSES[outcome.kind].fallbacks:
            if fallback == "half the samples" and self.probe.halve():
                return progress
            if fallback == "training batch" and is_first and self.probe.use_training_batch(ranks):
                return replace(progress, batch_error=outcome.error)
            if fallback == "without the failed part" and {outcome.part} < progress.parts:
                self.probe.restore(original)  # the other part may work on it
                return _Progress(progress.parts - {outcome.part}, part_error=outcome)
        return None

    def _finish(self, outcome: Outcome, progress: _Progress, share: float, warn: Warn) -> Outcome:
        self.parts = progress.parts
        self.probe.finalize()
        self._start = self._start if outcome.start is None else outcome.start
        if progress.batch_error is not None:
            warn(f"measured on the first training batch, not on a validation batch: {progress.batch_error}")
        if progress.part_error is not None:
            part = "pairs of layers" if progress.part_error.part == "pairs" else "eigenvalues"
            warn(f"{part} are not measured in this run: {progress.part_error.error}")
        measurement = outcome.measurement
        if measurement is not None:
            if share >= 1:
                self._full_hvps = measurement.hvps
            notes = [*self.probe.notes, *measurement.notes]
            notes += [] if outcome.error is None else [f"no eigenvalues: {outcome.error}"]
            measurement = replace(measurement, notes=tuple(notes))
        return replace(outcome, measurement=measurement, start=None)

    def state_dict(self) -> dict[str, Any]:
        return {
            "probe": self.probe.state_dict(),
            "start": storable(self._start),
            "full_hvps": self._full_hvps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """All of the state, or, if it raises, none of it."""
        probe = copy.copy(self.probe)
        probe.load_state_dict(state["probe"])
        self._start, self._full_hvps, self.probe = state["start"], state["full_hvps"], probe

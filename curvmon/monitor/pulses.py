"""The pulses of a run: every n optimizer steps, gain and curvature along the step, their means, and what they show.

For any training loop: `before_step` before every forward pass, `after_step` after every optimizer step.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from curvmon.alerts.instability import Instability, InstabilityDetector
from curvmon.alerts.suspicion import Suspicion
from curvmon.monitor.budget import Budget
from curvmon.monitor.fallbacks import RESPONSES, Failure, classify, describe
from curvmon.monitor.measurement import Warn
from curvmon.monitor.pairs_and_spectrum import release_memory
from curvmon.monitor.process_group import Ranks
from curvmon.monitor.pulse_schedule import PulseSchedule
from curvmon.monitor.pulse_taker import LEAST, PulseTaker, TakenPulse
from curvmon.monitor.target import Target
from curvmon.pulse import mean_pulse
from curvmon.records import PulseRecord
from curvmon.records.pulses import most_concentrated
from curvmon.records.thinning import thinned

MOST_BYTES = 400_000
"""of records in a checkpoint"""
MOST_FAILURES = 3
"""in a row, for reasons that may be transient"""
_NOT_JUDGED = "the step ratio is not judged: {}; training goes on"


class _Decision(NamedTuple):
    """Of rank 0, for all ranks."""

    record: PulseRecord
    event: Instability | None
    interval: int
    fewer: bool


class Pulses:
    """Takes pulses, and keeps the latest.

    Args:
        schedule: when they are taken.
        budget: times them.
        size: how many are kept.

    Attributes:
        budget: of the run.
        records: the latest, oldest first.
    """

    def __init__(self, schedule: PulseSchedule, budget: Budget, size: int) -> None:
        self._schedule = schedule
        self.budget = budget
        self._size = size
        self._taker = PulseTaker()
        self._detector = InstabilityDetector()
        self._suspicion = Suspicion()
        self._off = False
        self._failures = 0
        self._without_move = 0
        """steps in a row that were prepared for a pulse and did not move the parameters"""
        self._prepared_in = 0.0
        self.records: list[PulseRecord] = []

    @property
    def is_prepared(self) -> bool:
        """The next `after_step` takes a pulse."""
        return self._taker.is_prepared

    def start(self) -> None:
        """Before a run: what another one has prepared, which ended with an error, is not of this one's step."""
        self._taker.forget()
        self._prepared_in = 0.0

    def before_step(self, model: nn.Module, batch: Any) -> None:
        """Before the forward pass of a batch; several times before a step where gradients are accumulated."""
        if self._off or not self._schedule.is_due:
            return
        before = self.budget.pulse_seconds
        with self.budget.taking_pulse():
            self._taker.prepare(model, batch)
        self._prepared_in += self.budget.pulse_seconds - before

    def skip_step(self, ranks: Ranks, *, step: int, learning_rate: float, warn: Warn) -> Instability | None:
        """Instead of `after_step` where no pulse is prepared: what a learning rate that grows gives away by itself.

        It costs nothing in one process. Several would have to agree after every step: they look at pulses alone.
        """
        self._schedule.count()
        if self._off or ranks.world_size > 1 or not math.isfinite(learning_rate):
            return None
        try:
            return self._detector.advance(step, learning_rate)
        except Exception as error:
            warn(_NOT_JUDGED.format(describe(error)), "step ratio")
            return None

    def after_step(
        self,
        target: Target,
        ranks: Ranks,
        *,
        step: int,
        epoch: int,
        learning_rate: float,
        warn: Warn,
    ) -> tuple[PulseRecord, Instability | None] | None:
        """After an optimizer step; all ranks together. The pulse and what it shows, if one is due and succeeds.

        Args:
            target: the model, its loss, and what keeps the training loop unchanged.
            ranks: of the run.
            step: on the x-axis of the loggers.
            epoch: of the run.
            learning_rate: of the step.
            warn: for whatever stops pulses.
        """
        self._schedule.count()
        if not self.is_prepared:
            return None
        try:
            return self._pulse(target, ranks, PulseRecord(step, epoch, 0.0, 0.0, learning_rate), warn)
        finally:
            self._taker.forget()
            self._prepared_in = 0.0

    def _pulse(
        self, target: Target, ranks: Ranks, record: PulseRecord, warn: Warn
    ) -> tuple[PulseRecord, Instability | None] | None:
        _wait_for(target.device)  # what the training step has left to do is not time of the pulse
        with self.budget.taking_pulse():
            self._taker.check(target, ranks.world_size)
        seconds = -self.budget.pulse_seconds
        with self.budget.taking_pulse():
            outcomes = ranks.gather(self._outcome(target, ranks.world_size))
        seconds += self.budget.pulse_seconds + self._prepared_in
        taken = [outcome for outcome in outcomes if isinstance(outcome, TakenPulse)]
        failures = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
        if failures:
            self._failed(failures[0], ranks, warn)
        if len(taken) < len(outcomes):
            self._without_move += not failures
            if self._without_move >= MOST_FAILURES:  # not a copy of the parameters in every step
                self._schedule.failed()
            return None
        self._failures = self._without_move = 0
        pulse = mean_pulse([outcome.pulse for outcome in taken])
        if self._schedule.is_starting:
            self.budget.starting_pulses += seconds
        record = replace(
            record,
            gain=pulse.gain,
            curvature=pulse.curvature,
            loss=pulse.loss,
            critical=pulse.critical,
            attention=most_concentrated([outcome.attention for outcome in taken]),
        )
        with self.budget.taking_pulse():
            decision: _Decision = ranks.broadcast(self._decide(record, seconds, warn) if ranks.rank == 0 else None)
        self._schedule.follow(decision.interval)
        if decision.fewer and self._use_fewer(ranks, LEAST):
            self._schedule.became_cheaper(0.5)
        self.records = [*self.records, decision.record][-self._size :]
        return decision.record, decision.event

    def _outcome(self, target: Target, world_size: int) -> TakenPulse | Failure | None:
        """None where the parameters have not moved: a step that a gradient scaler skipped, or no step at all."""
        try:
            return self._taker.take(target, world_size)
        except Exception as error:
            return Failure(classify(error), describe(error))

    def _decide(self, record: PulseRecord, seconds: float, warn: Warn) -> _Decision:
        event, is_suspicious = None, False
        try:
            event = self._detector.update(record)
            is_suspicious = self._suspicion.update(record, self._detector)
        except Exception as error:  # the other ranks are waiting
            warn(_NOT_JUDGED.format(describe(error)), "step ratio")
        record = replace(record, step_ratio=self._detector.step_ratio, critical_lr=self._detector.critical_lr)
        trained = self.budget.trained
        interval = self._schedule.took(seconds, trained, is_suspicious)
        return _Decision(record, event, interval, self._schedule.wants_cheaper(trained))

    def _use_fewer(self, ranks: Ranks, least: int) -> bool:
        """Half of the samples from now on; False if that would be too few. All ranks together, the same on all."""
        samples = min(ranks.gather(self._taker.prepared_samples)) // 2
        if samples < least:
            return False
        self._taker.samples = samples
        return True

    def _failed(self, failure: Failure, ranks: Ranks, warn: Warn) -> None:
        """Pulses stop where the reason lasts. That training has diverged is what vital signs are for."""
        self._schedule.failed()
        if failure.kind == "diverged":
            return
        if failure.kind == "memory":
            release_memory()
            if self._use_fewer(ranks, 1):
                return
        self._failures += 1
        self._off = not RESPONSES[failure.kind].retry_later or self._failures >= MOST_FAILURES
        text = "no pulses in this run" if self._off else "a pulse failed"
        warn(f"{text}: {failure.message}; training goes on", text)

    def state_dict(self) -> dict[str, Any]:
        return {
            "records": thinned([record.to_dict() for record in self.records], MOST_BYTES),
            "schedule": self._schedule.state_dict(),
            "taker": self._taker.state_dict(),
            "detector": self._detector.state_dict(),
            "suspicion": self._suspicion.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """All of the state, or, if it raises, none of it."""
        schedule, taker = copy.copy(self._schedule), PulseTaker()
        detector, suspicion = InstabilityDetector(), Suspicion()
        records = [PulseRecord.from_dict(record) for record in state["records"]][-self._size :]
        schedule.load_state_dict(state["schedule"])
        taker.load_state_dict(state["taker"])
        detector.load_state_dict(state["detector"])
        suspicion.load_state_dict(state["suspicion"])
        self._schedule, self._taker, self.records = schedule, taker, records
        self._off, self._failures, self._without_move = False, 0, 0
        self._detector, self._suspicion = detector, suspicion


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()

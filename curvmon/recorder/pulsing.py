"""Pulses in a training loop: which of its batches make an optimizer step, and where the results go."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from curvmon.monitor.budget import Budget
from curvmon.monitor.measurement import Warn
from curvmon.monitor.process_group import Ranks
from curvmon.monitor.pulses import Pulses
from curvmon.recorder.alerting import Alerting, largest_rate
from curvmon.recorder.loop import Loop
from curvmon.reporting.reporter import Report


class Pulsing:
    """Follows the batches of a training loop.

    Args:
        pulses: takes them.
        budget: times their reports.
        alerting: raises alerts.
        report: writes to the loggers.
        warn: for whatever stops pulses.
    """

    def __init__(
        self,
        pulses: Pulses,
        budget: Budget,
        alerting: Alerting,
        report: Report,
        warn: Warn,
    ) -> None:
        self.pulses = pulses
        self._budget = budget
        self._alerting = alerting
        self._report = report
        self._warn = warn
        self._steps = 0
        """of the loop, before the batch"""
        self._rate = math.nan
        self._has_stepped = False
        """an optimizer has, in this batch"""

    def before_batch(self, loop: Loop, batch: Any) -> None:
        self._steps = loop.steps
        self.pulses.before_step(loop.model, batch)
        self._has_stepped = False
        self._read_rate(loop.optimizers)

    def before_optimizer_step(self, optimizer: Any) -> None:
        """A module may set the learning rate right before the step, and a scheduler changes it right after."""
        other = self._rate if self._has_stepped else -math.inf
        self._read_rate([optimizer])
        self._rate, self._has_stepped = max(self._rate, other), True

    def _read_rate(self, optimizers: Iterable[Any]) -> None:
        """One that is on a device only where a pulse waits for the device anyway."""
        self._rate = largest_rate(optimizers, on_host=not self.pulses.is_prepared)

    def after_batch(self, loop: Loop, ranks: Ranks) -> None:
        """Called by all ranks together."""
        if loop.steps == self._steps and loop.counts_every_step:
            return
        step, epoch = loop.step, loop.epoch
        if not self.pulses.is_prepared:
            foreseen = self.pulses.skip_step(ranks, step=step, learning_rate=self._rate, warn=self._warn)
            if foreseen is not None:
                with self._budget.reporting():
                    alerts = self._alerting.unstable(foreseen, step, epoch, ranks)
                    self._report.write_alerts(loop, alerts)
                    self._alerting.deliver(loop, alerts)
            return
        taken = self.pulses.after_step(
            loop.target(),
            ranks,
            step=step,
            epoch=epoch,
            learning_rate=self._rate if math.isfinite(self._rate) else math.nan,
            warn=self._warn,
        )
        if taken is None:
            return
        record, event = taken
        with self._budget.taking_pulse():
            alerts = [] if event is None else self._alerting.unstable(event, record.step, record.epoch, ranks)
            self._report.write_pulse(loop, record, alerts)
        with self._budget.reporting():  # which may save a checkpoint
            self._alerting.deliver(loop, alerts)

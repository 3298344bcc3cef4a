"""Pulses in a Trainer: which of its batches make an optimizer step, and where the results go."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from curvmon.integrations.lightning.alerting import Alerting, largest_rate
from curvmon.integrations.lightning.compatibility import batches_that_stepped
from curvmon.monitor.budget import Budget
from curvmon.monitor.measurement import Warn
from curvmon.monitor.process_group import Ranks
from curvmon.monitor.pulses import Pulses
from curvmon.monitor.target import Target
from curvmon.reporting.reporter import Report

if TYPE_CHECKING:
    import pytorch_lightning as pl


class Pulsing:
    """Follows the batches of a Trainer.

    Args:
        pulses: takes them.
        budget: times their reports.
        alerting: raises alerts.
        report: writes to loggers and `callback_metrics`.
        target: the model and its loss.
        warn: for whatever stops pulses.
    """

    def __init__(
        self,
        pulses: Pulses,
        budget: Budget,
        alerting: Alerting,
        report: Report,
        target: Callable[[pl.Trainer, pl.LightningModule], Target],
        warn: Warn,
    ) -> None:
        self.pulses = pulses
        self._budget = budget
        self._alerting = alerting
        self._report = report
        self._target = target
        self._warn = warn
        self._steps = 0
        """of the Trainer, before the batch"""
        self._rate = math.nan
        self._has_stepped = False
        """an optimizer has, in this batch"""

    def before_batch(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any) -> None:
        self._steps = trainer.global_step
        self.pulses.before_step(pl_module, batch)
        self._has_stepped = False
        self._read_rate(trainer.optimizers)

    def before_optimizer_step(self, optimizer: Any) -> None:
        """A module may set the learning rate right before the step, and a scheduler changes it right after."""
        other = self._rate if self._has_stepped else -math.inf
        self._read_rate([optimizer])
        self._rate, self._has_stepped = max(self._rate, other), True

    def _read_rate(self, optimizers: Iterable[Any]) -> None:
        """One that is on a device only where a pulse waits for the device anyway."""
        self._rate = largest_rate(optimizers, on_host=not self.pulses.is_prepared)

    def after_batch(self, trainer: pl.Trainer, pl_module: pl.LightningModule, ranks: Ranks) -> None:
        """Called by all ranks together."""
        # with manual optimization any batch may have stepped, with optimizers that the Trainer does not know, too
        if trainer.global_step == self._steps and pl_module.automatic_optimization:
            return
        step, epoch = batches_that_stepped(trainer), trainer.current_epoch
        if not self.pulses.is_prepared:
            foreseen = self.pulses.skip_step(ranks, step=step, learning_rate=self._rate, warn=self._warn)
            if foreseen is not None:
                with self._budget.reporting():
                    alerts = self._alerting.unstable(foreseen, step, epoch, ranks)
                    self._report.write_alerts(trainer, alerts)
                    self._alerting.deliver(trainer, alerts)
            return
        taken = self.pulses.after_step(
            self._target(trainer, pl_module),
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
            self._report.write_pulse(trainer, record, alerts)
        with self._budget.reporting():  # which may save a checkpoint
            self._alerting.deliver(trainer, alerts)

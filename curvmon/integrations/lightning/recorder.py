"""One measurement of a run: within the budget, then history, alerts and loggers."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from curvmon.errors import warn
from curvmon.integrations.lightning import announcements
from curvmon.integrations.lightning.alerting import Alerting, largest_rate
from curvmon.integrations.lightning.compatibility import (
    batches_ahead,
    check_nodes,
    has_validation,
    log_place,
    progress_of,
    say,
)
from curvmon.integrations.lightning.pulsing import Pulsing
from curvmon.integrations.lightning.training_step import isolated_step, step_loss
from curvmon.monitor.budget import Budget
from curvmon.monitor.fallbacks import RESPONSES, Failure
from curvmon.monitor.history import History
from curvmon.monitor.measurement import MeasurementRunner
from curvmon.monitor.plan import SKIP, Plan
from curvmon.monitor.process_group import Ranks
from curvmon.monitor.pulses import Pulses
from curvmon.monitor.target import Target
from curvmon.records import PROBE_LOSS, RunHistory, Snapshot
from curvmon.reporting.console import progress
from curvmon.reporting.reporter import Report

if TYPE_CHECKING:
    import pytorch_lightning as pl


class Recorder:
    """Measures, and adds the result to history, alerts and loggers.

    Args:
        runner: makes the measurement.
        budget: says whether it may be made, and with how many HVPs.
        history: gets the result.
        alerting: raises alerts.
        report: writes to loggers, `callback_metrics` and console.
        loss: `loss(module, batch)`; None: the module's training_step.
        pulses: taken between validations.
    """

    def __init__(
        self,
        runner: MeasurementRunner,
        budget: Budget,
        history: History,
        alerting: Alerting,
        report: Report,
        loss: Callable[..., Any] | None,
        pulses: Pulses,
    ) -> None:
        self.runner = runner
        self.budget = budget
        self.history = history
        self.alerting = alerting
        self.report = report
        self._loss = loss
        self.pulsing = Pulsing(pulses, budget, alerting, report, self._target, self.warn)
        self.counts = {"validations": 0, "full": 0}
        self._measures = True
        """False once it is clear that this run cannot be measured: vital signs go on"""
        self._skipped_last = False
        """the last measurement that was due"""
        self._is_at_start = False
        self._has_introduced_itself = False
        self._has_said_skipped = False
        self._warned: set[str] = set()

    @property
    def records(self) -> RunHistory:
        """Of the run so far."""
        return RunHistory(tuple(self.history), tuple(self.pulsing.pulses.records), tuple(self.alerting.raised))

    def check(self, pl_module: pl.LightningModule) -> None:
        """Before training. Raises NodeError for names that match no module; warns if matplotlib is missing."""
        settings = self.runner.settings
        check_nodes(pl_module, settings.nodes)
        check_nodes(pl_module, None if settings.output is None else [settings.output])
        if self.report.lacks_pictures:
            self.warn("heatmaps need matplotlib (pip install matplotlib); numbers are logged all the same")

    def start_training(self) -> None:
        self.budget.start_training()
        self.pulsing.pulses.start()
        self.report.start(self.records)
        self._is_at_start, self._skipped_last = True, False

    def start_batch(self, trainer: pl.Trainer) -> None:
        """Before every training step. Only in the first one is the progress that of a resumed training."""
        if self._is_at_start:
            self.budget.start_at(progress_of(trainer))
            self._is_at_start = False

    def end_training(self, trainer: pl.Trainer, pl_module: pl.LightningModule, ranks: Ranks, step: int) -> None:
        """Every run ends with a measurement, and the last one has pictures."""
        if self._skipped_last:  # the run has ended earlier than expected, or its end was not known
            self.measure(trainer, pl_module, ranks, step, ends=True)
        if self.report.schedule.undrawn is not None:
            self._draw(trainer)
        self.budget.stop_training()
        if self.counts["validations"]:
            full, points = self.counts["full"], self.counts["validations"]
            alerts, notices = len(self.alerting.alerts), len(self.alerting.notices)
            self._say(trainer, announcements.summary(full, points, alerts, notices, self.budget))

    def start_validation(self) -> None:
        self.runner.probe.start_validation()

    def observe_batch(self, source: str, batch: Any) -> None:
        """Captures the batch if it belongs to the probe batch."""
        self.runner.probe.observe(source, batch)

    def observe_training_batch(self, trainer: pl.Trainer, batch: Any) -> None:
        """Captures it if it belongs to the probe batch; what it looks like is context of alerts."""
        self.observe_batch("train", batch)
        self.alerting.observe_batch(trainer, batch)

    def observe_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any) -> None:
        """After a training step: its learning rate and its loss, as context of alerts."""
        self.alerting.observe_step(trainer, pl_module, outputs)

    @property
    def probe_is_short(self) -> bool:
        """Fewer samples have been captured than the probe batch should have."""
        return self.runner.probe.is_short()

    def measure(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        ranks: Ranks,
        step: int,
        *,
        due: bool = True,
        ends: bool = False,
        validates: bool = True,
    ) -> bool:
        """Vital signs, and a measurement if it is due and the budget has one; whether anything was recorded.

        Called by all ranks together.

        Args:
            trainer: whose loggers and `callback_metrics` get the values.
            pl_module: the model.
            ranks: of the run.
            step: on the x-axis of the loggers.
            due: more than vital signs, if the budget allows.
            ends: the run does not go on.
            validates: vital signs in any case; elsewhere, only if there is time for them.
        """
        target = self._target(trainer, pl_module)
        due = due and self._measures
        if due:
            self.budget.reach(1.0 if ends else progress_of(trainer))
        is_first = due and self.budget.plans_first
        plan: Plan = ranks.broadcast(self.budget.plan() if due else SKIP)
        if due:
            self._skipped_last = plan.skips
        if plan.skips and not (validates or ranks.broadcast(self.budget.affords_vital_signs)):
            self.budget.skip()
            return False
        with_sharpness: bool = ranks.broadcast(plan.skips and self.budget.affords_sharpness)
        with self.budget.taking_vital_signs(with_sharpness):
            signs = self.runner.vital_signs(
                target, ranks, warn=self.warn, with_loss=plan.skips or is_first, with_sharpness=with_sharpness
            )
        if is_first:
            self.budget.expect(self._training_passes(trainer))
            plan = ranks.broadcast(self.budget.plan())
        rate = largest_rate(trainer.optimizers, on_host=True)
        signs = replace(signs, learning_rate=rate if math.isfinite(rate) else math.nan)
        snapshot = Snapshot(step=step, epoch=trainer.current_epoch, vitals=signs)
        if due and plan.skips:
            self.budget.skip()
        if plan.skips or any(name != PROBE_LOSS for name in signs.not_finite):
            reason = _not_finite(signs.not_finite, pl_module)
            if reason is not None:
                self.warn(f"not measured: {reason}. curvmon does not stop the run", "diverged")
            self._record(trainer, pl_module, ranks, snapshot, reason)
            return True
        last = self.history.last_full
        with self.budget.measuring(), progress(trainer, None if last is None else last.hvps) as on_product:
            outcome = self.runner.run(
                target, ranks, warn=self.warn, share=plan.share, is_first=last is None, on_product=on_product
            )
        if outcome.succeeded:
            self.budget.update_estimate(plan)
        else:
            with self.budget.taking_vital_signs(False):
                loss = self.runner.vital_signs(target, ranks, warn=self.warn, with_loss=True).loss
            snapshot = replace(snapshot, vitals=replace(signs, loss=loss))
        snapshot = replace(snapshot, measurement=outcome.measurement, spectrum=outcome.spectrum)
        failure, reason = outcome.failure, None
        if failure is not None and failure.kind == "diverged" and (last is None or last.spectrum is not None):
            # perhaps the Hessian w.r.t. the parameters alone
            reason = failure.message
        if failure is not None and not outcome.succeeded:
            reason = failure.message if failure.kind == "diverged" else None
            self._failed(failure)
        self._record(trainer, pl_module, ranks, snapshot, reason, self.budget.last_seconds)
        if self.report.schedule.due:
            self._draw(trainer)
        return True

    def _record(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        ranks: Ranks,
        snapshot: Snapshot,
        not_finite: str | None,
        seconds: float = 0.0,
    ) -> None:
        """History, alerts and loggers; `not_finite`: why something could not be measured."""
        # before the first step there is no training time to compare with
        overhead = self.budget.overhead if trainer.global_step else float("nan")
        with self.budget.reporting():
            seconds, overhead, skipped = ranks.broadcast((seconds, overhead, self.budget.skipped))
            snapshot = replace(snapshot, seconds=seconds, overhead=overhead, skipped=skipped)
            self._compare_nodes(snapshot)
            fresh = self.alerting.update(trainer, pl_module, snapshot, list(self.history), self.runner.norms, ranks)
            if not_finite is not None:
                fresh += self.alerting.diverged(not_finite, snapshot, list(self.history), ranks)
            self.history.append(replace(snapshot, alerts=len(self.alerting.alerts)))
            self.counts["validations"] += 1
            self.counts["full"] += snapshot.is_full
            self.report.write(trainer, list(self.history), self.alerting.alerts, fresh)
            self.alerting.deliver(trainer, fresh)
        self._introduce(trainer)

    def _training_passes(self, trainer: pl.Trainer) -> float | None:
        """Of the probe batch, that the rest of the training takes as long as; None if its end is not known."""
        batches = batches_ahead(trainer)
        return None if batches is None else batches * self.runner.probe.training_batch

    def _draw(self, trainer: pl.Trainer) -> None:
        before = self.budget.measured
        with self.budget.reporting():
            self.report.draw(trainer)
        self.report.schedule.drew(self.budget.measured - before)

    def _target(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> Target:
        optimizers = trainer.optimizers
        return Target(
            model=pl_module,
            loss=self._loss or step_loss(pl_module),
            device=pl_module.device,
            optimizer=optimizers[0] if len(optimizers) == 1 else None,
            isolation=partial(isolated_step, trainer, pl_module),
        )

    def _introduce(self, trainer: pl.Trainer) -> None:
        """Once the first measurement has been timed; what follows from it the first time that one is skipped."""
        last = self.history.last_full
        if not self._has_introduced_itself and last is not None and trainer.global_step:
            self._has_introduced_itself = True
            nodes = () if last.measurement is None else last.measurement.nodes
            where = "validation" if has_validation(trainer) else "epoch"
            loggers = [log_place(logger) for logger in trainer.loggers]
            self._say(
                trainer, announcements.planned(nodes, self.runner.probe.description, self.budget.stride, where, loggers)
            )
        if self._skipped_last and not self._has_said_skipped:
            self._has_said_skipped = True
            step = list(self.history)[-1].step
            self._say(trainer, announcements.skipped(step, self.budget.max_overhead, self.budget.free_seconds))

    def _say(self, trainer: pl.Trainer, text: str) -> None:
        prefix = self.report.prefix.rstrip("/")
        say(trainer, f"curvmon ({prefix}): {text}" if prefix else f"curvmon: {text}")

    def _compare_nodes(self, snapshot: Snapshot) -> None:
        before = self.history.nodes
        if before is not None and snapshot.measurement is not None and before != snapshot.measurement.nodes:
            self.warn(
                f"the nodes are {', '.join(snapshot.measurement.nodes)}, before they were {', '.join(before)}: "
                "values of pairs before and after are not comparable"
            )

    def _failed(self, failure: Failure) -> None:
        """One warning for each kind of error."""
        self._measures = RESPONSES[failure.kind].retry_later
        if self._measures:
            self.warn(
                f"not measured: {failure.message}. Training goes on; the next validation measures again", failure.kind
            )
        else:
            self.warn(f"not measured: {failure.message}. Only vital signs from here on; training goes on")

    def warn(self, message: str, kind: str | None = None) -> None:
        """Once for each kind; by default every message is a kind of its own."""
        if (kind or message) not in self._warned:
            self._warned.add(kind or message)
            warn(message)

    def state_dict(self) -> dict[str, Any]:
        return {
            "history": self.history.state_dict(),
            "budget": self.budget.state_dict(),
            "counts": dict(self.counts),
            "file": self.report.file.state_dict(),
            "pulses": self.pulsing.pulses.state_dict(),
            **self.runner.state_dict(),
            **self.alerting.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """All of the state, or, if it raises, none of it."""
        # they assign to their attributes only: a shallow copy leaves the original as it is
        history, budget, runner = copy.copy(self.history), copy.copy(self.budget), copy.copy(self.runner)
        history.load_state_dict(state["history"])
        budget.load_state_dict(state["budget"])
        runner.load_state_dict(state)
        counts, pulses = dict(state["counts"]), copy.copy(self.pulsing.pulses)
        pulses.load_state_dict(state["pulses"])
        self.alerting.load_state_dict(state)
        self.history, self.budget, self.runner = history, budget, runner
        pulses.budget = budget
        self.pulsing = Pulsing(pulses, budget, self.alerting, self.report, self._target, self.warn)
        self.counts = counts
        self.report.file.load_state_dict(state["file"], max(self.records.steps, default=None))


def _not_finite(names: Sequence[str], pl_module: pl.LightningModule) -> str | None:
    """What is NaN or infinite; None if nothing is."""
    if not names:
        return None
    first, others = names[0], len(names) - 1
    if first != PROBE_LOSS:
        kind = "parameter" if first in dict(pl_module.named_parameters()) else "buffer"
        first = f"{kind} {first!r}"
    more = f" and {others} more are" if others else " is"
    return f"{first}{more} not finite: training has diverged"

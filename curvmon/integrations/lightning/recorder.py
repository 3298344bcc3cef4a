"""One measurement of a run: within the budget, then history, alerts and loggers."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from curvmon.errors import warn
from curvmon.integrations.lightning.alerting import Alerting
from curvmon.integrations.lightning.compatibility import check_nodes
from curvmon.integrations.lightning.training_step import isolated_step, step_loss
from curvmon.monitor.budget import Budget, Plan
from curvmon.monitor.fallbacks import RESPONSES, Failure
from curvmon.monitor.history import History
from curvmon.monitor.measurement import MeasurementRunner, Target
from curvmon.monitor.process_group import Ranks
from curvmon.records import Alert, Snapshot
from curvmon.reporting.console import progress
from curvmon.reporting.reporter import Report

if TYPE_CHECKING:
    import pytorch_lightning as pl

log = logging.getLogger("curvmon")


class Recorder:
    """Measures, and adds the result to history, alerts and loggers.

    Args:
        runner: makes the measurement.
        budget: says whether it may be made, and with how many HVPs.
        history: gets the result.
        alerting: raises alerts.
        report: writes to loggers, `callback_metrics` and console.
        loss: `loss(module, batch)`; None: the module's training_step.
    """

    def __init__(
        self,
        runner: MeasurementRunner,
        budget: Budget,
        history: History,
        alerting: Alerting,
        report: Report,
        loss: Callable[..., Any] | None,
    ) -> None:
        self.runner = runner
        self.budget = budget
        self.history = history
        self.alerting = alerting
        self.report = report
        self._loss = loss
        self._warned: set[str] = set()

    @property
    def alerts(self) -> list[Alert]:
        return self.alerting.alerts

    @property
    def notices(self) -> list[Alert]:
        return self.alerting.notices

    def check(self, pl_module: pl.LightningModule) -> None:
        """Before training. Raises NodeError for names that match no module; warns if matplotlib is missing."""
        settings = self.runner.settings
        check_nodes(pl_module, settings.nodes)
        check_nodes(pl_module, None if settings.output is None else [settings.output])
        if self.report.lacks_pictures:
            self.warn("heatmaps need matplotlib (pip install matplotlib); numbers are logged all the same")

    def start_training(self) -> None:
        self.budget.start_training()
        self.report.schedule.start()

    def end_training(self, trainer: pl.Trainer) -> None:
        """The last measurement always has pictures."""
        if self.report.schedule.undrawn is not None:
            self._draw(trainer)

    def start_validation(self) -> None:
        self.runner.probe.start_validation()

    def observe_batch(self, source: str, batch: Any) -> None:
        """Captures the batch if it belongs to the probe batch."""
        self.runner.probe.observe(source, batch)

    def observe_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any) -> None:
        """After a training step: its learning rate and its loss, as context of alerts."""
        self.alerting.observe_step(trainer, pl_module, outputs)

    @property
    def probe_is_short(self) -> bool:
        """Fewer samples have been captured than the probe batch should have."""
        return self.runner.probe.is_short()

    def measure(self, trainer: pl.Trainer, pl_module: pl.LightningModule, ranks: Ranks, step: int) -> bool:
        """Called by all ranks together; False if the run cannot be measured.

        Args:
            trainer: whose loggers and `callback_metrics` get the values.
            pl_module: the model.
            ranks: of the run.
            step: on the x-axis of the loggers.
        """
        plan: Plan = ranks.broadcast(self.budget.plan())
        if plan.skips:
            self.budget.skip()
            self._skip(trainer, step)
            return True
        last = self.history.last
        target = self._target(trainer, pl_module)
        with self.budget.measuring(), progress(trainer, None if last is None else last.hvps) as on_product:
            outcome = self.runner.run(
                target, ranks, warn=self.warn, share=plan.share, is_first=last is None, on_product=on_product
            )
        if outcome.succeeded:
            self.budget.update_estimate(plan)
        # before the first step there is no training time to compare with
        overhead = self.budget.overhead if trainer.global_step else float("nan")
        with self.budget.reporting():
            seconds, overhead, skipped = ranks.broadcast((self.budget.last_seconds, overhead, self.budget.skipped))
            failure = outcome.failure
            if failure is not None and not outcome.succeeded:
                return self._failed(trainer, failure, ranks, step)
            snapshot = Snapshot(
                step=step,
                epoch=trainer.current_epoch,
                measurement=outcome.measurement,
                spectrum=outcome.spectrum,
                seconds=seconds,
                overhead=overhead,
                skipped=skipped,
            )
            self._compare_nodes(snapshot)
            fresh = self.alerting.update(trainer, pl_module, snapshot, list(self.history), ranks)
            if failure is not None and failure.kind == "diverged" and (last is None or last.spectrum is not None):
                # the Hessian w.r.t. the parameters is not finite, although that between layers still is
                fresh += self.alerting.diverged(failure.message, step, snapshot.epoch, ranks)
            self.history.append(replace(snapshot, alerts=len(self.alerting.alerts)))
            self.report.write(trainer, list(self.history), self.alerting.alerts, fresh)
            self.alerting.deliver(trainer, fresh)
        if self.report.schedule.due:
            self._draw(trainer)
        return True

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

    def _skip(self, trainer: pl.Trainer, step: int) -> None:
        """Log that a point is missing; the first time also say why."""
        self.report.skipped(trainer, self.budget.skipped, step)
        if self.budget.skipped == 1 and trainer.is_global_zero:
            log.info(
                "curvmon skips measurements to stay within max_overhead=%g of the training time beyond 30 s; "
                "max_overhead=None measures at every validation, fewer eigenvalues and fewer nodes make it cheaper",
                self.budget.max_overhead,
            )

    def _compare_nodes(self, snapshot: Snapshot) -> None:
        before = self.history.nodes
        if before is not None and snapshot.measurement is not None and before != snapshot.measurement.nodes:
            self.warn(
                f"the nodes are {', '.join(snapshot.measurement.nodes)}, before they were {', '.join(before)}: "
                "values of pairs before and after are not comparable"
            )

    def _failed(self, trainer: pl.Trainer, failure: Failure, ranks: Ranks, step: int) -> bool:
        """One warning for each kind of error; False if the run cannot be measured."""
        if failure.kind == "diverged":
            fresh = self.alerting.diverged(failure.message, step, trainer.current_epoch, ranks)
            if fresh:
                self.report.count(trainer, self.alerting.alerts, step)
            self.alerting.deliver(trainer, fresh)
        retry_later = RESPONSES[failure.kind].retry_later
        if retry_later:
            self.warn(
                f"not measured: {failure.message}. Training goes on; the next validation measures again", failure.kind
            )
        else:
            self.warn(f"not measured: {failure.message}. This run is not monitored any more; training goes on")
        return retry_later

    def warn(self, message: str, kind: str | None = None) -> None:
        """Once for each kind; by default every message is a kind of its own."""
        if (kind or message) not in self._warned:
            self._warned.add(kind or message)
            warn(message)

    def state_dict(self) -> dict[str, Any]:
        return {
            "history": self.history.state_dict(),
            "budget": self.budget.state_dict(),
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
        self.alerting.load_state_dict(state)
        self.history, self.budget, self.runner = history, budget, runner

"""One measurement of a run: within the budget, then history, alerts and loggers."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from curvmon.errors import warn
from curvmon.graph.nodes import check_names
from curvmon.monitor.budget import Budget
from curvmon.monitor.fallbacks import RESPONSES, Failure
from curvmon.monitor.history import History
from curvmon.monitor.measurement import MeasurementRunner
from curvmon.monitor.plan import SKIP, Plan
from curvmon.monitor.process_group import Ranks
from curvmon.monitor.pulses import Pulses
from curvmon.recorder import announcements
from curvmon.recorder.alerting import Alerting, largest_rate
from curvmon.recorder.loop import Loop
from curvmon.recorder.pulsing import Pulsing
from curvmon.records import PROBE_LOSS, RunHistory, Snapshot
from curvmon.reporting.console import progress
from curvmon.reporting.loggers import log_place
from curvmon.reporting.reporter import Report


class Recorder:
    """Measures, and adds the result to history, alerts and loggers.

    Args:
        runner: makes the measurement.
        budget: says whether it may be made, and with how many HVPs.
        history: gets the result.
        alerting: raises alerts.
        report: writes to loggers and console.
        pulses: taken between validations.
    """

    def __init__(
        self,
        runner: MeasurementRunner,
        budget: Budget,
        history: History,
        alerting: Alerting,
        report: Report,
        pulses: Pulses,
    ) -> None:
        self.runner = runner
        self.budget = budget
        self.history = history
        self.alerting = alerting
        self.report = report
        self.pulsing = Pulsing(pulses, budget, alerting, report, self.warn)
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

    def check(self, model: nn.Module) -> None:
        """Before training. Raises NodeError for names that match no module; warns if matplotlib is missing."""
        settings = self.runner.settings
        if settings.nodes is not None:
            check_names(model, list(settings.nodes))
        if settings.output is not None:
            check_names(model, [settings.output])
        if self.report.lacks_pictures:
            self.warn("heatmaps need matplotlib (pip install matplotlib); numbers are logged all the same")

    def start_training(self) -> None:
        self.budget.start_training()
        self.pulsing.pulses.start()
        self.report.start(self.records)
        self._is_at_start, self._skipped_last = True, False

    def start_batch(self, loop: Loop) -> None:
        """Before every training step. Only in the first one is the progress that of a resumed training."""
        if self._is_at_start:
            self.budget.start_at(loop.progress)
            self._is_at_start = False

    def end_training(self, loop: Loop, ranks: Ranks, measures: bool = True) -> None:
        """Every run ends with a measurement, if it `measures`, and the last one has pictures."""
        if self._skipped_last and measures:  # the run has ended earlier than expected, or its end was not known
            self.measure(loop, ranks, loop.step, ends=True)
        if self.report.schedule.undrawn is not None:
            self._draw(loop)
        self.budget.stop_training()
        if self.counts["validations"]:
            full, points = self.counts["full"], self.counts["validations"]
            alerts, notices = len(self.alerting.alerts), len(self.alerting.notices)
            self._say(loop, announcements.summary(full, points, alerts, notices, self.budget))

    def start_validation(self) -> None:
        self.runner.probe.start_validation()

    def observe_batch(self, source: str, batch: Any) -> None:
        """Captures the batch if it belongs to the probe batch."""
        self.runner.probe.observe(source, batch)

    def observe_training_batch(self, loop: Loop, batch: Any) -> None:
        """Captures it if it belongs to the probe batch; what it looks like is context of alerts."""
        self.observe_batch("train", batch)
        self.alerting.observe_batch(loop, batch)

    def observe_step(self, loop: Loop, outputs: Any) -> None:
        """After a training step: its learning rate and its loss, as context of alerts."""
        self.alerting.observe_step(loop, outputs)

    @property
    def probe_is_short(self) -> bool:
        """Fewer samples have been captured than the probe batch should have."""
        return self.runner.probe.is_short()

    def measure(
        self,
        loop: Loop,
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
            loop: whose loggers get the values.
            ranks: of the run.
            step: on the x-axis of the loggers.
            due: more than vital signs, if the budget allows.
            ends: the run does not go on.
            validates: vital signs in any case; elsewhere, only if there is time for them.
        """
        target = loop.target()
        due = due and self._measures
        if due:
            self.budget.reach(1.0 if ends else loop.progress)
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
            self.budget.expect(self._training_passes(loop))
            plan = ranks.broadcast(self.budget.plan())
        rate = largest_rate(loop.optimizers, on_host=True)
        signs = replace(signs, learning_rate=rate if math.isfinite(rate) else math.nan)
        snapshot = Snapshot(step=step, epoch=loop.epoch, vitals=signs)
        if due and plan.skips:
            self.budget.skip()
        if plan.skips or any(name != PROBE_LOSS for name in signs.not_finite):
            reason = _not_finite(signs.not_finite, loop.model)
            if reason is not None:
                self.warn(f"not measured: {reason}. curvmon does not stop the run", "diverged")
            self._record(loop, ranks, snapshot, reason)
            return True
        last = self.history.last_full
        with self.budget.measuring(), progress(loop, None if last is None else last.hvps) as on_product:
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
        self._record(loop, ranks, snapshot, reason, self.budget.last_seconds)
        if self.report.schedule.due:
            self._draw(loop)
        return True

    def _record(
        self,
        loop: Loop,
        ranks: Ranks,
        snapshot: Snapshot,
        not_finite: str | None,
        seconds: float = 0.0,
    ) -> None:
        """History, alerts and loggers; `not_finite`: why something could not be measured."""
        # before the first step there is no training time to compare with
        overhead = self.budget.overhead if loop.steps else float("nan")
        with self.budget.reporting():
            seconds, overhead, skipped = ranks.broadcast((seconds, overhead, self.budget.skipped))
            snapshot = replace(snapshot, seconds=seconds, overhead=overhead, skipped=skipped)
            self._compare_nodes(snapshot)
            fresh = self.alerting.update(loop, snapshot, list(self.history), self.runner.norms, ranks)
            if not_finite is not None:
                fresh += self.alerting.diverged(not_finite, snapshot, list(self.history), ranks)
            self.history.append(replace(snapshot, alerts=len(self.alerting.alerts)))
            self.counts["validations"] += 1
            self.counts["full"] += snapshot.is_full
            self.report.write(loop, list(self.history), self.alerting.alerts, fresh)
            self.alerting.deliver(loop, fresh)
        self._introduce(loop)

    def _training_passes(self, loop: Loop) -> float | None:
        """Of the probe batch, that the rest of the training takes as long as; None if its end is not known."""
        batches = loop.batches_ahead
        return None if batches is None else batches * self.runner.probe.training_batch

    def _draw(self, loop: Loop) -> None:
        before = self.budget.measured
        with self.budget.reporting():
            self.report.draw(loop)
        self.report.schedule.drew(self.budget.measured - before)

    def _introduce(self, loop: Loop) -> None:
        """Once the first measurement has been timed; what follows from it the first time that one is skipped."""
        last = self.history.last_full
        if not self._has_introduced_itself and last is not None and loop.steps:
            self._has_introduced_itself = True
            nodes = () if last.measurement is None else last.measurement.nodes
            where = "validation" if loop.has_validation else "epoch"
            loggers = [log_place(logger) for logger in loop.loggers]
            samples, stride = self.runner.probe.description, self.budget.stride
            self._say(loop, announcements.planned(nodes, samples, stride, where, loggers))
        if self._skipped_last and not self._has_said_skipped:
            self._has_said_skipped = True
            step = list(self.history)[-1].step
            self._say(loop, announcements.skipped(step, self.budget.max_overhead, self.budget.free_seconds))

    def _say(self, loop: Loop, text: str) -> None:
        prefix = self.report.prefix.rstrip("/")
        loop.say(f"curvmon ({prefix}): {text}" if prefix else f"curvmon: {text}")

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
        self.pulsing = Pulsing(pulses, budget, self.alerting, self.report, self.warn)
        self.counts = counts
        self.report.file.load_state_dict(state["file"], max(self.records.steps, default=None))


def _not_finite(names: Sequence[str], model: nn.Module) -> str | None:
    """What is NaN or infinite; None if nothing is."""
    if not names:
        return None
    first, others = names[0], len(names) - 1
    if first != PROBE_LOSS:
        kind = "parameter" if first in dict(model.named_parameters()) else "buffer"
        first = f"{kind} {first!r}"
    more = f" and {others} more are" if others else " is"
    return f"{first}{more} not finite: training has diverged"

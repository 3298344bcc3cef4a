"""What a monitor sees of a run at its validations: the monitor's own functions with its default settings.

Follows `curvmon.recorder.recorder` and `alerting`, without a budget: everything is measured at every
validation.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.alert_families import Batch
from benchmarks.alert_training import Run
from curvmon.alerts.context import Context, context_values
from curvmon.monitor.fallbacks import Part
from curvmon.monitor.measurement import Request, attempt
from curvmon.monitor.process_group import Ranks
from curvmon.monitor.run_settings import run_settings
from curvmon.monitor.settings import Settings
from curvmon.monitor.target import Target
from curvmon.monitor.training_data import TrainingData
from curvmon.monitor.vital_signs import Taken, VitalSignsTaker
from curvmon.recorder.alerting import TrainingSignals
from curvmon.records import PROBE_LOSS, Snapshot
from curvmon.spectrum.findings import Findings

Plain = dict[str, Any]
BOTH: frozenset[Part] = frozenset(("pairs", "spectrum"))


class Seen(NamedTuple):
    """At one validation."""

    snapshot: Snapshot
    context: Context
    not_finite: str | None
    """why something could not be measured, where it was not finite"""
    logged: dict[str, float]
    """by the user: train_loss (mean of the epoch), val_loss, val_accuracy"""
    groups: list[dict[str, float]]
    """of the optimizer: learning rate, weight decay, momentum"""
    trainable: list[str]
    """names of parameters"""
    batch_size: int

    def plain(self) -> Plain:
        """What `torch.load(weights_only=True)` accepts."""
        context = {key: _interned(value) for key, value in self.context._asdict().items()}
        return {**self._asdict(), "snapshot": self.snapshot.to_dict(), "context": context}

    @classmethod
    def of(cls, plain: Plain) -> Seen:
        context = Context(**plain["context"])
        return cls(**{**plain, "snapshot": Snapshot.from_dict(plain["snapshot"]), "context": context})


class Watch:
    """Observes the steps of a run and looks at every validation; a deep copy watches a copied run."""

    def __init__(self, run: Run) -> None:
        self._settings = Settings(nodes=run.family.nodes, seed=run.seed)
        self._taker, self._findings = VitalSignsTaker(), Findings()
        self._signals, self._data = TrainingSignals(), TrainingData()
        self._start: Tensor | None = None
        self._had_spectrum = True
        """the last measurement that succeeded"""

    def before_step(self, run: Run, batch: Batch) -> None:
        self._data.observe(batch)

    def after_step(self, run: Run, loss: Tensor) -> None:
        self._signals.observe(loss, [run.optimizer], scheduled=run.scheduled_rate)

    def look(self, run: Run) -> Seen:
        logged = run.validate()
        rate, loss, over_schedule = self._signals.collect([run.optimizer])
        taken = self._taker.take(run.model, [run.probe], run.family.loss, None, self._findings)
        signs = replace(taken.signs, learning_rate=rate)
        snapshot = Snapshot(step=run.step, epoch=run.epoch, vitals=signs)
        not_finite = [name for name in signs.not_finite if name != PROBE_LOSS]
        if not_finite:
            reason: str | None = f"not finite: {', '.join(not_finite[:3])}"
        else:
            snapshot, reason = self._measured(run, snapshot)
        return Seen(
            snapshot,
            self._context(run, snapshot, taken, logged, (rate, loss, over_schedule)),
            reason,
            {"train_loss": loss, **logged},
            [_numbers(group) for group in run.optimizer.param_groups],
            [name for name, parameter in run.model.named_parameters() if parameter.requires_grad],
            run.batch,
        )

    def _context(
        self, run: Run, snapshot: Snapshot, taken: Taken, logged: Mapping[str, float], signals: tuple[float, ...]
    ) -> Context:
        rate, loss, over_schedule = signals
        values = context_values(taken.norms, rate, loss)
        signs = {
            **{source: value for source, value in taken.norms.items() if source not in values},
            **self._data.collect(),
            **{("metric", name): value for name, value in logged.items()},
        }
        if math.isfinite(over_schedule):
            signs["learning rate over scheduled", ""] = over_schedule
        operations = {} if snapshot.measurement is None else snapshot.measurement.operations
        return Context(values, operations, signs, run_settings(run.model, [run.optimizer]))

    def _measured(self, run: Run, snapshot: Snapshot) -> tuple[Snapshot, str | None]:
        target = Target(run.model, run.family.loss, torch.device("cpu"), run.optimizer)
        request = Request(self._settings, BOTH, [run.probe], start=self._start, findings=self._findings)
        outcome = attempt(target, request, Ranks(1))
        self._start = self._start if outcome.start is None else outcome.start
        had_spectrum = self._had_spectrum
        if outcome.succeeded:
            self._had_spectrum = outcome.spectrum is not None
        snapshot = replace(snapshot, measurement=outcome.measurement, spectrum=outcome.spectrum)
        failure = outcome.failure
        if failure is not None and failure.kind == "diverged" and (had_spectrum or not outcome.succeeded):
            return snapshot, failure.message
        return snapshot, None


def _numbers(group: Mapping[str, Any]) -> dict[str, float]:
    return {key: float(value) for key, value in group.items() if type(value) in (int, float)}


def _interned(mapping: Mapping[Any, Any]) -> dict[Any, Any]:
    """Equal strings are stored once."""

    def once(value: Any) -> Any:
        if isinstance(value, Mapping):
            return _interned(value)
        if isinstance(value, tuple):
            return tuple(once(each) for each in value)
        return sys.intern(value) if isinstance(value, str) else value

    return {once(key): once(value) for key, value in mapping.items()}

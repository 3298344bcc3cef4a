"""What a monitor sees of a run at its validations, with the monitor's own functions and default settings, as plain data.

Follows `curvmon.integrations.lightning.recorder`, without a budget: everything is measured at every validation.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.alert_families import Batch
from benchmarks.alert_training import Run
from curvmon.alerts.context import Context, context_values
from curvmon.integrations.lightning.alerting import TrainingSignals
from curvmon.monitor.measurement import Request, attempt
from curvmon.monitor.process_group import Ranks
from curvmon.monitor.settings import Settings
from curvmon.monitor.target import Target
from curvmon.monitor.vital_signs import VitalSignsTaker
from curvmon.records import PROBE_LOSS, Snapshot
from curvmon.spectrum.findings import Findings

Plain = dict[str, Any]


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
    batch_size: int

    def plain(self) -> Plain:
        """What `torch.load(weights_only=True)` accepts."""
        context = {
            "values": dict(self.context.values),
            "operations": {k: dict(v) for k, v in self.context.operations.items()},
        }
        return {**self._asdict(), "snapshot": self.snapshot.to_dict(), "context": context}

    @classmethod
    def of(cls, plain: Plain) -> Seen:
        context = Context(**plain["context"])
        return cls(**{**plain, "snapshot": Snapshot.from_dict(plain["snapshot"]), "context": context})


class Watch:
    """Observes the steps of a run and looks at every validation; a deep copy watches a copied run."""

    def __init__(self, run: Run) -> None:
        self._settings = Settings(nodes=run.family.nodes, seed=run.seed)
        self._taker, self._findings, self._signals = VitalSignsTaker(), Findings(), TrainingSignals()
        self._start: Tensor | None = None
        self._losses: list[float] = []
        self._last_had_spectrum = True

    def observe(self, run: Run, batch: Batch, loss: Tensor) -> None:
        """After a training step."""
        self._signals.observe(loss, [run.optimizer])
        self._losses.append(loss.item())

    def look(self, run: Run) -> Seen:
        logged = run.validate()
        if self._losses:
            logged["train_loss"] = sum(self._losses) / len(self._losses)
        self._losses = []
        run.model.train()
        signs, _ = self._taker.take(run.model, [run.probe], run.family.loss, None, self._findings)
        rate, loss = self._signals.collect([run.optimizer])
        signs = replace(signs, learning_rate=rate if math.isfinite(rate) else math.nan)
        snapshot, reason = Snapshot(step=run.step, epoch=run.epoch, vitals=signs), None
        not_finite = [name for name in signs.not_finite if name != PROBE_LOSS]
        if not_finite:
            reason = f"not finite: {', '.join(not_finite[:3])}"
        else:
            snapshot, reason = self._measured(run, snapshot)
        operations = {} if snapshot.measurement is None else snapshot.measurement.operations
        return Seen(
            snapshot,
            Context(context_values(run.model, rate, loss), operations),
            reason,
            logged,
            [_numbers(group) for group in run.optimizer.param_groups],
            [name for name, parameter in run.model.named_parameters() if parameter.requires_grad],
            run.batch,
        )

    def _measured(self, run: Run, snapshot: Snapshot) -> tuple[Snapshot, str | None]:
        target = Target(run.model, run.family.loss, torch.device("cpu"), run.optimizer)
        parts, batches = frozenset(("pairs", "spectrum")), [run.probe]
        request = Request(self._settings, parts, batches, start=self._start, findings=self._findings)  # type: ignore[arg-type]
        outcome = attempt(target, request, Ranks(1))
        self._start = self._start if outcome.start is None else outcome.start
        snapshot = replace(snapshot, measurement=outcome.measurement, spectrum=outcome.spectrum)
        failure, had_spectrum = outcome.failure, self._last_had_spectrum
        if outcome.succeeded:
            self._last_had_spectrum = outcome.spectrum is not None
        if failure is not None and failure.kind == "diverged" and (had_spectrum or not outcome.succeeded):
            return snapshot, failure.message
        return snapshot, None


def _numbers(group: dict[str, Any]) -> dict[str, float]:
    return {key: float(value) for key, value in group.items() if type(value) in (int, float) and key != "initial_lr"}

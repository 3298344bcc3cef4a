"""Alerts in a training loop: gathers the context, lets rank 0 decide for all ranks, and delivers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from curvmon.alerts.context import Context, Source, context_values
from curvmon.alerts.instability import Instability
from curvmon.alerts.manager import AlertManager
from curvmon.alerts.rules import AlertRules
from curvmon.errors import warn
from curvmon.monitor.process_group import Ranks
from curvmon.monitor.run_settings import run_settings
from curvmon.monitor.training_data import TrainingData
from curvmon.recorder.loop import Loop
from curvmon.records import Alert, Snapshot
from curvmon.reporting.alert_delivery import deliver_alert
from curvmon.reporting.scalars import Keys


class TrainingSignals:
    """Mean loss and largest learning rate since they were last collected.

    The loss is summed on its device, so that no step waits for a transfer. The largest learning rate: one that was too
    large for part of an epoch may be small again when the epoch ends.
    """

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._count = 0
        self._rate = self._over_schedule = -math.inf

    @torch.no_grad()
    def observe(
        self, outputs: Any, optimizers: Iterable[Any], accumulated: int = 1, scheduled: float | None = None
    ) -> None:
        """`outputs`: the loss of a step, or a mapping that has it; steps without a loss are skipped.

        `accumulated`: the loss was divided by the number of batches whose gradients are accumulated. `scheduled`: the
        learning rate that schedulers have set.
        """
        rate = largest_rate(optimizers, on_host=True)
        self._rate = max(self._rate, rate)
        if scheduled:
            self._over_schedule = max(self._over_schedule, rate / scheduled)
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            return
        value = loss.detach().reshape(()).float() * accumulated
        self._sum = value if self._sum is None else self._sum.to(value.device) + value
        self._count += 1

    def collect(self, optimizers: Iterable[Any]) -> tuple[float, float, float]:
        """Learning rate, mean loss, and the learning rate over what schedulers had set, then starts again.

        Not finite where there was none.
        """
        mean = math.nan if self._sum is None else self._sum.item() / self._count
        rate = max(self._rate, largest_rate(optimizers, on_host=False))
        over_schedule = self._over_schedule
        self._sum, self._count, self._rate, self._over_schedule = None, 0, -math.inf, -math.inf
        return rate, mean, over_schedule


def largest_rate(optimizers: Iterable[Any], on_host: bool) -> float:
    """-inf if there is none; `on_host`: without those that are tensors on a device, which would need a transfer."""
    rates = [group.get("lr") for optimizer in optimizers for group in optimizer.param_groups]
    # a custom optimizer may keep anything there
    numbers = [r for r in rates if isinstance(r, (int, float)) or (isinstance(r, Tensor) and r.numel() == 1)]
    readable = [float(r) for r in numbers if not (on_host and isinstance(r, Tensor) and not r.is_cpu)]
    return max(readable, default=-math.inf)


class Alerting:
    """An `AlertManager` on every rank: rank 0 decides, all of them record the same alerts."""

    def __init__(
        self, alerts: bool | AlertRules, on_alert: Callable[[Alert], Any] | str | None, log_key_prefix: str
    ) -> None:
        self._manager = AlertManager(alerts)
        self._on_alert = on_alert
        self._keys = Keys(log_key_prefix)
        self._signals = TrainingSignals()
        self._data = TrainingData()

    @property
    def raised(self) -> list[Alert]:
        """Alerts and notices, oldest first."""
        return self._manager.raised

    @property
    def alerts(self) -> list[Alert]:
        return self._manager.alerts

    @property
    def notices(self) -> list[Alert]:
        return self._manager.notices

    def observe_batch(self, loop: Loop, batch: Any) -> None:
        """Before a training step: its batch."""
        if self._manager.enabled and loop.is_global_zero:
            self._data.observe(batch)

    def observe_step(self, loop: Loop, outputs: Any) -> None:
        """After a training step: its learning rate and its loss."""
        if self._manager.enabled and loop.is_global_zero:
            self._signals.observe(outputs, loop.optimizers, loop.accumulated, loop.scheduled_rate)

    def update(
        self,
        loop: Loop,
        snapshot: Snapshot,
        past: Sequence[Snapshot],
        norms: Mapping[Source, float],
        ranks: Ranks,
    ) -> list[Alert]:
        """The alerts that a new snapshot raises, on every rank; `norms`: of all tensors."""
        metrics = loop.validation_metrics() if self._manager.enabled else {}  # may be synchronized among the ranks

        def decide() -> list[Alert]:
            rate, loss, over_schedule = self._signals.collect(loop.optimizers)
            values = context_values(norms, rate, loss)
            operations = {} if snapshot.measurement is None else snapshot.measurement.operations
            signs = {
                **{source: value for source, value in norms.items() if source not in values},
                **self._data.collect(),
                **{("metric", name): value for name, value in metrics.items()},
            }
            if math.isfinite(over_schedule):
                signs["learning rate over scheduled", ""] = over_schedule
            settings = run_settings(loop.model, loop.optimizers)
            return self._manager.update(snapshot, past, Context(values, operations, signs, settings))

        return self._broadcast(decide, ranks)

    def diverged(self, reason: str, snapshot: Snapshot, past: Sequence[Snapshot], ranks: Ranks) -> list[Alert]:
        """The alerts that a snapshot raises where something was not finite, on every rank."""
        return self._broadcast(lambda: self._manager.diverged(reason, snapshot, past), ranks)

    def unstable(self, event: Instability, step: int, epoch: int, ranks: Ranks) -> list[Alert]:
        """The alerts that a pulse raises, on every rank."""
        return self._broadcast(lambda: self._manager.unstable(event, step, epoch), ranks)

    def _broadcast(self, decide: Callable[[], list[Alert]], ranks: Ranks) -> list[Alert]:
        """Rank 0 decides: losses and running statistics differ between ranks, and rounding can tip a decision."""
        if not self._manager.enabled:
            return []
        alerts: list[Alert] = []
        if ranks.rank == 0:
            try:
                alerts = decide()
            except Exception as error:
                warn(f"alerts failed at this measurement ({type(error).__name__}: {error}); training goes on")
        alerts = ranks.broadcast(alerts)
        return alerts if ranks.rank == 0 else self._manager.record(alerts)

    def deliver(self, loop: Loop, alerts: Sequence[Alert]) -> None:
        if loop.is_global_zero:
            for alert in alerts:
                deliver_alert(loop, alert, self._keys)
        serious = [alert for alert in alerts if alert.level != "info"]
        # a checkpoint is written once, whatever the number of alerts
        for alert in serious[:1] if isinstance(self._on_alert, str) else serious:
            _run_on_alert(loop, alert, self._on_alert)

    def state_dict(self) -> dict[str, Any]:
        return {"alerts": self._manager.state_dict(), "data": self._data.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """All or nothing; a checkpoint without alerts has none of it."""
        data = TrainingData()
        data.load_state_dict(state.get("data", {"usual": {}}))
        self._manager.load_state_dict(state.get("alerts", {}))
        self._data = data


def _run_on_alert(loop: Loop, alert: Alert, on_alert: Callable[[Alert], Any] | str | None) -> None:
    """What `on_alert` asks for, on every rank; a callable is called on rank 0 only."""
    if on_alert == "stop":
        loop.stop(alert)
    elif on_alert == "checkpoint":
        loop.save_checkpoint(alert)
    elif callable(on_alert) and loop.is_global_zero:
        try:
            on_alert(alert)
        except Exception as error:
            warn(f"on_alert raised {type(error).__name__}: {error}; training goes on")

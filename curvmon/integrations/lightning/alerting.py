"""Alerts in a Trainer: gathers the context, lets rank 0 decide for all ranks, and delivers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from curvmon.alerts.context import Context, context_values
from curvmon.alerts.manager import AlertManager
from curvmon.alerts.rules import AlertRules
from curvmon.errors import warn
from curvmon.integrations.lightning.training_signals import TrainingSignals
from curvmon.monitor.process_group import Ranks
from curvmon.records import Alert, Snapshot
from curvmon.reporting import alert_delivery
from curvmon.reporting.keys import ALERT, Keys

if TYPE_CHECKING:
    import pytorch_lightning as pl


class Alerting:
    """An `AlertManager` on every rank: rank 0 decides, all of them record the same alerts."""

    def __init__(
        self, alerts: bool | AlertRules, on_alert: Callable[[Alert], Any] | str | None, log_key_prefix: str
    ) -> None:
        self._manager = AlertManager(alerts)
        self._on_alert = on_alert
        self._key = Keys(log_key_prefix)(ALERT)
        self._signals = TrainingSignals()

    @property
    def alerts(self) -> list[Alert]:
        return self._manager.alerts

    @property
    def notices(self) -> list[Alert]:
        return self._manager.notices

    def observe_step(self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any) -> None:
        """After a training step: its learning rate and its loss."""
        if self._manager.enabled and trainer.is_global_zero:
            accumulated = trainer.accumulate_grad_batches if module.automatic_optimization else 1
            self._signals.observe(outputs, trainer.optimizers, accumulated)

    def update(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        snapshot: Snapshot,
        past: Sequence[Snapshot],
        ranks: Ranks,
    ) -> list[Alert]:
        """The alerts that a new snapshot raises, on every rank."""

        def decide() -> list[Alert]:
            values = context_values(module, *self._signals.collect(trainer.optimizers))
            operations = {} if snapshot.measurement is None else snapshot.measurement.operations
            return self._manager.update(snapshot, past, Context(values, operations))

        return self._broadcast(decide, ranks)

    def diverged(self, reason: str | None, step: int, epoch: int, ranks: Ranks) -> list[Alert]:
        """The alerts that a measurement raises which was not finite, on every rank."""
        return self._broadcast(lambda: self._manager.diverged(reason or "", step, epoch), ranks)

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

    def deliver(self, trainer: pl.Trainer, alerts: Sequence[Alert]) -> None:
        if trainer.is_global_zero:
            for alert in alerts:
                alert_delivery.deliver(trainer, alert, self._key)
        serious = [alert for alert in alerts if alert.level != "info"]
        # a checkpoint is written once, whatever the number of alerts
        for alert in serious[:1] if isinstance(self._on_alert, str) else serious:
            alert_delivery.act(trainer, alert, self._on_alert)

    def state_dict(self) -> dict[str, Any]:
        return {"alerts": self._manager.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """All or nothing; a checkpoint without alerts has none of it."""
        self._manager.load_state_dict(state.get("alerts", {}))

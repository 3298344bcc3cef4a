"""The alerts of a run: what raises them, what was told so far, and how it is told."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from curvmon.alerts.context import Circumstances, circumstances
from curvmon.alerts.manager import Alarms
from curvmon.alerts.rules import AlertRules
from curvmon.errors import warn
from curvmon.integrations.lightning.training_signals import Pace
from curvmon.monitor.process_group import Ranks
from curvmon.records import Alert, Snapshot
from curvmon.reporting.alert_delivery import act, deliver


class Alerting:
    """Every process comes to the same alerts; the first one delivers them."""

    def __init__(
        self, rules: bool | AlertRules, on_alert: Callable[[Alert], Any] | str | None, log_key_prefix: str
    ) -> None:
        self._rules = rules if isinstance(rules, AlertRules) else None
        self._alarms = Alarms(self._rules) if rules else None
        self._on_alert = on_alert
        self._key = f"{log_key_prefix}curvmon/alert"
        self._pace = Pace()
        self.told: list[Alert] = []
        """notices included"""

    @property
    def alerts(self) -> list[Alert]:
        return [alert for alert in self.told if alert.level != "info"]

    @property
    def notices(self) -> list[Alert]:
        return [alert for alert in self.told if alert.level == "info"]

    def see(self, trainer: Any, module: Any, outputs: Any) -> None:
        """A training step as it passes, on the process that decides."""
        if self._alarms is not None and trainer.is_global_zero:
            accumulated = trainer.accumulate_grad_batches if module.automatic_optimization else 1
            self._pace.see(outputs, trainer.optimizers, accumulated)

    def look(
        self, trainer: Any, module: Any, snapshot: Snapshot, past: Sequence[Snapshot], ranks: Ranks
    ) -> list[Alert]:
        """What a new snapshot gives rise to."""

        def found(alarms: Alarms) -> list[Alert]:
            values = circumstances(module, *self._pace.take(trainer.optimizers))
            operations = {} if snapshot.measurement is None else snapshot.measurement.operations
            return alarms.update(snapshot, past, Circumstances(values, operations))

        return self._decided(found, ranks)

    def diverged(self, reason: str | None, step: int, epoch: int, ranks: Ranks) -> list[Alert]:
        """What a measurement gives rise to that found nothing finite."""
        return self._decided(lambda alarms: alarms.diverged(reason or "", step, epoch), ranks)

    def _decided(self, find: Callable[[Alarms], list[Alert]], ranks: Ranks) -> list[Alert]:
        """By the first process, for all: losses and running statistics differ, and rounding may decide."""
        if self._alarms is None:
            return []
        fresh: list[Alert] = []
        if ranks.rank == 0:
            try:
                fresh = find(self._alarms)
            except Exception as error:
                warn(f"alerts failed at this measurement ({type(error).__name__}: {error}); training goes on")
        fresh = ranks.broadcast(fresh)
        self.told += fresh
        return fresh

    def tell(self, trainer: Any, fresh: Sequence[Alert]) -> None:
        if trainer.is_global_zero:
            for alert in fresh:
                deliver(trainer, alert, self._key)
        serious = [alert for alert in fresh if alert.level != "info"]
        # a checkpoint is written once, whatever the number of alerts
        for alert in serious[:1] if isinstance(self._on_alert, str) else serious:
            act(trainer, alert, self._on_alert)

    def state_dict(self) -> dict[str, Any]:
        return {
            "alarms": None if self._alarms is None else self._alarms.state_dict(),
            "told": [alert.to_dict() for alert in self.told],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """All of it or nothing; a state from before there were alerts has none of it."""
        alarms = None if self._alarms is None else Alarms(self._rules)
        if alarms is not None and state.get("alarms") is not None:
            alarms.load_state_dict(state["alarms"])
        told = [Alert.from_dict(alert) for alert in state.get("told", ())]
        self._alarms, self.told = alarms, told

"""The one owner of alerts: change detection, rules, context, and the alerts raised so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from curvmon.alerts.context import Cause, Context, ContextTracker
from curvmon.alerts.context_features import context_features
from curvmon.alerts.drift import Drift, DriftDetector
from curvmon.alerts.event_detector import EventDetector
from curvmon.alerts.event_messages import alert_of_drift, alert_of_event
from curvmon.alerts.features import features_of, layer_families
from curvmon.alerts.instability import Instability
from curvmon.alerts.instability_alert import alert_of_instability
from curvmon.alerts.rule_checker import RuleChecker
from curvmon.alerts.rule_messages import alert_of_explosion
from curvmon.alerts.rules import AlertRules
from curvmon.alerts.setting_changes import DROPOUT, FORWARD, STATISTICS, SettingChanges, kind_of
from curvmon.alerts.signature_table import SIGNATURES
from curvmon.alerts.signatures import Signatures
from curvmon.records import Alert, Snapshot
from curvmon.records.thinning import thinned

MOST_BYTES = 200_000
"""of alerts and notices in a checkpoint"""

SAME_EVENT = frozenset({"jump", "drift", "loss_explosion", "dead_network", "not_finite", "approaching_instability"})
"""kinds of alerts that a step ratio out of bounds may be another sign of"""


CAUSES = {"rate": "learning rate", "weights": "weights grown"}
"""of drifts, where the family says it"""
EXPLAINED = frozenset({"loss_explosion", "dead_network"})
"""rules that events trigger"""
OF_MODULES = frozenset({FORWARD, DROPOUT, STATISTICS})
"""kinds of settings that belong to a module, where the event is"""


class AlertManager:
    """Takes every snapshot of a run and raises alerts: at most one for a change, and those of the rules.

    Args:
        alerts: True for the default rules. False raises none, and keeps those of a checkpoint.
        signatures: what events look like.

    Attributes:
        enabled: False if no alerts are raised.
        raised: everything raised so far, notices included, oldest first.
    """

    def __init__(self, alerts: bool | AlertRules = True, signatures: Signatures = SIGNATURES) -> None:
        self.enabled = bool(alerts)
        self._rules = alerts if isinstance(alerts, AlertRules) else AlertRules()
        self._signatures = signatures
        self._events = EventDetector(signatures, self._rules.sensitivity)
        self._drifts = DriftDetector()
        self._settings = SettingChanges()
        self._checker = RuleChecker(self._rules)
        self._context = ContextTracker()
        self._why_not_finite: tuple[tuple[str, float], ...] = ()
        self._nodes: tuple[str, ...] | None = None
        self._last_step = 0
        """of the last snapshot"""
        self.raised: list[Alert] = []

    @property
    def alerts(self) -> list[Alert]:
        return [alert for alert in self.raised if alert.level != "info"]

    @property
    def notices(self) -> list[Alert]:
        return [alert for alert in self.raised if alert.level == "info"]

    def update(self, snapshot: Snapshot, past: Sequence[Snapshot] = (), context: Context | None = None) -> list[Alert]:
        """What a snapshot raises; `past`: the snapshots before it."""
        if not self.enabled:
            return []
        self._last_step = snapshot.step
        causes = self._context.update(context or Context())
        context = context or Context()
        changes = self._changes(snapshot, past, context, causes) if self._rules.changes else []
        rules = self._checker.update(snapshot, past, causes)
        rules = [self._explained(alert, changes) for alert in rules]
        kinds = {alert.kind for alert in rules}
        if "dead_network" in kinds:  # which says why everything changed
            changes, rules = [], _with_the_loss_first(rules)
        if any(change.level != "info" for change in changes):  # which say that the loss rose
            rules = [alert for alert in rules if alert.kind != "loss_explosion"]
        return self.record([*changes, *rules])

    def _changes(
        self, snapshot: Snapshot, past: Sequence[Snapshot], context: Context, causes: Sequence[Cause]
    ) -> list[Alert]:
        """At most one."""
        self._compare_nodes(snapshot)
        changed = self._settings.update(context.settings)
        kinds = {name: kind_of(name, context.settings) for name in changed}
        rebuilt = [cause for cause in causes if cause.kind == "operations"]
        features = [*features_of(snapshot), *context_features(context)]
        signs = frozenset(kinds.values()) | ({"operations"} if rebuilt else frozenset())
        if snapshot.vitals is not None and snapshot.vitals.not_finite:  # which is the event
            self._why_not_finite = self._events.certain_causes(features, signs)
            return []
        event = self._events.update(
            features,
            signs,
            rebuilt=[cause.name for cause in rebuilt],
            named=[name.rpartition(".")[0] for name, kind in kinds.items() if kind in OF_MODULES],
            at=snapshot.step,
        )
        drifts = self._drifts.update(features)
        if event is None:
            return [self._drift(drifts[0], past, snapshot)] if drifts else []
        self._drifts.restart()
        facts = [f"{name}: {before or 'none'} → {after or 'none'}" for name, (before, after) in changed.items()]
        facts += [cause.text for cause in rebuilt]
        return [alert_of_event(event, facts, past[-event.age] if len(past) >= event.age else None, snapshot)]

    def _explained(self, alert: Alert, changes: Sequence[Alert]) -> Alert:
        """With the causes of what happened at the same time."""
        if alert.kind not in EXPLAINED:
            return alert
        if changes:
            return replace(alert, causes=changes[0].causes, places=changes[0].places)
        return replace(alert, causes=self._events.recent_causes(1))

    def _drift(self, drift: Drift, past: Sequence[Snapshot], snapshot: Snapshot) -> Alert:
        causes = ((CAUSES[drift.family], 1.0),) if drift.family in CAUSES else self._events.recent_causes()
        before = past[-drift.intervals] if len(past) >= drift.intervals else None
        return alert_of_drift(drift, causes, before, snapshot)

    def diverged(self, reason: str, snapshot: Snapshot, past: Sequence[Snapshot] = ()) -> list[Alert]:
        """What a snapshot raises where something was not finite."""
        if not self.enabled:
            return []
        alerts = self._checker.diverged(reason, snapshot, past)
        if self._why_not_finite:
            alerts = [replace(alert, causes=self._why_not_finite) for alert in alerts]
        return self.record(alerts)

    def unstable(self, event: Instability, step: int, epoch: int) -> list[Alert]:
        """What a pulse raises. A warning only if the last snapshot, or a pulse since, did not report the same."""
        if not self.enabled or not self._rules.instability:
            return []
        reported = any(alert.step >= self._last_step and alert.kind in SAME_EVENT for alert in self.alerts)
        if event.kind == "approaching_instability" and reported:
            return []
        return self.record([alert_of_instability(event, step, epoch)])

    def record(self, alerts: list[Alert]) -> list[Alert]:
        """Add alerts to those raised, also those that another process has raised."""
        self.raised += alerts
        return alerts

    def _compare_nodes(self, snapshot: Snapshot) -> None:
        """Features of other nodes have no past; those of the whole network keep theirs."""
        if snapshot.measurement is None:
            return
        if self._nodes is not None and self._nodes != snapshot.measurement.nodes:
            self._events.forget(layer_families())
        self._nodes = snapshot.measurement.nodes

    def state_dict(self) -> dict[str, Any]:
        """Lists, dicts, strings and numbers only."""
        state: dict[str, Any] = {"raised": thinned([alert.to_dict() for alert in self.raised], MOST_BYTES)}
        if not self.enabled:
            return state
        return {
            **state,
            "events": self._events.state_dict(),
            "drifts": self._drifts.state_dict(),
            "settings": self._settings.state_dict(),
            "rules": self._checker.state_dict(),
            "context": self._context.state_dict(),
            "nodes": None if self._nodes is None else list(self._nodes),
            "last_step": self._last_step,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """All or nothing. A checkpoint without a detector, because alerts were off, starts detection empty."""
        raised = [Alert.from_dict(alert) for alert in state.get("raised", ())]
        events, drifts = EventDetector(self._signatures, self._rules.sensitivity), DriftDetector()
        settings = SettingChanges()
        checker, context = RuleChecker(self._rules), ContextTracker()
        nodes, last_step = None, 0
        if self.enabled and "events" in state:
            events.load_state_dict(state["events"])
            drifts.load_state_dict(state["drifts"])
            settings.load_state_dict(state["settings"])
            checker.load_state_dict(state["rules"])
            context.load_state_dict(state["context"])
            nodes = None if state["nodes"] is None else tuple(state["nodes"])
            last_step = state["last_step"]
        self._events, self._drifts, self._settings = events, drifts, settings
        self._checker, self._context = checker, context
        self._nodes, self._last_step, self.raised = nodes, last_step, raised


def _with_the_loss_first(rules: list[Alert]) -> list[Alert]:
    """Of a loss that exploded and a dead network, one alert: the loss, with the network as evidence."""
    by_kind = {alert.kind: alert for alert in rules}
    if "loss_explosion" not in by_kind:
        return rules
    alert = alert_of_explosion(by_kind["loss_explosion"], by_kind["dead_network"])
    return [alert, *(each for each in rules if each.kind not in ("loss_explosion", "dead_network"))]

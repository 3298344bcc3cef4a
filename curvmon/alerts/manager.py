"""The one owner of alerts: change detection, rules, context, and the alerts raised so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from curvmon.alerts.context import Cause, Context, ContextTracker
from curvmon.alerts.detector import Detector, DetectorSettings
from curvmon.alerts.features import NETWORK_FAMILIES, features_of
from curvmon.alerts.instability import Instability
from curvmon.alerts.instability_alert import alert_of_instability
from curvmon.alerts.messages import alert_of_change
from curvmon.alerts.rate_growth import rate_growth
from curvmon.alerts.rule_checker import RuleChecker
from curvmon.alerts.rule_messages import alert_of_explosion
from curvmon.alerts.rules import AlertRules
from curvmon.records import Alert, Snapshot
from curvmon.records.thinning import thinned

MOST_BYTES = 200_000
"""of alerts and notices in a checkpoint"""

SAME_EVENT = frozenset({"jump", "drift", "loss_explosion", "dead_network", "not_finite", "approaching_instability"})
"""kinds of alerts that a step ratio out of bounds may be another sign of"""


class AlertManager:
    """Takes every snapshot of a run and raises alerts: at most one for a change, and those of the rules.

    Args:
        alerts: True for the default rules. False raises none, and keeps those of a checkpoint.
        settings: settings of change detection, before `AlertRules.sensitivity` is applied.

    Attributes:
        enabled: False if no alerts are raised.
        raised: everything raised so far, notices included, oldest first.
    """

    def __init__(self, alerts: bool | AlertRules = True, settings: DetectorSettings | None = None) -> None:
        self.enabled = bool(alerts)
        self._rules = alerts if isinstance(alerts, AlertRules) else AlertRules()
        settings = settings or DetectorSettings()
        self._settings = replace(settings, threshold_factor=settings.threshold_factor / self._rules.sensitivity)
        self._network, self._layers = Detector(self._settings), Detector(self._settings)
        self._checker = RuleChecker(self._rules)
        self._context = ContextTracker()
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
        changes = self._changes(snapshot, past, causes) if self._rules.changes else []
        rules = self._checker.update(snapshot, past, causes)
        kinds = {alert.kind for alert in rules}
        if not changes and kinds & {"loss_explosion", "dead_network"}:  # not to be detected again
            self._network.restart(None)
            self._layers.restart(None)
        if "dead_network" in kinds:  # which says why everything changed
            changes, rules = [], _with_the_loss_first(rules)
        if changes:  # which say that the loss rose
            rules = [alert for alert in rules if alert.kind != "loss_explosion"]
        return self.record([*changes, *rules])

    def _changes(self, snapshot: Snapshot, past: Sequence[Snapshot], causes: Sequence[Cause]) -> list[Alert]:
        """At most one: what the network has once is looked at in every validation, the layers where measured."""
        self._compare_nodes(snapshot)
        features = features_of(snapshot)
        network = [feature for feature in features if feature.family in NETWORK_FAMILIES]
        has_cause = any(cause.lowers_threshold for cause in causes)
        layers = [feature for feature in features if feature.family not in NETWORK_FAMILIES]
        of_network = self._network.update(network, has_cause, snapshot.step) if network else None
        of_layers = self._layers.update(layers, has_cause, snapshot.step) if snapshot.is_full else None
        change = of_layers or of_network
        if change is None:
            return []
        # the other one must not detect the same event later
        if of_layers is None:
            self._layers.restart(layers if snapshot.is_full else None)
        if of_network is None:
            self._network.restart(network or None)
        deviations = self._network.deviations if network else []
        deviations = deviations + (self._layers.deviations if snapshot.is_full else [])
        growth = rate_growth(past, snapshot)
        past = [each for each in past if each.is_full] if of_layers is not None else past
        before = past[-change.age] if len(past) >= change.age else None
        evidence = self._network.evidence_by_family(deviations)
        return [alert_of_change(change._replace(deviations=deviations), evidence, causes, before, snapshot, growth)]

    def diverged(self, reason: str, snapshot: Snapshot, past: Sequence[Snapshot] = ()) -> list[Alert]:
        """What a snapshot raises where something was not finite."""
        return self.record(self._checker.diverged(reason, snapshot, past)) if self.enabled else []

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
            self._layers.clear()
        self._nodes = snapshot.measurement.nodes

    def state_dict(self) -> dict[str, Any]:
        """Lists, dicts, strings and numbers only."""
        state: dict[str, Any] = {"raised": thinned([alert.to_dict() for alert in self.raised], MOST_BYTES)}
        if not self.enabled:
            return state
        return {
            **state,
            "network": self._network.state_dict(),
            "layers": self._layers.state_dict(),
            "rules": self._checker.state_dict(),
            "context": self._context.state_dict(),
            "nodes": None if self._nodes is None else list(self._nodes),
            "last_step": self._last_step,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """All or nothing. A checkpoint without a detector, because alerts were off, starts detection empty."""
        raised = [Alert.from_dict(alert) for alert in state.get("raised", ())]
        network, layers = Detector(self._settings), Detector(self._settings)
        checker, context = RuleChecker(self._rules), ContextTracker()
        nodes, last_step = None, 0
        if self.enabled and "network" in state:
            network.load_state_dict(state["network"])
            layers.load_state_dict(state["layers"])
            checker.load_state_dict(state["rules"])
            context.load_state_dict(state["context"])
            nodes = None if state["nodes"] is None else tuple(state["nodes"])
            last_step = state["last_step"]
        self._network, self._layers, self._checker, self._context = network, layers, checker, context
        self._nodes, self._last_step, self.raised = nodes, last_step, raised


def _with_the_loss_first(rules: list[Alert]) -> list[Alert]:
    """Of a loss that exploded and a dead network, one alert: the loss, with the network as evidence."""
    by_kind = {alert.kind: alert for alert in rules}
    if "loss_explosion" not in by_kind:
        return rules
    alert = alert_of_explosion(by_kind["loss_explosion"], by_kind["dead_network"])
    return [alert, *(each for each in rules if each.kind not in ("loss_explosion", "dead_network"))]

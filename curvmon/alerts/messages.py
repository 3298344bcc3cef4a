"""From a detected change to one alert: where in the network it is, its likely causes, and what to check."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from curvmon.alerts.context import BUFFERS, LEARNING_RATE, OPERATIONS, TRAINING_LOSS, WEIGHTS, Cause
from curvmon.alerts.features import PAIR_FEATURES, Family, FeatureDeviation, pairs_across
from curvmon.records import Alert, Pair, Snapshot

ALL_PAIRS = "all pairs"
MOST_NAMED, MOST_CAUSES = 6, 3
AFFECTED = 3.0
"""standard deviations from which on a feature is affected by an event"""
WIDESPREAD = 0.75
"""an event that affects more than this share of the pairs has no particular place"""
STANDS_OUT = 1.5
"""times the median deviation of all layers: the layer where an event is"""
VISIBLE = 1.2
"""two values that differ by this factor differ visibly"""

_TITLES: Mapping[str, str] = {
    "gn_gap": "GN-Gap",
    "hessian": "top eigenvalue",
    "loss": "loss of the probe batch",
}
_MEANINGS: Mapping[tuple[str, bool], str] = {
    ("resonance", True): "the loss curves more strongly between these layers, optimizer steps overshoot sooner",
    ("resonance", False): "the curvature between these layers vanished, gradients may have stopped flowing",
    ("coupling", True): "these layers now act on the loss jointly",
    ("coupling", False): "a path between these layers no longer carries curvature",
    ("stable_rank", True): "the curvature spread to more directions",
    ("stable_rank", False): "the curvature collapsed to fewer directions",
    ("gn_gap", True): "Gauss-Newton misses more of the curvature, which comes from nonlinear activations",
    ("gn_gap", False): "Gauss-Newton captures more of the curvature than before",
    ("hessian", True): "the loss became sharper along its sharpest direction",
    ("hessian", False): "the loss became flatter along its sharpest direction",
    ("loss", True): "the network is forgetting what it had learned",
    ("loss", False): "the network improved abruptly",
}


class Location(NamedTuple):
    node: str | None
    """None: throughout the network"""
    pairs: list[Pair]
    """most affected first"""


class ReportedChange(NamedTuple):
    """The metric and the values that an alert reports."""

    metric: str
    where: str
    before: float
    after: float

    @property
    def is_visible(self) -> bool:
        """The two numbers alone show that something happened."""
        small, large = sorted((abs(self.before), abs(self.after)))
        return large > VISIBLE * small or not math.isfinite(self.before)


def alert_of_change(
    deviations: Sequence[FeatureDeviation],
    evidence: Mapping[Family, float],
    causes: Sequence[Cause],
    before: Snapshot | None,
    now: Snapshot,
) -> Alert:
    """One alert for all features that deviate.

    It reports the metric of the family with the most evidence among those whose values differ visibly.
    """
    location = _location(deviations, causes, now)
    families = sorted(evidence, key=lambda name: -evidence[name])
    changes = {family: _reported_change(family, deviations, location, before, now) for family in families}
    family = next((f for f in families if changes[f].is_visible), families[0])
    change = changes[family]
    members = [d.deviation for d in deviations if d.family == family]
    if math.isnan(change.before):  # not measured then: the forecast instead
        size = max(members, key=lambda deviation: deviation.score).size
        change = change._replace(before=change.after / math.exp(size))
    return Alert(
        kind="jump",
        metric=change.metric,
        where=change.where,
        before=change.before,
        after=change.after,
        score=max(deviation.score for deviation in members),
        step=now.step,
        epoch=now.epoch,
        message=_message(change, location, causes, deviations, now.step),
        others=tuple(str(pair) for pair in location.pairs[:MOST_NAMED] if str(pair) != change.where),
    )


def _location(deviations: Sequence[FeatureDeviation], causes: Sequence[Cause], now: Snapshot) -> Location:
    """The layer whose resonance stands out most from the others', and the pairs across it."""
    if now.measurement is None or len(now.measurement.nodes) < 2:
        return Location(None, [])
    nodes = now.measurement.nodes
    everywhere = any(cause.source == LEARNING_RATE and cause.lowers_threshold for cause in causes)
    profile = {d.where: d.deviation for d in deviations if d.family == "profile"}
    rebuilt = {cause.node(nodes) for cause in causes if cause.source.startswith(OPERATIONS)}
    suspects = rebuilt or {cause.node(nodes) for cause in causes if cause.source.startswith(WEIGHTS)}
    node = suspects.pop() if len(suspects) == 1 else None
    if node is None or everywhere:
        node = max(profile, key=lambda name: abs(profile[name].size), default=nodes[0])
        sizes = [abs(deviation.size) for deviation in profile.values()]
        usual = statistics.median(sizes) if sizes else math.inf
        if everywhere or not sizes or profile[node].score < AFFECTED or abs(profile[node].size) < STANDS_OUT * usual:
            couplings = sorted((d for d in deviations if d.family == "coupling"), key=lambda d: -d.deviation.score)
            # where all are affected, only the first third stands out enough to be named
            named = couplings[: max(1, len(couplings) // 3)]
            return Location(None, [Pair(*d.where.split("--", 1)) for d in named])
    return Location(node, pairs_across(nodes, node) or [Pair(node, other) for other in nodes[1:]])


def _reported_change(
    family: Family,
    deviations: Sequence[FeatureDeviation],
    location: Location,
    before: Snapshot | None,
    now: Snapshot,
) -> ReportedChange:
    """The member of a family to report: at the location of the event if there is one, else of the highest score."""
    if family == "loss":
        where = "loss" if location.node is None else str(location.pairs[0])
        return ReportedChange("loss", where, math.nan if before is None else before.loss, now.loss)
    if family == "lambda_1":
        where = "lambda_1" if location.node is None else str(location.pairs[0])
        return ReportedChange("hessian", where, _sharpness(before), _sharpness(now))
    metric = family if any(family == spec.metric for spec in PAIR_FEATURES) else "resonance"
    scores = {d.where: d.deviation.score for d in deviations if d.family == family}
    affected = sum(score > AFFECTED for score in scores.values())
    if (metric == "resonance" and (family == "level" or location.node is None)) or (
        location.node is None and affected > WIDESPREAD * len(scores)
    ):
        return ReportedChange(metric, ALL_PAIRS, _mean(before, metric), _mean(now, metric))
    pairs = list(scores) if location.node is None else [str(pair) for pair in location.pairs]
    where = max(pairs, key=lambda pair: scores.get(pair, 0.0))
    return ReportedChange(metric, where, _value(before, metric, where), _value(now, metric, where))


def _message(
    change: ReportedChange,
    location: Location,
    causes: Sequence[Cause],
    deviations: Sequence[FeatureDeviation],
    step: int,
) -> str:
    """`coupling stem--layer4 fell from 0.82 to 0.31: …; at the same time: …; check …`"""
    metric, up = change.metric, change.after > change.before
    at = f" {change.where}" if metric not in ("loss", "hessian") else ""
    values = f"{'rose' if up else 'fell'} from {change.before:.3g} to {change.after:.3g}"
    title, meaning = _TITLES.get(metric, metric.replace("_", " ")), _MEANINGS.get((metric, up))
    parts = [f"{title}{at} {values}" + (f": {meaning}" if meaning else "")]
    if location.node is None:
        parts.append("throughout the network")
    else:
        others = ", ".join(str(pair) for pair in location.pairs[:3] if str(pair) != change.where)
        parts.append(f"at {location.node} (also {others})" if others else f"at {location.node}")
    loss = next((d.deviation for d in deviations if d.family == "loss"), None)
    if metric != "loss" and loss is not None and loss.score > AFFECTED:
        parts.append(f"the loss {'rose' if loss.size > 0 else 'fell'} {math.exp(abs(loss.size)):.3g}-fold")
    if causes:
        parts.append(f"at the same time: {_list_causes(causes)}")
    parts.append(f"check {_suggestion(location, causes)} before step {step}")
    return "; ".join(parts)


def _list_causes(causes: Sequence[Cause]) -> str:
    """The most informative kinds first; running statistics all change together, so one of them is enough."""
    order = (OPERATIONS, LEARNING_RATE, TRAINING_LOSS, WEIGHTS, BUFFERS)
    kinds = [[cause for cause in causes if cause.source.startswith(kind)] for kind in order]
    kinds[-1] = kinds[-1][:1]
    shown = [cause.text for kind in kinds for cause in kind][:MOST_CAUSES]
    rest = len(causes) - len(shown)
    return ", ".join(shown) + (f" and {rest} more" if rest else "")


def _suggestion(location: Location, causes: Sequence[Cause]) -> str:
    def changed(kind: str) -> bool:
        return any(cause.source.startswith(kind) and cause.lowers_threshold for cause in causes)

    if changed(OPERATIONS):
        return "what the network computes, which is not the same as"
    if changed(LEARNING_RATE):
        return "the learning rate"
    if changed(WEIGHTS) and location.node is not None:
        return f"what happened to the weights of {location.node}"
    if changed(TRAINING_LOSS):
        return "the data and their labels"
    if changed(BUFFERS):
        return "running statistics (batch norm)"
    return "the data and the learning rate" if location.node is None else f"what changed in {location.node}"


def _sharpness(snapshot: Snapshot | None) -> float:
    return math.nan if snapshot is None or snapshot.spectrum is None else snapshot.spectrum.sharpness


def _value(snapshot: Snapshot | None, metric: str, where: str) -> float:
    if snapshot is None or snapshot.measurement is None:
        return math.nan
    measurement = snapshot.measurement
    try:
        i, j = (measurement.nodes.index(name) for name in where.split("--", 1))
    except ValueError:  # measured on other nodes
        return math.nan
    value: float = getattr(measurement, metric)[i, j].item()
    return value


def _mean(snapshot: Snapshot | None, metric: str) -> float:
    """Over all pairs; geometric for resonances."""
    if snapshot is None or snapshot.measurement is None:
        return math.nan
    values = getattr(snapshot.measurement, metric)
    values = values[values.isfinite()]
    if metric != "resonance":
        return float(values.mean())
    return float(values[values > 0].log().mean().exp())

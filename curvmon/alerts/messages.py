"""From a detected change to one alert: where in the network it is, its likely causes, and what to check."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from curvmon.alerts.context import Cause, Kind
from curvmon.alerts.detector import Change
from curvmon.alerts.features import Family, FeatureDeviation, pairs_across
from curvmon.alerts.headlines import headline
from curvmon.metrics.registry import (
    MetricSpec,
    PairMetric,
    ScalarMetric,
    get,
    pair_metric,
    pair_metric_names,
    scalar_metrics,
)
from curvmon.records import Alert, Pair, Snapshot

ALL_PAIRS = "all pairs"
MAX_NAMED, MAX_CAUSES = 6, 3
AFFECTED = 3.0
"""standard deviations from which on a feature is affected by an event"""
WIDESPREAD = 0.75
"""an event that affects more than this share of the pairs has no particular place"""
STANDS_OUT = 1.5
"""times the median deviation of all layers: the layer where an event is"""
VISIBLE = 1.2
"""two values that differ by this factor differ visibly"""


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
    change: Change,
    evidence: Mapping[Family, float],
    causes: Sequence[Cause],
    before: Snapshot | None,
    now: Snapshot,
) -> Alert:
    """One alert for all features that deviate.

    It reports the metric of the family with the most evidence among those whose values differ visibly.
    """
    deviations = change.deviations
    location = _location(deviations, causes, now)
    families = sorted(evidence, key=lambda name: -evidence[name])
    by_family = {family: _reported_change(family, deviations, location, before, now) for family in families}
    family = next((f for f in families if by_family[f].is_visible), families[0])
    reported = by_family[family]
    members = [d.deviation for d in deviations if d.family == family]
    if math.isnan(reported.before):  # not measured then: the forecast instead
        size = max(members, key=lambda deviation: deviation.score).size
        reported = reported._replace(before=reported.after / math.exp(size))
    return Alert(
        kind=change.kind,
        metric=reported.metric,
        where=reported.where,
        before=reported.before,
        after=reported.after,
        score=max(deviation.score for deviation in members),
        step=now.step,
        epoch=now.epoch,
        headline=_headline(reported, now.step),
        evidence=_evidence(reported, location, causes, deviations),
        suggestion=f"Check {_suggestion(location, causes)} before step {now.step}.",
        others=tuple(str(pair) for pair in location.pairs[:MAX_NAMED] if str(pair) != reported.where),
    )


def _location(deviations: Sequence[FeatureDeviation], causes: Sequence[Cause], now: Snapshot) -> Location:
    """The layer whose resonance stands out most from the others', and the pairs across it."""
    if now.measurement is None or len(now.measurement.nodes) < 2:
        return Location(None, [])
    nodes = now.measurement.nodes
    everywhere = any(cause.kind == "learning rate" and cause.lowers_threshold for cause in causes)
    profile = {d.where: d.deviation for d in deviations if d.family == "profile"}
    rebuilt = {cause.node(nodes) for cause in causes if cause.kind == "operations"}
    suspects = rebuilt or {cause.node(nodes) for cause in causes if cause.kind == "weights"}
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
    scores = {d.where: d.deviation.score for d in deviations if d.family == family}
    scalar = next((spec for spec in scalar_metrics() if spec.name == family), None)
    if scalar is not None:
        key = max(scores, key=lambda key: scores[key])
        where = key or (family if location.node is None else str(location.pairs[0]))
        values = _scalar(before, scalar, key), _scalar(now, scalar, key)
        return ReportedChange("hessian" if family == "lambda_1" else family, where, *values)
    metric = family if family in pair_metric_names() else "resonance"
    affected = sum(score > AFFECTED for score in scores.values())
    if (metric == "resonance" and (family == "level" or location.node is None)) or (
        location.node is None and affected > WIDESPREAD * len(scores)
    ):
        return ReportedChange(metric, ALL_PAIRS, _mean(before, metric), _mean(now, metric))
    pairs = list(scores) if location.node is None else [str(pair) for pair in location.pairs]
    where = max(pairs, key=lambda pair: scores.get(pair, 0.0))
    return ReportedChange(metric, where, _value(before, metric, where), _value(now, metric, where))


def _headline(change: ReportedChange, step: int) -> str:
    verb = "rose" if change.after > change.before else "fell"
    title = _spec(change.metric).title
    return headline(f"{title[0].upper()}{title[1:]} {verb} from {change.before:.3g} to {change.after:.3g}", step=step)


def _evidence(
    change: ReportedChange, location: Location, causes: Sequence[Cause], deviations: Sequence[FeatureDeviation]
) -> tuple[str, ...]:
    """`coupling stem--layer4: 0.82 → 0.31`, its meaning, where it is, what changed at the same time."""
    spec, up = _spec(change.metric), change.after > change.before
    # a scalar has no place, apart from its key in a list
    has_place = isinstance(spec, PairMetric) or (isinstance(spec, ScalarMetric) and "{}" in spec.key)
    at = f" {change.where}" if has_place else ""
    assert spec.alert is not None
    points = [
        f"{spec.title}{at}: {change.before:.3g} → {change.after:.3g}, {spec.alert.rise if up else spec.alert.fall}"
    ]
    if location.node is None:
        points.append("throughout the network")
    else:
        others = ", ".join(str(pair) for pair in location.pairs[:3] if str(pair) != change.where)
        points.append(f"at {location.node} (also {others})" if others else f"at {location.node}")
    loss = next((d.deviation for d in deviations if d.family == "loss"), None)
    if change.metric != "loss" and loss is not None and loss.score > AFFECTED:
        points.append(f"the loss {'rose' if loss.size > 0 else 'fell'} {math.exp(abs(loss.size)):.3g}-fold")
    if causes:
        points.append(f"at the same time: {_list_causes(causes)}")
    return tuple(points)


def _spec(metric: str) -> MetricSpec:
    return get("lambda_1" if metric == "hessian" else metric)


def _list_causes(causes: Sequence[Cause]) -> str:
    """The most informative kinds first; running statistics all change together, so one of them is enough."""
    order: tuple[Kind, ...] = ("operations", "learning rate", "training loss", "weights", "statistics")
    kinds = [[cause for cause in causes if cause.kind == kind] for kind in order]
    kinds[-1] = kinds[-1][:1]
    shown = [cause.text for kind in kinds for cause in kind][:MAX_CAUSES]
    rest = len(causes) - len(shown)
    return ", ".join(shown) + (f" and {rest} more" if rest else "")


def _suggestion(location: Location, causes: Sequence[Cause]) -> str:
    def changed(kind: Kind) -> bool:
        return any(cause.kind == kind and cause.lowers_threshold for cause in causes)

    if changed("operations"):
        return "what changed in the forward pass"
    if changed("learning rate"):
        return "the learning rate"
    if changed("weights") and location.node is not None:
        return f"what changed the weights of {location.node}"
    if changed("training loss"):
        return "the data and the labels"
    if changed("statistics"):
        return "the running statistics (batch norm)"
    return "the data and the learning rate" if location.node is None else f"what changed in {location.node}"


def _scalar(snapshot: Snapshot | None, spec: ScalarMetric, key: str) -> float:
    return math.nan if snapshot is None else spec.scalars(snapshot).get(key or spec.key, math.nan)


def _value(snapshot: Snapshot | None, metric: str, where: str) -> float:
    if snapshot is None or snapshot.measurement is None:
        return math.nan
    measurement = snapshot.measurement
    try:
        i, j = (measurement.nodes.index(name) for name in where.split("--", 1))
    except ValueError:  # measured on other nodes
        return math.nan
    return pair_metric(metric).values(measurement)[i, j].item()


def _mean(snapshot: Snapshot | None, metric: str) -> float:
    """Mean over all pairs, geometric for metrics on a logarithmic scale."""
    if snapshot is None or snapshot.measurement is None:
        return math.nan
    spec = pair_metric(metric)
    values = spec.values(snapshot.measurement)
    values = values[values.isfinite()]
    positive = values[values > 0]
    if not spec.log_scale or not len(positive):
        return float(values.mean())
    return float(positive.log().mean().exp())

"""From a detected change to one alert: what changed and where, the evidence, and what to do."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from curvmon.alerts.context import Cause
from curvmon.alerts.detector import Change
from curvmon.alerts.features import Family, FeatureDeviation
from curvmon.alerts.location import AFFECTED, Location, locate, suspected_node, suspected_weights
from curvmon.alerts.observations import checkpoint, evidence, is_visible, loss_rose, raised_rate, since
from curvmon.alerts.rate_growth import RateGrowth
from curvmon.alerts.wording import JUMPED, MAX_HEADLINE, before_after, headline, times, verb
from curvmon.metrics.registry import (
    MetricSpec,
    PairMetric,
    ScalarMetric,
    get,
    pair_metric,
    pair_metric_names,
    scalar_metrics,
)
from curvmon.records import Alert, Snapshot
from curvmon.records.formatting import short

ALL_PAIRS = "all pairs"
MAX_NAMED = 6
WIDESPREAD = 0.75
"""an event that affects more than this share of the pairs has no particular place"""
SUBJECTS = {"resonance": "curvature (resonance)", "hessian": "sharpness λ_1", "loss": "the loss"}
"""in a headline, in place of the metric's title: what a reader may not have heard of"""


class ReportedChange(NamedTuple):
    """The metric and the values that an alert reports."""

    metric: str
    where: str
    before: float
    after: float
    is_forecast: bool = False
    """the value before was not measured: it is what had been expected"""

    @property
    def is_visible(self) -> bool:
        """The two numbers alone show that something happened."""
        return is_visible(self.before, self.after)

    @property
    def has_jumped(self) -> bool:
        return self.before > 0 and self.after >= JUMPED * self.before

    @property
    def spec(self) -> MetricSpec:
        return get("lambda_1" if self.metric == "hessian" else self.metric)


def alert_of_change(
    change: Change,
    significance: Mapping[Family, float],
    causes: Sequence[Cause],
    before: Snapshot | None,
    now: Snapshot,
    growth: RateGrowth | None = None,
) -> Alert:
    """One alert for all features that deviate.

    It reports the metric of the family with the most significance among those whose values differ visibly, or a loss
    that jumped. Norms grow where the learning rate does: with `growth`, no place, headline or suggestion follows them.
    """
    deviations, measured = change.deviations, causes
    if growth is not None:
        causes = [cause for cause in causes if cause.kind not in ("weights", "statistics")]
    location = locate(deviations, causes, now)
    families = sorted(significance, key=lambda name: -significance[name])
    by_family = {family: _reported_change(family, deviations, location, before, now) for family in families}
    family = next((f for f in families if by_family[f].is_visible), families[0])
    if "loss" in by_family and not location.is_certain and by_family["loss"].has_jumped:
        family = "loss"  # what matters most, where no layer stands out
    reported = by_family[family]
    members = [d.deviation for d in deviations if d.family == family]
    if math.isnan(reported.before):  # not measured then: the forecast instead
        size = max(members, key=lambda deviation: deviation.score).size
        reported = reported._replace(before=reported.after / math.exp(size), is_forecast=True)
    return Alert(
        kind=change.kind,
        metric=reported.metric,
        where=reported.where,
        before=reported.before,
        after=reported.after,
        score=max(deviation.score for deviation in members),
        step=now.step,
        epoch=now.epoch,
        headline=_headline(reported, location, causes, now),
        evidence=evidence(_first_evidence(reported), before, now, measured, reported.spec.name, growth),
        suggestion=_suggestion(location, causes, before, now, growth),
        others=tuple(str(pair) for pair in location.pairs[:MAX_NAMED] if str(pair) != reported.where),
    )


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


def _headline(change: ReportedChange, location: Location, causes: Sequence[Cause], now: Snapshot) -> str:
    """`Learning rate x 300: the loss jumped from 0.02 to 2.4, step 900`."""
    nodes = () if now.measurement is None else now.measurement.nodes
    cause, names = _cause(causes, nodes)
    event = f" {verb(change.metric, change.before, change.after)}"
    if not isinstance(change.spec, PairMetric):
        event += f" from {short(change.before)} to {short(change.after)}"
    elif location.node is None or location.node not in names:
        place, where = location.place(change.where, nodes)
        event, names = event + place, names + where
    title = change.spec.title.replace("{", "{{").replace("}", "}}")
    subjects = SUBJECTS.get(change.metric, title), title  # the title alone is the shorter one
    starts = [f"{cause}: {subject}" if cause else subject[:1].upper() + subject[1:] for subject in subjects]
    available = MAX_HEADLINE - len(f", step {now.step}")
    start = next((start for start in starts if len((start + event).format(*names)) <= available), starts[-1])
    return headline(start + event, *names, step=now.step)


def _cause(causes: Sequence[Cause], nodes: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """`Learning rate x 300`, `Forward pass of {} changed`; empty if nothing in the context has one clear change."""
    rate = raised_rate(causes)
    if rate is not None:
        return f"Learning rate {times(rate.before, rate.after)}", ()
    kinds = {cause.kind for cause in causes}
    if "operations" in kinds:
        node = suspected_node(causes, nodes)
        return ("Forward pass changed", ()) if node is None else ("Forward pass of {} changed", (node,))
    weights = suspected_weights(causes, nodes)
    if weights is not None:
        grew = {cause.after > cause.before for cause in causes if cause.kind == "weights"}
        event = "changed" if len(grew) > 1 else "grew" if grew.pop() else "shrank"
        return f"{weights[0].capitalize()} {event}", weights[1:]
    return ("Running statistics changed", ()) if kinds == {"statistics"} else ("", ())


def _first_evidence(change: ReportedChange) -> list[str]:
    """`coupling stem--layer4: 0.82 → 0.31 (a path between these layers no longer carries curvature)`."""
    spec = change.spec
    # a scalar has no place, apart from its key in a list
    has_place = isinstance(spec, PairMetric) or (isinstance(spec, ScalarMetric) and "{}" in spec.key)
    where = "" if not has_place else ", mean over all pairs" if change.where == ALL_PAIRS else f" {change.where}"
    assert spec.alert is not None
    meaning = spec.alert.rise if change.after > change.before else spec.alert.fall
    title = "sharpness λ_1" if change.metric == "hessian" else spec.title
    expected = "expected " if change.is_forecast else ""
    return [f"{title}{where}: {expected}{before_after(change.before, change.after)} ({meaning})"]


def _suggestion(
    location: Location,
    causes: Sequence[Cause],
    before: Snapshot | None,
    now: Snapshot,
    growth: RateGrowth | None,
) -> str:
    """One imperative sentence, by what changed at the same time."""
    when = since(before, now)
    nodes = () if now.measurement is None else now.measurement.nodes

    def changed(kind: str) -> bool:
        return any(cause.kind == kind and cause.lowers_threshold for cause in causes)

    if changed("operations"):
        node = "" if location.node is None else f" of {location.node}"
        return f"Check what changed in the forward pass{node} {when}."
    if changed("learning rate"):
        if loss_rose(before, now):
            return f"Lower the learning rate, and go back to {checkpoint(before, now)}."
        return f"Check why the learning rate rose {when}, and lower it if the loss starts to rise."
    if growth is not None:
        return "Check the learning rate."
    weights = suspected_weights(causes, nodes)
    if weights is not None:
        which = "{}" if weights[0] == "{}" else f"the {weights[0]}"
        return f"Check what changed {which.format(weights[1])} {when}."
    if changed("training loss"):
        return f"Check the data and the labels of the training batches {when}."
    if changed("statistics"):
        return f"Check what changed the running statistics (batch norm) {when}."
    if location.node is not None and location.is_certain:
        return f"Check what changed in {location.node} {when}: its weights, its inputs or its forward pass."
    if any(cause.kind == "learning rate" for cause in causes):
        return f"Do nothing if the learning rate was meant to fall {when}; otherwise check its schedule."
    return f"Check the data and the learning rate {when}."


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

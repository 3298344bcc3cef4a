"""What a change means, in plain language: where it is, what came with it, and what to look at."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from curvmon.alerts.context import BUFFERS, LOSS, OPERATIONS, RATE, WEIGHTS, Cause
from curvmon.alerts.features import Family, Move, alert_spec, straddling
from curvmon.metrics.registry import get, pair_metric, pair_metric_names
from curvmon.records import Alert, Pair, Snapshot

EVERYWHERE = "all pairs"
MOST_NAMED, MOST_CAUSES = 6, 3
MOVED = 3.0
"""standard deviations from which on a series has a part in an event"""
THROUGHOUT = 0.75
"""share of the layers or pairs that have a part in an event which is nowhere in particular"""
STANDING_OUT = 1.5
"""times the median of all layers: a layer that an event is at"""

VISIBLE = 1.2
"""by this factor two numbers differ visibly"""


class Place(NamedTuple):
    node: str | None
    """where in particular, if anywhere"""
    pairs: list[Pair]
    """most affected first"""


class Reading(NamedTuple):
    """What is said to have changed."""

    metric: str
    where: str
    before: float
    after: float

    @property
    def shows(self) -> bool:
        """A reader of these two numbers sees that something happened."""
        small, large = sorted((abs(self.before), abs(self.after)))
        return large > VISIBLE * small or not math.isfinite(self.before)


def change(
    moves: Sequence[Move],
    strengths: Mapping[Family, float],
    causes: Sequence[Cause],
    before: Snapshot | None,
    now: Snapshot,
) -> Alert:
    """One alert for all that moved: the clearest family whose values show it gives the metric."""
    place = _place(moves, causes, now)
    families = sorted(strengths, key=lambda name: -strengths[name])
    readings = {family: _reading(family, moves, place, before, now) for family in families}
    family = next((f for f in families if readings[f].shows), families[0])
    reading = readings[family]
    if math.isnan(reading.before):  # not measured then: what was expected instead
        size = max((move.surprise for move in moves if move.family == family), key=lambda s: s.score).size
        reading = reading._replace(before=reading.after / math.exp(size))
    return Alert(
        kind="jump",
        metric=reading.metric,
        where=reading.where,
        before=reading.before,
        after=reading.after,
        score=max(move.surprise.score for move in moves if move.family == family),
        step=now.step,
        epoch=now.epoch,
        message=_message(reading, place, causes, moves, now.step),
        others=tuple(str(pair) for pair in place.pairs[:MOST_NAMED] if str(pair) != reading.where),
    )


def _place(moves: Sequence[Move], causes: Sequence[Cause], now: Snapshot) -> Place:
    """The layer whose resonance stands out most from the others', and the pairs that lie across it."""
    if now.measurement is None or len(now.measurement.nodes) < 2:
        return Place(None, [])
    nodes = now.measurement.nodes
    everywhere = any(cause.source == RATE and cause.incriminating for cause in causes)
    profile = {move.where: move.surprise for move in moves if move.family == "profile"}
    rebuilt = {cause.node(nodes) for cause in causes if cause.source.startswith(OPERATIONS)}
    blamed = rebuilt or {cause.node(nodes) for cause in causes if cause.source.startswith(WEIGHTS)}
    node = blamed.pop() if len(blamed) == 1 else None
    if node is None or everywhere:
        node = max(profile, key=lambda name: abs(profile[name].size), default=nodes[0])
        sizes = [abs(surprise.size) for surprise in profile.values()]
        usual = statistics.median(sizes) if sizes else math.inf
        if everywhere or not sizes or profile[node].score < MOVED or abs(profile[node].size) < STANDING_OUT * usual:
            affected = sorted(
                (move for move in moves if move.family == "coupling"), key=lambda move: -move.surprise.score
            )
            # where all have a part in it, the first third stands out enough to be named
            named = affected[: max(1, len(affected) // 3)]
            return Place(None, [Pair(*move.where.split("--", 1)) for move in named])
    return Place(node, straddling(nodes, node) or [Pair(node, other) for other in nodes[1:]])


def _reading(family: Family, moves: Sequence[Move], place: Place, before: Snapshot | None, now: Snapshot) -> Reading:
    """The member of a family to speak of: at the place of the event, if there is one, else the most surprised one."""
    if family == "loss":
        where = "loss" if place.node is None else str(place.pairs[0])
        return Reading("loss", where, math.nan if before is None else before.loss, now.loss)
    if family == "lambda_1":
        values = [math.nan if s is None or s.spectrum is None else s.spectrum.sharpness for s in (before, now)]
        return Reading("hessian", "lambda_1" if place.node is None else str(place.pairs[0]), *values)
    metric = family if family in pair_metric_names() else "resonance"
    members = {move.where: move.surprise.score for move in moves if move.family == family}
    moved = sum(score > MOVED for score in members.values())
    if (metric == "resonance" and (family == "level" or place.node is None)) or (
        place.node is None and moved > THROUGHOUT * len(members)
    ):
        return Reading(metric, EVERYWHERE, _mean(before, metric), _mean(now, metric))
    across = list(members) if place.node is None else [str(pair) for pair in place.pairs]
    where = max(across, key=lambda pair: members.get(pair, 0.0))
    return Reading(metric, where, _value(before, metric, where), _value(now, metric, where))


def _message(reading: Reading, place: Place, causes: Sequence[Cause], moves: Sequence[Move], step: int) -> str:
    """`coupling stem--layer4 fell from 0.82 to 0.31: …; at the same time: …; check …`"""
    metric, up = reading.metric, reading.after > reading.before
    at = f" {reading.where}" if metric not in ("loss", "hessian") else ""
    moved = f"{'rose' if up else 'fell'} from {reading.before:.3g} to {reading.after:.3g}"
    spec = get("lambda_1" if metric == "hessian" else metric)
    means = alert_spec(spec.name)
    parts = [f"{spec.title}{at} {moved}: {means.rise if up else means.fall}"]
    if place.node is None:
        parts.append("throughout the network")
    else:
        others = ", ".join(str(pair) for pair in place.pairs[:3] if str(pair) != reading.where)
        parts.append(f"at {place.node} (also {others})" if others else f"at {place.node}")
    loss = next((move.surprise for move in moves if move.family == "loss"), None)
    if metric != "loss" and loss is not None and loss.score > MOVED:
        parts.append(f"the loss {'rose' if loss.size > 0 else 'fell'} {math.exp(abs(loss.size)):.3g}-fold with it")
    if causes:
        parts.append(f"at the same time: {_listed(causes)}")
    parts.append(f"check {_suspects(place, causes)} before step {step}")
    return "; ".join(parts)


def _listed(causes: Sequence[Cause]) -> str:
    """The most telling kinds first; of running statistics, which all move together, one."""
    order = (OPERATIONS, RATE, LOSS, WEIGHTS, BUFFERS)
    kinds = [[cause for cause in causes if cause.source.startswith(kind)] for kind in order]
    kinds[-1] = kinds[-1][:1]
    shown = [cause.text for kind in kinds for cause in kind][:MOST_CAUSES]
    rest = len(causes) - len(shown)
    return ", ".join(shown) + (f" and {rest} more" if rest else "")


def _suspects(place: Place, causes: Sequence[Cause]) -> str:
    def moved(kind: str) -> bool:
        return any(cause.source.startswith(kind) and cause.incriminating for cause in causes)

    if moved(OPERATIONS):
        return "what the network computes: it is not the same as"
    if moved(RATE):
        return "the learning rate"
    if moved(WEIGHTS) and place.node is not None:
        return f"what happened to the weights of {place.node}"
    if moved(LOSS):
        return "the data and their labels"
    if moved(BUFFERS):
        return "running statistics (batch norm)"
    return "the data and the learning rate" if place.node is None else f"what changed in {place.node}"


def _value(snapshot: Snapshot | None, metric: str, where: str) -> float:
    if snapshot is None or snapshot.measurement is None:
        return math.nan
    found = snapshot.measurement
    try:
        i, j = (found.nodes.index(name) for name in where.split("--", 1))
    except ValueError:  # other nodes then
        return math.nan
    return pair_metric(metric).values(found)[i, j].item()


def _mean(snapshot: Snapshot | None, metric: str) -> float:
    """Over all pairs; of resonances, geometric."""
    if snapshot is None or snapshot.measurement is None:
        return math.nan
    values = pair_metric(metric).values(snapshot.measurement)
    values = values[values.isfinite()]
    if metric != "resonance":
        return float(values.mean())
    return float(values[values > 0].log().mean().exp())

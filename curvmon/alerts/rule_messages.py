"""What the alerts of rules say: headline, evidence and suggestion, one function for each rule."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from curvmon.alerts.context import Cause
from curvmon.alerts.observations import MAX_EVIDENCE, checkpoint, evidence, loss_rose, raised_rate
from curvmon.alerts.rate_growth import RateGrowth
from curvmon.alerts.wording import JUMPED, before_after, headline, times
from curvmon.records import PROBE_LOSS, Alert, Level, Snapshot
from curvmon.records.formatting import short

_LOWER = "Lower the learning rate, or warm it up longer."
STABILITY = "λ_1 over the largest stable sharpness of the optimizer, on the probe batch"


class Violation(NamedTuple):
    """A rule's condition that holds at this measurement."""

    rule: str
    metric: str
    where: str
    threshold: float
    value: float
    level: Level = "warning"
    before: float = math.nan
    """what the value is compared with, where it is not that of a single snapshot"""


class Occasion(NamedTuple):
    """When a violation is reported, and what is known then."""

    now: Snapshot
    before: Snapshot | None
    """the last snapshot at which the condition did not hold; None if there is none"""
    causes: Sequence[Cause] = ()
    lasting: int = 1
    """measurements in a row at which it has held"""
    growth: RateGrowth | None = None
    """of the learning rate"""


class Text(NamedTuple):
    headline: str
    """without its step"""
    names: tuple[str, ...]
    """for every `{}` in it"""
    evidence: list[str]
    suggestion: str
    reported: str = ""
    """name of the metric that the evidence is about"""


def alert_of_violation(violation: Violation, occasion: Occasion) -> Alert:
    text = TEXTS[violation.rule](violation, occasion)
    now = occasion.now
    return Alert(
        kind=violation.rule,
        metric=violation.metric,
        where=violation.where,
        before=violation.threshold,
        after=violation.value,
        score=abs(violation.value / violation.threshold) if violation.threshold else math.inf,
        step=now.step,
        epoch=now.epoch,
        headline=headline(text.headline, *text.names, step=now.step),
        evidence=evidence(text.evidence, occasion.before, now, occasion.causes, text.reported, occasion.growth),
        suggestion=text.suggestion,
        level=violation.level,
    )


def alert_of_explosion(explosion: Alert, dead: Alert) -> Alert:
    """Of a loss that exploded and a dead network, where the same steps did both: the loss leads."""
    loss, *others = explosion.evidence
    return replace(explosion, evidence=(loss, dead.evidence[0], *others)[:MAX_EVIDENCE])


def alert_of_divergence(reason: str, now: Snapshot, before: Snapshot | None, growth: RateGrowth | None = None) -> Alert:
    """`reason`: what is not finite, where there is no name for it in the vital signs."""
    names = () if now.vitals is None else now.vitals.not_finite
    tensors = [name for name in names if name != PROBE_LOSS]
    if tensors:
        more = f" and {len(tensors) - 1} more tensor{'s' if len(tensors) > 2 else ''}" if len(tensors) > 1 else ""
        text = headline(f"NaN or infinity in {{}}{more}", tensors[0], step=now.step)
    elif names or math.isnan(now.loss):
        text = headline("The loss is NaN or infinite", step=now.step)
    else:
        text = headline("The curvature is NaN or infinite", step=now.step)
    points = [reason]
    if len(tensors) > 1:
        points.append(f"tensors that are not finite: 0 → {len(tensors)}, also {_list(tensors[1:])}")
    if before is not None and math.isfinite(before.loss):
        after = f" → {short(now.loss)}" if math.isfinite(now.loss) else f" at step {before.step}, the last finite one"
        points.append(f"loss of the probe batch: {short(before.loss)}{after}")
    return Alert(
        kind="not_finite",
        causes=(("not finite", 1.0),),
        metric="loss",
        where="loss",
        before=math.nan,
        after=math.nan,
        score=math.inf,
        step=now.step,
        epoch=now.epoch,
        headline=text,
        evidence=evidence(points, before, now, reported="loss", growth=growth),
        suggestion=f"Go back to {checkpoint(before, now)}, with a lower learning rate or gradient clipping; "
        "detect_anomaly=True of the Trainer names the operation.",
        level="error",
    )


def _loss_explosion(violation: Violation, at: Occasion) -> Text:
    before = violation.before
    verb = "jumped" if violation.value >= JUMPED * before else "rose"
    rate = raised_rate(at.causes)
    start = "The loss" if rate is None else f"Learning rate {times(rate.before, rate.after)}: the loss"
    return Text(
        f"{start} {verb} from {short(before)} to {short(violation.value)}",
        (),
        [f"loss of the probe batch: {before_after(before, violation.value)} (what the network had learned is lost)"],
        f"Go back to {checkpoint(at.before, at.now)}, with a lower learning rate.",
        "loss",
    )


def _dead_network(violation: Violation, at: Occasion) -> Text:
    points = ["couplings between layers: none is defined any more, as where all ReLUs are off or all outputs saturate"]
    norms = [_largest_block(snapshot) for snapshot in (at.before, at.now)]
    if not any(map(math.isnan, norms)):
        points.append(f"largest resonance of all pairs: {before_after(*norms)}")
    return Text(
        "The network is dead: its layers no longer affect the loss",
        (),
        points,
        f"Go back to {checkpoint(at.before, at.now)}, with a lower learning rate or a longer warm-up.",
    )


def _edge_of_stability(violation: Violation, at: Occasion) -> Text:
    return Text(
        f"Sharpness reached the optimizer's stability limit, {short(violation.value)} times it",
        (),
        [_stability(violation, at)],
        "Do nothing while the loss falls (most runs train at this edge of stability); otherwise lower the learning "
        "rate.",
    )


def _far_beyond_stability(violation: Violation, at: Occasion) -> Text:
    return Text(
        f"Sharpness is {short(violation.value)} times the optimizer's stability limit",
        (),
        [_stability(violation, at)],
        _LOWER if loss_rose(at.before, at.now) else f"{_LOWER[:-1]}, unless the loss keeps falling.",
    )


def _coupling_above(violation: Violation, at: Occasion) -> Text:
    pair = tuple(violation.where.split("--", 1))
    gaps = [_value(snapshot, "gn_gap", pair) for snapshot in (at.before, at.now)]
    return Text(
        f"Coupling is {short(violation.value)} at {{}} → {{}}, beyond Gauss-Newton",
        pair,
        [
            f"coupling {violation.where}: {_pair_values(violation, at, pair)}",
            f"GN-Gap {violation.where}: {before_after(*gaps)} (curvature that K-FAC and Fisher miss)",
        ],
        "Look at the GN-Gap before relying on Gauss-Newton, K-FAC or Fisher between these layers.",
    )


def _saddle(violation: Violation, at: Occasion) -> Text:
    before = None if at.before is None else at.before.spectrum
    ratio = math.nan if before is None else before.smallest / before.sharpness
    points = [f"smallest eigenvalue over the largest: {_with_threshold(ratio, violation, 'below', at)}"]
    if at.before is not None:
        points.append(f"loss of the probe batch: {before_after(at.before.loss, at.now.loss)}")
    return Text(
        "The loss stalls where the curvature is negative: a saddle point",
        (),
        points,
        "Raise the learning rate or the momentum, or use smaller batches, to escape it.",
        "loss",
    )


def _rank_collapse(violation: Violation, at: Occasion) -> Text:
    return Text(
        f"Curvature collapsed to a single direction, stable rank {short(violation.value)}",
        (),
        [f"mean stable rank between layers: {before_after(violation.before, violation.value)}"],
        "Do nothing if the network has learned its data; otherwise look for collapsed representations, or one sample "
        "that dominates the loss.",
    )


def _gn_gap_above(violation: Violation, at: Occasion) -> Text:
    pair = tuple(violation.where.split("--", 1))
    place = " → ".join(["{}"] * len(set(pair)))
    return Text(
        f"GN-Gap is {short(violation.value)} at {place}, above {short(violation.threshold)}",
        tuple(dict.fromkeys(pair)),
        [f"GN-Gap {violation.where}: {_pair_values(violation, at, pair)}"],
        "Do not rely on Gauss-Newton, K-FAC or Fisher between these layers.",
    )


TEXTS: dict[str, Callable[[Violation, Occasion], Text]] = {
    "loss_explosion": _loss_explosion,
    "dead_network": _dead_network,
    "edge_of_stability": _edge_of_stability,
    "far_beyond_stability": _far_beyond_stability,
    "coupling_above": _coupling_above,
    "saddle": _saddle,
    "rank_collapse": _rank_collapse,
    "gn_gap_above": _gn_gap_above,
}


def _stability(violation: Violation, at: Occasion) -> str:
    before = None if at.before is None else at.before.spectrum
    ratio = math.nan if before is None else before.stability_ratio
    return f"{STABILITY}: {_with_threshold(ratio, violation, 'above', at)}"


def _pair_values(violation: Violation, at: Occasion, pair: tuple[str, ...]) -> str:
    return _with_threshold(_value(at.before, violation.metric, pair), violation, "above", at)


def _with_threshold(before: float, violation: Violation, side: str, at: Occasion) -> str:
    """`0.9 → 1.3, above 1 in 3 measurements in a row`."""
    row = f" in {at.lasting} measurements in a row" if at.lasting > 1 else ""
    return f"{before_after(before, violation.value)}, {side} {short(violation.threshold)}{row}"


def _value(snapshot: Snapshot | None, metric: str, pair: tuple[str, ...]) -> float:
    measurement = None if snapshot is None else snapshot.measurement
    if measurement is None or not set(pair) <= set(measurement.nodes):
        return math.nan
    i, j = (measurement.nodes.index(name) for name in pair)
    return float(getattr(measurement, metric)[i, j])


def _largest_block(snapshot: Snapshot | None) -> float:
    if snapshot is None or snapshot.measurement is None:
        return math.nan
    return float(snapshot.measurement.resonance.nan_to_num(0.0).max())


def _list(names: Sequence[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (", …" if len(names) > most else "")

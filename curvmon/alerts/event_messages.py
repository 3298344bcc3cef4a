"""From an event to its alert: the most probable cause and place, what it did, and what to do."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from curvmon.alerts.drift import Drift
from curvmon.alerts.event_detector import CLEAR, Event
from curvmon.alerts.evidence import AFFECTED, weighted
from curvmon.alerts.family_wording import WORDINGS, in_words, metric_of, wording_of
from curvmon.alerts.features import FeatureDeviation
from curvmon.alerts.observations import MAX_EVIDENCE, checkpoint, since
from curvmon.alerts.signatures import UNCLEAR
from curvmon.alerts.wording import headline, times
from curvmon.records import Alert, Snapshot
from curvmon.records.formatting import short

VISIBLE = math.log(1.2)
SHOWN = 3.0
"""standard deviations, from which on a feature is evidence; the largest one is anyway"""
MAX_CAUSES, MAX_PAIRS = 2, 6


class Advice(NamedTuple):
    title: str
    """of the cause, with `{}` for the place"""
    elsewhere: str
    """the same without a place"""
    suggestion: str
    """with {since} and {checkpoint}"""


ADVICE = {
    "learning rate": Advice(
        "Learning rate changed", "Learning rate changed",
        "Lower the learning rate, and go back to {checkpoint}.",
    ),
    "labels": Advice(
        "Labels no longer fit", "Labels no longer fit",
        "Check the labels of the training batches {since}: are they still in the order of their inputs?",
    ),
    "class missing": Advice(
        "A class is missing", "A class is missing",
        "Check the sampler and the filters of the training data: some values no longer occur.",
    ),
    "repeated data": Advice(
        "Batches repeat", "Batches repeat",
        "Check the sampler and the DataLoader: the same batches come again and again.",
    ),
    "inputs": Advice(
        "Training inputs changed", "Training inputs changed",
        "Check the preprocessing and the source of the training inputs {since}.",
    ),
    "weights zeroed": Advice(
        "Weights of {} zeroed", "Weights zeroed",
        "Check what wrote to these weights {since}, and go back to {checkpoint}.",
    ),
    "weights replaced": Advice(
        "Weights of {} replaced", "Weights replaced",
        "Check what re-initialized these weights {since}, and go back to {checkpoint}.",
    ),
    "weight noise": Advice(
        "All weights changed", "All weights changed",
        "Check what wrote to the weights {since}, and go back to {checkpoint}.",
    ),
    "weights grown": Advice(
        "Weights of {} grew", "Weights grew",
        "Check what scaled these weights {since}, and go back to {checkpoint}.",
    ),
    "dead units": Advice(
        "Units of {} died", "Units died",
        "Check the biases and the activations of this layer {since}, and go back to {checkpoint}.",
    ),
    "statistics": Advice(
        "Batch norm statistics changed", "Batch norm statistics changed",
        "Check what changed the running statistics {since}: their momentum, or buffers that were not loaded.",
    ),
    "forward pass": Advice(
        "Forward pass of {} changed", "Forward pass changed", "Check what changed in the forward pass {since}.",
    ),
    "dropout": Advice("Dropout changed", "Dropout changed", "Check the dropout probabilities {since}."),
    "optimizer state": Advice(
        "Optimizer state lost", "Optimizer state lost",
        "Check whether the optimizer's state was lost {since}; a warmup lets it recover.",
    ),
    "gradient sign": Advice(
        "Steps go uphill", "Steps go uphill", "Check the signs of the loss and of the gradients {since}.",
    ),
    "weight decay": Advice("Weight decay changed", "Weight decay changed", "Check the weight decay {since}."),
    "schedule": Advice("Learning rate changed by its schedule", "Learning rate changed by its schedule", ""),
    "batch size": Advice("Batch size changed", "Batch size changed", ""),
    "weight decay setting": Advice("Weight decay changed", "Weight decay changed", ""),
    "trained parameters": Advice("Other parameters are trained", "Other parameters are trained", ""),
    UNCLEAR: Advice(
        "", "", "The cause is unclear: check what changed {since}, first the data and the learning rate.",
    ),
}  # fmt: skip
CERTAIN, SEVERE = 10.0, 15.0
"""log odds, or standard deviations of a family, from which on a change of unclear cause is an alert although no loss
rose"""
INTENDED = "Nothing to do if this was intended; later measurements are compared with the new level."


def alert_of_event(
    event: Event,
    facts: Sequence[str],
    before: Snapshot | None,
    now: Snapshot,
) -> Alert:
    """An alert, or a notice if the user did it on purpose.

    Args:
        event: what was detected.
        facts: settings and operations that changed, in words.
        before: the last measurement.
        now: the one of the alert.
    """
    advice = ADVICE[event.cause]
    places = event.places if event.cause == UNCLEAR or "{}" in advice.title else ()
    place = places[0][0] if places and places[0][1] >= CLEAR else None
    ranked = sorted(event.deviations, key=lambda deviation: -weighted(deviation))
    damage = _damage(ranked)
    main = damage or ranked[0]
    values = _values(main, event.last)
    names = (place,) if place is not None and "{}" in advice.title else ()
    title = advice.title if names else advice.elsewhere
    rates = [d for d in event.deviations if d.family == "rate" and event.cause in ("learning rate", "schedule")]
    for rate in rates:
        title = f"Learning rate {times(*_values(rate, event.last))}"
    if damage is not None or event.cause == UNCLEAR:
        text = f"{wording_of(main.family).text.format(main.where).strip()} {short(values[0])} → {short(values[1])}"
        text = text.replace("{", "{{").replace("}", "}}")
        title = text[:1].upper() + text[1:] if event.cause == UNCLEAR else f"{title}: {text}"
    is_serious = not event.is_intended
    score = max(abs(score.score) for score in event.scores.values())
    if event.cause == UNCLEAR and damage is None and not event.is_own:
        is_serious = event.log_odds >= CERTAIN or score >= SEVERE
    causes = [] if event.is_intended else [_in_order(event.causes)]
    leading = [*rates, *([damage] if damage is not None else [])]
    shown = _evidence([*leading, *ranked], event.last, MAX_EVIDENCE - len(facts[:2]) - len(causes))
    suggestion = INTENDED if event.is_intended else advice.suggestion
    texts = {"since": since(before, now), "checkpoint": checkpoint(before, now)}
    return Alert(
        kind="intervention" if event.is_intended else "jump",
        metric=metric_of(main.family),
        where=place or main.where,
        before=values[0],
        after=values[1],
        score=score,
        step=now.step,
        epoch=now.epoch,
        headline=headline(title, *names, step=now.step),
        evidence=(*facts[:2], *shown, *causes),
        suggestion=suggestion.format(**texts),
        level="warning" if is_serious else "info",
        others=_pairs(ranked),
        causes=tuple((name, round(share, 4)) for name, share in event.causes if share > 0.001),
        places=tuple((name, round(share, 4)) for name, share in places if share > 0.001),
    )


def alert_of_drift(drift: Drift, causes: Sequence[tuple[str, float]], before: Snapshot | None, now: Snapshot) -> Alert:
    """`causes`: most probable first."""
    advice = ADVICE[causes[0][0] if causes[0][1] >= CLEAR else UNCLEAR]
    wording = wording_of(drift.family)
    values = wording.value(drift.before), wording.value(drift.after)
    evidence = [
        f"{in_words(drift.family, drift.where, drift.before, drift.after)} in {drift.intervals} validations",
        f"it grows by {math.expm1(drift.per_interval):.0%} from one to the next",
        *_outlook(drift, now),
        _in_order(causes),
    ]
    name = wording.text.format(drift.where)
    title = f"{name[:1].upper() + name[1:]} keeps growing: {short(values[0])} → {short(values[1])}"
    places = ((drift.where.rpartition(".")[0], 1.0),) if drift.family == "weights" else ()
    texts = {"since": since(before, now), "checkpoint": checkpoint(before, now)}
    return Alert(
        kind="drift",
        metric=metric_of(drift.family),
        where=drift.where,
        before=values[0],
        after=values[1],
        score=drift.per_interval,
        step=now.step,
        epoch=now.epoch,
        headline=headline(title.replace("{", "{{").replace("}", "}}"), step=now.step),
        evidence=tuple(evidence),
        suggestion=advice.suggestion.format(**texts),
        causes=tuple((name, round(share, 4)) for name, share in causes if share > 0.001),
        places=places,
    )


def _outlook(drift: Drift, now: Snapshot) -> list[str]:
    """When a learning rate that grows reaches the limit of stability."""
    ratio = math.nan if now.spectrum is None else now.spectrum.stability_ratio
    if drift.family != "rate" or not 0 < ratio < 1:
        return []
    left = math.ceil(-math.log(ratio) / drift.per_interval)
    return [f"at this rate the stability limit is reached in about {left} validations, at the present sharpness"]


def _pairs(ranked: Sequence[FeatureDeviation]) -> tuple[str, ...]:
    """Pairs of layers that the event affected, most affected first."""
    pairs = [d.where for d in ranked if "--" in d.where and weighted(d) > AFFECTED]
    return tuple(dict.fromkeys(pairs))[:MAX_PAIRS]


def _damage(ranked: Sequence[FeatureDeviation]) -> FeatureDeviation | None:
    """A loss that rose visibly, the one with the largest score."""
    for deviation in ranked:
        wording = WORDINGS.get(deviation.family)
        if wording is None or not wording.is_damage or weighted(deviation) < SHOWN:
            continue
        if deviation.deviation.size > VISIBLE:
            return deviation
    return None


def _values(deviation: FeatureDeviation, last: Mapping[tuple[str, str], float]) -> tuple[float, float]:
    """Before and after, as the user knows them."""
    forecast, size = deviation.deviation.forecast, deviation.deviation.size
    before = last.get((deviation.family, deviation.where), forecast)
    value = wording_of(deviation.family).value
    return value(before), value(forecast + size)


def _evidence(ranked: Sequence[FeatureDeviation], last: Mapping[tuple[str, str], float], count: int) -> tuple[str, ...]:
    """The members with the largest scores, one of each family."""
    shown: dict[str, str] = {}
    for deviation in ranked:
        if deviation.family not in shown and len(shown) < count and (not shown or weighted(deviation) > SHOWN):
            forecast, size = deviation.deviation.forecast, deviation.deviation.size
            before = last.get((deviation.family, deviation.where), forecast)
            shown[deviation.family] = in_words(deviation.family, deviation.where, before, forecast + size)
    return tuple(shown.values())


def _in_order(causes: Sequence[tuple[str, float]]) -> str:
    named = [f"{name} ({share:.0%})" for name, share in causes[:MAX_CAUSES] if share >= 0.01]
    return f"most likely cause: {', then '.join(named)}"

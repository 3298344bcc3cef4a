"""What the families of features are called in alerts, and how their values read."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from curvmon.alerts.context_features import ERROR_OFFSET
from curvmon.alerts.features import RESONANCE, alert_spec
from curvmon.alerts.wording import before_after
from curvmon.metrics.registry import get


class Wording(NamedTuple):
    text: str
    """with `{}` for the member: a tensor, a layer, a pair, or the name of a metric"""
    value: Callable[[float], float] = math.exp
    """of a feature"""
    is_damage: bool = False
    """a rise is what the user cares about in the end"""


def _same(value: float) -> float:
    return value


def _accuracy(value: float) -> float:
    return 1 + ERROR_OFFSET - math.exp(value)


WORDINGS = {
    "validation loss": Wording("{}", is_damage=True),
    "validation error": Wording("{}", _accuracy, is_damage=True),
    "training loss": Wording("training loss", is_damage=True),
    "loss": Wording("loss of the probe batch", is_damage=True),
    "rate": Wording("learning rate"),
    "unscheduled rate": Wording("learning rate over that of the scheduler"),
    "weights": Wording("norm of {}"),
    "statistics": Wording("norm of {}"),
    "zeros": Wording("share of zeros in {}", _same),
    "update level": Wording("relative update of the weights"),
    "update profile": Wording("relative update of {} over that of the others"),
    "inputs rms": Wording("root mean square of {}"),
    "inputs mean": Wording("mean of {} over its root mean square", _same),
    "inputs spread": Wording("differences between the batches of {}"),
    "labels perplexity": Wording("number of different values in {}"),
    "labels missing": Wording("values missing from {}", _same),
    "labels shift": Wording("distance of the values in {} from the usual ones", _same),
    "batches different": Wording("share of training batches that differ"),
    "batches size": Wording("batch size"),
    "level": Wording("resonance, mean over all layers"),
    "profile": Wording("resonance of {} relative to the other layers"),
    "contrast": Wording("resonance of {} relative to its neighbours"),
    "lambda_1": Wording("sharpness λ_1"),
}


def metric_of(family: str) -> str:
    """What users know it by."""
    if family in RESONANCE:
        return "resonance"
    return family.replace(" ", "_")


def wording_of(family: str) -> Wording:
    if family in WORDINGS:
        return WORDINGS[family]
    spec = get(family)
    offset = spec.alert.offset if spec.alert is not None else 0.0
    title = spec.title.replace("{", "{{").replace("}", "}}")
    return Wording(f"{title} {{}}", lambda value: math.exp(value) - offset)


def in_words(family: str, where: str, before: float, after: float) -> str:
    """`norm of head.weight: 0.82 → 24.6`, and what it means where that is known; before, after: of the feature."""
    wording = wording_of(family)
    name = wording.text.format(where).strip()
    text = f"{name}: {before_after(wording.value(before), wording.value(after))}"
    spec = alert_spec(family)
    if spec is None or after == before:
        return text
    return f"{text} ({spec.rise if after > before else spec.fall})"

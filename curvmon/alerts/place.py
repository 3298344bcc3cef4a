"""Where an event happened: modules by how far their tensors, operations and curvature are from the forecasts.

P(module) ∝ s^SHARPNESS,   s: largest score of anything that belongs to the module
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from curvmon.alerts.evidence import MOST, weighted
from curvmon.alerts.features import FeatureDeviation

SHARPNESS = 3.0
LEAST = 4.0
"""smaller scores have no place"""
OF_TENSORS = ("weights", "zeros", "update profile")
OF_NODES = ("profile", "contrast")
NODE_WEIGHT = 0.3
"""the curvature of a layer also follows its neighbours"""
WIDESPREAD = 0.5
"""if more than this share of the tensors stands out, there is no particular place"""


def places(
    deviations: Sequence[FeatureDeviation], rebuilt: Iterable[str] = (), named: Iterable[str] = ()
) -> tuple[tuple[str, float], ...]:
    """Modules and their probabilities, most probable first; none if there is no particular place.

    Args:
        deviations: of all features.
        rebuilt: nodes whose operations changed.
        named: modules whose settings changed.
    """
    exact = set(named) or set(rebuilt)
    if exact:
        return tuple((name, 1 / len(exact)) for name in sorted(exact))
    scores: dict[str, float] = defaultdict(float)
    tensors: dict[str, float] = defaultdict(float)
    for deviation in deviations:
        if deviation.family in OF_TENSORS:
            tensors[deviation.where] = max(tensors[deviation.where], weighted(deviation))
    standing_out = sum(score > LEAST for score in tensors.values())
    if len(tensors) > 2 and standing_out > WIDESPREAD * len(tensors):
        largest = sorted(tensors.values(), reverse=True)
        if largest[0] < 3 * largest[len(largest) // 2]:
            return ()
    for name, score in tensors.items():
        module = name.rpartition(".")[0]
        scores[module] = max(scores[module], min(score, MOST))
    for deviation in deviations:
        if deviation.family in OF_NODES:
            scores[deviation.where] = max(scores[deviation.where], NODE_WEIGHT * min(weighted(deviation), MOST))
    kept = {name: score**SHARPNESS for name, score in scores.items() if score > LEAST}
    total = sum(kept.values())
    return tuple(sorted(((name, score / total) for name, score in kept.items()), key=lambda each: -each[1]))

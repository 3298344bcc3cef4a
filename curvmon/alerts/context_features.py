"""The features of a measurement's context: losses, learning rate, weights and their updates, training data.

Logarithms where ratios matter. `update profile`: log of a tensor's relative update minus the median over all tensors,
which the learning rate does not change.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping

from curvmon.alerts.context import Context, Source
from curvmon.alerts.features import MIN_VALUE, Feature

ERROR_OFFSET = 0.02
"""added to 1 - accuracy before its logarithm: a single sample is not much"""
_LOSSES = ("loss", "nll", "perplexity", "ppl", "error", "mse", "mae", "rmse", "wer", "cer")
_SCORES = ("acc", "accuracy", "f1", "auc", "auroc", "iou", "dice", "precision", "recall", "score", "map", "r2", "bleu")


def context_features(context: Context) -> list[Feature]:
    signs = context.signs
    return [
        *_of_kind("rate", context.values, "learning rate"),
        *_of_kind("training loss", context.values, "training loss"),
        *_of_kind("unscheduled rate", signs, "learning rate over scheduled"),
        *_of_kind("weights", context.values, "weights"),
        *_of_kind("statistics", context.values, "statistics"),
        *_metrics(signs),
        *_updates(signs),
        *_data(signs),
    ]


def _of_kind(family: str, values: Mapping[Source, float], kind: str) -> list[Feature]:
    return [
        Feature(family, name, math.log(value), 0.0)
        for (of, name), value in values.items()
        if of == kind and MIN_VALUE < value < math.inf
    ]


def _metrics(signs: Mapping[Source, float]) -> list[Feature]:
    """Of those that a user logs, the ones whose name says what is good. They grow as it gets worse."""
    features = []
    for (kind, name), value in signs.items():
        words = set(name.lower().replace("/", "_").replace("-", "_").split("_")) if kind == "metric" else set()
        if not math.isfinite(value):
            continue
        if words & set(_LOSSES) and value > MIN_VALUE:
            features.append(Feature("validation loss", name, math.log(value), 0.0))
        elif words & set(_SCORES) and 0 <= value <= 1:
            features.append(Feature("validation error", name, math.log(1 - value + ERROR_OFFSET), 0.0))
    return features


def _updates(signs: Mapping[Source, float]) -> list[Feature]:
    sizes = {name: math.log(value) for (kind, name), value in signs.items() if kind == "update" and value > MIN_VALUE}
    if not sizes:
        return []
    median = statistics.median(sizes.values())
    return [
        Feature("update level", "", median, 0.0),
        *(Feature("update profile", name, size - median, 0.0) for name, size in sizes.items()),
    ]


def _data(signs: Mapping[Source, float]) -> list[Feature]:
    """Values that may be zero or negative have no logarithm."""
    features = []
    for (kind, name), value in signs.items():
        if kind in ("inputs mean", "labels missing", "labels shift", "zeros"):
            features.append(Feature(kind, name, value, 0.0))
        elif kind.startswith(("inputs ", "labels ", "batches ")) and value > MIN_VALUE:
            features.append(Feature(kind, name, math.log(value), 0.0))
    return features

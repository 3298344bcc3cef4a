"""The features that are watched for changes: the logarithms of all quantities of a snapshot, decorrelated.

A disturbance scales all resonances at once, by a factor that differs between measurements even in a quiet run.
`level`: mean of log R(v, v) over the nodes v; `profile`: log R(v, v) - level; `contrast`: log R(v, v) minus the mean of
its two neighbours. In one layer the profile may be steady to a few percent while the level varies by a factor of two.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from curvmon.alerts.forecast import Deviation
from curvmon.metrics.registry import AlertSpec, all_metrics, pair_metrics, scalar_metrics
from curvmon.records import Measurement, Snapshot

Family = str
"""level, profile or contrast of the resonance, or the name of a metric in the registry"""

RESONANCE: frozenset[Family] = frozenset({"level", "profile", "contrast"})
"""families of the metric `resonance`"""
MIN_VALUE = 1e-30
"""smaller values have no logarithm"""


class Feature(NamedTuple):
    """One value of one feature."""

    family: Family
    where: str
    """a pair, a node, or the logger key of a value in a list; empty for what the network has once"""
    value: float
    """logarithm"""
    stderr: float


class FeatureDeviation(NamedTuple):
    """Deviation of a feature from its forecast."""

    family: Family
    where: str
    deviation: Deviation


def features_of(snapshot: Snapshot) -> list[Feature]:
    """The features of a snapshot. Undefined values, and zeros, which have no logarithm, are missing."""
    features: list[Feature] = []
    if snapshot.measurement is not None:
        features += _resonance_features(snapshot.measurement)
        features += _pair_features(snapshot.measurement)
    return features + _scalar_features(snapshot)


def layer_families() -> frozenset[Family]:
    """Families without a past where other nodes are measured."""
    return RESONANCE | {spec.name for spec in pair_metrics()}


def alert_spec(family: Family) -> AlertSpec | None:
    """Of the metric; None for families that are none."""
    name = "resonance" if family in RESONANCE else family
    return next((spec.alert for spec in all_metrics() if spec.name == name), None)


def _resonance_features(m: Measurement) -> list[Feature]:
    diagonal, errors = m.resonance.diagonal().tolist(), m.stderr["resonance"].diagonal().tolist()
    positive = [
        (node, math.log(r), min(e / r, 1.0))
        for node, r, e in zip(m.nodes, diagonal, errors)
        if math.isfinite(r) and r > MIN_VALUE
    ]
    if not positive:
        return []
    names, values, relative = zip(*positive)
    mean = sum(values) / len(values)
    # the mean over a subset of the nodes is a feature of its own
    subset = "" if len(positive) == len(m.nodes) else ",".join(names)
    features = [Feature("level", subset, mean, max(relative) / math.sqrt(len(values)))]
    if len(values) > 1:
        features += [Feature("profile", name, v - mean, e) for name, v, e in positive]
    for i in range(1, len(values) - 1):
        between = (values[i - 1] + values[i + 1]) / 2
        features.append(Feature("contrast", names[i], values[i] - between, relative[i]))
    return features


def _pair_features(m: Measurement) -> list[Feature]:
    features: list[Feature] = []
    index = {name: i for i, name in enumerate(m.nodes)}
    metrics = [
        (spec, spec.alert.offset, spec.values(m), spec.stderr(m))
        for spec in pair_metrics()
        if spec.alert is not None and spec.alert.per_pair
    ]
    for pair in m.pairs():
        i, j = index[pair.row], index[pair.col]
        for spec, offset, values, stderr in metrics:
            if i != j or not spec.unit_diagonal:
                features += _logarithm(spec.name, str(pair), values[i, j].item() + offset, stderr[i, j].item())
    return features


def _scalar_features(snapshot: Snapshot) -> list[Feature]:
    features: list[Feature] = []
    for spec in scalar_metrics():
        if spec.alert is not None:
            errors = spec.errors(snapshot)
            for key, value in spec.scalars(snapshot).items():
                where = "" if key == spec.key else key
                features += _logarithm(spec.name, where, value + spec.alert.offset, errors.get(key, 0.0))
    return features


def _logarithm(family: Family, where: str, value: float, stderr: float) -> list[Feature]:
    if not math.isfinite(value) or value <= MIN_VALUE:
        return []
    stderr = stderr if math.isfinite(stderr) else value
    return [Feature(family, where, math.log(value), min(stderr / value, 1.0))]

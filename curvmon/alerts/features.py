"""The features that are watched for changes: the logarithms of all quantities of a snapshot, decorrelated.

A disturbance scales all resonances at once, by a factor that differs between measurements even in a quiet run.
`level`: mean of log R(v, v) over the nodes v; `profile`: log R(v, v) - level; `contrast`: log R(v, v) minus the mean of
its two neighbours. In one layer the profile may be steady to a few percent while the level varies by a factor of two.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from curvmon.alerts.forecast import Deviation
from curvmon.records import Measurement, Pair, Snapshot

Family = str
"""level, profile or contrast of the resonance, a pair metric, lambda_1, loss"""


class PairFeatures(NamedTuple):
    """How the values of a pair metric become features: log(value + offset)."""

    metric: str
    offset: float = 0.0
    """values far below it do not differ"""
    diagonal: bool = True
    """also of a node with itself"""


PAIR_FEATURES = (
    PairFeatures("coupling", diagonal=False),
    PairFeatures("stable_rank"),
    PairFeatures("gn_gap", offset=0.02),
)
NETWORK_FAMILIES = ("lambda_1", "loss")
"""which do not depend on the choice of nodes"""
MIN_VALUE = 1e-30
"""smaller values have no logarithm"""


class Feature(NamedTuple):
    """One value of one feature."""

    family: Family
    where: str
    """a pair or a node; empty for what the network has once"""
    value: float
    """logarithm"""
    stderr: float


class FeatureDeviation(NamedTuple):
    """Of a feature from its forecast."""

    family: Family
    where: str
    deviation: Deviation


def features_of(snapshot: Snapshot) -> list[Feature]:
    """The features of a snapshot. Undefined values, and zeros, which have no logarithm, are missing."""
    features: list[Feature] = []
    if snapshot.measurement is not None:
        features += _resonance_features(snapshot.measurement)
        features += _pair_features(snapshot.measurement)
    if snapshot.spectrum is not None:
        top = snapshot.spectrum
        features += _logarithm("lambda_1", "", top.sharpness, top.residuals[0].item() if len(top.residuals) else 0.0)
    return features + _logarithm("loss", "", snapshot.loss, 0.0)


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
    for pair in m.pairs():
        i, j = index[pair.row], index[pair.col]
        for metric, offset, diagonal in PAIR_FEATURES:
            if diagonal or i != j:
                value, stderr = getattr(m, metric)[i, j].item(), m.stderr[metric][i, j].item()
                features += _logarithm(metric, str(pair), value + offset, stderr)
    return features


def _logarithm(family: Family, where: str, value: float, stderr: float) -> list[Feature]:
    if not math.isfinite(value) or value <= MIN_VALUE:
        return []
    stderr = stderr if math.isfinite(stderr) else value
    return [Feature(family, where, math.log(value), min(stderr / value, 1.0))]


def pairs_across(nodes: tuple[str, ...], node: str) -> list[Pair]:
    """The pairs with one end before `node` and the other at or after it, nearest first."""
    at = nodes.index(node)
    pairs = [(i, j) for i in range(at) for j in range(at, len(nodes))]
    return [Pair(nodes[i], nodes[j]) for i, j in sorted(pairs, key=lambda ij: (ij[1] - ij[0], ij[1]))]

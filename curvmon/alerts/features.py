"""The series that are watched for changes: everything a snapshot holds, taken apart so that each says one thing.

A disturbed run moves all resonances at once, by a factor that differs from one validation to the next even in a quiet
run. Taken apart into their common level, the profile over the layers and the couplings, what is quiet becomes visible
as such: in one layer the profile may be steady to a few percent while the level swings by a factor of two.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from curvmon.alerts.forecast import Surprise
from curvmon.metrics.registry import AlertSpec, get, pair_metric, pair_metrics
from curvmon.records import Measurement, Pair, Snapshot

Family = str
"""level, profile or contrast of the resonance, or the name of a metric in the registry"""
LEAST_RELATIVE = 1e-30
"""of a value whose logarithm is taken"""


def alert_spec(family: Family) -> AlertSpec:
    """When a change of a family is significant: that of its metric, lower for the resonance of single layers."""
    spec = pair_metric("resonance").alert if family in ("level", "profile", "contrast") else get(family).alert
    assert spec is not None
    if family in ("profile", "contrast"):
        return replace(spec, threshold=4.5, family_threshold=3.2, smallest_change=0.25)
    return spec


class Watched(NamedTuple):
    family: Family
    where: str
    """a pair, a node, or empty for what the whole network has once"""
    value: float
    """on a scale on which differences count"""
    stderr: float


class Move(NamedTuple):
    """What one series did."""

    family: Family
    where: str
    surprise: Surprise


def watched(snapshot: Snapshot) -> list[Watched]:
    """Every series' next point. What is not defined, or zero where a logarithm is needed, is missing."""
    found: list[Watched] = []
    if snapshot.measurement is not None:
        found += _resonances(snapshot.measurement)
        found += _ratios(snapshot.measurement)
    if snapshot.spectrum is not None:
        top = snapshot.spectrum
        found += _logarithm("lambda_1", "", top.sharpness, top.residuals[0].item() if len(top.residuals) else 0.0)
    return found + _logarithm("loss", "", snapshot.loss, 0.0)


def _resonances(m: Measurement) -> list[Watched]:
    """log R(v, v): their mean, what each is off the mean, and off its two neighbours."""
    diagonal, errors = m.resonance.diagonal().tolist(), m.stderr["resonance"].diagonal().tolist()
    known = [
        (node, math.log(r), min(e / r, 1.0))
        for node, r, e in zip(m.nodes, diagonal, errors)
        if math.isfinite(r) and r > LEAST_RELATIVE
    ]
    if not known:
        return []
    names, values, relative = zip(*known)
    mean = sum(values) / len(values)
    # the mean over some of the layers is another series than that over all
    which = "" if len(known) == len(m.nodes) else ",".join(names)
    found = [Watched("level", which, mean, max(relative) / math.sqrt(len(values)))]
    if len(values) > 1:
        found += [Watched("profile", name, v - mean, e) for name, v, e in known]
    for i in range(1, len(values) - 1):
        between = (values[i - 1] + values[i + 1]) / 2
        found.append(Watched("contrast", names[i], values[i] - between, relative[i]))
    return found


def _ratios(m: Measurement) -> list[Watched]:
    found: list[Watched] = []
    index = {name: i for i, name in enumerate(m.nodes)}
    per_pair = [spec for spec in pair_metrics() if spec.alert is not None and spec.alert.per_pair]
    metrics = [(spec, spec.values(m), spec.stderr(m)) for spec in per_pair]
    for pair in m.pairs():
        i, j = index[pair.row], index[pair.col]
        for spec, values, errors in metrics:
            if spec.alert is not None and not (spec.unit_diagonal and i == j):
                value = values[i, j].item() + spec.alert.offset
                found += _logarithm(spec.name, str(pair), value, errors[i, j].item())
    return found


def _logarithm(family: Family, where: str, value: float, stderr: float) -> list[Watched]:
    if not math.isfinite(value) or value <= LEAST_RELATIVE:
        return []
    stderr = stderr if math.isfinite(stderr) else value
    return [Watched(family, where, math.log(value), min(stderr / value, 1.0))]


def straddling(nodes: tuple[str, ...], node: str) -> list[Pair]:
    """The pairs with one end before `node` and the other at it or behind it, nearest first."""
    at = nodes.index(node)
    pairs = [(i, j) for i in range(at) for j in range(at, len(nodes))]
    return [Pair(nodes[i], nodes[j]) for i, j in sorted(pairs, key=lambda ij: (ij[1] - ij[0], ij[1]))]

"""The series that are watched for changes: everything a snapshot holds, taken apart so that each says one thing.

A disturbed run moves all resonances at once, by a factor that differs from one validation to the next even in a quiet
run. Taken apart into their common level, the profile over the layers and the couplings, what is quiet becomes visible
as such: in one layer the profile may be steady to a few percent while the level swings by a factor of two.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from curvmon.alerts.forecast import Surprise
from curvmon.records import Measurement, Pair, Snapshot

Family = Literal["level", "profile", "contrast", "coupling", "stable_rank", "gn_gap", "lambda_1", "loss"]
LEAST_GAP = 0.02
"""added to every GN-Gap before its logarithm is taken: below it, a gap is as good as none"""
LEAST_RELATIVE = 1e-30
"""of a value whose logarithm is taken"""


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
    for pair in m.pairs():
        i, j = index[pair.row], index[pair.col]
        if i != j:
            found += _logarithm("coupling", str(pair), *_entry(m, "coupling", i, j))
        found += _logarithm("stable_rank", str(pair), *_entry(m, "stable_rank", i, j))
        gap, error = _entry(m, "gn_gap", i, j)
        found += _logarithm("gn_gap", str(pair), gap + LEAST_GAP, error)
    return found


def _entry(m: Measurement, metric: str, i: int, j: int) -> tuple[float, float]:
    return getattr(m, metric)[i, j].item(), m.stderr[metric][i, j].item()


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

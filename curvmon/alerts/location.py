"""Where in the network a change is, and how sure that is."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from curvmon.alerts.context import Cause
from curvmon.alerts.features import FeatureDeviation, pairs_across
from curvmon.records import Pair, Snapshot

AFFECTED = 3.0
"""standard deviations from which on a feature is affected by an event"""
STANDS_OUT = 1.5
"""times the median deviation of all layers: the layer where an event is"""
CLEARLY = 1.5
"""times the deviation of the second layer: it is this one, not a neighbour"""


class Location(NamedTuple):
    node: str | None
    """None: no node stands out"""
    pairs: list[Pair]
    """most affected first"""
    is_certain: bool = False
    """the next node is far behind, or the context names this one"""

    def place(self, where: str, nodes: Sequence[str]) -> tuple[str, tuple[str, ...]]:
        """In a headline, a text with `{}` and the names for it: ` at {} → {}`, ` around {}`.

        `where`: the pair that is reported.
        """
        pair = tuple(where.split("--", 1))
        if self.node is None:
            return (" around {} → {}", pair) if len(pair) == 2 else (" throughout the network", ())
        if not self.is_certain:
            return " around {}", (self.node,)
        at = nodes.index(self.node)
        if at > 0 and pair == (nodes[at - 1], self.node):  # both ends of the step to this node
            return " at {} → {}", pair
        return " at {}", (self.node,)


def locate(deviations: Sequence[FeatureDeviation], causes: Sequence[Cause], now: Snapshot) -> Location:
    """The layer whose resonance stands out most from the others', and the pairs across it."""
    if now.measurement is None or len(now.measurement.nodes) < 2:
        return Location(None, [])
    nodes = now.measurement.nodes
    everywhere = any(cause.kind == "learning rate" and cause.lowers_threshold for cause in causes)
    suspect = None if everywhere else suspected_node(causes, nodes)
    if suspect is not None:
        return Location(suspect, _across(nodes, suspect), is_certain=True)
    profile = {d.where: d.deviation for d in deviations if d.family == "profile"}
    node = max(profile, key=lambda name: abs(profile[name].size), default=nodes[0])
    sizes = sorted((abs(deviation.size) for deviation in profile.values()), reverse=True)
    usual = statistics.median(sizes) if sizes else math.inf
    if everywhere or not sizes or profile[node].score < AFFECTED or sizes[0] < STANDS_OUT * usual:
        couplings = sorted((d for d in deviations if d.family == "coupling"), key=lambda d: -d.deviation.score)
        # where all are affected, only the first third stands out enough to be named
        named = couplings[: max(1, len(couplings) // 3)]
        return Location(None, [Pair(*d.where.split("--", 1)) for d in named])
    return Location(node, _across(nodes, node), is_certain=len(sizes) > 2 and sizes[0] > CLEARLY * sizes[1])


def suspected_node(causes: Sequence[Cause], nodes: Sequence[str]) -> str | None:
    """The one node whose operations changed, or else the one whose weights did; None if there are several."""
    rebuilt = {cause.node(nodes) for cause in causes if cause.kind == "operations"}
    suspects = rebuilt or {cause.node(nodes) for cause in causes if cause.kind == "weights"}
    return suspects.pop() if len(suspects) == 1 else None


def suspected_weights(causes: Sequence[Cause], nodes: Sequence[str]) -> tuple[str, str] | None:
    """`("weights of {}", "blocks.1")`: the one node, or the one tensor, whose norm changed; None if several did."""
    weights = [cause for cause in causes if cause.kind == "weights"]
    if not weights:
        return None
    owners = {cause.node(nodes) for cause in weights}
    owner = owners.pop() if len(owners) == 1 else None
    if owner is None:
        return ("{}", weights[0].name) if len(weights) == 1 else None
    return "weights of {}", owner


def _across(nodes: tuple[str, ...], node: str) -> list[Pair]:
    return pairs_across(nodes, node) or [Pair(node, other) for other in nodes[1:]]

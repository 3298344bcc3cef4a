"""One event, one alert: all series of a run watched together.

A measurement of n nodes has hundreds of series, most of them moved by the same event. Each has its expectation; how
surprised all of a family are together, and the most surprised one of them, are compared with thresholds that grow with
their number. An event that is less clear waits for the next measurement: if that is off in the same way, it is told.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from curvmon.alerts.features import Family, Move, Watched, alert_spec, watched
from curvmon.alerts.forecast import Expectation, Surprise
from curvmon.records import Snapshot

PAST, FADING = 20, 0.95
"""how many seeming changes are remembered, and what one still counts after one more measurement"""
MOST = 30.0
"""a single surprise counts for no more in the mean of a family"""


@dataclass(frozen=True)
class Vigilance:
    """When a change of many series is told."""

    caution: float = 1.65
    """a factor of all thresholds of the metric registry"""
    per_doubling: float = 0.06
    """by how much the threshold of the most surprised one grows with every doubling of a family's size beyond four,
    relatively"""
    confirmed: float = 0.85
    """share of a threshold that is enough if two measurements in a row are off in the same way"""
    alike: float = 0.8
    """what "the same way" is: the cosine of the two"""
    warm_up: int = 6
    """measurements before the first decision, and after a change before the next"""
    settled: int = 12
    """measurements from which on thresholds are as stated; at the first decision they are twice as high"""
    restlessness: float = 1.15
    """a change has to be so many times as clear as the clearest of late that was none"""
    suspected: float = 0.2
    """share of a threshold that is enough if the circumstances changed at the same time (`circumstances.py`)"""
    soonest: int = 4
    """measurements after a change before the next, if the circumstances changed again"""
    least_spread: float = 0.02


class Change(NamedTuple):
    """Something changed: what every series did, and how many measurements ago it began."""

    moves: list[Move]
    age: int


class Watch:
    """Takes every snapshot of a run; `update` returns what happened if something changed, else None."""

    def __init__(self, vigilance: Vigilance | None = None) -> None:
        self._vigilance = vigilance or Vigilance()
        self._expectations: dict[tuple[str, str], Expectation] = {}
        self._waiting: list[Watched] | None = None
        """the measurement before this one, if it was off, but not far enough to be told by itself"""
        self._quiet = 0
        """measurements since the last change"""
        self._nodes: tuple[str, ...] | None = None
        self._past: list[float] = []
        """how clear changes seemed to be that were none"""

    def update(self, snapshot: Snapshot, suspicious: bool = False, gap: bool = False) -> Change | None:
        """`suspicious`: there is another sign that something happened just now.

        After a `gap` of measurements that were left out nothing is told: much may have changed without a jump.
        """
        if snapshot.measurement is not None:
            self._compare_nodes(snapshot.measurement.nodes)
        points = watched(snapshot)
        if gap:
            if self._waiting is not None:
                self._accept(self._waiting)
                self._waiting = None
            self._accept(points)
            return None
        moves = self._moves(points)
        if self._waiting is not None and self._confirms(moves):
            self._begin_anew(self._waiting, points)
            return Change(moves, age=2)
        if self._waiting is not None:
            self._seemed(self._moves(self._waiting))
            self._accept(self._waiting)
            self._waiting = None
            moves = self._moves(points)
        strength = self.strength(moves)
        if strength >= 1 or (suspicious and self._is_suspected(moves)):
            self._begin_anew(points)
            return Change(moves, age=1)
        if strength >= self._vigilance.confirmed:
            self._waiting = points
        else:
            self._seemed(moves)
            self._accept(points)
        return None

    def _compare_nodes(self, nodes: tuple[str, ...]) -> None:
        """With other nodes, the series of pairs and layers start anew; sharpness and loss go on."""
        if self._nodes is not None and self._nodes != nodes:
            whole = ("lambda_1", "loss")
            self._expectations = {key: held for key, held in self._expectations.items() if key[0] in whole}
            self._waiting, self._quiet = None, 0
        self._nodes = nodes

    def _seemed(self, moves: Sequence[Move]) -> None:
        """Remember how clear a change seemed to be that was none."""
        if self._quiet >= self._vigilance.warm_up:
            self._past.append(self._bare(moves))
            del self._past[:-PAST]

    def _is_suspected(self, moves: Sequence[Move]) -> bool:
        rules = self._vigilance
        needed = rules.suspected if self._quiet >= rules.warm_up else 1.0
        return self._quiet >= rules.soonest and self._bare(moves) >= needed

    def strength(self, moves: Sequence[Move]) -> float:
        """How clearly something changed: above one, it is told. Zero during warm-up."""
        rules = self._vigilance
        if self._quiet < rules.warm_up:
            return 0.0
        early = max(0, rules.settled - self._quiet) / max(1, rules.settled - rules.warm_up)
        usual = max((past * FADING ** (len(self._past) - 1 - i) for i, past in enumerate(self._past)), default=0.0)
        return self._bare(moves) / max(1.0 + early, rules.restlessness * usual)

    def _bare(self, moves: Sequence[Move]) -> float:
        return max(self.strengths(moves).values(), default=0.0)

    def strengths(self, moves: Sequence[Move]) -> dict[Family, float]:
        """The same by family, regardless of warm-up."""
        families: dict[Family, list[Surprise]] = defaultdict(list)
        for move in moves:
            families[move.family].append(move.surprise)
        return {family: self._of_family(family, members) for family, members in families.items()}

    def _of_family(self, family: Family, members: list[Surprise]) -> float:
        spec = alert_spec(family)
        if not any(abs(s.size) > spec.smallest_change for s in members):
            return 0.0
        alone = spec.threshold * (1 + self._vigilance.per_doubling * math.log2(max(1.0, len(members) / 4)))
        most = max(s.score for s in members if abs(s.size) > spec.smallest_change)
        mean = math.sqrt(sum(min(s.score, MOST) ** 2 for s in members) / len(members))
        return max(most / alone, mean / spec.family_threshold) / self._vigilance.caution

    def _confirms(self, moves: Sequence[Move]) -> bool:
        """Is this measurement off in the same way as the one that waits? Both seen from what was before them."""
        assert self._waiting is not None
        if self.strength(moves) < self._vigilance.confirmed:
            return False
        before = {(m.family, m.where): _signed(m) for m in self._moves(self._waiting)}
        now = {(m.family, m.where): _signed(m) for m in moves}
        shared = [key for key in before if key in now]  # in a fixed order: sums of floats depend on it
        product = sum(before[key] * now[key] for key in shared)
        sizes = [math.sqrt(sum(side[key] ** 2 for key in shared)) for side in (before, now)]
        return product > self._vigilance.alike * sizes[0] * sizes[1]

    def _moves(self, points: Sequence[Watched]) -> list[Move]:
        return [Move(p.family, p.where, self._expectation(p).look(p.value, p.stderr)) for p in points]

    def _expectation(self, point: Watched) -> Expectation:
        key = point.family, point.where
        if key not in self._expectations:
            self._expectations[key] = Expectation(self._vigilance.least_spread)
        return self._expectations[key]

    def _accept(self, points: Sequence[Watched]) -> None:
        for point in points:
            self._expectation(point).accept(point.value)
        self._quiet += 1

    def _begin_anew(self, first: Sequence[Watched], *rest: Sequence[Watched]) -> None:
        for point in first:
            self._expectation(point).restart(point.value)
        self._quiet = 1
        for points in rest:
            self._accept(points)
        self._waiting = None

    def state_dict(self) -> dict[str, Any]:
        """Lists, dicts, strings and numbers only."""
        return {
            "expectations": [[*key, held.state_dict()] for key, held in self._expectations.items()],
            "waiting": None if self._waiting is None else [list(point) for point in self._waiting],
            "quiet": self._quiet,
            "past": list(self._past),
            "nodes": None if self._nodes is None else list(self._nodes),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._expectations = {}
        for family, where, saved in state["expectations"]:
            self._expectations[family, where] = Expectation(self._vigilance.least_spread)
            self._expectations[family, where].load_state_dict(saved)
        waiting = state["waiting"]
        self._waiting = None if waiting is None else [Watched(*point) for point in waiting]
        self._quiet, self._past = state["quiet"], list(state["past"])
        self._nodes = None if state["nodes"] is None else tuple(state["nodes"])


def _signed(move: Move) -> float:
    return math.copysign(min(move.surprise.score, 10.0), move.surprise.size)

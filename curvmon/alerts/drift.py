"""Slow growth towards trouble: of the learning rate, of the weights of one layer, of the training loss.

Forecasts follow a trend, so that each single value is as expected. Here the last values of a feature are compared
with the run before them: it drifts if it grew in every one of the last RISES intervals, by much more than it used to
deviate from its trend.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from curvmon.alerts.features import Feature

RISES = 3
"""intervals in a row that a feature has to grow in; one fewer is enough if the rise is TWICE as clear"""
TWICE = 2.0
KEPT, RECENT = 40, 8
"""values kept, and intervals before the rise that say what is usual"""
BEFORE: Mapping[str, int] = {"rate": 4, "weights": 8, "training loss": 4}
"""how many of them are needed, by family: the weights of a fresh network grow"""
LEAST: Mapping[str, float] = {"rate": math.log(1.25), "weights": math.log(1.2), "training loss": math.log(1.2)}
"""smallest rise in all, by family"""
USUAL = 3.0
"""the mean rise per interval is this many times the usual deviation from the trend at least"""
APART = 3.0
"""a drifting layer grows this many times as fast as the median tensor"""


class Drift(NamedTuple):
    family: str
    where: str
    before: float
    after: float
    """values of the feature"""
    intervals: int
    """measurements that it has been growing for"""

    @property
    def per_interval(self) -> float:
        return (self.after - self.before) / self.intervals


class DriftDetector:
    """Takes the features of every measurement; drifts that have just become visible."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, str], list[float]] = {}
        self._reported: set[tuple[str, str]] = set()
        """until they stop growing"""

    def update(self, features: Sequence[Feature]) -> list[Drift]:
        for family, where, value, _ in features:
            if family in LEAST and not where.endswith("bias"):  # small tensors grow by large factors
                values = self._values.setdefault((family, where), [])
                values.append(value)
                del values[:-KEPT]
        drifts = []
        typical = self._typical_growth()
        for key, values in self._values.items():
            drift = _drift(*key, values)
            if drift is None or (key[0] == "weights" and drift.per_interval < APART * typical):
                if len(values) > 1 and values[-1] <= values[-2]:
                    self._reported.discard(key)
                continue
            if key not in self._reported:
                self._reported.add(key)
                drifts.append(drift)
        return drifts

    def restart(self) -> None:
        """Something abrupt happened: what was usual before is no measure of what follows."""
        self._values = {key: values[-1:] for key, values in self._values.items()}

    def _typical_growth(self) -> float:
        """Of the tensors' norms in the last intervals."""
        growths = [
            (values[-1] - values[-1 - RISES]) / RISES
            for (family, _), values in self._values.items()
            if family == "weights" and len(values) > RISES
        ]
        return max(0.0, statistics.median(growths)) if growths else 0.0

    def state_dict(self) -> dict[str, Any]:
        return {
            "values": [[*key, list(values)] for key, values in self._values.items()],
            "reported": [list(key) for key in sorted(self._reported)],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._values = {(family, where): list(values) for family, where, values in state["values"]}
        self._reported = {(family, where) for family, where in state["reported"]}


def _drift(family: str, where: str, values: Sequence[float]) -> Drift | None:
    steps = [b - a for a, b in pairwise(values)]
    rising = 0
    while rising < len(steps) and steps[-1 - rising] > 0:
        rising += 1
    if rising < RISES - 1 or len(steps) - rising < BEFORE[family]:
        return None
    clear = TWICE if rising < RISES else 1.0
    before, after = values[-1 - rising], values[-1]
    recent = steps[:-rising][-RECENT:]
    trend = statistics.median(recent)
    usual = statistics.median(abs(step - trend) for step in recent)
    if after - before < clear * LEAST[family] or (after - before) / rising < clear * USUAL * usual:
        return None
    if family == "rate" and after <= max(values[: -1 - rising]):  # a schedule that goes up and down
        return None
    return Drift(family, where, before, after, rising)

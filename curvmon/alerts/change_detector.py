"""Abrupt changes in one series of few points, each with a known standard error.

A point is a jump if it is far from what the series so far lets expect (`expectation.py`), and by enough to matter. One
that is less far off waits: if the next point is off to the same side, the two together are a jump. A drift is a run of
smaller errors of one sign.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from curvmon.alerts.forecast import WINDOW, Expectation, Surprise
from curvmon.records import Alert

Scale = Literal["log", "linear"]
Kind = Literal["jump", "drift"]


@dataclass(frozen=True)
class Sensitivity:
    """What counts as a change. `matters` is in units of the scale: 0.4 is a factor of 1.5 where that is logarithmic."""

    threshold: float = 6.0
    """of a jump, in standard deviations"""
    confirmed: float = 3.8
    """of a jump that two points in a row agree on"""
    matters: float = 0.4
    warm_up: int = 6
    """points before the first decision, and after a change before the next"""
    drift_threshold: float = 14.0
    drift_slack: float = 1.0
    """standard deviations a point may be off in one direction without adding to a drift"""
    least_spread: float = 0.02
    """nothing is ever expected more exactly than this, in units of the scale"""

    def __post_init__(self) -> None:
        if not 0 < self.confirmed <= self.threshold:
            raise ValueError(f"0 < confirmed <= threshold is needed, not {self.confirmed} and {self.threshold}")
        if not 3 <= self.warm_up <= WINDOW:
            raise ValueError(f"warm_up must be between 3 and {WINDOW}, not {self.warm_up}")
        if self.matters < 0 or not self.least_spread > 0:
            raise ValueError("matters must not be negative, least_spread must be positive")


class Point(NamedTuple):
    value: float
    """on the scale"""
    stderr: float


class ChangeDetector:
    """Tells when a series changes abruptly, and otherwise keeps silent.

    Give it every new value with its standard error; it returns an `Alert` for a jump or a persistent drift, else None.
    After a change it forgets what was before and arms itself again within a few points. Values that are not finite are
    passed over, on a logarithmic scale also those that are not positive.

    Args:
        scale: "log" for quantities whose ratios count (resonance, eigenvalues), "linear" for others; then `matters` and
            `least_spread` are in units of the values and should be given.
        sensitivity: what counts as a change.
        options: single fields of `Sensitivity`.

    Example:
        >>> from curvmon import ChangeDetector
        >>> detector = ChangeDetector(scale="log")
        >>> quiet = [detector.update(1.0 + 0.05 * (-1) ** i, stderr=0.02) for i in range(20)]
        >>> any(quiet)
        False
        >>> detector.update(4.0, stderr=0.1).kind
        'jump'
    """

    def __init__(self, scale: Scale = "log", sensitivity: Sensitivity | None = None, **options: Any) -> None:
        if scale not in ("log", "linear"):
            raise ValueError(f'scale must be "log" or "linear", not {scale!r}')
        self.scale = scale
        self.sensitivity = replace(sensitivity or Sensitivity(), **options)
        self._expectation = Expectation(self.sensitivity.least_spread)
        self._waiting: Point | None = None
        """a point that is off, but not far enough to be a jump by itself"""
        self._sums = [0.0, 0.0]
        """of standardised errors, upwards and downwards"""
        self._count = 0

    def update(self, value: float, stderr: float = 0.0) -> Alert | None:
        """Take one more point; an `Alert` if it is a change."""
        point = self._scaled(value, stderr)
        if point is None:
            return None
        self._count += 1
        surprise = self._expectation.look(*point)
        kind: Kind | None = "jump" if self._confirms(surprise) else None
        if kind is None and self._waiting is not None:
            self._accept(self._waiting)
            self._waiting = None
            surprise = self._expectation.look(*point)
        kind = kind or self._verdict(surprise)
        if kind is not None:
            return self._changed(kind, point, surprise, value)
        if self._may_be(surprise):
            self._waiting = point
        else:
            self._accept(point)
        return None

    def _verdict(self, surprise: Surprise) -> Kind | None:
        """Is it a change by itself? Not during warm-up."""
        rules = self.sensitivity
        if len(self._expectation) < rules.warm_up:
            return None
        if surprise.score > rules.threshold and abs(surprise.size) > rules.matters:
            return "jump"
        far = abs(self._expectation.last + surprise.size - self._expectation.first) > 2 * rules.matters
        return "drift" if far and max(self._summed(surprise)) > rules.drift_threshold else None

    def _may_be(self, surprise: Surprise) -> bool:
        rules = self.sensitivity
        armed = len(self._expectation) >= rules.warm_up
        return armed and surprise.score > rules.confirmed and abs(surprise.size) > rules.matters

    def _confirms(self, surprise: Surprise) -> bool:
        """Off to the same side as the point that waits, by as much."""
        if self._waiting is None or not self._may_be(surprise):
            return False
        return (self._waiting.value - surprise.expected) * surprise.size > 0

    def _accept(self, point: Point) -> None:
        if len(self._expectation) >= self.sensitivity.warm_up:
            self._sums = self._summed(self._expectation.look(*point))
        self._expectation.accept(point.value)

    def _changed(self, kind: Kind, point: Point, surprise: Surprise, value: float) -> Alert:
        if self._waiting is None:
            self._expectation.restart(point.value)
        else:
            self._expectation.restart(self._waiting.value)
            self._expectation.accept(point.value)
        self._waiting, self._sums = None, [0.0, 0.0]
        before = math.exp(surprise.expected) if self.scale == "log" else surprise.expected
        word = {"jump": "jumped", "drift": "drifted"}[kind]
        return Alert(
            kind=kind,
            metric="value",
            where="",
            before=before,
            after=value,
            score=surprise.score,
            step=self._count - 1,
            epoch=-1,
            message=f"the value {word} from {before:.4g} to {value:.4g} ({surprise.score:.1f} standard deviations)",
        )

    def _summed(self, surprise: Surprise) -> list[float]:
        sign = math.copysign(min(surprise.score, 4.0), surprise.size)
        slack = self.sensitivity.drift_slack
        return [max(0.0, self._sums[0] + sign - slack), max(0.0, self._sums[1] - sign - slack)]

    def _scaled(self, value: float, stderr: float) -> Point | None:
        value, stderr = float(value), float(stderr)  # numpy's numbers would not pass through a checkpoint
        if not math.isfinite(value) or (self.scale == "log" and value <= 0):
            return None
        stderr = stderr if math.isfinite(stderr) else abs(value)
        if self.scale == "linear":
            return Point(value, stderr)
        return Point(math.log(value), stderr / value)

    def state_dict(self) -> dict[str, Any]:
        """Lists and numbers only."""
        return {
            "expectation": self._expectation.state_dict(),
            "waiting": None if self._waiting is None else list(self._waiting),
            "sums": list(self._sums),
            "count": self._count,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._expectation.load_state_dict(state["expectation"])
        waiting = state["waiting"]
        self._waiting = None if waiting is None else Point(*waiting)
        self._sums = list(state["sums"])
        self._count = state["count"]

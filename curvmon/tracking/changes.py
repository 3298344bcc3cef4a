"""Abrupt changes in one series of few points, each with a known standard error.

Three simple predictors (the last value, the level of late, the trend of late) each say what the next point should be,
and how wrong they have been so far. A point is a jump if it is far off for all three, in units of

    sqrt(σ_p² + se² + se_p²)        σ_p: robust spread of the past errors of predictor p; se: of the measurement

and large enough to matter. A trend is no jump, because the third predictor expects it; the fast change of the first
points is none, because all were wrong by as much before. A drift is a run of smaller errors of one sign.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from curvmon.types import Alert

Scale = Literal["log", "linear"]
MAD = 1.4826
"""from a median of absolute values to a standard deviation, if they are normal"""


@dataclass(frozen=True)
class Sensitivity:
    """What counts as a change. `matters` is in units of the scale: 0.4 is a factor of 1.5 where that is logarithmic."""

    threshold: float = 6.0
    """of a jump, in standard deviations"""
    matters: float = 0.4
    warm_up: int = 5
    """points before the first decision, and after a change before the next"""
    window: int = 12
    """how far back a predictor looks"""
    memory: int = 16
    """how many of its errors it remembers"""
    agreement: float = 2.0
    """how many times less surprised than the best predictor another may be"""
    tail: float = 3.0
    """the largest error so far is taken for so many standard deviations at most"""
    drift_threshold: float = 12.0
    drift_slack: float = 1.0
    """standard deviations a point may be off in one direction without adding to a drift"""
    least_spread: float = 0.02
    """no predictor is ever surer than this, in units of the scale"""


class Point(NamedTuple):
    value: float
    """on the scale"""
    stderr: float


Predictor = Callable[[Sequence[Point]], float]


def _last(points: Sequence[Point]) -> float:
    return points[-1].value


def _level(points: Sequence[Point]) -> float:
    return statistics.median(point.value for point in points[-5:])


def _trend(points: Sequence[Point]) -> float:
    """The line through the points by medians (Theil and Sen), one step further."""
    values = [point.value for point in points]
    n = len(values)
    if n < 3:
        return values[-1]
    slope = statistics.median((values[j] - values[i]) / (j - i) for i in range(n) for j in range(i + 1, n))
    return statistics.median(values[i] + slope * (n - i) for i in range(n))


PREDICTORS: tuple[Predictor, ...] = (_last, _level, _trend)


class Surprise(NamedTuple):
    """How far a point is from what was expected: `size` on the scale with its sign, `score` in standard deviations."""

    size: float
    score: float
    expected: float


class ChangeDetector:
    """Tells when a series changes abruptly, and otherwise keeps silent.

    Give it every new value with its standard error; it returns an `Alert` for a jump or a persistent drift, else None.
    After a change it forgets what was before and arms itself again within a few points. Values that are not finite are
    passed over, on a logarithmic scale also those that are not positive.

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
        self._points: list[Point] = []
        self._errors: list[list[float]] = [[] for _ in PREDICTORS]
        self._spreads: list[float] | None = None
        """of the predictors before the last change: how noisy such a series is"""
        self._sums = [0.0, 0.0]
        """of standardised errors, upwards and downwards"""
        self._count = 0

    def update(self, value: float, stderr: float = 0.0) -> Alert | None:
        """Take one more point; an `Alert` if it is a change."""
        surprise = self.look(value, stderr)
        if surprise is None:
            return None
        kind = self.verdict(surprise)
        before = self._unscaled(surprise.expected)
        if kind is None:
            self.accept(value, stderr)
            return None
        self.restart(value, stderr)
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

    def look(self, value: float, stderr: float = 0.0) -> Surprise | None:
        """How surprising a point would be, without taking it; None for one that says nothing."""
        point = self._scaled(value, stderr)
        if point is None:
            return None
        if not self._points:
            return Surprise(0.0, 0.0, point.value)
        window = self._points[-self.sensitivity.window :]
        found, spreads = [], self._current_spreads()
        for predict, spread in zip(PREDICTORS, spreads):
            expected = predict(window)
            noise = math.sqrt(spread**2 + point.stderr**2)
            size = point.value - expected
            found.append(Surprise(size, abs(size) / noise, expected))
        best = min(zip(spreads, found), key=lambda pair: pair[0])[1]
        weakest = min(surprise.score for surprise in found)
        # the predictor that has been right so far decides, unless another finds the point nearly ordinary
        return best._replace(score=min(best.score, self.sensitivity.agreement * weakest))

    def verdict(self, surprise: Surprise) -> Literal["jump", "drift"] | None:
        """Is it a change? Not during warm-up."""
        rules = self.sensitivity
        if len(self._points) < rules.warm_up:
            return None
        if surprise.score > rules.threshold and abs(surprise.size) > rules.matters:
            return "jump"
        sums = self._summed(surprise)
        drifted = abs(self._points[-1].value + surprise.size - self._points[0].value) > 2 * rules.matters
        return "drift" if max(sums) > rules.drift_threshold and drifted else None

    def accept(self, value: float, stderr: float = 0.0) -> None:
        """Take a point as more of the same."""
        point = self._scaled(value, stderr)
        if point is None:
            return
        surprise = self.look(value, stderr)
        if self._points and surprise is not None:
            window = self._points[-self.sensitivity.window :]
            # a line through two points says nothing
            known = PREDICTORS if len(window) >= 3 else PREDICTORS[:2]
            for predict, errors in zip(known, self._errors):
                errors.append(point.value - predict(window))
                del errors[: -self.sensitivity.memory]
            if len(self._points) >= self.sensitivity.warm_up:
                self._sums = self._summed(surprise)
        self._points.append(point)
        del self._points[: -max(self.sensitivity.window, self.sensitivity.warm_up)]
        self._count += 1

    def restart(self, value: float, stderr: float = 0.0) -> None:
        """Begin anew with this point; how noisy the series is stays known."""
        if len(self._points) >= self.sensitivity.warm_up:
            self._spreads = self._current_spreads()
        self._points, self._sums = [], [0.0, 0.0]
        self._errors = [[] for _ in PREDICTORS]
        self.accept(value, stderr)

    def _current_spreads(self) -> list[float]:
        """Robust standard deviations of the predictors' errors; with few of them, wider."""
        spreads = []
        for i, errors in enumerate(self._errors):
            sizes = sorted(abs(error) for error in errors)
            if len(sizes) < 3:
                known = self._spreads[i] if self._spreads else math.inf
                spreads.append(known)
                continue
            # the median alone forgets that tails are heavy: the largest so far has a say, too
            spread = max(MAD * statistics.median(sizes), sizes[-1] / self.sensitivity.tail)
            spreads.append(max(spread * (1 + 2 / len(sizes)), self.sensitivity.least_spread))
        return spreads

    def _summed(self, surprise: Surprise) -> list[float]:
        sign = math.copysign(min(surprise.score, 4.0), surprise.size)
        slack = self.sensitivity.drift_slack
        return [max(0.0, self._sums[0] + sign - slack), max(0.0, self._sums[1] - sign - slack)]

    def _scaled(self, value: float, stderr: float) -> Point | None:
        if not math.isfinite(value) or (self.scale == "log" and value <= 0):
            return None
        stderr = stderr if math.isfinite(stderr) else abs(value)
        if self.scale == "linear":
            return Point(value, stderr)
        return Point(math.log(value), stderr / value)

    def _unscaled(self, value: float) -> float:
        return math.exp(value) if self.scale == "log" else value

    def state_dict(self) -> dict[str, Any]:
        """Lists and numbers only."""
        return {
            "points": [list(point) for point in self._points],
            "errors": [list(errors) for errors in self._errors],
            "spreads": None if self._spreads is None else list(self._spreads),
            "sums": list(self._sums),
            "count": self._count,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._points = [Point(*point) for point in state["points"]]
        self._errors = [list(errors) for errors in state["errors"]]
        self._spreads = None if state["spreads"] is None else list(state["spreads"])
        self._sums = list(state["sums"])
        self._count = state["count"]

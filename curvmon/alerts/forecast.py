"""What the next point of a short series should be, and how wrong that has been so far.

Five simple predictors (the last value, the level of late, the trend of late, the slope of the last few, a decay) make a
forecast each. How far a new point is off counts in units of

    sqrt(σ_p² + se²)        σ_p: robust spread of the past errors of predictor p; se: of the measurement

for the predictor p that has done best, unless another that has done nearly as well finds the point less surprising. A
trend or a decay is no surprise, because some of them expect it; the fast change of the first points is soon forgotten,
because an error counts less the older it is.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

WINDOW = 12
"""points that a predictor looks back"""
MEMORY = 16
"""errors of its own that it remembers"""
FORGETTING = 0.85
"""what a large error of the past still counts after one more point"""
TAIL = 2.0
"""the largest error so far is taken for so many standard deviations at most: tails may be heavy"""
FEW = 2.0
"""with n errors a spread is taken for 1 + FEW / n times as large as they say"""
NEARLY_AS_GOOD = 2.0
"""a predictor whose spread is at most this many times the best one's has a say"""
LENIENCE = 2.0
"""the score is at most this many times that of the least surprised predictor which has a say"""
MAD = 1.4826
"""from a median of absolute values to a standard deviation, if they are normal"""

Predictor = Callable[[Sequence[float]], float]


def _last(values: Sequence[float]) -> float:
    return values[-1]


def _level(values: Sequence[float]) -> float:
    return statistics.median(values[-5:])


def _trend(values: Sequence[float]) -> float:
    """The line through the points by medians (Theil and Sen), one step further."""
    n = len(values)
    if n < 3:
        return values[-1]
    slope = statistics.median((values[j] - values[i]) / (j - i) for i in range(n) for j in range(i + 1, n))
    return statistics.median(values[i] + slope * (n - i) for i in range(n))


def _slope(values: Sequence[float]) -> float:
    """The line through the last four points by least squares, one step further: follows a curve."""
    values = values[-4:]
    n = len(values)
    if n < 3:
        return values[-1]
    middle, mean = (n - 1) / 2, sum(values) / n
    slope = sum((i - middle) * (y - mean) for i, y in enumerate(values)) / sum((i - middle) ** 2 for i in range(n))
    return mean + slope * (n - middle)


def _decay(values: Sequence[float]) -> float:
    """A curve that levels off: the last step once more, as much smaller as it was than the one before."""
    if len(values) < 5:
        return values[-1]
    late, early = (values[-1] - values[-3]) / 2, (values[-3] - values[-5]) / 2
    ratio = min(max(late / early, 0.0), 1.0) if early else 0.0
    # both are means over two steps; from the middle of the later one to the next step it is one step and a half
    step: float = late * ratio**0.75
    return values[-1] + step


PREDICTORS: tuple[Predictor, ...] = (_last, _level, _trend, _slope, _decay)
NEEDED = (1, 1, 3, 3, 5)
"""points before a predictor says anything"""


class Surprise(NamedTuple):
    """How far a point is from what was expected: `size` with its sign, `score` in standard deviations."""

    size: float
    score: float
    expected: float


class Expectation:
    """Of one series. `look` says how surprising a point would be, `accept` takes it, `restart` begins anew with it."""

    def __init__(self, least_spread: float) -> None:
        self.least_spread = least_spread
        """no predictor is ever surer than this"""
        self._values: list[float] = []
        self._errors: list[list[float]] = [[] for _ in PREDICTORS]
        self._spreads_before: list[float] | None = None
        """the break: how noisy such a series is stays known"""
        self._forecasts: list[float] | None = None

    def __len__(self) -> int:
        """Points since the last break, as far as they are remembered."""
        return len(self._values)

    @property
    def first(self) -> float:
        return self._values[0]

    @property
    def last(self) -> float:
        return self._values[-1]

    def look(self, value: float, stderr: float = 0.0) -> Surprise:
        """How surprising a point would be, without taking it."""
        if not self._values:
            return Surprise(0.0, 0.0, value)
        spreads = self.spreads()
        found = [
            Surprise(value - expected, abs(value - expected) / math.sqrt(spread**2 + stderr**2), expected)
            for expected, spread in zip(self._predicted(), spreads)
        ]
        least = min(spreads)
        best = found[spreads.index(least)]
        mildest = min(s.score for s, spread in zip(found, spreads) if spread <= NEARLY_AS_GOOD * least)
        return best._replace(score=min(best.score, LENIENCE * mildest))

    def accept(self, value: float) -> None:
        """Take a point as more of the same."""
        if self._values:
            for expected, errors, needed in zip(self._predicted(), self._errors, NEEDED):
                if len(self._values) >= needed:
                    errors.append(value - expected)
                    del errors[:-MEMORY]
        self._values.append(value)
        del self._values[:-WINDOW]
        self._forecasts = None

    def restart(self, value: float) -> None:
        """Forget what was before this point."""
        spreads = self.spreads()
        if all(math.isfinite(spread) for spread in spreads):
            self._spreads_before = spreads
        self._values, self._errors, self._forecasts = [], [[] for _ in PREDICTORS], None
        self.accept(value)

    def spreads(self) -> list[float]:
        """Robust standard deviations of the predictors' errors; with few of them, wider."""
        found = []
        for i, errors in enumerate(self._errors):
            n = len(errors)
            if n < 3:
                found.append(self._spreads_before[i] if self._spreads_before else math.inf)
                continue
            sizes = [abs(error) for error in errors]
            # the median alone forgets that tails are heavy: the largest of late has a say, too
            largest = max(size * FORGETTING ** (n - 1 - age) for age, size in enumerate(sizes))
            spread = max(MAD * statistics.median(sizes), largest / TAIL)
            found.append(max(spread * (1 + FEW / n), self.least_spread))
        return found

    def _predicted(self) -> list[float]:
        if self._forecasts is None:
            self._forecasts = [predict(self._values) for predict in PREDICTORS]
        return self._forecasts

    def state_dict(self) -> dict[str, Any]:
        """Lists and numbers only."""
        before = self._spreads_before
        return {
            "values": list(self._values),
            "errors": [list(errors) for errors in self._errors],
            "spreads_before": None if before is None else list(before),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._values = list(state["values"])
        self._errors = [list(errors) for errors in state["errors"]]
        before = state["spreads_before"]
        self._spreads_before = None if before is None else list(before)
        self._forecasts = None

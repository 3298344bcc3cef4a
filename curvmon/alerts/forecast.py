"""One-step forecasts of a short sequence of values, and how large their errors have been so far.

Five predictors (last value, recent median, Theil-Sen trend, least-squares slope, decay) forecast the next value. The
deviation of a new value y with standard error se from the forecast f_p of predictor p scores

    z = |y - f_p| / sqrt(σ_p² + se²)        σ_p: robust spread of the past errors of p

where p is the predictor with the smallest spread, or one of nearly as small a spread for which z is smaller. A trend or
a decay therefore does not score high: a predictor follows it. Errors lose weight with age, so that the fast change of
the first values of a run is soon forgotten.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

WINDOW = 12
"""values that a predictor looks back"""
MEMORY = 16
"""past errors kept per predictor"""
ERROR_DECAY = 0.85
"""weight of the largest past error, per further value"""
TAIL = 2.0
"""the largest past error counts as at most this many standard deviations: tails may be heavy"""
SMALL_SAMPLE = 2.0
"""with n errors, their spread is widened by 1 + SMALL_SAMPLE / n"""
NEARLY_AS_GOOD = 2.0
"""predictors whose spread is at most this many times the smallest one may lower the score"""
MAX_REDUCTION = 2.0
"""by at most this factor"""
MAD = 1.4826
"""median absolute deviation to standard deviation, for a normal distribution"""

Predictor = Callable[[Sequence[float]], float]


def _last(values: Sequence[float]) -> float:
    return values[-1]


def _level(values: Sequence[float]) -> float:
    return statistics.median(values[-5:])


def _trend(values: Sequence[float]) -> float:
    """The line of median slope (Theil 1950, Sen 1968), one step ahead."""
    n = len(values)
    if n < 3:
        return values[-1]
    slope = statistics.median((values[j] - values[i]) / (j - i) for i in range(n) for j in range(i + 1, n))
    return statistics.median(values[i] + slope * (n - i) for i in range(n))


def _slope(values: Sequence[float]) -> float:
    """The least-squares line through the last four values, one step ahead: follows a curve."""
    values = values[-4:]
    n = len(values)
    if n < 3:
        return values[-1]
    middle, mean = (n - 1) / 2, sum(values) / n
    slope = sum((i - middle) * (y - mean) for i, y in enumerate(values)) / sum((i - middle) ** 2 for i in range(n))
    return mean + slope * (n - middle)


def _decay(values: Sequence[float]) -> float:
    """Exponential decay to a level: the next step is the last one times the ratio of the last two steps."""
    if len(values) < 5:
        return values[-1]
    late, early = (values[-1] - values[-3]) / 2, (values[-3] - values[-5]) / 2
    ratio = min(max(late / early, 0.0), 1.0) if early else 0.0
    # both are means over two steps; from the middle of the later one to the next step it is one step and a half
    step: float = late * ratio**0.75
    return values[-1] + step


PREDICTORS: tuple[Predictor, ...] = (_last, _level, _trend, _slope, _decay)
MIN_VALUES = (1, 1, 3, 3, 5)
"""values that a predictor needs before its errors count"""


class Deviation(NamedTuple):
    """Deviation of a value from its forecast."""

    size: float
    """value - forecast"""
    score: float
    """|size| in standard deviations"""
    forecast: float


class Forecast:
    """Forecasts the next value of one feature.

    `deviation` scores a value without taking it, `append` takes it, `restart` drops the past and starts with it.
    """

    def __init__(self, min_spread: float) -> None:
        self.min_spread = min_spread
        """lower bound of every predictor's spread"""
        self._values: list[float] = []
        self._errors: list[list[float]] = [[] for _ in PREDICTORS]
        self._previous_spreads: list[float] | None = None
        """spreads before the last restart: a restart keeps the noise estimate"""
        self._predictions: list[float] | None = None

    def __len__(self) -> int:
        """Values since the last restart, at most `WINDOW`."""
        return len(self._values)

    @property
    def first(self) -> float:
        return self._values[0]

    @property
    def last(self) -> float:
        return self._values[-1]

    def deviation(self, value: float, stderr: float = 0.0, gap: float = 1.0) -> Deviation:
        """`gap`: distance from the last value, in usual distances; the uncertainty of the forecast grows with it."""
        if not self._values:
            return Deviation(0.0, 0.0, value)
        spreads = [gap * spread for spread in self._spreads()]
        candidates = [
            Deviation(value - forecast, abs(value - forecast) / math.sqrt(spread**2 + stderr**2), forecast)
            for forecast, spread in zip(self._predict(), spreads)
        ]
        smallest = min(spreads)
        best = candidates[spreads.index(smallest)]
        lowest = min(c.score for c, spread in zip(candidates, spreads) if spread <= NEARLY_AS_GOOD * smallest)
        return best._replace(score=min(best.score, MAX_REDUCTION * lowest))

    def append(self, value: float) -> None:
        if self._values:
            for prediction, errors, needed in zip(self._predict(), self._errors, MIN_VALUES):
                if len(self._values) >= needed:
                    errors.append(value - prediction)
                    del errors[:-MEMORY]
        self._values.append(value)
        del self._values[:-WINDOW]
        self._predictions = None

    def restart(self, value: float) -> None:
        spreads = self._spreads()
        if all(math.isfinite(spread) for spread in spreads):
            self._previous_spreads = spreads
        self._values, self._errors, self._predictions = [], [[] for _ in PREDICTORS], None
        self.append(value)

    def _spreads(self) -> list[float]:
        """Robust standard deviation of every predictor's errors, wider where there are few; inf below three."""
        spreads = []
        for i, errors in enumerate(self._errors):
            n = len(errors)
            if n < 3:
                spreads.append(self._previous_spreads[i] if self._previous_spreads else math.inf)
                continue
            sizes = [abs(error) for error in errors]
            # the median alone ignores heavy tails: the largest recent error bounds the spread from below
            largest = max(size * ERROR_DECAY ** (n - 1 - k) for k, size in enumerate(sizes))
            spread = max(MAD * statistics.median(sizes), largest / TAIL)
            spreads.append(max(spread * (1 + SMALL_SAMPLE / n), self.min_spread))
        return spreads

    def _predict(self) -> list[float]:
        if self._predictions is None:
            self._predictions = [predict(self._values) for predict in PREDICTORS]
        return self._predictions

    def state_dict(self) -> dict[str, Any]:
        """Lists and numbers only."""
        previous = self._previous_spreads
        return {
            "values": list(self._values),
            "errors": [list(errors) for errors in self._errors],
            "previous_spreads": None if previous is None else list(previous),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._values = list(state["values"])
        self._errors = [list(errors) for errors in state["errors"]]
        previous = state["previous_spreads"]
        self._previous_spreads = None if previous is None else list(previous)
        self._predictions = None

"""Change-point detection on one quantity, for `ChangeDetector`.

A value whose deviation from its forecast exceeds the threshold is a jump. One that exceeds a lower threshold is a
candidate: a jump if the next value deviates to the same side. A drift is a `Cusum`, the cumulative sum of forecast
errors, that exceeds a threshold of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from curvmon.alerts.forecast import WINDOW, Deviation, Forecast
from curvmon.alerts.rules import is_number

MAX_CUSUM_SCORE = 4.0
"""a single error counts as at most this many standard deviations in a cumulative sum"""


@dataclass(frozen=True)
class Sensitivity:
    """What counts as a change. `matters` and `least_spread` are in units of the scale: 0.4 on a logarithmic one is a
    factor of 1.5."""

    threshold: float = 6.0
    """threshold of a jump, in standard deviations"""
    confirmed: float = 3.8
    """threshold of a jump that two values in a row agree on"""
    matters: float = 0.4
    """smaller changes do not count"""
    warm_up: int = 6
    """values before the first decision, and after a change before the next"""
    drift_threshold: float = 14.0
    """threshold of the cumulative sum of forecast errors, in standard deviations; inf: no detection of drifts"""
    drift_slack: float = 1.0
    """standard deviations that a forecast error may have without adding to the sum"""
    least_spread: float = 0.02
    """lower bound of the standard deviation of a forecast"""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not is_number(value):
                raise ValueError(f"{name} must be a number, not {value!r}")
        if not 0 < self.confirmed <= self.threshold:
            raise ValueError(f"0 < confirmed <= threshold is needed, not {self.confirmed} and {self.threshold}")
        if not isinstance(self.warm_up, int) or not 3 <= self.warm_up <= WINDOW:
            raise ValueError(f"warm_up must be an integer between 3 and {WINDOW}, not {self.warm_up}")
        if self.matters < 0 or not self.least_spread > 0:
            raise ValueError("matters must not be negative, least_spread must be positive")


class Change(NamedTuple):
    kind: Literal["jump", "drift"]
    deviation: Deviation


class Value(NamedTuple):
    value: float
    stderr: float


class Cusum:
    """S± ← max(0, S± ± z - slack), z: signed forecast error in standard deviations (Page 1954)."""

    def __init__(self, slack: float, sums: Sequence[float] = (0.0, 0.0)) -> None:
        self._slack = slack
        self.sums = list(sums)
        """S+ and S-"""

    def after(self, deviation: Deviation) -> list[float]:
        """S+ and S- with one more error, which is not stored."""
        z = math.copysign(min(deviation.score, MAX_CUSUM_SCORE), deviation.size)
        return [max(0.0, self.sums[0] + z - self._slack), max(0.0, self.sums[1] - z - self._slack)]

    def append(self, deviation: Deviation) -> None:
        self.sums = self.after(deviation)


class Detector:
    """Takes every value; `update` returns a `Change` where one is detected, else None.

    After a change, the forecast restarts and decisions pause for a warm-up.
    """

    def __init__(self, sensitivity: Sensitivity) -> None:
        self._sensitivity = sensitivity
        self._forecast = Forecast(sensitivity.least_spread)
        self._cusum = Cusum(sensitivity.drift_slack)
        self._candidate: Value | None = None
        """the previous value, if it waits for confirmation"""
        self._count = 0
        """values since the last change"""

    def update(self, value: float, stderr: float) -> Change | None:
        s, now = self._sensitivity, Value(value, stderr)
        deviation = self._forecast.deviation(*now)
        if self._candidate is not None and self._confirms(deviation):
            self._restart(self._candidate, now)
            return Change("jump", deviation)
        if self._candidate is not None:
            self._append(self._candidate)
            self._candidate = None
            deviation = self._forecast.deviation(*now)
        if self._exceeds(deviation, s.threshold):
            self._restart(now)
            return Change("jump", deviation)
        if self._drifts(deviation):
            self._restart(now)
            return Change("drift", deviation)
        if self._exceeds(deviation, s.confirmed):
            self._candidate = now
        else:
            self._append(now)
        return None

    def _exceeds(self, deviation: Deviation, threshold: float) -> bool:
        """Not during warm-up."""
        s = self._sensitivity
        return self._count >= s.warm_up and abs(deviation.size) > s.matters and deviation.score >= threshold

    def _confirms(self, deviation: Deviation) -> bool:
        """Does this value deviate to the same side as the candidate? Both from the forecast before the candidate."""
        assert self._candidate is not None
        before = self._forecast.deviation(*self._candidate)
        return self._exceeds(deviation, self._sensitivity.confirmed) and before.size * deviation.size > 0

    def _drifts(self, deviation: Deviation) -> bool:
        """Does a cumulative sum exceed its threshold, and the value differ from the first by 2 `matters`?"""
        s = self._sensitivity
        if math.isinf(s.drift_threshold) or self._count < s.warm_up:
            return False
        difference = abs(self._forecast.last + deviation.size - self._forecast.first)
        return difference > 2 * s.matters and max(self._cusum.after(deviation)) > s.drift_threshold

    def _append(self, value: Value) -> None:
        if self._count >= self._sensitivity.warm_up:
            self._cusum.append(self._forecast.deviation(*value))
        self._forecast.append(value.value)
        self._count += 1

    def _restart(self, first: Value, *rest: Value) -> None:
        self._forecast.restart(first.value)
        self._cusum = Cusum(self._sensitivity.drift_slack)
        self._candidate, self._count = None, 1
        for value in rest:
            self._append(value)

    def state_dict(self) -> dict[str, Any]:
        """Lists, dicts and numbers only."""
        return {
            "forecast": self._forecast.state_dict(),
            "cusum": list(self._cusum.sums),
            "candidate": None if self._candidate is None else list(self._candidate),
            "count": self._count,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._forecast.load_state_dict(state["forecast"])
        self._cusum = Cusum(self._sensitivity.drift_slack, state["cusum"])
        self._candidate = None if state["candidate"] is None else Value(*state["candidate"])
        self._count = state["count"]

"""The critical learning rate, at which a step leaves the loss of its batch as it is; smoothed over pulses.

    η t_c,   t_c ≈ κ t_q,   t_q = 2 g^T u / u^T H u,   log κ = EMA(log(t_c / t_q)) over the pulses that measure t_c

t_q is that of a quadratic loss, and known in every pulse. Losses of networks flatten or bend upwards before t_c: κ is
between 0.5 and 2. Rates of single steps scatter by a factor of 1.4 to 2.6, some by far more, so that logarithms are
averaged, and the distance of each from their mean is limited.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from curvmon.operators.loss_crossing import RANGE

SMOOTHED, CORRECTIONS = 4, 5
"""weights of a new value in the means are the inverse of these, once there are as many"""
MOST = math.log(4)
"""distance of a new value from the mean, as it counts"""


class CriticalRate:
    """Takes every pulse of a run.

    Attributes:
        value: smoothed; infinite before any pulse has one.
    """

    def __init__(self) -> None:
        self._rate = _Mean(SMOOTHED)
        """of log(η t_c)"""
        self._correction = _Mean(CORRECTIONS)
        """log κ"""

    @property
    def value(self) -> float:
        return math.exp(self._rate.value) if self._rate.count else math.inf

    def update(self, rate: float, gain: float, curvature: float, critical: float) -> None:
        """Take one more pulse. Those uphill, and those along negative curvature that measure nothing, say nothing.

        Args:
            rate: η.
            gain: g^T u.
            curvature: u^T H u.
            critical: t_c; NaN if it is not measured, infinite if it is more than RANGE times t_q.
        """
        if gain <= 0:
            return
        quadratic = math.log(2 * gain / curvature) if curvature > 0 else math.nan
        measured = math.log(critical) if 0 < critical < math.inf else math.nan
        if critical == math.inf:
            measured = quadratic + math.log(RANGE)
        self._correction.update(measured - quadratic)
        self._rate.update(math.log(rate) + (quadratic + self._correction.value if math.isnan(measured) else measured))

    def forget(self) -> None:
        """The rate so far, not the correction."""
        self._rate = _Mean(SMOOTHED)

    def state_dict(self) -> dict[str, Any]:
        return {name: [mean.value, mean.count] for name, mean in self._means()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, mean in self._means():
            mean.value, mean.count = state[name]

    def _means(self) -> list[tuple[str, _Mean]]:
        return [("rate", self._rate), ("correction", self._correction)]


class _Mean:
    """Exponential moving average of logarithms; the mean of all at first."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.value, self.count = 0.0, 0

    def update(self, value: float) -> None:
        """NaN is ignored."""
        if math.isnan(value):
            return
        self.count = min(self.count + 1, self._size)
        if self.count == 1:
            self.value = value
        self.value += max(-MOST, min(MOST, value - self.value)) / self.count

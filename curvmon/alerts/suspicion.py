"""Whether pulses look unusual enough to take the next one soon: far weaker evidence than that of an alert.

A pulse is suspicious if its own step ratio or gain is far above the usual one. Single pulses are noisy: those that
follow stay suspicious as long as their mean is far above, too. The first one is not part of it, it has been selected.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from curvmon.alerts.instability import InstabilityDetector, is_step_ignored
from curvmon.records import PulseRecord

RATIO, GAIN = 2.5, 1.75
"""times the usual step ratio, and the usual gain"""
MOST = 30
"""pulses in a row; what is unusual for longer has been reported, or is the new usual"""


class Suspicion:
    """Takes every pulse of a run, after the detector."""

    def __init__(self) -> None:
        self._pulses = 0
        """since the one that was suspicious; 0: none was"""
        self._gain = self._curvature = 0.0
        """sums over these pulses, g^T u / η and u^T H u / η²"""

    def update(self, record: PulseRecord, detector: InstabilityDetector) -> bool:
        """Take one more pulse; whether the next one should come soon."""
        rate = record.learning_rate if math.isfinite(record.learning_rate) else 1.0
        if is_step_ignored(rate, record.gain, record.curvature, detector.largest_rate):
            return self._end()
        gain, curvature = record.gain / rate, record.curvature / rate**2
        usual_ratio, usual_gain = detector.usual(rate)
        if not self._pulses:
            self._pulses = int(_is_high(gain, curvature, rate, usual_ratio, usual_gain))
            return bool(self._pulses)
        self._gain += gain
        self._curvature += curvature
        mean_gain, mean_curvature = self._gain / self._pulses, self._curvature / self._pulses
        self._pulses += 1
        if self._pulses > MOST or not _is_high(mean_gain, mean_curvature, rate, usual_ratio, usual_gain):
            return self._end()
        return True

    def _end(self) -> bool:
        self._pulses, self._gain, self._curvature = 0, 0.0, 0.0
        return False

    def state_dict(self) -> dict[str, Any]:
        return {"pulses": self._pulses, "gain": self._gain, "curvature": self._curvature}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._pulses, self._gain, self._curvature = state["pulses"], state["gain"], state["curvature"]


def _is_high(gain: float, curvature: float, rate: float, usual_ratio: float, usual_gain: float) -> bool:
    """False where nothing is usual yet."""
    if usual_gain > 0 and gain > GAIN * usual_gain:
        return True
    if not usual_ratio > 0:
        return False
    return curvature > 0 and (gain <= 0 or rate * curvature > 2 * gain * RATIO * usual_ratio)

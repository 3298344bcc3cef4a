"""Cumulative sums of forecast errors, which find drifts that no single value reveals."""

from __future__ import annotations

import math
from collections.abc import Sequence

from curvmon.alerts.forecast import Deviation

MOST = 4.0
"""a single error counts as at most this many standard deviations"""


class Cusum:
    """S± ← max(0, S± ± z - slack), z: signed forecast error in standard deviations (Page 1954)."""

    def __init__(self, slack: float, sums: Sequence[float] = (0.0, 0.0)) -> None:
        self._slack = slack
        self.sums = list(sums)
        """S+ and S-"""

    def after(self, deviation: Deviation) -> list[float]:
        """S+ and S- with one more error, which is not taken."""
        z = math.copysign(min(deviation.score, MOST), deviation.size)
        return [max(0.0, self.sums[0] + z - self._slack), max(0.0, self.sums[1] - z - self._slack)]

    def append(self, deviation: Deviation) -> None:
        self.sums = self.after(deviation)

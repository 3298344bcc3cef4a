"""Is the optimizer about to become unstable? Decided from the pulses of a run.

    step ratio = EMA(u^T H u) / (2 EMA(g^T u))        a ratio of means: single ratios are large where g^T u is near 0

At 1 a step no longer lowers the loss of its own batch, to second order.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from curvmon.records import PulseRecord

MEMORY = 10
"""pulses that the means are over, about"""
ENOUGH = 5
"""pulses before there is a ratio"""
QUIET = 50
"""latest ratios, of which the median is the usual one"""
RISE, LEAST_RATIO = 2.0, 0.3
"""times the usual ratio, and smallest ratio, that an instability has"""
CALM = 0.75
"""of both, below which another one can be reported"""
HEADROOM = 0.1
"""ratio below which the learning rate could be several times larger"""
FITTING = 0.5
"""of the critical learning rate: what is suggested"""


class Instability(NamedTuple):
    """Something to report.

    Attributes:
        kind: what it is.
        step_ratio: now.
        usual: its median so far.
        learning_rate: of the last step.
        suggested_lr: a better one.
    """

    kind: Literal["approaching_instability", "rate_headroom"]
    step_ratio: float
    usual: float
    learning_rate: float
    suggested_lr: float


class InstabilityDetector:
    """Takes pulses, oldest first.

    Attributes:
        step_ratio: of the latest pulses; NaN before there are enough.
        critical_lr: the learning rate at which it would be 1.
    """

    def __init__(self) -> None:
        self._gain = self._curvature = 0.0
        self._pulses = 0
        self._ratios: list[float] = []
        self._raised = self._noticed = False
        self.step_ratio = self.critical_lr = math.nan

    def update(self, record: PulseRecord) -> Instability | None:
        """What a pulse shows, if anything: an instability once until the ratio has come down, headroom once."""
        self._pulses += 1
        weight = 1 / min(self._pulses, MEMORY)
        self._gain += weight * (record.gain - self._gain)
        self._curvature += weight * (record.curvature - self._curvature)
        self.step_ratio = self.critical_lr = math.nan
        if self._pulses < ENOUGH or self._gain <= 0:
            return None
        ratio = self.step_ratio = self._curvature / (2 * self._gain)
        self.critical_lr = record.learning_rate / ratio if ratio > 0 else math.nan
        usual = statistics.median(self._ratios) if self._ratios else ratio
        self._ratios = [*self._ratios, ratio][-QUIET:]
        threshold = max(RISE * usual, LEAST_RATIO)
        suggested = FITTING * self.critical_lr
        self._raised &= ratio > CALM * threshold
        if ratio > threshold and len(self._ratios) > ENOUGH and not self._raised:
            self._raised = True
            return Instability("approaching_instability", ratio, usual, record.learning_rate, suggested)
        if 0 < ratio < HEADROOM and len(self._ratios) == QUIET and usual < HEADROOM and not self._noticed:
            self._noticed = True
            return Instability("rate_headroom", ratio, usual, record.learning_rate, suggested)
        return None

    def state_dict(self) -> dict[str, Any]:
        return {
            "means": [self._gain, self._curvature],
            "pulses": self._pulses,
            "ratios": list(self._ratios),
            "raised": [self._raised, self._noticed],
            "now": [self.step_ratio, self.critical_lr],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._gain, self._curvature = state["means"]
        self._pulses, self._ratios = state["pulses"], list(state["ratios"])
        self._raised, self._noticed = state["raised"]
        self.step_ratio, self.critical_lr = state["now"]

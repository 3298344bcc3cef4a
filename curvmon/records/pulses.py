"""A pulse of a training run: gain and curvature of the batch's loss along one optimizer step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class PulseRecord:
    """One pulse (`curvmon.pulse`), and when it was measured.

    Attributes:
        step: the optimizer step that it was measured at.
        epoch: of the run.
        gain: g^T u, by how much the step lowers the loss of its batch to first order.
        curvature: u^T H u.
        learning_rate: of the step; the largest of all parameter groups.
        loss: of the batch, before the step.
        step_ratio: the mean curvature of the last pulses over twice their mean gain; NaN before there are enough.
        critical_lr: learning rate / `step_ratio`.
    """

    step: int
    epoch: int
    gain: float
    curvature: float
    learning_rate: float = math.nan
    loss: float = math.nan
    step_ratio: float = math.nan
    critical_lr: float = math.nan

    @property
    def ratio(self) -> float:
        """u^T H u / (2 g^T u) of this step alone: above 1, it raises the loss of its batch, to second order."""
        if self.gain:
            return self.curvature / (2 * self.gain)
        return math.copysign(math.inf, self.curvature) if self.curvature else math.nan

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> PulseRecord:
        return cls(**state)

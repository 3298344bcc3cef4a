"""How much time a run may spend on measuring, and what to do when a full measurement would take more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

FREE_SECONDS = 30.0
"""per run: short runs and demos are never thinned out"""
LEAST_SHARE = 0.25
"""of the products of a full measurement: with fewer the numbers would not be worth having; rather skip"""


@dataclass(frozen=True)
class Plan:
    """`share` of the products of a full measurement; zero: skip this one."""

    share: float

    @property
    def skips(self) -> bool:
        return self.share == 0.0


class Budget:
    """Keeps the time spent measuring below `max_overhead` of the training time, beyond the free seconds.

    Fewer products first: a measurement that does not fit is made with as large a share as does. Below a quarter it is
    skipped, and the allowance grows until one fits. Clocks come from outside.
    """

    def __init__(self, max_overhead: float | None, free: float = FREE_SECONDS) -> None:
        self.max_overhead = max_overhead
        self._free = free
        self.measured = 0.0
        """seconds spent measuring"""
        self.trained = 0.0
        """seconds of training, up to the last look at the clock"""
        self.skipped = 0
        self._full: float | None = None
        """seconds of a full measurement, as far as is known"""

    def plan(self, trained: float) -> Plan:
        self.trained = max(trained, self.trained)
        if self.max_overhead is None or self._full is None:
            return Plan(1.0)
        left = self._free + self.max_overhead * self.trained - self.measured
        share = left / self._full if self._full else 1.0
        if share >= 1:
            return Plan(1.0)
        if share < LEAST_SHARE:
            self.skipped += 1
            return Plan(0.0)
        return Plan(share)

    def spent(self, seconds: float, plan: Plan) -> None:
        """Tell what a measurement took; one that failed counts as well."""
        self.measured += seconds
        if plan.skips:
            return
        expected = seconds / plan.share
        # the newest counts half: batches and probes are the same, but the machine may be busy
        self._full = expected if self._full is None else (self._full + expected) / 2

    def overhead(self, trained: float) -> float:
        """Time spent measuring over training time."""
        self.trained = max(trained, self.trained)
        return self.measured / self.trained if self.trained > 0 else 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"measured": self.measured, "trained": self.trained, "skipped": self.skipped, "full": self._full}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.measured, self.trained = state["measured"], state["trained"]
        self.skipped, self._full = state["skipped"], state["full"]

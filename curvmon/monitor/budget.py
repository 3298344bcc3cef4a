"""How much time a run may spend on measuring, and how many HVPs a measurement gets.

    allowed = free seconds + max_overhead · training time
    share   = (allowed - spent) / (seconds of a full measurement),  clipped to [0, 1], and 0 below 0.25

A measurement with share < 1 takes that share of the HVPs of a full one; one with share 0 is skipped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

FREE_SECONDS = 30.0
"""per run, not limited by the training time: in short runs and demos every measurement is a full one"""
MIN_SHARE = 0.25
"""smallest share of the HVPs of a full measurement; with fewer, standard errors would be too large to be useful"""


@dataclass(frozen=True)
class Plan:
    """`share` of the HVPs of a full measurement; 0 skips it."""

    share: float

    @property
    def skips(self) -> bool:
        return self.share == 0.0


class Budget:
    """Keeps measuring time below free seconds + `max_overhead` · training time; at most one measurement exceeds it.

    Also the clock of a run: training time excludes measuring, and both include earlier runs of a resumed training.

    Args:
        max_overhead: measuring time as a share of training time; None: no limit.
        free_seconds: may be spent regardless of the training time.
        clock: returns seconds, from any origin.

    Attributes:
        measured: seconds spent measuring and reporting.
        skipped: number of skipped measurements.
        last_seconds: how long the last measurement took.
    """

    def __init__(
        self,
        max_overhead: float | None,
        free_seconds: float = FREE_SECONDS,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.max_overhead = max_overhead
        self.measured = 0.0
        self.skipped = 0
        self.last_seconds = 0.0
        self._free_seconds = free_seconds
        self._clock = clock
        self._trained = 0.0
        self._started_at: float | None = None
        self._trained_before = 0.0
        self._measured_before = 0.0
        self._full_seconds: float | None = None
        """estimated duration of a full measurement; None until one succeeds"""

    def start_training(self) -> None:
        """Training time counts from here on, in addition to what there is already."""
        self._trained_before, self._measured_before = self._trained, self.measured
        self._started_at = self._clock()

    @property
    def trained(self) -> float:
        """Seconds of training so far, without measuring. Never decreases."""
        if self._started_at is not None:
            measured = self.measured - self._measured_before
            elapsed = self._clock() - self._started_at - measured
            self._trained = max(self._trained, self._trained_before + elapsed)
        return self._trained

    @property
    def overhead(self) -> float:
        """Measuring time / training time."""
        trained = self.trained
        return self.measured / trained if trained > 0 else 0.0

    def plan(self) -> Plan:
        """What the next measurement may cost. Until one succeeds: a full one, if there is any time left."""
        trained = self.trained
        if self.max_overhead is None or self.measured == 0:
            return Plan(1.0)
        left = self._free_seconds + self.max_overhead * trained - self.measured
        if self._full_seconds is None:
            return Plan(1.0 if left > 0 else 0.0)
        share = left / self._full_seconds if self._full_seconds else 1.0
        if share >= 1:
            return Plan(1.0)
        return Plan(share if share >= MIN_SHARE else 0.0)

    def skip(self) -> None:
        """Counts a measurement that is not made."""
        self.skipped += 1

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Times a measurement, also one that fails."""
        before = self.measured
        with self.reporting():
            yield
        self.last_seconds = self.measured - before

    def update_estimate(self, plan: Plan) -> None:
        """The last measurement succeeded with this plan. The duration of a failed one says nothing about the next."""
        full = self.last_seconds / plan.share
        # weight 1/2 for the newest: batch and probes stay the same, but the machine may be busy
        self._full_seconds = full if self._full_seconds is None else (self._full_seconds + full) / 2

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Times alerts, figures and logging: part of the overhead, but not of a measurement's own cost."""
        started = self._clock()
        try:
            yield
        finally:
            self.measured += self._clock() - started

    def state_dict(self) -> dict[str, Any]:
        return {
            "measured": self.measured,
            "trained": self._trained,
            "skipped": self.skipped,
            "full_seconds": self._full_seconds,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.measured, self._trained = state["measured"], state["trained"]
        self.skipped, self._full_seconds = state["skipped"], state["full_seconds"]

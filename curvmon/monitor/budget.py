"""How much time a run may spend on measuring, when it is spent, and how many HVPs a measurement gets.

    allowed = free seconds + max_overhead · training time              of the whole run, expected from its progress
    n       = (allowed - spent) / (seconds of a full measurement)      full measurements that are left

They are spread evenly over the rest of the run, and the last validation gets one in any case. Where n is too small for
one in every quarter of the run, measurements get a share of the HVPs of a full one. Vital signs are taken in every
validation.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass, replace
from typing import Any

FREE_SECONDS = 30.0
"""per run, not limited by the training time: in short runs and demos every measurement is a full one"""
FREE_UNTIL = 600.0
"""training seconds in which half of the free seconds may be spent, where the length of the run is not known"""
QUARTERS = 4
"""parts of a run that get a measurement each"""
VITAL_SHARE = 0.005
"""of the training time, for the HVPs of vital signs"""
VITAL_COST = 0.1
"""of their HVPs, in full measurements, until they have been timed"""
MIN_SHARE = 0.25
"""smallest share of the HVPs of a full measurement; with fewer, standard errors would be too large to be useful"""


@dataclass(frozen=True)
class Plan:
    """`share` of the HVPs of a full measurement; 0 skips it."""

    share: float

    @property
    def skips(self) -> bool:
        return self.share == 0.0


@dataclass(frozen=True)
class Position:
    """Progress of the run, from 0 to 1."""

    at: float = 0.0
    interval: float = 0.0
    """since the last time that it could be measured"""
    full: float = 0.0
    """where the last measurement succeeded"""
    has_end: bool = False
    """False if the end of the run is not given"""


class Budget:
    """Keeps measuring time below free seconds + `max_overhead` · training time; at most one measurement exceeds it.

    Also the clock of a run: training time excludes measuring, and both include earlier runs of a resumed training.

    Args:
        max_overhead: measuring time as a share of training time; None: no limit.
        free_seconds: may be spent regardless of the training time.
        clock: returns seconds, from any origin.

    Attributes:
        measured: seconds spent measuring and reporting.
        vital_seconds: those of them for vital signs.
        pulse_seconds: those of them for pulses.
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
        self.vital_seconds = 0.0
        self.pulse_seconds = 0.0
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
        self._sharpness_seconds: float | None = None
        """duration of the last vital signs with HVPs"""
        self._position = Position()

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

    def reach(self, progress: float | None) -> None:
        """The run has got this far, from 0 to 1, and may measure; None: its end is not known."""
        before = self._position
        if progress is None:
            self._position = replace(before, has_end=False)
        elif progress > before.at:
            self._position = Position(progress, progress - before.at, before.full, True)
        else:  # the run has been extended
            interval = before.interval * progress / before.at if before.at else 0.0
            self._position = Position(progress, interval, max(0.0, progress - interval), True)

    def plan(self) -> Plan:
        """What the next measurement may cost. Until one succeeds: a full one, if there is any time left."""
        at, interval, last, has_end = astuple(self._position)
        left = self._seconds_left()
        if self.max_overhead is None or self.measured <= self.vital_seconds + self.pulse_seconds:
            return Plan(1.0)
        if self._full_seconds is None:
            return Plan(1.0 if left > 0 else 0.0)
        n = left / self._full_seconds if self._full_seconds else math.inf
        if not has_end or at == 0:
            return Plan(min(1.0, n) if n >= MIN_SHARE else 0.0)
        if at + interval / 2 >= 1:  # the next validation would come after the end
            return Plan(min(1.0, max(MIN_SHARE, n)))
        remaining = 1 - last
        share = _share(n, remaining)
        is_due = n / share * (at - last + interval / 2) >= remaining
        return Plan(share if is_due and n >= share else 0.0)

    @property
    def stride(self) -> int | None:
        """One validation in how many gets a measurement; None where that cannot be known."""
        at, interval, last, has_end = astuple(self._position)
        if self.max_overhead is None:
            return 1
        if not has_end or not at * interval or self._full_seconds is None:
            return None
        n, remaining = self._seconds_left() / self._full_seconds if self._full_seconds else math.inf, 1 - last
        return max(1, round(remaining / interval / max(1.0, n / _share(n, remaining)))) if remaining else 1

    def _seconds_left(self) -> float:
        """For measuring, in the whole run where its end is known; inf without a limit."""
        trained, free, position = self.trained, self._free_seconds, self._position
        if self.max_overhead is None:
            return math.inf
        if not position.has_end:
            free *= trained / (trained + FREE_UNTIL)
        elif position.at > 0:
            trained /= position.at  # expected
        return free + self.max_overhead * trained - self.measured

    @property
    def affords_sharpness(self) -> bool:
        """Whether vital signs may have HVPs."""
        if self.max_overhead is None:
            return True
        cost = self._sharpness_seconds
        if cost is None:
            if self._full_seconds is None:
                return False
            cost = VITAL_COST * self._full_seconds
        return self.vital_seconds + cost <= VITAL_SHARE * self.trained

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

    @contextmanager
    def taking_vital_signs(self, with_sharpness: bool) -> Iterator[None]:
        """Times vital signs."""
        before = self.measured
        with self.reporting():
            yield
        seconds = self.measured - before
        self.vital_seconds += seconds
        if with_sharpness:
            self._sharpness_seconds = seconds

    @contextmanager
    def taking_pulse(self) -> Iterator[None]:
        """Times a pulse, or a part of one."""
        before = self.measured
        with self.reporting():
            yield
        self.pulse_seconds += self.measured - before

    def update_estimate(self, plan: Plan) -> None:
        """The last measurement succeeded with this plan. The duration of a failed one says nothing about the next."""
        self._position = replace(self._position, full=self._position.at)
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
            "vital_seconds": self.vital_seconds,
            "pulse_seconds": self.pulse_seconds,
            "sharpness_seconds": self._sharpness_seconds,
            "position": asdict(self._position),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.measured, self._trained = state["measured"], state["trained"]
        self.skipped, self._full_seconds = state["skipped"], state["full_seconds"]
        self.vital_seconds, self._sharpness_seconds = state["vital_seconds"], state["sharpness_seconds"]
        self.pulse_seconds = state["pulse_seconds"]
        self._position = Position(**state["position"])


def _share(n: float, remaining: float) -> float:
    """Of the HVPs of a full measurement, where n full ones are left: one in every quarter of the run, if possible."""
    return min(1.0, max(MIN_SHARE, n / (QUARTERS * remaining)))

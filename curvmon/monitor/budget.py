"""How much time a run may spend on measuring, when it is spent, and how many HVPs a measurement gets.

    allowed = free seconds + max_overhead · training time              of the whole run, expected from its progress
    n       = (allowed - spent) / (seconds of a full measurement)      full measurements that are left

`plan.next_plan` spreads them evenly over the rest of the run. Vital signs are taken in every validation.

The first measurement is planned before anything has been timed but one forward pass: a full one takes about as long as
FULL_PASSES passes of the probe batch, and training as long as its own samples take.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from curvmon.monitor.plan import FULL, Plan, Position, first_plan, next_plan, stride

FREE_SECONDS = 30.0
"""per run, not limited by the training time: in short runs and demos every measurement is a full one"""
FREE_UNTIL = 600.0
"""training seconds in which half of the free seconds may be spent, where the length of the run is not known"""
VITAL_SHARE = 0.005
"""of the training time, for the HVPs of vital signs"""
VITAL_COST = 0.1
"""of their HVPs, in full measurements, until they have been timed"""
FULL_PASSES = 100
"""of the probe batch, forward and backward, that a full measurement takes before the first step"""
FORWARD_PASSES = 3
"""that take as long as one forward and backward pass"""


@dataclass(frozen=True)
class Origin:
    """Where this fit began: progress, and seconds of training, and of vital signs and pulses, before it."""

    at: float = 0.0
    trained: float = 0.0
    steady: float = 0.0


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
        starting_pulses: those of them for the first pulses, which come more often than the others.
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
        self.free_seconds = free_seconds
        self.measured = 0.0
        self.vital_seconds = 0.0
        self.pulse_seconds = 0.0
        self.starting_pulses = 0.0
        self.skipped = 0
        self.last_seconds = 0.0
        self._clock = clock
        self._trained = 0.0
        self._started_at: float | None = None
        self._trained_before = 0.0
        self._measured_before = 0.0
        self._has_measured = False
        """or has tried to"""
        self._full_seconds: float | None = None
        """estimated duration of a full measurement; None until one succeeds, but for the estimate of `expect`"""
        self._is_timed = False
        """it is not an estimate of `expect`"""
        self._expected = 0.0
        """training seconds of the whole run, before they follow from its progress"""
        self._vital_cost = 0.0
        """duration of the last vital signs without HVPs"""
        self._sharpness_seconds: float | None = None
        """duration of the last vital signs with HVPs"""
        self._report_seconds = 0.0
        """longest report, with pictures; the last measurement has some, too"""
        self._position = Position()
        self._origin = Origin()

    # ---- the clock of the run ----

    def start_training(self) -> None:
        """Training time counts from here on, in addition to what there is already."""
        self._trained_before, self._measured_before = self._trained, self.measured
        self._started_at = self._clock()
        self._origin = Origin(0.0, self._trained, self._steady)

    def start_at(self, progress: float | None) -> None:
        """The fit that has just started begins here; None: its end is not known."""
        self._position = self._position.restarted(progress)
        self._origin = replace(self._origin, at=self._position.at)

    def stop_training(self) -> None:
        """What follows is no training: the time between two fits, for example."""
        self._trained, self._started_at = self.trained, None

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
        self._position = self._position.moved(progress)

    # ---- plans ----

    @property
    def plans_first(self) -> bool:
        """Nothing has been measured yet, and the first measurement is limited: `expect` says how long it may take."""
        return self.max_overhead is not None and not self._has_measured

    def expect(self, training_passes: float | None) -> None:
        """How long the first measurement and training will take, by the vital signs that have just been taken.

        `training_passes`: of the probe batch, that training takes as long as; None where its end is not known.
        """
        one = FORWARD_PASSES * self._vital_cost
        self._full_seconds = FULL_PASSES * one
        self._expected = one * (training_passes or 0.0)

    def plan(self) -> Plan:
        """What the next measurement may cost."""
        if self.max_overhead is None:
            return FULL
        return (next_plan if self._has_measured else first_plan)(self._fulls_left(), self._position)

    @property
    def stride(self) -> int | None:
        """One validation in how many gets a measurement; None where that cannot be known."""
        if self.max_overhead is None:
            return 1
        return stride(self._fulls_left(), self._position) if self._has_measured else None

    def _fulls_left(self) -> float:
        """Full measurements that fit into what is left, in the whole run where its end is known."""
        left, full = self._seconds_left(), self._full_seconds
        if full:
            return left / full
        return math.inf if left > 0 or not self._has_measured else 0.0

    @property
    def _steady(self) -> float:
        """Seconds for what is spent throughout a run, whatever is planned."""
        return self.vital_seconds + self.pulse_seconds - self.starting_pulses

    def _seconds_left(self) -> float:
        """For measuring, after vital signs and pulses of the rest of the run and the pictures at its end."""
        assert self.max_overhead is not None
        trained, free, position, origin = self.trained, self.free_seconds, self._position, self._origin
        steady, done = 0.0, position.at - origin.at
        if not position.has_end:
            free *= trained / (trained + FREE_UNTIL) if self._has_measured else 1.0
        elif done > 0:
            rest = (1 - position.at) / done
            trained += rest * (trained - origin.trained)
            steady = rest * (self._steady - origin.steady)
        elif not self._has_measured:
            trained = max(trained, self._expected)
        return free + self.max_overhead * trained - self.measured - steady - self._report_seconds

    @property
    def affords_vital_signs(self) -> bool:
        """Whether there is time for them, without HVPs, elsewhere than in a validation, where they always are."""
        if self.max_overhead is None:
            return True
        return self.vital_seconds + self._vital_cost <= min(VITAL_SHARE, self.max_overhead) * self.trained

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
        before, self._has_measured = self.measured, True
        with self._spending():
            yield
        self.last_seconds = self.measured - before

    @contextmanager
    def taking_vital_signs(self, with_sharpness: bool) -> Iterator[None]:
        """Times vital signs."""
        before = self.measured
        with self._spending():
            yield
        seconds = self.measured - before
        self.vital_seconds += seconds
        if with_sharpness:
            self._sharpness_seconds = seconds
        else:
            self._vital_cost = seconds

    @contextmanager
    def taking_pulse(self) -> Iterator[None]:
        """Times a pulse, or a part of one."""
        before = self.measured
        with self._spending():
            yield
        self.pulse_seconds += self.measured - before

    def update_estimate(self, plan: Plan) -> None:
        """The last measurement succeeded with this plan. The duration of a failed one says nothing about the next."""
        self._position = replace(self._position, full=self._position.at)
        full = self.last_seconds / (plan.cost if self._is_timed else plan.first_cost)
        # weight 1/2 for the newest: batch and probes stay the same, but the machine may be busy
        self._full_seconds = (self._full_seconds + full) / 2 if self._is_timed and self._full_seconds else full
        self._is_timed = True

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Times alerts, figures and logging: part of the overhead, but not of a measurement's own cost."""
        before = self.measured
        with self._spending():
            yield
        self._report_seconds = max(self._report_seconds, self.measured - before)

    @contextmanager
    def _spending(self) -> Iterator[None]:
        started = self._clock()
        try:
            yield
        finally:
            self.measured += self._clock() - started

    def state_dict(self) -> dict[str, Any]:
        return {
            "measured": self.measured,
            "trained": self.trained,
            "skipped": self.skipped,
            "full_seconds": self._full_seconds if self._is_timed else None,
            "has_measured": self._has_measured,
            "report_seconds": self._report_seconds,
            "vital_seconds": self.vital_seconds,
            "pulse_seconds": self.pulse_seconds,
            "starting_pulses": self.starting_pulses,
            "sharpness_seconds": self._sharpness_seconds,
            "position": asdict(self._position),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.measured, self._trained = state["measured"], state["trained"]
        self.skipped, self._full_seconds = state["skipped"], state["full_seconds"]
        self.vital_seconds, self._sharpness_seconds = state["vital_seconds"], state["sharpness_seconds"]
        self.pulse_seconds, self.starting_pulses = state["pulse_seconds"], state["starting_pulses"]
        self._position = Position(**state["position"])
        self._is_timed = self._full_seconds is not None
        self._has_measured, self._report_seconds = state["has_measured"], state["report_seconds"]

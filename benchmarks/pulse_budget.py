"""Warnings before training diverges where pulses may take 1 % of the training time: when they are taken decides.

The monitor's own schedule picks pulses from recorded runs; a pulse takes a given share of a training step.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from benchmarks.markdown import table
from benchmarks.pulse_runs import AT, EVENTS, EVERY, Recorded
from curvmon.alerts.instability import InstabilityDetector
from curvmon.alerts.suspicion import Suspicion
from curvmon.monitor.pulse_schedule import RESERVE, SHARE, SHORTEST, START, PulseSchedule

MAX_OVERHEAD = 0.05
COSTS = (0.15, 0.33, 0.7, 1.4)
"""training steps that a pulse takes; the monitor's own by three forward passes on a slice of a batch"""
SHIFTS = (0, 14, 28)
"""steps after which the first pulse may come: where an event falls between two pulses is chance"""


class Taken(NamedTuple):
    """What a monitor makes of a recorded run."""

    raised_at: list[int]
    pulses: list[int]


class FixedInterval:
    """A schedule without first pulses and without suspicion: as many pulses as the share allows, evenly."""

    def __init__(self, cost: float) -> None:
        self._interval, self._next, self._steps = max(SHORTEST, math.ceil(cost / SHARE)), SHORTEST, 0

    @property
    def is_due(self) -> bool:
        return self._steps + 1 >= self._next

    def count(self) -> None:
        self._steps += 1

    def took(self, seconds: float, trained: float, suspicious: bool) -> int:
        return self._interval

    def follow(self, interval: int) -> None:
        self._next = self._steps + interval


Make = Callable[[float], "PulseSchedule | FixedInterval"]


def monitored(make: Make, looks_closer: bool, cost: float, shift: int, run: Recorded) -> Taken:
    """Pulses were recorded at every EVERY-th step: one that is due in between is taken at the next."""
    schedule, detector, suspicion = make(cost), InstabilityDetector(), Suspicion()
    raised_at, pulses = [], []
    for i, step in enumerate(run.steps):
        record = run.pulse(i, EVERY) if i >= shift and schedule.is_due else None
        if i >= shift:
            schedule.count()
        if record is None:
            event = detector.advance(i, step.learning_rate)
        else:
            event = detector.update(record)
            suspicious = suspicion.update(record, detector) and looks_closer
            schedule.follow(schedule.took(cost, i + 1 - shift, suspicious))
            pulses.append(i)
        if event is not None and event.kind == "approaching_instability":
            raised_at.append(i)
    return Taken(raised_at, pulses)


def regular(cost: float) -> PulseSchedule:
    return PulseSchedule(True, MAX_OVERHEAD)


RULES: dict[str, tuple[Make, bool]] = {
    "at a fixed interval": (FixedInterval, False),
    f"the first {START} soon, then at an interval": (regular, False),
    "and closer after suspicious ones: the monitor": (regular, True),
}


def budget_table(runs: Sequence[Recorded], unstable: Sequence[str]) -> str:
    head = ["warned before", *unstable, "median lead, steps", "false warnings", "time of pulses", "of the first"]
    rows = [["a pulse in training steps", "pulses", *head]]
    for cost in COSTS:
        for name, (make, looks_closer) in RULES.items():
            first = 0 if make is FixedInterval else START
            found = partial(monitored, make, looks_closer, cost)
            rows.append([f"{cost:g}", name, *_row(found, runs, unstable, cost, first)])
    return table(rows)


def _row(
    found: Callable[[int, Recorded], Taken], runs: Sequence[Recorded], unstable: Sequence[str], cost: float, first: int
) -> list[str]:
    """The time of pulses is that of quiet runs, without the first."""
    leads: dict[str, list[int | None]] = {kind: [] for kind in unstable}
    false, steps, seconds, starting = 0, 0, 0.0, 0.0
    for shift in SHIFTS:
        for run in runs:
            if run.kind in leads and (rise := run.rises_at()) is not None:
                before = [i for i in found(shift, run).raised_at if run.at <= i < rise]
                leads[run.kind].append(rise - before[0] if before else None)
            elif run.kind not in EVENTS:
                taken = found(shift, run)
                false += len(taken.raised_at)
                start = taken.pulses[first - 1] + 1 if first else shift
                steps, seconds = steps + len(run.steps) - start, seconds + cost * len(taken.pulses[first:])
                starting = max(starting, cost * first)
    known = [lead for of in leads.values() for lead in of if lead is not None]
    return [
        f"{len(known) / sum(map(len, leads.values())):.0%}",
        *(f"{sum(lead is not None for lead in of) / len(of):.0%}" for of in leads.values()),
        f"{statistics.median(known):.0f}" if known else "",
        str(false),
        f"{seconds / steps:.2%}",
        f"{starting:.0f} steps" if first else "",
    ]


def budget_section(runs: Sequence[Recorded], unstable: Sequence[str]) -> list[str]:
    quiet = sum(len(run.steps) for run in runs if run.kind not in EVENTS)
    return [
        f"### At a budget of {SHARE:.0%} of the training time",
        f"What the monitor does by itself: the share of a training step that a pulse takes decides when pulses are "
        f"taken. Runs that an event destabilises at step {AT}: warned before the loss has risen, of all and by event. "
        f"Each run counts {len(SHIFTS)} times, with pulses that begin {', '.join(map(str, SHIFTS))} steps late; false "
        f"warnings are those in {len(SHIFTS) * quiet:,} quiet steps. The time of pulses is a share of the training "
        f"steps of quiet runs after the first {START}; in runs this short, the {RESERVE} pulses of credit that every "
        f"run starts with take it above the budget. At {COSTS[-1]:g} steps, the first {START} last until step 530 or "
        "so, and nothing is usual yet at the event.",
        budget_table(runs, unstable),
    ]

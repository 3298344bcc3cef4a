"""How often pulses are taken: their cost decides, and the clock is the test's."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import pairwise

import pytest

from curvmon.monitor.pulse_schedule import REGULAR, RESERVE, SHARE, SHORTEST, SOON, START, WANTED, PulseSchedule


def run(
    schedule: PulseSchedule,
    steps: int,
    seconds: float,
    trained: float = 1.0,
    suspicious: Callable[[int], bool] = lambda step: False,
) -> list[int]:
    """Steps with a pulse, where one takes so many seconds and a training step `trained`."""
    taken = []
    for _ in range(steps):
        due = schedule.is_due
        schedule.count()
        if due:
            step = schedule.steps
            taken.append(step)
            schedule.follow(schedule.took(seconds, step * trained, suspicious(step)))
    return taken


def started(max_overhead: float | None, seconds: float = 1.0) -> PulseSchedule:
    """A schedule right after the first pulses, with training steps of a second."""
    schedule = PulseSchedule(True, max_overhead)
    while schedule.is_starting:
        run(schedule, 1, seconds)
    return schedule


@pytest.mark.parametrize(("max_overhead", "share"), [(0.05, 0.01), (0.5, 0.01), (0.02, 0.004)])
def test_pulses_stay_within_their_share(max_overhead: float, share: float) -> None:
    schedule = started(max_overhead, seconds=1.3)
    taken = run(schedule, 9000, seconds=1.3)
    assert 0.8 * share < 1.3 * (len(taken) - 1) / (taken[-1] - taken[0]) <= REGULAR * share
    assert len({b - a for a, b in pairwise(taken)}) == 1


@pytest.mark.parametrize(("max_overhead", "share"), [(0.05, 0.01), (0.02, 0.004)])
def test_suspicious_pulses_stay_within_the_share_too(max_overhead: float, share: float) -> None:
    """Even if all of them are; but for the first pulses and the reserve."""
    schedule = started(max_overhead)
    taken = run(schedule, 9000, seconds=1.0, suspicious=lambda step: True)
    assert 0.95 * share * schedule.steps <= len(taken) <= share * schedule.steps + RESERVE
    assert SOON in {b - a for a, b in pairwise(taken)}


def test_the_first_pulses_come_soon() -> None:
    """The first one says little of how long the next will take."""
    assert run(PulseSchedule(True, 0.05), 100, seconds=1.0) == [10, 20, 40, 60, 80, 100]
    assert run(PulseSchedule(True, 0.05), 250, seconds=0.3)[:START] == list(range(10, 201, 10))
    assert run(PulseSchedule(True, 0.02), 120, seconds=1.0) == [10, 20, 70, 120]


def test_pulses_come_closer_after_suspicious_ones_as_long_as_there_is_credit() -> None:
    """Of the reserve, and of what regular pulses have left."""
    schedule = started(0.05)
    regular = run(schedule, 2000, seconds=1.0)
    saved = int(SHARE * schedule.steps) - len(regular)
    since = schedule.steps
    taken = run(schedule, 200, seconds=1.0, suspicious=lambda step: step > since)
    assert taken[1] - taken[0] == SOON
    burst = [b for a, b in pairwise(taken) if b - a == SOON]
    assert saved + RESERVE - 2 <= len(burst) <= saved + RESERVE + 2
    assert all(b - a in (SOON, schedule.interval) for a, b in pairwise(taken))


def test_suspicion_ends_the_wait_for_no_fixed_interval() -> None:
    assert run(PulseSchedule(7, 0.05), 30, seconds=1.0, suspicious=lambda step: True) == [7, 14, 21, 28]


def test_without_a_limit_there_is_always_credit() -> None:
    taken = run(started(None), 100, seconds=1000.0, suspicious=lambda step: True)
    assert taken == list(range(taken[0], taken[0] + 100 - SHORTEST + 1, SOON))


def test_a_pulse_that_failed_is_not_tried_again_soon() -> None:
    schedule = started(0.05)
    since = schedule.steps
    while schedule.interval != SOON:
        run(schedule, 1, seconds=1.0, suspicious=lambda step: step > since)
    schedule.failed()
    assert schedule.interval == WANTED and not schedule.is_due
    fixed = PulseSchedule(7, 0.05)
    fixed.failed()
    assert fixed.interval == 7


def test_cheap_pulses_are_not_taken_more_often_than_is_useful() -> None:
    assert run(PulseSchedule(True, 0.05), 100, seconds=SHARE) == list(range(SHORTEST, 101, SHORTEST))


@pytest.mark.parametrize(
    ("every", "max_overhead", "taken"),
    [
        (7, 0.05, [7, 14, 21, 28]),
        (True, None, [10, 20, 30]),
        (False, None, []),
        (True, 0.0, []),
        (7, 0.0, [7, 14, 21, 28]),
    ],
)
def test_settings(every: bool | int, max_overhead: float | None, taken: list[int]) -> None:
    assert run(PulseSchedule(every, max_overhead), 30, seconds=1000.0) == taken


def test_one_pulse_that_was_interrupted_counts_little() -> None:
    schedule = started(0.05)
    interval = schedule.took(1.0, schedule.steps)
    assert interval == math.ceil(1 / (REGULAR * SHARE))
    assert schedule.took(60.0, schedule.steps) == interval


def test_a_step_without_a_pulse_does_not_end_the_wait() -> None:
    """Where a gradient scaler skips the step, the next one is due."""
    schedule = PulseSchedule(5, None)
    for _ in range(8):
        schedule.count()
    assert schedule.is_due
    schedule.follow(5)
    assert not schedule.is_due


def test_fewer_samples_are_wanted_where_pulses_are_far_apart() -> None:
    schedule = PulseSchedule(True, 0.05)
    schedule.count()
    schedule.took(1.0, 1.0)
    assert not schedule.wants_cheaper(1.0)  # the first says little
    schedule.took(1.0, 1.0)
    assert schedule.wants_cheaper(1.0)
    schedule.became_cheaper(0.4)
    assert not schedule.wants_cheaper(1.0)
    fixed = PulseSchedule(1000, 0.05)
    for _ in range(2):
        fixed.took(1.0, 1.0)
    assert not fixed.wants_cheaper(1.0)


@pytest.mark.parametrize("steps", [47, 1000])
def test_a_resumed_run_goes_on(steps: int) -> None:
    """During the first pulses and after them, with the same credit."""
    first, second = PulseSchedule(True, 0.05), PulseSchedule(True, 0.05)
    run(first, steps, seconds=0.5)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    after = [run(schedule, 900, 0.5, suspicious=lambda step: step > 300) for schedule in (first, second)]
    assert after[0] == after[1]
    third = PulseSchedule(3, 0.05)
    third.load_state_dict(first.state_dict())
    assert third.interval == 3

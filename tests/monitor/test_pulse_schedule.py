"""How often pulses are taken: their cost decides, and the clock is the test's."""

from __future__ import annotations

from itertools import pairwise

import pytest

from curvmon.monitor.pulse_schedule import SHARE, SHORTEST, PulseSchedule


def run(schedule: PulseSchedule, steps: int, seconds: float, trained: float = 1.0) -> list[int]:
    """Steps with a pulse, where one takes so many seconds and a training step `trained`."""
    taken = []
    for step in range(1, steps + 1):
        due = schedule.is_due
        schedule.count()
        if due:
            taken.append(step)
            schedule.follow(schedule.took(seconds, step * trained))
    return taken


@pytest.mark.parametrize(("max_overhead", "share"), [(0.05, 0.01), (0.5, 0.01), (0.02, 0.004)])
def test_pulses_stay_within_their_share(max_overhead: float, share: float) -> None:
    taken = run(PulseSchedule(True, max_overhead), 5000, seconds=1.3)
    assert taken[0] == SHORTEST
    assert 0.9 * share < 1.3 * (len(taken) - 1) / 5000 <= share
    assert len({b - a for a, b in pairwise(taken)}) == 1


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
    schedule = PulseSchedule(True, 0.05)
    for _ in range(3):
        schedule.took(1.0, 0.0)
    for _ in range(100):
        schedule.count()
    assert schedule.took(60.0, 100.0) == 100


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
    assert not schedule.wants_cheaper(schedule.took(1.0, 1.0))  # the first says little
    interval = schedule.took(1.0, 1.0)
    assert interval == 100 and schedule.wants_cheaper(interval)
    schedule.became_cheaper(0.5)
    assert schedule.took(0.5, 1.0) == 50 and not schedule.wants_cheaper(50)
    assert not PulseSchedule(1000, 0.05).wants_cheaper(1000)


def test_a_resumed_run_goes_on() -> None:
    first, second = PulseSchedule(True, 0.05), PulseSchedule(True, 0.05)
    run(first, 47, seconds=0.5)
    second.load_state_dict(first.state_dict())
    assert run(first, 300, seconds=0.5) == run(second, 300, seconds=0.5)
    third = PulseSchedule(3, 0.05)
    third.load_state_dict(first.state_dict())
    assert third.interval == 3

"""Where measurements fall in a run, and how large they are, by what they cost; no clock."""

from __future__ import annotations

import pytest

from curvmon.monitor.budget import FORWARD_PASSES, FULL_PASSES, Budget
from curvmon.monitor.plan import FULL, MIN_SHARE, QUARTERS, SMALLEST, Plan, Position, first_plan, next_plan, stride
from tests.helpers.fake_clock import FakeClock

NEVER = Position(0.0, 0.0, 0.0, True)


def run(n: float, validations: int, position: Position = NEVER) -> tuple[list[float], list[Plan], float]:
    """Where measurements are made after the first one, with which plans, and what is left of n full ones."""
    places, plans = [], []
    for i in range(1, validations + 1):
        position = position.moved(i / validations)
        plan = next_plan(n, position)
        if not plan.skips:
            position = Position(position.at, position.interval, position.at, True)
            places.append(position.at)
            plans.append(plan)
            n -= plan.cost
    return places, plans, n


@pytest.mark.parametrize("share", [MIN_SHARE, 0.4, 0.7, 1.0])
def test_cost_and_share_are_inverse(share: float) -> None:
    assert Plan.costing(Plan(share).cost).share == pytest.approx(share)


def test_costs_have_limits() -> None:
    assert Plan.costing(0.0) == Plan.costing(-3.0) == SMALLEST and Plan.costing(100.0) == FULL
    assert Plan(0.0).cost == 0.0 and FULL.cost == 1.0 and MIN_SHARE < SMALLEST.cost < 1


@pytest.mark.parametrize("validations", [4, 5, 7, 16, 100, 999])
@pytest.mark.parametrize("n", [0.0, 0.2, 0.5, 1.0, 1.9, 2.5, 4.0, 5.5, 30.0])
def test_the_last_one_is_reserved(n: float, validations: int) -> None:
    places, _, left = run(n, validations)
    assert places[-1] == 1.0
    assert left >= min(0.0, n - SMALLEST.cost) - 1e-9


@pytest.mark.parametrize("validations", [4, 5, 7, 16, 100, 999])
@pytest.mark.parametrize("n", [QUARTERS * SMALLEST.cost + 1e-6, 2.5, 4.0, 5.5, 30.0])
def test_every_quarter_has_one(n: float, validations: int) -> None:
    places, plans, _ = run(n, validations)
    for quarter in range(QUARTERS):
        assert any(quarter / QUARTERS < at <= (quarter + 1) / QUARTERS + 1e-9 for at in places)
    if n > QUARTERS + 1:
        assert set(plans) == {FULL} and len(plans) >= min(validations, n) - 1


@pytest.mark.parametrize("n", [2.0, 3.0, 6.0, 20.0])
def test_they_are_evenly_spread(n: float) -> None:
    places, _, _ = run(n, 1000)
    gaps = [b - a for a, b in zip([0.0, *places], places)]
    assert max(gaps) <= 1.1 * min(gaps) and max(gaps) <= 1 / QUARTERS + 0.005


def test_a_measurement_that_cost_more_than_expected_leaves_the_other_quarters_theirs() -> None:
    """The costs of a small one differ from network to network."""
    position, n, places = NEVER, 2.6, list[float]()
    for i in range(1, 101):
        position = position.moved(i / 100)
        plan = next_plan(n, position)
        if not plan.skips:
            position = Position(position.at, position.interval, position.at, True)
            places.append(position.at)
            n -= 1.25 * plan.cost
    assert sorted({min(3, int(4 * at - 0.04)) for at in places}) == [0, 1, 2, 3]


def test_measuring_twice_at_one_place_changes_nothing() -> None:
    """A training step and a validation after it."""
    position = NEVER.moved(0.5)
    assert position.moved(0.5) == position and position.full == 0.0


@pytest.mark.parametrize(("n", "share"), [(1e9, 1.0), (5.0, 1.0), (0.1, MIN_SHARE)])
def test_the_first_one_is_always_made(n: float, share: float) -> None:
    assert first_plan(n, NEVER).share == share


def expecting(forward: float, passes: float | None, free: float = 30.0, share: float = 0.05) -> Plan:
    """The first plan of a run, after vital signs that took `forward` seconds."""
    clock = FakeClock()
    budget = Budget(share, free, clock)
    budget.start_training()
    budget.start_at(None if passes is None else 0.0)
    budget.reach(None if passes is None else 0.0)
    with budget.taking_vital_signs(False):
        clock.advance(forward)
    budget.expect(passes)
    assert budget.plans_first
    return budget.plan()


def test_the_first_one_is_full_in_long_runs_and_for_fast_networks() -> None:
    assert expecting(0.001, 100.0) == FULL  # 0.3 s: the free seconds pay for all of them
    assert expecting(1.0, 1e6) == FULL  # five minutes of a month
    assert expecting(0.001, None) == FULL


def test_the_first_one_is_small_where_little_fits() -> None:
    """Half a minute of measuring before the first step of a run of ten minutes would be its whole budget."""
    forward, passes = 0.1, 2000.0  # 30 seconds, 10 minutes of training
    assert expecting(forward, passes).share == pytest.approx(Plan.costing(2 / 5).share, abs=0.01)
    assert expecting(forward, passes, free=0.0) == SMALLEST
    assert expecting(forward, None).share == pytest.approx(Plan.costing(0.5).share, abs=0.01)
    n = (30 + 0.05 * passes * FORWARD_PASSES * forward) / (FULL_PASSES * FORWARD_PASSES * forward)
    assert n == pytest.approx(2.0)


def test_the_estimate_gives_way_to_the_first_duration() -> None:
    clock = FakeClock()
    budget = Budget(0.05, 8.0, clock)
    budget.start_training()
    with budget.taking_vital_signs(False):
        clock.advance(1.0)
    budget.expect(None)
    assert budget.state_dict()["full_seconds"] is None
    plan = budget.plan()
    with budget.measuring():
        clock.advance(plan.first_cost * 2.0)
    budget.update_estimate(plan)
    assert budget.state_dict()["full_seconds"] == pytest.approx(2.0, abs=1e-4)


def test_strides() -> None:
    assert stride(5.0, Position(0.1, 0.0, 0.0, True)) is None and stride(5.0, Position(0.1, 0.1, 0.0, False)) is None
    assert stride(100.0, Position(0.01, 0.01, 0.0, True)) == 1
    assert stride(10.0, Position(0.01, 0.01, 0.0, True)) in (9, 10)
    assert stride(0.0, Position(0.01, 0.01, 0.0, True)) == 100  # the last one


def test_a_restarted_run_goes_on_where_it_was() -> None:
    position = Position(0.5, 0.1, 0.4, True)
    assert position.restarted(0.5) == Position(0.5, 0.0, 0.4, True)
    assert position.restarted(0.25) == Position(0.25, 0.0, 0.2, True)  # now twice as long
    assert position.restarted(0.0) == NEVER and Position().restarted(0.5) == Position(0.5, 0.0, 0.5, True)
    assert not position.restarted(None).has_end

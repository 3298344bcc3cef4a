"""Measuring takes its share of a run and no more, whatever a measurement costs. The clock is a fake."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from curvmon.monitor.budget import FREE_SECONDS, Budget
from curvmon.monitor.plan import MIN_SHARE, SMALLEST, Plan
from tests.helpers.fake_clock import FakeClock

Costs = Callable[[random.Random], float]


def budget_with(max_overhead: float | None, free: float = FREE_SECONDS) -> tuple[Budget, FakeClock]:
    """In training since now, which has just begun: all of the free seconds may be spent."""
    clock = FakeClock()
    budget = Budget(max_overhead, free, clock)
    budget.start_training()
    budget.reach(0.0)
    return budget, clock


def spend(budget: Budget, clock: FakeClock, seconds: float, plan: Plan) -> float:
    with budget.measuring():
        spent = clock.advance(seconds)
    budget.update_estimate(plan)
    return spent


def simulate(
    budget: Budget, clock: FakeClock, cost: Costs, *, validations: int = 1000, interval: float = 10.0, seed: int = 0
) -> Any:
    """Training, and at every validation a measurement, a full one at `cost` seconds, a smaller one at its plan's."""
    generator, trained, costs, shares = random.Random(seed), 0.0, [], []
    for _ in range(validations):
        trained += clock.advance(interval * generator.uniform(0.5, 1.5))
        plan = budget.plan()
        shares.append(plan.share)
        if plan.skips:
            budget.skip()
        else:
            costs.append(spend(budget, clock, plan.cost * cost(generator), plan))
    return SimpleNamespace(trained=trained, costs=costs, shares=shares, spent=sum(costs))


COSTS: dict[str, Costs] = {
    "cheap": lambda g: 0.01,
    "expensive": lambda g: 8.0,
    "noisy": lambda g: g.lognormvariate(1.0, 1.0),
    "two kinds": lambda g: g.choice([0.1, 60.0]),
    "nothing or much": lambda g: g.choice([0.0, 0.0, 100.0]),
    "more expensive than the run": lambda g: 5000.0,
}


@pytest.mark.parametrize("max_overhead", [0.0, 0.01, 0.05, 0.5])
@pytest.mark.parametrize("free", [0.0, FREE_SECONDS])
@pytest.mark.parametrize("name", COSTS)
def test_overhead_is_bounded(name: str, free: float, max_overhead: float) -> None:
    """spent <= free + max_overhead * trained + one measurement, at every moment."""
    for seed in range(3):
        budget, clock = budget_with(max_overhead, free)
        run = simulate(budget, clock, COSTS[name], seed=seed)
        assert budget.measured == pytest.approx(run.spent)
        assert budget.trained == pytest.approx(run.trained)
        assert run.spent <= free + max_overhead * run.trained + max(run.costs)
        assert run.costs and budget.skipped == run.shares.count(0.0)
        assert all(share == 0 or MIN_SHARE <= share <= 1 for share in run.shares)
        assert budget.overhead == pytest.approx(run.spent / run.trained)


def test_overhead_is_bounded_at_every_moment() -> None:
    (budget, clock), generator, trained, largest = budget_with(0.05, 3.0), random.Random(1), 0.0, 0.0
    for _ in range(1000):
        trained += clock.advance(generator.expovariate(0.2))
        plan = budget.plan()
        if not plan.skips:
            cost = spend(budget, clock, plan.cost * generator.lognormvariate(0.0, 1.5), plan)
            largest = max(largest, cost)
        assert budget.measured <= 3.0 + 0.05 * trained + largest


def test_the_allowance_is_used() -> None:
    """Measurements of 8 s every 10 s of training, 5 % allowed: one in sixteen in the long run."""
    run = simulate(*budget_with(0.05), COSTS["expensive"])
    assert run.spent >= 0.9 * (FREE_SECONDS + 0.05 * run.trained)
    assert 0.0 in run.shares and 1.0 in run.shares and any(MIN_SHARE <= share < 1 for share in run.shares)


def test_measurements_that_fit_are_full_ones() -> None:
    assert set(simulate(*budget_with(0.05), COSTS["cheap"]).shares) == {1.0}
    assert set(simulate(*budget_with(None), COSTS["more expensive than the run"]).shares) == {1.0}


def test_the_free_seconds_come_first() -> None:
    budget, clock = budget_with(0.0, free=10.0)
    shares = []
    for _ in range(6):
        plan = budget.plan()
        shares.append(plan.share)
        if not plan.skips:
            spend(budget, clock, 4.0 * plan.cost, plan)
    # 4 + 4, then a smaller one with the two seconds left, then nothing
    assert shares == [1.0, 1.0, pytest.approx(2 / 7), 0.0, 0.0, 0.0]
    assert budget.measured == pytest.approx(10.0, abs=1e-5)


def test_the_smallest_is_skipped_until_it_fits() -> None:
    budget, clock = budget_with(0.1, free=0.0)
    spend(budget, clock, 8.0, budget.plan())  # the cost is not known yet
    clock.advance(80.0)
    assert budget.plan().skips  # 8 seconds allowed, all of them spent
    clock.advance(8.0 / 0.1 * SMALLEST.cost - 1.0)
    assert budget.plan().skips
    clock.advance(1.5)
    assert budget.plan().share == pytest.approx(MIN_SHARE, abs=0.01)
    clock.advance(80.0 - 8.0 / 0.1 * SMALLEST.cost)
    assert budget.plan().share == 1.0


def test_plan_is_a_query() -> None:
    """Every rank plans, and follows the plan of rank 0: only `skip` counts."""
    budget, clock = budget_with(0.0, free=1.0)
    spend(budget, clock, 4.0, budget.plan())
    before = budget.state_dict()
    assert budget.plan().skips and budget.plan().skips
    assert budget.state_dict() == before
    budget.skip()
    assert budget.skipped == 1


def test_one_slow_measurement_does_not_end_it() -> None:
    """A busy machine once: a hundred times the usual; the allowance catches up."""
    costs = iter([1.0] * 10 + [100.0] + [1.0] * 1000)
    run = simulate(*budget_with(0.05), lambda generator: next(costs), validations=600)
    assert 0.0 in run.shares
    assert run.shares[-100:].count(0.0) < 100 and len(run.costs) > 100


def test_a_failed_measurement_counts() -> None:
    budget, clock = budget_with(0.05, free=1.0)
    clock.advance(5.0)
    with pytest.raises(KeyboardInterrupt), budget.measuring():
        clock.advance(3.0)
        raise KeyboardInterrupt
    assert budget.measured == 3.0 and budget.trained == 5.0


def test_failed_measurements_leave_the_estimate_unchanged() -> None:
    """Otherwise a series of early failures would make a measurement look cheap, and a full one would be planned."""
    budget, clock = budget_with(0.0, free=12.0)
    spend(budget, clock, 8.0, budget.plan())
    for _ in range(8):
        with budget.measuring():
            clock.advance(0.125)
    assert budget.measured == 9.0
    # three seconds are left: too few for the smallest one if a full one takes 8
    assert budget.plan().skips
    budget.free_seconds += 1.0
    assert budget.plan() == Plan.costing(4.0 / 8.0)


def test_overhead_is_bounded_if_every_measurement_fails() -> None:
    budget, clock = budget_with(0.05, free=3.0)
    for _ in range(100):
        clock.advance(10.0)
        if budget.plan().skips:
            budget.skip()
        else:
            with budget.measuring():
                clock.advance(4.0)
        assert budget.measured <= 3.0 + 0.05 * budget.trained + 4.0
    assert budget.skipped > 80


def test_a_clock_that_goes_back_does_not_count() -> None:
    budget, clock = budget_with(0.05, free=1.0)
    clock.advance(5.0)
    spend(budget, clock, 3.0, budget.plan())
    clock.advance(-4.0)
    assert budget.plan().skips and budget.trained == 5.0
    assert budget.overhead == 3.0 / 5.0


def test_without_training_there_is_no_overhead() -> None:
    clock = FakeClock()
    budget = Budget(0.05, clock=clock)
    assert budget.overhead == 0.0
    spend(budget, clock, 3.0, budget.plan())
    assert budget.overhead == 0.0 and budget.trained == 0.0 and budget.measured == 3.0


def test_reporting_counts_but_is_not_part_of_the_cost_of_a_measurement() -> None:
    budget, clock = budget_with(0.0, free=14.0)
    spend(budget, clock, 4.0, budget.plan())
    with budget.reporting():
        clock.advance(4.0)
    assert budget.measured == 8.0 and budget.last_seconds == 4.0
    assert budget.plan() == Plan.costing(2.0 / 4.0)  # another four seconds are for the pictures of the last one
    assert budget.trained == 0.0


def test_state_goes_through_a_checkpoint() -> None:
    (first, first_clock), (second, second_clock) = budget_with(0.05), budget_with(0.05)
    before = simulate(first, first_clock, COSTS["noisy"], validations=50)
    second.load_state_dict(first.state_dict())
    for budget in (first, second):
        budget.start_training()
    assert second.trained == first.trained == before.trained
    runs = [
        simulate(budget, clock, COSTS["noisy"], validations=50, seed=1)
        for budget, clock in ((first, first_clock), (second, second_clock))
    ]
    assert runs[0].shares == runs[1].shares and first.state_dict() == second.state_dict()


def whole_run(
    budget: Budget, clock: FakeClock, cost: float, validations: int, interval: float, known: bool = True
) -> list[float]:
    """The shares of all validations; before the first step there is a full measurement."""
    spend(budget, clock, cost, budget.plan())
    shares = []
    for i in range(1, validations + 1):
        clock.advance(interval)
        budget.reach(i / validations if known else None)
        plan = budget.plan()
        shares.append(plan.share)
        if not plan.skips:
            spend(budget, clock, plan.cost * cost, plan)
    return shares


@pytest.mark.parametrize("validations", [4, 16, 100, 1000])
@pytest.mark.parametrize("affordable", [0.5, 1.0, 2.0, 3.7, 10.0, 60.0, 5000.0])
def test_measurements_are_spread_over_the_run(affordable: float, validations: int) -> None:
    """One in every quarter, as far apart as possible, and one at the end; within the budget but for the last one."""
    interval, cost = 10.0, 10.0 * validations * 0.05 / (affordable + 1)  # and the first one
    budget, clock = budget_with(0.05, free=0.0)
    shares = whole_run(budget, clock, cost, validations, interval)
    measured = [i for i, share in enumerate(shares) if share]
    assert shares[-1] >= MIN_SHARE
    assert budget.measured <= 0.05 * budget.trained + MIN_SHARE * cost + 1e-6
    if affordable >= 1.1:
        quarters = {4 * i // validations for i in measured}
        assert quarters == {0, 1, 2, 3}
    if affordable >= 10:
        assert sum(shares) >= min(0.85 * affordable - 1, 0.999 * validations)
        gaps = [b - a for a, b in zip([-1, *measured], measured)]
        assert max(gaps) <= 2 * min(gaps) + 1


def test_the_intervals_grow_where_the_end_is_not_known() -> None:
    budget, clock = budget_with(0.01)
    shares = whole_run(budget, clock, cost=2.0, validations=2000, interval=10.0, known=False)
    measured = [i for i, share in enumerate(shares) if share]
    early, late = sum(i < 200 for i in measured), sum(i >= 1800 for i in measured)
    assert early > 1.5 * late > 0
    assert budget.measured <= 30.0 + 0.01 * budget.trained + 2.0


def test_a_run_that_is_resumed_and_extended_is_planned_anew() -> None:
    budget, clock = budget_with(0.05, free=0.0)
    whole_run(budget, clock, cost=5.0, validations=20, interval=10.0)
    shares = []
    for i in range(21, 41):
        clock.advance(10.0)
        budget.reach(i / 40)
        plan = budget.plan()
        shares.append(plan.share)
        if not plan.skips:
            spend(budget, clock, plan.cost * 5.0, plan)
    assert shares[-1] > 0 and sum(share > 0 for share in shares[:10]) >= 1


def test_hvps_of_vital_signs_have_a_share_of_their_own() -> None:
    budget, clock = budget_with(0.05, free=100.0)
    assert not budget.affords_sharpness  # nothing is known about their cost
    spend(budget, clock, 10.0, budget.plan())
    taken = 0
    for _ in range(1000):
        clock.advance(10.0)
        with_sharpness = budget.affords_sharpness
        taken += with_sharpness
        with budget.taking_vital_signs(with_sharpness):
            clock.advance(0.4 if with_sharpness else 0.01)
    assert budget.vital_seconds <= 0.006 * budget.trained and taken >= 80

"""Measuring takes its share of a run and no more, whatever a measurement costs."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader

from curvmon import CurvatureMonitor
from curvmon.integrations.lightning import callback
from curvmon.monitor import measuring
from curvmon.monitor.budget import FREE_SECONDS, LEAST_SHARE, Budget, Plan
from curvmon.monitor.taking import take
from tests.helpers.module_zoo import BATCH, REGRESSION, REGRESSION_VAL, Regression
from tests.integrations.lightning.test_module_zoo import QUIET

Costs = Callable[[random.Random], float]


def simulate(budget: Budget, cost: Costs, *, validations: int = 1000, interval: float = 10.0, seed: int = 0) -> Any:
    """Training, and at every validation a measurement, a full one at `cost` seconds, a smaller one at its share."""
    generator, trained, costs, shares = random.Random(seed), 0.0, [], []
    for _ in range(validations):
        trained += interval * generator.uniform(0.5, 1.5)
        plan = budget.plan(trained)
        shares.append(plan.share)
        if not plan.skips:
            costs.append(plan.share * cost(generator))
            budget.spent(costs[-1], plan)
    return SimpleNamespace(trained=trained, costs=costs, shares=shares, spent=sum(costs))


COSTS: dict[str, Costs] = {
    "cheap": lambda g: 0.01,
    "dear": lambda g: 8.0,
    "noisy": lambda g: g.lognormvariate(1.0, 1.0),
    "two kinds": lambda g: g.choice([0.1, 60.0]),
    "nothing or much": lambda g: g.choice([0.0, 0.0, 100.0]),
    "dearer than all": lambda g: 5000.0,
}


@pytest.mark.parametrize("max_overhead", [0.0, 0.01, 0.05, 0.5])
@pytest.mark.parametrize("free", [0.0, FREE_SECONDS])
@pytest.mark.parametrize("name", COSTS)
def test_overhead_is_bounded(name: str, free: float, max_overhead: float) -> None:
    """spent <= free + max_overhead * trained + one measurement, at every moment."""
    for seed in range(3):
        budget = Budget(max_overhead, free)
        run = simulate(budget, COSTS[name], seed=seed)
        assert budget.measured == pytest.approx(run.spent)
        assert run.spent <= free + max_overhead * run.trained + max(run.costs)
        assert run.costs and budget.skipped == run.shares.count(0.0)
        assert all(share == 0 or LEAST_SHARE <= share <= 1 for share in run.shares)
        assert budget.overhead(run.trained) == pytest.approx(run.spent / run.trained)


def test_the_bound_holds_at_every_moment() -> None:
    generator, budget, trained, dearest = random.Random(1), Budget(0.05, 3.0), 0.0, 0.0
    for _ in range(1000):
        trained += generator.expovariate(0.2)
        plan = budget.plan(trained)
        if not plan.skips:
            cost = plan.share * generator.lognormvariate(0.0, 1.5)
            dearest = max(dearest, cost)
            budget.spent(cost, plan)
        assert budget.measured <= 3.0 + 0.05 * trained + dearest


def test_the_allowance_is_used() -> None:
    """Measurements of 8 s every 10 s of training, 5 % allowed: one in sixteen in the long run."""
    run = simulate(Budget(0.05), COSTS["dear"])
    assert run.spent >= 0.9 * (FREE_SECONDS + 0.05 * run.trained)
    assert 0.0 in run.shares and 1.0 in run.shares and any(LEAST_SHARE <= share < 1 for share in run.shares)


def test_what_fits_is_never_thinned_out() -> None:
    assert set(simulate(Budget(0.05), COSTS["cheap"]).shares) == {1.0}
    assert set(simulate(Budget(None), COSTS["dearer than all"]).shares) == {1.0}


def test_the_free_seconds_come_first() -> None:
    budget = Budget(0.0, free=10.0)
    shares = []
    for _ in range(6):
        plan = budget.plan(0.0)
        shares.append(plan.share)
        if not plan.skips:
            budget.spent(4.0 * plan.share, plan)
    # 4 + 4, then half of one with the two seconds left, then nothing
    assert shares == [1.0, 1.0, 0.5, 0.0, 0.0, 0.0]
    assert budget.measured == 10.0 and budget.skipped == 3


def test_less_than_a_quarter_is_skipped_until_one_fits() -> None:
    budget = Budget(0.1, free=0.0)
    budget.spent(8.0, budget.plan(0.0))  # nothing is known yet: it is made
    assert budget.plan(80.0).skips  # 8 seconds allowed, all of them spent
    assert budget.plan(99.0).skips  # 1.9 are less than a quarter of 8
    assert budget.plan(100.0).share == 0.25
    assert budget.plan(140.0).share == 0.75
    assert budget.plan(160.0).share == 1.0
    assert budget.skipped == 2


def test_one_slow_measurement_does_not_end_it() -> None:
    """A busy machine once: a hundred times the usual; the allowance catches up."""
    costs = iter([1.0] * 10 + [100.0] + [1.0] * 1000)
    run = simulate(Budget(0.05), lambda generator: next(costs), validations=600)
    assert 0.0 in run.shares
    assert run.shares[-100:].count(0.0) < 100 and len(run.costs) > 100


def test_a_failed_measurement_counts_and_a_clock_that_goes_back_does_not() -> None:
    budget = Budget(0.05, free=1.0)
    plan = budget.plan(5.0)
    budget.spent(3.0, plan)
    assert budget.plan(1.0).skips and budget.trained == 5.0
    assert budget.overhead(0.0) == 3.0 / 5.0
    assert Budget(0.05).overhead(0.0) == 0.0


def test_what_another_process_planned_is_not_learnt_from_when_skipped() -> None:
    budget = Budget(0.05, free=10.0)
    budget.spent(0.0, Plan(0.0))
    assert budget.plan(0.0).share == 1.0 and budget.measured == 0.0


def test_state_goes_through_a_checkpoint() -> None:
    one, other = Budget(0.05), Budget(0.05)
    simulate(one, COSTS["noisy"], validations=50)
    other.load_state_dict(one.state_dict())
    ours, theirs = (simulate(budget, COSTS["noisy"], validations=50, seed=1) for budget in (one, other))
    assert ours.shares == theirs.shares and one.state_dict() == other.state_dict()


# ---- in a run, with a clock of its own ----


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def perf_counter(self) -> float:
        return self.now


class Timed(pl.Callback):
    """A training step takes a second."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def on_train_batch_end(self, *args: Any) -> None:
        self._clock.now += 1.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(callback, "time", found)
    return found


class Run:
    """Four steps an epoch, and `seconds` for every product of a measurement."""

    def __init__(self, clock: Clock, seconds: float, epochs: int, free: float = FREE_SECONDS, **options: Any) -> None:
        began, self.monitor, self.trained = clock.now, CurvatureMonitor(**options), 4.0 * epochs
        self.monitor._budget._free = free

        def taken(*args: Any, **kwargs: Any) -> Any:
            found = take(*args, **kwargs)
            parts = (found[0].measurement, found[0].spectrum)
            clock.now += seconds * sum(part.hvps for part in parts if part is not None)
            return found

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(measuring, "take", taken)
            torch.manual_seed(0)
            trainer = pl.Trainer(callbacks=[Timed(clock), self.monitor], **{**QUIET, "max_epochs": epochs})
            trainer.fit(Regression(), DataLoader(REGRESSION, BATCH), DataLoader(REGRESSION_VAL, BATCH))
        self.spent = clock.now - began - self.trained
        self.snapshots, self.trainer = self.monitor.snapshots, trainer


def test_a_run_stays_within_its_budget(clock: Clock) -> None:
    run = Run(clock, 0.2, epochs=30, eigenvalues=2, max_overhead=0.1)
    assert 0 < run.spent <= FREE_SECONDS + 0.1 * run.trained + max(s.seconds for s in run.snapshots)
    assert sum(s.seconds for s in run.snapshots) == pytest.approx(run.spent)
    last = run.snapshots[-1]
    assert last.skipped > 0 and len(run.snapshots) < 31
    # over the training until then, the measurements left out
    assert last.overhead == pytest.approx(run.spent / (4.0 * (last.epoch + 1)))


def test_a_measurement_that_does_not_fit_takes_fewer_products(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="curvmon")
    full = Run(clock, 1.0, epochs=1, eigenvalues=0, max_overhead=None).snapshots[0]
    assert full.measurement is not None and full.seconds == full.measurement.hvps
    run = Run(clock, 1.0, epochs=3, eigenvalues=0, max_overhead=0.0, free=1.75 * full.seconds)
    first, second = run.monitor.history
    assert first.hvps == full.measurement.hvps
    assert second.hvps <= round(0.75 * first.hvps) < first.hvps and second.resonance.isfinite().all()
    assert run.monitor._budget.skipped == 2
    # told at the validation that was left out, not at the next measurement, which may never come
    assert run.trainer.callback_metrics["curvmon/skipped"] == 2
    (said,) = [record.getMessage() for record in caplog.records if record.name == "curvmon"]
    assert said.startswith("curvmon leaves out measurements to stay within max_overhead=0 of")


def test_short_runs_are_measured_in_full(clock: Clock) -> None:
    run = Run(clock, 0.01, epochs=5)
    assert len(run.monitor.history) == len(run.monitor.spectra) == 6 and run.snapshots[-1].skipped == 0
    assert 0 < run.spent < FREE_SECONDS


def test_no_limit(clock: Clock) -> None:
    run = Run(clock, 1000.0, epochs=4, eigenvalues=0, max_overhead=None)
    assert len(run.monitor.history) == 5 and run.snapshots[-1].overhead == pytest.approx(run.spent / run.trained)

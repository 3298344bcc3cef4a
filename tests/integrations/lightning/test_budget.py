"""The budget in a real training run, with a fake clock."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader

from curvmon.monitor.budget import FREE_SECONDS, Budget
from curvmon.monitor.fallbacks import Failure
from curvmon.monitor.measurement import Outcome, attempt
from tests.helpers.budgets import monitor_with
from tests.helpers.fake_clock import FakeClock
from tests.helpers.lightning_runs import QUIET
from tests.helpers.module_zoo import BATCH, REGRESSION, REGRESSION_VAL, Regression


class Timed(pl.Callback):
    """A training step takes a second."""

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock

    def on_train_batch_end(self, *args: Any) -> None:
        self._clock.advance(1.0)


class Run:
    """Four steps an epoch, and `seconds` for every product of a measurement."""

    def __init__(self, seconds: float, epochs: int, free: float = FREE_SECONDS, **options: Any) -> None:
        clock, self.trained = FakeClock(), 4.0 * epochs
        self.budget = Budget(options.get("max_overhead", 0.05), free, clock)

        def timed_attempt(*args: Any) -> Outcome:
            outcome = attempt(*args)
            parts = (outcome.measurement, outcome.spectrum)
            clock.advance(seconds * sum(part.hvps for part in parts if part is not None))
            return outcome

        self.monitor = monitor_with(self.budget, timed_attempt, **options)
        torch.manual_seed(0)
        began = clock()
        trainer = pl.Trainer(callbacks=[Timed(clock), self.monitor], **{**QUIET, "max_epochs": epochs})
        trainer.fit(Regression(), DataLoader(REGRESSION, BATCH), DataLoader(REGRESSION_VAL, BATCH))
        self.spent = clock() - began - self.trained
        self.snapshots, self.trainer = self.monitor.snapshots, trainer


def test_a_run_stays_within_its_budget() -> None:
    run = Run(0.2, epochs=30, eigenvalues=2, max_overhead=0.1)
    assert 0 < run.spent <= FREE_SECONDS + 0.1 * run.trained + max(s.seconds for s in run.snapshots)
    assert sum(s.seconds for s in run.snapshots) == pytest.approx(run.spent)
    last = run.snapshots[-1]
    assert last.skipped > 0 and len(run.snapshots) == 31 and last.is_full
    assert sum(s.is_full for s in run.snapshots) == 31 - last.skipped
    assert all(math.isfinite(s.loss) for s in run.snapshots)
    # over the training time until then, measuring excluded
    assert last.overhead == pytest.approx(run.spent / (4.0 * (last.epoch + 1)))


def test_a_measurement_that_does_not_fit_takes_fewer_products(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="pytorch_lightning.callbacks.curvmon")
    full = Run(1.0, epochs=1, eigenvalues=0, max_overhead=None).snapshots[0]
    assert full.measurement is not None and full.seconds == full.measurement.hvps
    run = Run(1.0, epochs=3, eigenvalues=0, max_overhead=0.0, free=1.75 * full.seconds)
    first, last = run.monitor.history
    assert first.hvps == full.measurement.hvps
    assert last.hvps <= round(0.75 * first.hvps) < first.hvps and last.resonance.isfinite().all()
    assert [snapshot.is_full for snapshot in run.snapshots] == [True, False, False, True]
    assert run.budget.skipped == 2
    assert run.trainer.callback_metrics["curvmon_detail/skipped"] == 2
    said = [record.getMessage() for record in caplog.records if record.name.endswith("curvmon")]
    planned, skipped, done = said[-3:]
    assert planned.startswith("curvmon: 3 layers") and skipped.startswith("curvmon: vital signs only at step 3: full ")
    assert done.startswith("curvmon: measured 2 of 4 in full, 4 vital signs, 0 alerts, overhead ")
    limit = f"the limit is 0 % plus {1.75 * full.seconds:g} s; the first and the last measurement are made in any case"
    assert done.endswith(f" % ({run.spent:.0f} s; {limit})")


def test_short_runs_are_measured_in_full() -> None:
    run = Run(0.01, epochs=5)
    assert len(run.monitor.history) == len(run.monitor.spectra) == 6 and run.snapshots[-1].skipped == 0
    assert 0 < run.spent < FREE_SECONDS


def test_no_limit() -> None:
    run = Run(1000.0, epochs=4, eigenvalues=0, max_overhead=None)
    assert len(run.monitor.history) == 5 and run.snapshots[-1].overhead == pytest.approx(run.spent / run.trained)


@pytest.mark.parametrize("fails", [True, False])
def test_failed_measurements_do_not_change_the_estimate(fails: bool) -> None:
    def failing(*args: Any) -> Outcome:
        return Outcome(failure=Failure("transient", "ValueError: no")) if fails else attempt(*args)

    budget = Budget(0.05)
    monitor = monitor_with(budget, failing, eigenvalues=0, heatmaps=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pl.Trainer(callbacks=[monitor], **QUIET).fit(
            Regression(), DataLoader(REGRESSION, BATCH), DataLoader(REGRESSION_VAL, BATCH)
        )
    assert budget.measured > 0
    assert (budget.state_dict()["full_seconds"] is None) == fails

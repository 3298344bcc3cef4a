"""The budget holds, and the whole run is looked at, whatever the Trainer's arguments. By a fake clock."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch

from tests.helpers.timed_runs import STEPS, Finished, timed_run

EPOCHS = 40


def assert_looked_at(run: Finished) -> None:
    """Within the budget, before the first step, in every quarter, and at the end."""
    assert run.within_budget
    assert run.snapshots[0].is_full and run.snapshots[0].step == 0 and run.snapshots[-1].is_full
    assert min(run.quarters) >= 1
    assert all(s.vitals is not None for s in run.snapshots)


# a full measurement for every 40 of the 160 steps at 5 %, and one more
@pytest.mark.parametrize("cost", [0.01, 0.5, 1.0, 1.5, 2.0])
def test_every_cost(cost: float) -> None:
    assert_looked_at(timed_run(cost, max_epochs=EPOCHS))


@pytest.mark.parametrize(
    "options",
    [
        {"val_check_interval": 0.5},
        {"check_val_every_n_epoch": 3},
        {"val_check_interval": 7, "check_val_every_n_epoch": None},
        {"max_steps": EPOCHS * STEPS, "max_epochs": -1},
        {"limit_val_batches": 0},
        {"accumulate_grad_batches": 2},
        {"num_sanity_val_steps": 0},
        {"limit_train_batches": 0.5, "max_epochs": 2 * EPOCHS},
    ],
    ids=str,
)
def test_every_way_of_validating(options: dict[str, Any]) -> None:
    run = timed_run(1.5, **{"max_epochs": EPOCHS, **options})
    assert_looked_at(run)
    assert run.budget.trained == EPOCHS * STEPS


@pytest.mark.parametrize("every", [1, 3, 50])
@pytest.mark.parametrize("validations", [None, 4])
def test_measurements_at_training_steps(every: int, validations: int | None) -> None:
    options = {"every_n_train_steps": every, "every_n_validations": validations}
    run = timed_run(1.0, monitor=options, max_epochs=EPOCHS)
    assert run.within_budget and run.snapshots[0].is_full
    if every < 50:
        assert min(run.quarters) >= 1
    assert max(s.step for s in run.snapshots if s.is_full) >= EPOCHS * STEPS - every - 1


def test_vital_signs_at_training_steps_are_part_of_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """One step takes a second, vital signs a tenth: in every step they would take a tenth of the training time."""
    from curvmon.monitor.measurement import MeasurementRunner

    original, taken = MeasurementRunner.vital_signs, list[int]()

    def slow(self: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        taken.append(1)
        target.model.trainer.callbacks[0]._clock.advance(0.1)
        return original(self, target, *args, **kwargs)

    monkeypatch.setattr(MeasurementRunner, "vital_signs", slow)
    options = {"every_n_train_steps": 1, "every_n_validations": None}
    run = timed_run(2.0, monitor=options, max_epochs=EPOCHS)
    # in all validations, with the measurements, and beyond them for half a percent
    assert EPOCHS <= len(taken) <= EPOCHS + len(run.plans) + 0.005 * EPOCHS * STEPS / 0.1
    assert len(run.snapshots) == len(taken)


def test_time_is_the_end_of_the_run() -> None:
    """Trainer(max_time=...): 100 of the 4,000 steps that max_epochs would allow."""
    run = timed_run(1.0, max_time=100, max_epochs=1000)
    assert_looked_at(run)
    assert run.trainer.global_step < 110 and len(run.plans) >= 4


@pytest.mark.parametrize("options", [{"max_epochs": -1}, {"max_epochs": 1000}], ids=str)
def test_early_stopping(options: dict[str, Any]) -> None:
    class Stop(pl.Callback):
        def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            trainer.should_stop = trainer.current_epoch == EPOCHS - 1

    run = timed_run(0.5, callbacks=[Stop()], **options)
    assert run.trainer.global_step == EPOCHS * STEPS
    assert run.within_budget or options["max_epochs"] == 1000  # of a run of 1000 epochs it is
    assert run.budget.measured <= 0.05 * 1000 * STEPS
    assert run.snapshots[0].is_full and run.snapshots[-1].is_full and len(run.plans) >= 4


@pytest.mark.parametrize("validation", [1.0, 10.0, 300.0])
def test_validation_may_take_longer_than_training(validation: float) -> None:
    """It is part of the time that the overhead is a share of."""
    run = timed_run(1.0, validation=validation, max_epochs=12)
    assert_looked_at(run)
    assert run.budget.trained == 12 * (STEPS + validation)


def test_where_memory_runs_out() -> None:
    run = timed_run(1.0, max_epochs=EPOCHS, fails=lambda number: number in (2, 3, 4))
    assert run.within_budget and run.snapshots[-1].is_full
    # half the samples, and their half, belong to the same measurement; the next validation tries again
    assert run.budget.measured <= 0.05 * EPOCHS * STEPS + 3.0


def test_where_memory_always_runs_out() -> None:
    """Every measurement tries several times, until a batch cannot be split."""
    run = timed_run(1.0, max_epochs=EPOCHS, fails=lambda number: True)
    assert not any(s.is_full for s in run.snapshots)
    assert len(run.snapshots) == EPOCHS + 1 and all(math.isfinite(s.loss) for s in run.snapshots)
    one = sum(plan.cost for plan in run.plans[:6])
    assert run.budget.measured <= 0.05 * EPOCHS * STEPS + 2 * one


def halted(at: int) -> pl.Callback:
    """Stops in the middle of an epoch."""

    class Halt(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            trainer.should_stop = trainer.should_stop or trainer.global_step == at

    return Halt()


@pytest.mark.parametrize("at", [20 * STEPS, 20 * STEPS + 2], ids=["after an epoch", "within one"])
@pytest.mark.parametrize("watched", [True, False], ids=["watched before", "not watched before"])
def test_resumed_in_the_middle(at: int, watched: bool, tmp_path: Path) -> None:
    """What is left of the run is looked at as a whole would be."""
    path = tmp_path / "half.ckpt"
    first = timed_run(1.0, max_epochs=EPOCHS, callbacks=[halted(at)])
    if not watched:
        first.trainer.callbacks.remove(first.monitor)  # type: ignore[attr-defined]
    first.trainer.save_checkpoint(path)
    second = timed_run(1.0, max_epochs=EPOCHS, ckpt=path)
    steps = second.trainer.global_step
    assert EPOCHS * STEPS - steps in (0, 2)  # Lightning counts an epoch that was stopped for a whole one
    trained = steps - (0 if watched else at)
    assert second.budget.trained == trained
    assert second.within_budget and second.snapshots[-1].is_full
    own = [s for s in second.snapshots if s.step >= at]
    assert any(s.is_full for s in own if s.step < at + (steps - at) / 2)
    measured = second.budget.measured - (first.budget.measured if watched else 0.0)
    assert measured >= 0.4 * 0.05 * (steps - at)


def test_another_fit_is_planned_for_itself() -> None:
    """Folds of a cross-validation with one monitor: the second does not take the first one's time for its own."""
    run = timed_run(1.0, max_epochs=EPOCHS)
    before, count = run.budget.measured, len(run.plans)
    run.clock.advance(5000.0)  # between the two
    from torch.utils.data import DataLoader

    from tests.helpers.lightning_runs import QUIET
    from tests.helpers.module_zoo import BATCH, REGRESSION, REGRESSION_VAL, Regression
    from tests.helpers.timed_runs import Timed

    torch.manual_seed(1)
    trainer = pl.Trainer(callbacks=[Timed(run.clock), run.monitor], **{**QUIET, "max_epochs": EPOCHS})
    trainer.fit(Regression(), DataLoader(REGRESSION, BATCH), DataLoader(REGRESSION_VAL, BATCH))
    assert run.budget.trained == 2 * EPOCHS * STEPS
    assert run.budget.measured - before <= 0.05 * EPOCHS * STEPS + 2.0
    assert len(run.plans) - count >= 4

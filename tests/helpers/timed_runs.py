"""Training runs by a fake clock: a training step, a validation and a full measurement take as long as a test says."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Timer
from torch.utils.data import DataLoader

from curvmon import CurvatureMonitor
from curvmon.monitor.budget import Budget
from curvmon.monitor.fallbacks import Failure
from curvmon.monitor.measurement import Outcome, Request, attempt
from curvmon.monitor.plan import Plan
from curvmon.monitor.process_group import Ranks
from curvmon.monitor.target import Target
from curvmon.records import Snapshot
from tests.helpers.budgets import monitor_with
from tests.helpers.fake_clock import FakeClock
from tests.helpers.lightning_runs import QUIET
from tests.helpers.module_zoo import BATCH, REGRESSION, REGRESSION_VAL, Regression

STEPS = len(REGRESSION) // BATCH
"""training steps of an epoch"""


class Timed(pl.Callback):
    """A training step takes a second, a validation `validation` seconds."""

    def __init__(self, clock: FakeClock, validation: float = 0.0) -> None:
        self._clock, self._validation = clock, validation

    def on_train_batch_end(self, *args: Any) -> None:
        self._clock.advance(1.0)

    def on_validation_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if not trainer.sanity_checking:
            self._clock.advance(self._validation)


class FakeTimer(Timer):
    """`max_time` by the fake clock."""

    def __init__(self, seconds: int, clock: FakeClock) -> None:
        super().__init__({"seconds": seconds}, verbose=False)
        self._clock, self._began = clock, clock()

    def time_elapsed(self, stage: str = "train") -> float:
        return self._clock() - self._began


@dataclass(frozen=True)
class Finished:
    """A run: what was measured, with which plans, how long it trained and measured, and its progress at each point."""

    monitor: CurvatureMonitor
    trainer: pl.Trainer
    clock: FakeClock
    plans: list[Plan]
    cost: float

    @property
    def snapshots(self) -> list[Snapshot]:
        return self.monitor.snapshots

    @property
    def budget(self) -> Budget:
        return self.monitor._recorder.budget

    @property
    def within_budget(self) -> bool:
        """5 %, and the first and the last measurement, which are made in any case."""
        ends = self.cost * (self.plans[0].cost + self.plans[-1].cost)
        assert self.budget.max_overhead is not None
        return self.budget.measured <= self.budget.free_seconds + self.budget.max_overhead * self.budget.trained + ends

    @property
    def quarters(self) -> list[int]:
        """Measurements in each quarter of the steps of the run, without the one before the first step."""
        steps, counts = self.trainer.fit_loop.epoch_loop._batches_that_stepped, [0] * 4
        for snapshot in self.snapshots:
            if snapshot.is_full and snapshot.step:
                counts[min(3, 4 * snapshot.step // steps)] += 1
        return counts


def timed_run(
    cost: float,
    *,
    share: float = 0.05,
    free: float = 0.0,
    validation: float = 0.0,
    max_time: int | None = None,
    fails: Any = lambda number: False,
    callbacks: Any = (),
    monitor: Any = (),
    ckpt: Path | None = None,
    val: Any = REGRESSION_VAL,
    **options: Any,
) -> Finished:
    """A full measurement takes `cost` seconds; `fails(number)`: it runs out of memory, in all of its time.

    The first one is made, the others repeat its result: when they are made is the question.

    `monitor`: options of the CurvatureMonitor.
    """
    clock, plans, outcomes = FakeClock(), list[Plan](), list[Outcome]()
    budget = Budget(share, free, clock)

    def attempted(target: Target, request: Request, ranks: Ranks) -> Outcome:
        plans.append(Plan(request.share))
        clock.advance(cost * plans[-1].cost)
        if fails(len(plans)):
            return Outcome(failure=Failure("memory", "OutOfMemoryError: out of memory"))
        if not outcomes:
            outcomes.append(attempt(target, request, ranks))
        return outcomes[0]

    settings = {"eigenvalues": 0, "heatmaps": False, "max_overhead": share, **dict(monitor)}
    own = monitor_with(budget, attempted, **settings)
    timer = [] if max_time is None else [FakeTimer(max_time, clock)]
    trainer = pl.Trainer(callbacks=[Timed(clock, validation), *timer, *callbacks, own], **{**QUIET, **options})
    torch.manual_seed(0)
    loaders = DataLoader(REGRESSION, BATCH), None if val is None else DataLoader(val, BATCH)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(Regression(), *loaders, ckpt_path=ckpt, **({} if ckpt is None else {"weights_only": True}))
    return Finished(own, trainer, clock, plans, cost)

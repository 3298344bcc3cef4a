"""Two runs from the same seed, with and without something: where they differ, bit by bit."""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from curvmon import CurvatureMonitor
from tests.helpers import side_effects as hazards
from tests.helpers.state_differences import PREFIX, RecordingLogger, Spy, State, differences, flattened, state_of

Options = dict[str, Any]


@dataclass
class Case:
    """One hazard: a module, or a setting of the Trainer, the loaders or the monitor."""

    module: Callable[[], Any] = hazards.Plain
    trainer: Options = field(default_factory=dict)
    monitor: Options = field(default_factory=dict)
    loader: Options = field(default_factory=dict)
    callbacks: tuple[Callable[[], Any], ...] = ()
    validation: bool = True
    entry: str = "fit"
    measured: int = 3
    """smallest number of measurements: before the first step and after each of two validations"""


@dataclass
class Run:
    spy: Spy
    logger: RecordingLogger
    module: Any
    end: State


def run(case: Case, *watchers: pl.Callback) -> Run:
    """Train from the same seed, with `watchers` right before the spy."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:  # what an earlier run has compiled would be taken for this one
        dynamo.reset()
        dynamo.utils.counters.clear()
    inputs, labels = torch.randn(24, 4), torch.randint(3, (24,))
    train = DataLoader(TensorDataset(inputs[:16], labels[:16]), batch_size=4, **case.loader)
    val = DataLoader(TensorDataset(inputs[16:], labels[16:]), batch_size=4)
    module, logger, spy = case.module(), RecordingLogger(), Spy()
    options: Options = {"max_epochs": 2, "log_every_n_steps": 1, **case.trainer}
    own = [make() for make in case.callbacks]
    quiet = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    trainer = pl.Trainer(accelerator="cpu", logger=logger, callbacks=[*own, *watchers, spy], **quiet, **options)
    returned: list[Any] = []
    if "validate" in case.entry:
        returned.append(trainer.validate(module, val, verbose=False))
    if "fit" in case.entry:
        trainer.fit(module, train, val if case.validation else None)
    compiled = sys.modules.get("torch._dynamo")
    left = flattened(
        rows=logger.others(),
        experiment=logger.experiment.calls,
        returned=returned,
        callbacks=[vars(callback) for callback in own],
        compiled=[{} if compiled is None else dict(compiled.utils.counters[name]) for name in ("frames", "stats")],
    )
    return Run(spy, logger, module, state_of(trainer, module) | left)


def traces(one: Run, other: Run) -> list[str]:
    """The differences between two runs, at the first hook after which there are some."""
    looks = [[hook for hook, _ in found.spy.seen] for found in (one, other)]
    if looks[0] != looks[1]:
        return [f"other hooks: {looks}"]
    for (hook, before), (_, after) in zip(one.spy.seen, other.spy.seen):
        if found := differences(before, after):
            return [f"{hook}: {name}" for name in found]
    return differences(one.end, other.end)


def monitor_of(case: Case) -> CurvatureMonitor:
    options = {"eigenvalues": 1, "probe_size": 8, "heatmaps": False, "max_overhead": None, "pulse": 1, **case.monitor}
    return CurvatureMonitor(log_key_prefix=PREFIX, **options)


def both(case: Case, monitor: CurvatureMonitor) -> tuple[list[str], list[str]]:
    """The differences that the monitor makes, and its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = traces(run(case), run(case, monitor))
    return found[:20], [str(w.message) for w in caught if "curvmon" in str(w.message)]

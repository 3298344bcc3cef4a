"""Is the critical learning rate critical? One step at half of it, and one at twice of it, on the batch it belongs to.

The loss of the batch is measured before and after a step of the same direction. At half the critical rate it should
fall, at twice it should rise: for the rate of this batch alone, and for the smoothed one of `InstabilityDetector`.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.pulse_networks import OPTIMIZERS, Batch, Family, loss
from benchmarks.pulse_runs import Run, put
from curvmon.alerts.instability import InstabilityDetector
from curvmon.records import PulseRecord

STEPS, EVERY, FIRST, TRIAL = 400, 4, 60, 20
"""a pulse at every fourth step, and from step 60 on a trial at every twentieth"""


class Trial(NamedTuple):
    family: str
    optimizer: str
    falls: bool | None
    """the loss falls at half the critical learning rate of this batch; None: it has none, H is not positive along u"""
    rises: bool | None
    """at twice"""
    falls_smoothed: bool | None
    rises_smoothed: bool | None


def trials(family: Family, optimizer: str, seed: int, data: Path | None) -> list[Trial]:
    run, detector, made = Run(family, optimizer, seed, data, every=EVERY), InstabilityDetector(), []
    for i in range(STEPS):
        parameters = list(run.model.parameters())
        before = [p.detach().clone() for p in parameters]
        generator = run.generator.get_state()
        step = run.train()
        if i % EVERY:
            continue
        record = PulseRecord(i, 0, step.gain, step.curvature, step.learning_rate, step.loss)
        detector.update(record)
        if i < FIRST or i % TRIAL:
            continue
        after = [p.detach().clone() for p in parameters]
        run.generator.set_state(generator)
        batch = run.draw()  # the same again

        outcomes: list[bool | None] = []
        for ratio in (record.ratio, detector.step_ratio):
            if not (math.isfinite(ratio) and ratio > 0):
                outcomes += [None, None]
                continue
            half, twice = (_change(run, batch, before, after, length / ratio) for length in (0.5, 2.0))
            outcomes += [half < 0, not twice <= 0]
        put(parameters, after)
        made.append(Trial(family.name, optimizer, *outcomes))
    return made


def _change(run: Run, batch: Batch, before: list[Tensor], after: list[Tensor], times: float) -> float:
    """Of the loss of the batch, by a step that is so many times as long."""
    parameters = list(run.model.parameters())
    losses = []
    for length in (0.0, times):
        put(parameters, [b - length * (b - a) for a, b in zip(after, before)])
        with torch.no_grad():
            losses.append(loss(run.model, batch).item())
    return losses[1] - losses[0]


def shares(made: list[Trial]) -> list[str]:
    """Of trials in which the loss falls at half, and rises at twice; of this batch, and smoothed; and how many."""
    columns = list(zip(*(trial[2:] for trial in made)))
    defined = [[outcome for outcome in column if outcome is not None] for column in columns]
    counted = [f"{sum(column)}/{len(column)} ({sum(column) / len(column):.0%})" if column else "" for column in defined]
    return [*counted, str(len(made) - len(defined[0]))]


def all_trials(families: list[Family], seeds: list[int], data: Path | None, cache: Path) -> list[Trial]:
    made = []
    for family in families:
        for optimizer in OPTIMIZERS:
            for seed in seeds:
                path = cache / f"trials-{family.name}-{optimizer}-{seed}-{data.stem if data else 'digits'}.pt"
                if not path.exists():
                    path.parent.mkdir(parents=True, exist_ok=True)
                    torch.save([tuple(trial) for trial in trials(family, optimizer, seed, data)], path)
                made += [Trial(*trial) for trial in torch.load(path, weights_only=True)]
    return made

"""Is the critical learning rate critical? One step at half of it, and one at twice of it, on the batch it belongs to.

The loss of the batch is measured before and after a step of the same direction. At half the critical rate it should
fall, at twice it should rise: for the rate of this batch alone, and for the one smoothed over pulses; both from a
quadratic model, and from crossings, where the loss of a batch is again what it was before the step. Every batch tried
is measured for its own crossing; the smoothed rate knows those that a monitor measures, with a monitor's tolerance.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.pulse_networks import OPTIMIZERS, Batch, Family, loss
from benchmarks.pulse_runs import Run, Step, put
from curvmon.alerts.instability import InstabilityDetector
from curvmon.monitor.pulse_taker import CLOSE, CROSSING_EVERY
from curvmon.operators.loss_crossing import TOLERANCE
from curvmon.operators.loss_differences import open_loss_along_step
from curvmon.records import PulseRecord

STEPS, EVERY, FIRST, TRIAL = 400, 4, 60, 20
"""a pulse at every fourth step, and from step 60 on a trial at every twentieth"""


class Trial(NamedTuple):
    """For each rate, whether the loss falls at half of it and rises at twice; None: there is no such rate."""

    family: str
    optimizer: str
    is_measured: bool
    """the crossing of this batch is in the smoothed rate"""
    quadratic_falls: bool | None
    quadratic_rises: bool | None
    measured_falls: bool | None
    measured_rises: bool | None
    smoothed_quadratic_falls: bool | None
    smoothed_quadratic_rises: bool | None
    smoothed_falls: bool | None
    """of `InstabilityDetector.critical_lr`"""
    smoothed_rises: bool | None


def trials(family: Family, optimizer: str, seed: int, data: Path | None) -> list[Trial]:
    run, detector, made = Run(family, optimizer, seed, data, every=EVERY), InstabilityDetector(), []
    for i in range(STEPS):
        parameters = list(run.model.parameters())
        before = [p.detach().clone() for p in parameters]
        generator = run.generator.get_state()
        step = run.train()
        if i % EVERY:
            continue
        after = [p.detach().clone() for p in parameters]
        run.generator.set_state(generator)
        batch = run.draw()  # the same again

        is_measured, is_tried = i // EVERY % CROSSING_EVERY == 0, i >= FIRST and i % TRIAL == 0
        crossing = _crossing(run, batch, before, step, CLOSE) if is_measured else math.nan
        rate = step.learning_rate
        record = PulseRecord(i, 0, step.gain, step.curvature, rate, step.loss, critical=crossing)
        detector.update(record)
        if not is_tried:
            continue
        closely = _crossing(run, batch, before, step, TOLERANCE)
        quadratic, smoothed = (1 / ratio if ratio else math.inf for ratio in (record.ratio, detector.step_ratio))
        lengths = (quadratic, closely, smoothed, detector.critical_lr / rate)
        outcomes: list[bool | None] = []
        for length in lengths:
            if not 0 < length < math.inf:
                outcomes += [None, None]
                continue
            half, twice = (_change(run, batch, before, after, times * length) for times in (0.5, 2.0))
            outcomes += [half < 0, not twice <= 0]
        put(parameters, after)
        made.append(Trial(family.name, optimizer, is_measured, *outcomes))
    return made


def _crossing(run: Run, batch: Batch, before: list[Tensor], step: Step, tolerance: float) -> float:
    with open_loss_along_step(run.model, batch, loss=loss, before=before) as along:
        return along.crossing(step.gain, step.curvature, tolerance)


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
    """Of trials in which the loss falls at half, and rises at twice, for each rate, of those that have it."""
    cells = []
    for column in list(zip(*made))[3:]:
        outcomes = [outcome for outcome in column if outcome is not None]
        cells.append(f"{sum(outcomes)}/{len(outcomes)} ({sum(outcomes) / len(outcomes):.0%})" if outcomes else "")
    return cells


def all_trials(families: list[Family], seeds: list[int], data: Path | None, cache: Path) -> list[Trial]:
    made = []
    for family in families:
        for optimizer in OPTIMIZERS:
            for seed in seeds:
                path = cache / f"crossings-{family.name}-{optimizer}-{seed}-{data.stem if data else 'digits'}.pt"
                if not path.exists():
                    path.parent.mkdir(parents=True, exist_ok=True)
                    torch.save([tuple(trial) for trial in trials(family, optimizer, seed, data)], path)
                made += [Trial(*trial) for trial in torch.load(path, weights_only=True)]
    return made

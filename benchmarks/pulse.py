"""Warnings before training diverges: share, lead and false warnings; the critical learning rate; what a pulse costs.

    python -m benchmarks.pulse --data cifar10_subset.npz --write docs/pulse-table.md

Thresholds were chosen on `pulse_networks.TUNED` with seeds below 1000; the table uses REPORTED, with seeds from 1000
on. Recorded runs are kept in --cache.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning_fabric.utilities.spike import SpikeDetection
from torch import nn

import curvmon
from benchmarks.header import measured_on
from benchmarks.markdown import table
from benchmarks.networks import Decoder, classification_loss, next_token_loss
from benchmarks.pulse_budget import budget_section
from benchmarks.pulse_networks import OPTIMIZERS, REPORTED
from benchmarks.pulse_runs import AT, EVENTS, EVERY, SPARSE_AT, SPARSE_EVERY, Recorded, Step, recorded, recorded_sparse
from benchmarks.pulse_trials import all_trials, shares
from curvmon.alerts.instability import InstabilityDetector
from curvmon.monitor.batch_samples import sample_count
from curvmon.monitor.pulse_schedule import WANTED
from curvmon.monitor.pulse_taker import CLOSE, CROSSING_EVERY, LEAST, SLICE, WHOLE, PulseTaker
from curvmon.monitor.target import Target
from curvmon.operators.session import Loss
from tests.helpers.resnet import resnet18

FIRST_SEED = 1000
INTERVALS = (2, 4, 10)
REARM = 40
"""steps without a warning after which the next one of a baseline counts again"""
MEMORY = 50
"""steps whose median is what is usual for a baseline"""
SPARSE = ("MLP", "LSTM")
TIMES = 1 + 2 * CROSSING_EVERY
"""that what is timed runs; the first is not counted"""
UNSTABLE = ("ramp, 1 % per step", "ramp, 2 % per step", "ramp, 5 % per step", "inputs grow", "samples repeated")
"""events that destabilise training; the others raise the loss by themselves, or within a few steps"""

Find = Callable[[Recorded], list[int]]
"""the steps of a run at which a detector warns"""


def ours(run: Recorded, every: int, every_rate: bool = True) -> list[int]:
    """`every_rate`: the learning rates of steps without a pulse are seen as well."""
    detector, raised_at = InstabilityDetector(), []
    for i, step in enumerate(run.steps):
        record = run.pulse(i, every)
        if record is not None:
            event = detector.update(record)
        else:
            event = detector.advance(i, step.learning_rate) if every_rate else None
        if event is not None and event.kind == "approaching_instability":
            raised_at.append(i)
    return raised_at


def spikes(run: Recorded) -> list[int]:
    """Lightning's SpikeDetection as it comes, on the training loss."""
    detector, at = SpikeDetection(), []
    for i, step in enumerate(run.steps):
        loss = torch.tensor(step.loss)
        if i >= detector.warmup and detector._is_spike(loss):
            at.append(i)
        else:
            detector._update_stats(loss)
    return episodes(at)


def times_usual(value: Callable[[Step], float], factor: float, run: Recorded) -> list[int]:
    values = [value(step) for step in run.steps]
    return episodes(
        i for i in range(MEMORY, len(values)) if not values[i] <= factor * statistics.median(values[i - MEMORY : i])
    )


def episodes(steps: Any) -> list[int]:
    """The first step of every episode."""
    first, last = [], -math.inf
    for i in steps:
        if i - last > REARM:
            first.append(i)
        last = i
    return first


BASELINES: dict[str, Find] = {
    "SpikeDetection": spikes,
    "gradient norm x 3": partial(times_usual, lambda step: step.gradient_norm, 3.0),
    "update norm x 3": partial(times_usual, lambda step: step.update_norm, 3.0),
    "learning rate x 2": partial(times_usual, lambda step: step.learning_rate, 2.0),
}


class Warned(NamedTuple):
    """One run whose loss rises after an event."""

    run: Recorded
    lead: int | None
    """steps from the first warning after the event to the rise of the loss; None: no warning before"""


def leads(find: Find, runs: Sequence[Recorded]) -> list[Warned]:
    outcomes = []
    for run in runs:
        rise = run.rises_at() if run.kind in EVENTS else None
        if rise is not None:
            warnings = [i for i in find(run) if run.at <= i < rise]
            outcomes.append(Warned(run, rise - warnings[0] if warnings else None))
    return outcomes


def false_warnings(find: Find, runs: Sequence[Recorded]) -> tuple[int, int]:
    """And the number of quiet steps: of quiet runs, or where there are none, of the common past of the others.

    That past is the same as the beginning of the quiet run at a constant rate.
    """
    quiet = [run for run in runs if run.kind not in EVENTS]
    if not quiet:
        quiet = list({(r.family, r.optimizer, r.seed): r._replace(steps=r.steps[: r.at]) for r in runs}.values())
    return sum(len(find(run)) for run in quiet), sum(len(run.steps) for run in quiet)


def shown(outcomes: Sequence[Warned]) -> str:
    """`9/10, 45`: warned before, of all; the median lead of those that are."""
    known = [outcome.lead for outcome in outcomes if outcome.lead is not None]
    lead = f", {statistics.median(known):.0f}" if known else ""
    return f"{len(known)}/{len(outcomes)}{lead}" if outcomes else ""


def summary(outcomes: Sequence[Warned]) -> list[str]:
    known = [outcome.lead for outcome in outcomes if outcome.lead is not None]
    share = f"{len(known)}/{len(outcomes)} ({len(known) / len(outcomes):.0%})" if outcomes else ""
    return [share, f"{statistics.median(known):.0f}" if known else ""]


def warnings_table(finders: dict[str, Find], runs: Sequence[Recorded]) -> str:
    rows = [["", "warned before", "median lead, steps", "all events", "false warnings in 10,000 quiet steps"]]
    for name, find in finders.items():
        outcomes = leads(find, runs)
        count, steps = false_warnings(find, runs)
        unstable = [outcome for outcome in outcomes if outcome.run.kind in UNSTABLE]
        rows.append(
            [name, *summary(unstable), summary(outcomes)[0], f"{1e4 * count / steps:.2f} ({count} in {steps:,})"]
        )
    return table(rows)


def table_by(key: Callable[[Recorded], str], values: Sequence[str], finders: dict[str, Find], runs: Any) -> str:
    outcomes = {name: leads(find, runs) for name, find in finders.items()}
    rows = [["warned before, median lead", *finders]]
    for value in values:
        chosen = {name: [o for o in found if key(o.run) == value] for name, found in outcomes.items()}
        rows.append([value, *(shown(found) for found in chosen.values())])
    return table(rows)


def critical_table(seeds: list[int], data: Path | None, cache: Path) -> str:
    rates = "this batch, quadratic", "this batch, measured", "smoothed, quadratic", "smoothed, `critical_lr`"
    head = [f"{rate}: {outcome}" for rate in rates for outcome in ("falls at half", "rises at twice")]
    made = all_trials(list(REPORTED.values()), seeds, data, cache)
    by_family = [[name, *shares([trial for trial in made if trial.family == name])] for name in REPORTED]
    by_optimizer = [[name, *shares([trial for trial in made if trial.optimizer == name])] for name in OPTIMIZERS]
    unseen = ["all but batches measured by the monitor", *shares([trial for trial in made if not trial.is_measured])]
    return table([["", *head], *by_family, *by_optimizer, ["all", *shares(made)], unseen])


def networks_of_usual_size() -> Iterator[tuple[str, nn.Module, Any, Loss]]:
    torch.manual_seed(0)
    for size in (32, 128):
        images = torch.randn(size, 3, 32, 32), torch.randint(10, (size,))
        yield f"ResNet-18 shape, {size} images of 32 x 32", resnet18(seed=0), images, classification_loss
    decoder = Decoder(layers=6, width=128, vocabulary=512)
    yield "GPT-like, 6 layers of 128, 8 x 128 tokens", decoder, torch.randint(512, (8, 128)), next_token_loss


def cost_table() -> str:
    """Computing time of this process, of which other processes take nothing."""
    rows = [["", "`curvmon.pulse`, in training steps", "the monitor's pulse", "at 1 %, one in … steps", "samples"]]
    for name, model, batch, loss in networks_of_usual_size():
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        step = seconds(partial(train, model, batch, loss, optimizer))
        u = [1e-3 * p.grad for p in model.parameters() if p.grad is not None]
        exact = seconds(partial(curvmon.pulse, model, batch, loss=loss, step=u)) / step
        for samples in (None, LEAST):
            own, used = monitors_pulse(model, batch, loss, optimizer, samples)
            cells = [name, f"{exact:.1f}"] if samples is None else ["", ""]
            rows.append([*cells, f"{own / step:.2f}", f"{math.ceil(100 * own / step)}", str(used)])
            if used == LEAST:
                break
    return table(rows)


def monitors_pulse(
    model: nn.Module, batch: Any, loss: Loss, optimizer: torch.optim.Optimizer, samples: int | None
) -> tuple[float, int]:
    """Seconds around training steps, with the copies before them and without the check of every hundredth; samples.

    A mean, because one in CROSSING_EVERY looks for its crossing.
    """
    taker, target = PulseTaker(), Target(model, loss, torch.device("cpu"))
    taker.samples = samples
    times, used = [], 0
    for _ in range(TIMES):
        began = time.process_time()
        taker.prepare(model, batch)
        prepared = time.process_time() - began
        used = sample_count(taker._batch) or 0
        train(model, batch, loss, optimizer)
        began = time.process_time()
        assert taker.take(target, 1) is not None
        times.append(time.process_time() - began + prepared)
        taker.forget()
    assert taker.from_losses
    return statistics.fmean(times[1:]), used


def train(model: nn.Module, batch: Any, loss: Loss, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    loss(model, batch).backward()
    optimizer.step()


def seconds(call: Callable[[], object]) -> float:
    call()
    times = []
    for _ in range(TIMES - 1):
        began = time.process_time()
        call()
        times.append(time.process_time() - began)
    return statistics.median(times)


def report(seeds: list[int], data: Path | None, cache: Path) -> str:
    each = [(family, optimizer, seed) for seed in seeds for family in REPORTED.values() for optimizer in OPTIMIZERS]
    runs = [run for family, optimizer, seed in each for run in recorded(family, optimizer, seed, data, cache)]
    sparse = [
        run
        for name in SPARSE
        for optimizer in OPTIMIZERS
        for run in recorded_sparse(REPORTED[name], optimizer, seeds[0], data, cache)
    ]
    finders: dict[str, Find] = {f"curvmon, a pulse every {n} steps": partial(ours, every=n) for n in INTERVALS}
    pulses_only: dict[str, Find] = {
        f"a pulse every {n} steps, learning rates at pulses only": partial(ours, every=n, every_rate=False)
        for n in INTERVALS
    }
    few = {"curvmon": partial(ours, every=EVERY), **BASELINES}
    with_few_pulses: dict[str, Find] = {
        f"a pulse every {SPARSE_EVERY} steps": partial(ours, every=SPARSE_EVERY),
        "learning rates at pulses only": partial(ours, every=SPARSE_EVERY, every_rate=False),
    }
    rises = leads(lambda run: [], runs)
    spread = [
        [event, str(len(of)), f"{statistics.median((o.run.rises_at() or 0) - o.run.at for o in of):.0f}"]
        for event in EVENTS
        if (of := [o for o in rises if o.run.kind == event])
    ]
    images = "scikit-learn's digits" if data is None else "CIFAR-10"
    parts = [
        "# Warnings before training diverges",
        f"Made with `make bench-pulse`. Seeds {', '.join(map(str, seeds))}; {images}, averaged down, and characters of "
        "Python's documentation. Thresholds were chosen on other seeds and other networks: a smaller GPT, a ReLU "
        "ResNet and a tanh MLP. The networks here are a wider GPT, a SiLU ResNet, a residual MLP with layer norm, and "
        "an LSTM, a family that no threshold was chosen on. Each with SGD, SGD with momentum and AdamW. An event "
        f"begins at step {AT}; the loss has risen when its mean over about 20 steps is 10 % above its minimum. "
        "Runs in which it never does are not counted. The first seed had been tried with an earlier version, in which "
        "an error was corrected since; the others had not.",
        "### All runs",
        '"Warned before": runs warned after the event and before the loss has risen, of those that an event '
        f'destabilises ({", ".join(UNSTABLE)}). The other events raise the loss by themselves or at once; "all events" '
        "counts them, too.",
        warnings_table({**finders, **BASELINES}, runs),
        "The same without `advance`, which passes on the learning rates of steps without a pulse:",
        warnings_table(pulses_only, runs),
        *budget_section(runs, UNSTABLE),
        "### By event, optimizer and network",
        "Runs, and the median number of steps from the event to the rise of the loss, which no lead can exceed:",
        table([["", "runs", "steps to the rise"], *spread]),
        f"A pulse every {EVERY} steps:",
        table_by(lambda run: run.kind, [row[0] for row in spread], few, runs),
        "Events that destabilise training:",
        table_by(lambda run: run.optimizer, OPTIMIZERS, few, [run for run in runs if is_counted(run)]),
        table_by(lambda run: run.family, list(REPORTED), few, [run for run in runs if is_counted(run)]),
        table_by(lambda run: str(run.seed), list(map(str, seeds)), few, [run for run in runs if is_counted(run)]),
        f"### A pulse every {SPARSE_EVERY} steps",
        f"Events at step {SPARSE_AT}, {' and '.join(SPARSE)} alone.",
        table_by(lambda run: run.kind, list(EVENTS), with_few_pulses, sparse),
        warnings_table(with_few_pulses, sparse),
        "### Critical learning rate",
        "The loss of a batch before and after a step along the same direction, at half and at twice the critical "
        "learning rate. Quadratic: learning rate / step ratio, of this batch or smoothed; there is none where the "
        "curvature along the step is not positive. Measured: the learning rate at which the loss of this very batch is "
        "again what it was, which is nearly exact by construction; there is none where the step goes uphill or the "
        "search finds no rise. `critical_lr` is what the monitor shows: it measures one pulse in "
        f"{CROSSING_EVERY}, until two estimates are within a factor of {math.exp(CLOSE):.0f}, and so has seen one in "
        f"{CROSSING_EVERY} of the batches that are tried here; the last row is without those.",
        critical_table(seeds, data, cache),
        "### Cost",
        f"The monitor takes the whole batch up to {WHOLE} samples, else {SLICE}, and halves them down to {LEAST} where "
        f"pulses would be more than {WANTED} steps apart.",
        cost_table(),
        measured_on("pulse"),
    ]
    return "\n\n".join(parts)


def is_counted(run: Recorded) -> bool:
    return run.kind not in EVENTS or run.kind in UNSTABLE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--data", type=Path, help="cifar10_subset.npz; without it, scikit-learn's digits")
    parser.add_argument("--cache", type=Path, default=Path("runs/pulse"))
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    text = report(list(range(FIRST_SEED, FIRST_SEED + arguments.seeds)), arguments.data, arguments.cache)
    print(text)
    if arguments.write:
        arguments.write.write_text(text + "\n")


if __name__ == "__main__":
    main()

"""What the five largest eigenvalues of a network take: HVPs, computing time and kernels, by package.

The networks of `benchmarks.measurement`, after some training steps. A pass is one forward and backward pass of the same
batch. Every method stops by its own rule, at the loosest tolerance with which all values are right to one percent.
What is computed with numpy on the host launches no kernels. Kernels are counted in all runs that are timed, passes
included.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.eigensolvers import LADDER_NOTE, METHODS, all_loosest, truth, truth_note
from benchmarks.header import cached
from benchmarks.measurement import NETWORKS as TRAININGS
from benchmarks.measurement import SAMPLES, Training
from benchmarks.trained import Setting
from tests.helpers.kernel_counts import KernelCounts

NETWORKS = ("relu", "silu", "gpt6")
STEPS = 30
"""of training: about an epoch"""
K = 5
LEFT_TO_TRAINED = ("curvmon, trace=False, verified", "power iteration")
"""methods that the other table alone has"""
SLOW = "hessian-eigenthings, power iteration"
"""not run on ResNets, where it would take half an hour"""
SKIPPED = f"{SLOW}: not run on this network. "


class Flat(nn.Module):
    """Logits as (tokens, vocabulary): what the other packages take."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids).flatten(0, 1)


def trained(name: str, training: Training) -> Setting:
    """After STEPS steps."""
    model, data = training.model.train(), training.data
    optimizer = training.optimizer(model.parameters())
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        chosen = torch.randint(len(data[0]), (SAMPLES,), generator=generator)
        optimizer.zero_grad()
        training.loss(model, [tensor[chosen] for tensor in data]).backward()
        optimizer.step()
    optimizer.zero_grad()
    if len(data) == 2:
        batch = data[0][:SAMPLES], data[1][:SAMPLES]
    else:
        ids = data[0][:SAMPLES]
        model, batch = Flat(model), (ids[:, :-1], ids[:, 1:].flatten())
    model.eval()
    return Setting(f"{name}, after {STEPS} steps", model, model, batch, nn.CrossEntropyLoss())


def passes(setting: Setting) -> tuple[float, int]:
    """Seconds and kernels of one forward and backward pass."""
    parameters = list(setting.model.parameters())

    def run() -> None:
        torch.autograd.grad(setting.loss(setting.model, setting.batch), parameters)

    times = []
    for _ in range(6):
        began = time.process_time()
        with KernelCounts() as counts:
            run()
        times.append(time.process_time() - began)
    return statistics.median(times[1:]), counts.totals[0]


def table(network: str, data: Path | None, starts: Sequence[int]) -> Iterator[str]:
    name, make = TRAININGS[network]
    setting = cached(f"{name} after {STEPS} steps, {data and data.name}", lambda: trained(name, make(data)))
    true = truth(setting, K)
    resnet = network in ("relu", "silu")
    methods = [name for name in METHODS if name not in LEFT_TO_TRAINED and not (resnet and name == SLOW)]
    yield f"### The five largest eigenvalues to one percent: {setting.name}"
    yield ""
    yield "| | tolerance | HVPs | computing time, passes | kernels, passes | error |"
    yield "|---|---|---|---|---|---|"
    before = passes(setting)
    for method, attempt in all_loosest(methods, setting, K, true, starts):
        after = passes(setting)
        unit, before = statistics.mean([before[0], after[0]]), after
        last = attempt.answers[-1]
        if not attempt.serves:
            values = ", ".join(f"{value:.3g}" for value in last.values)
            reason = attempt.failure if attempt.interrupted else f"not with {last.products}: {values}"
            yield f"| {method} | {attempt.tolerance:g} | {reason} | | | |"
            continue
        hvps = statistics.median(max(answer.products, answer.counted) for answer in attempt.answers)
        seconds, kernels = statistics.median(attempt.seconds), statistics.median(attempt.kernels)
        cells = f"{seconds / unit:.0f} | {kernels / after[1]:.0f}"
        yield f"| {method} | {attempt.tolerance:g} | {hvps:g} | {cells} | {100 * attempt.error:.2g} % |"
    yield ""
    yield (
        f"Medians over {len(starts)} starting vectors. {LADDER_NOTE} With its trace, curvmon's HVPs include what the "
        f"trace is worth. {SKIPPED if resnet else ''}{truth_note(true)}"
    )

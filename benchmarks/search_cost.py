"""What the five largest eigenvalues of a network take: products, computing time and kernels, by package.

The networks of `benchmarks.measurement`, after some training steps. A pass is one forward and backward pass of the same
batch. Every method stops by its own rule, at the loosest tolerance with which all values are right to one percent.
What is computed with numpy on the host launches no kernels.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.eigensolvers import METHODS, loosest, truth
from benchmarks.measurement import NETWORKS as TRAININGS
from benchmarks.measurement import SAMPLES, Training
from benchmarks.trained import Setting
from tests.helpers.kernel_counts import KernelCounts

NETWORKS = ("relu", "silu", "gpt6")
STEPS = 30
"""of training: about an epoch"""
K = 5


class Flat(nn.Module):
    """Logits as (tokens, vocabulary): what the other packages take."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids).flatten(0, 1)


def trained(name: str, training: Training) -> Setting:
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
        run()
        times.append(time.process_time() - began)
    with KernelCounts() as counts:
        run()
    return statistics.median(times[1:]), counts.totals[0]


def table(network: str, data: Path | None, starts: Sequence[int]) -> Iterator[str]:
    name, make = TRAININGS[network]
    setting = trained(name, make(data))
    true, disagreement = truth(setting, K)
    yield f"### The five largest eigenvalues to one percent: {setting.name}"
    yield ""
    yield "| | tolerance | HVPs | computing time, passes | kernels, passes | error |"
    yield "|---|---|---|---|---|---|"
    for method in METHODS:
        before = passes(setting)
        attempt = loosest(method, setting, K, true, starts)
        last = attempt.answers[-1]
        if not attempt.serves:
            values = ", ".join(f"{value:.3g}" for value in last.values)
            yield f"| {method} | {attempt.tolerance:g} | not within {last.products}: {values} | | | |"
            continue
        unit = statistics.mean([before[0], passes(setting)[0]])
        with KernelCounts() as counts:
            METHODS[method](setting, K, starts[0], attempt.tolerance)
        hvps = statistics.median(max(answer.products, answer.counted) for answer in attempt.answers)
        cells = f"{statistics.median(attempt.seconds) / unit:.0f} | {counts.totals[0] / before[1]:.0f}"
        yield f"| {method} | {attempt.tolerance:g} | {hvps:g} | {cells} | {100 * attempt.error:.2g} % |"
    yield ""
    yield (
        f"Medians over {len(starts)} starting vectors; kernels of the first. For hessian-eigenthings' Lanczos, which "
        "has no tolerance, the number of steps that it was given. With its trace, curvmon's HVPs include what the "
        f"trace is worth. True eigenvalues {', '.join(f'{value:.4g}' for value in true)}; eigsh at a tolerance of 1e-5 "
        f"agrees to {disagreement:.0e} of the first."
    )

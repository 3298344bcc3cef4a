"""Training loops with a pulse every second step: quiet ones, and ones that an event drives towards divergence.

An event disturbs a copy of a quiet run at step AT, so that all runs of a network, an optimizer and a seed share their
past. Recorded are what a monitor would see: per step the training loss, the learning rate and the norms of gradient and
update; per pulse gain and curvature along the step.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.pulse_networks import OPTIMIZERS, TOKENS, VOCABULARY, Batch, Family, images, loss, text
from curvmon.records import PulseRecord

AT = 300
"""steps of a quiet run that an event may follow"""
LONGEST = 400
"""steps after an event"""
QUIET = 700
"""steps of a quiet run"""
EVERY = 2
"""steps from one pulse to the next"""
SPARSE_AT, SPARSE_EVERY = 1500, 50
"""the same where pulses are as rare as a small budget makes them"""
EMA = 0.05
"""weight of a new value in the smoothed loss: a mean over about 20 steps"""
RISE = 1.1
"""the smoothed loss has risen when it is this many times its minimum"""
WARM_UP = 50


class Step(NamedTuple):
    """One training step, the norms before and after it."""

    loss: float
    learning_rate: float
    gradient_norm: float
    update_norm: float
    gain: float = math.nan
    curvature: float = math.nan
    """NaN without a pulse"""


Schedule = Literal["constant", "cosine", "warmup and cosine", "warm restarts", "one cycle"]
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)


def share_of_rate(schedule: Schedule, step: int, steps: int = QUIET) -> float:
    """The learning rate relative to its largest."""
    if schedule == "constant":
        return 1.0
    if schedule == "warm restarts":
        return 0.01 + 0.99 * _cosine(step % (steps // 4) / (steps // 4))
    if schedule == "one cycle":
        return _one_cycle(step / steps)
    if schedule == "cosine":
        return _cosine(step / steps)
    return min(1.0, (step + 1) / WARM_UP) * _cosine(max(0, step - WARM_UP) / (steps - WARM_UP))


def _one_cycle(done: float) -> float:
    """From 1/25 up during the first 30 %, then down to zero."""
    return 1 - 0.96 * _cosine(done / 0.3) if done < 0.3 else _cosine((done - 0.3) / 0.7)


def _cosine(done: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * done))


class Run:
    """A training run that can be disturbed."""

    def __init__(
        self,
        family: Family,
        optimizer: str,
        seed: int,
        data: Path | None,
        schedule: Schedule = "constant",
        every: int = EVERY,
    ) -> None:
        """A pulse at every `every`-th step."""
        self.family, self.optimizer_name, self.data, self.schedule = family, optimizer, data, schedule
        self.every = every
        self.generator = torch.Generator().manual_seed(seed)
        self.rate = family.rates[OPTIMIZERS.index(optimizer)]
        self.step = 0
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model = family.make(self.draw()[0][0])
        self.optimizer = self.cold_optimizer()
        self.corrupt: Callable[[Batch], Batch] = lambda batch: batch
        self.factor = lambda: 1.0

    def cold_optimizer(self) -> torch.optim.Optimizer:
        parameters = self.model.parameters()
        if self.optimizer_name == "AdamW":
            return torch.optim.AdamW(parameters, lr=self.rate)
        return torch.optim.SGD(parameters, lr=self.rate, momentum=0.9 if self.optimizer_name == "momentum" else 0.0)

    def copied(self) -> Run:
        twin = copy.copy(self)
        # the optimizer's parameters are the model's: copied in one go, they stay so
        twin.model, twin.optimizer = copy.deepcopy((self.model, self.optimizer))
        twin.generator = torch.Generator()
        twin.generator.set_state(self.generator.get_state())
        return twin

    def draw(self) -> Batch:
        """A random batch; images are shifted at random."""
        if not self.family.pixels:
            code = text()
            starts = torch.randint(len(code) - TOKENS - 1, (self.family.batch,), generator=self.generator)
            windows = torch.stack([code[i : i + TOKENS + 1] for i in starts.tolist()])
            return windows[:, :-1], windows[:, 1:]
        x, y = images(self.family.pixels, self.data)
        chosen = torch.randint(len(x), (self.family.batch,), generator=self.generator)
        down, right = torch.randint(-1, 2, (2,), generator=self.generator).tolist()
        return x[chosen].roll((down, right), (2, 3)), y[chosen]

    def train(self) -> Step:
        """One step, maybe with a pulse."""
        batch = self.corrupt(self.draw())
        rate = self.rate * share_of_rate(self.schedule, self.step) * self.factor()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad()
        value = loss(self.model, batch)
        value.backward()  # type: ignore[no-untyped-call]
        parameters = list(self.model.parameters())
        gradient_norm = _norm([p.grad for p in parameters if p.grad is not None])
        before = [p.detach().clone() for p in parameters]
        self.optimizer.step()
        u = [a - p.detach() for a, p in zip(before, parameters)]
        gain = curvature = math.nan
        if self.step % self.every == 0:
            after = [p.detach().clone() for p in parameters]
            put(parameters, before)
            gain, curvature = pulse(self.model, batch, u)
            put(parameters, after)
        self.step += 1
        return Step(value.item(), rate, gradient_norm, _norm(u), gain, curvature)


def pulse(model: nn.Module, batch: Batch, u: Sequence[Tensor]) -> tuple[float, float]:
    """g^T u and u^T H u: what `curvmon.pulse` computes (a test compares), without its isolation, which takes more time
    than the products of networks this small."""
    parameters = list(model.parameters())
    with sdpa_kernel(SDPBackend.MATH):
        g = torch.autograd.grad(loss(model, batch), parameters, create_graph=True)
        gain = torch.stack([(a * b).sum() for a, b in zip(g, u)]).sum()
        image = torch.autograd.grad(gain, parameters)
    return gain.item(), sum((a * b).sum().item() for a, b in zip(image, u))


def put(parameters: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for parameter, value in zip(parameters, values):
            parameter.copy_(value)


def _norm(tensors: Sequence[Tensor]) -> float:
    return torch.stack([t.detach().norm() for t in tensors]).norm().item()


# ---- events: each takes the run as it is at step AT ----


def ramp(per_step: float) -> Callable[[Run], None]:
    def apply(run: Run) -> None:
        at = run.step
        run.factor = lambda: (1 + per_step) ** (run.step - at)

    return apply


def inputs_grow(run: Run) -> None:
    """By 2 % per step; images only."""
    at = run.step
    run.corrupt = lambda batch: (batch[0] * 1.02 ** (run.step - at), batch[1])


def labels_shuffled(run: Run) -> None:
    """Of a share of the batch that grows by 0.5 % per step."""
    at = run.step

    def corrupt(batch: Batch) -> Batch:
        x, y = batch
        wrong = torch.rand(y.shape, generator=run.generator) < 0.005 * (run.step - at)
        return x, torch.where(wrong, y.flatten()[torch.randperm(y.numel(), generator=run.generator)].view_as(y), y)

    run.corrupt = corrupt


def outlier_batches(run: Run) -> None:
    """More and more batches of ten times the scale, or of random characters: one more in a hundred every four steps."""
    at = run.step

    def corrupt(batch: Batch) -> Batch:
        if torch.rand((), generator=run.generator) >= 0.0025 * (run.step - at):
            return batch
        if batch[0].dtype == torch.long:
            ids = torch.randint(VOCABULARY, (len(batch[0]), TOKENS + 1), generator=run.generator)
            return ids[:, :-1], ids[:, 1:]
        return 10 * batch[0], batch[1]

    run.corrupt = corrupt


def samples_repeated(run: Run) -> None:
    """Copies of the first sample in the place of a share of the batch that grows by 0.5 % per step."""
    at = run.step

    def corrupt(batch: Batch) -> Batch:
        index = torch.arange(len(batch[0]))
        index[: round(0.005 * (run.step - at) * len(index))] = 0
        return batch[0][index], batch[1][index]

    run.corrupt = corrupt


def restarted(run: Run) -> None:
    """A restart with cold optimizer state, at ten times the rate."""
    run.optimizer = run.cold_optimizer()
    run.factor = lambda: 10.0


EVENTS: dict[str, Callable[[Run], None]] = {
    "ramp, 1 % per step": ramp(0.01),
    "ramp, 2 % per step": ramp(0.02),
    "ramp, 5 % per step": ramp(0.05),
    "inputs grow": inputs_grow,
    "samples repeated": samples_repeated,
    "labels shuffled": labels_shuffled,
    "outlier batches": outlier_batches,
    "restart without warmup": restarted,
}


def smoothed(losses: Sequence[float]) -> list[float]:
    """Exponential moving average, a mean of all values at first."""
    mean, weight, values = 0.0, 0.0, []
    for value in losses:
        mean += EMA * (value - mean)
        weight += EMA * (1 - weight)
        values.append(mean / weight)
    return values


def risen_at(losses: Sequence[float], since: int) -> int | None:
    """The first step from `since` on at which the smoothed loss is RISE times its minimum so far, or not finite."""
    least = math.inf
    for i, value in enumerate(smoothed(losses)):
        least = min(least, value) if i > 20 else math.inf
        if i >= since and not value < RISE * least:
            return i
    return None


class Recorded(NamedTuple):
    family: str
    optimizer: str
    seed: int
    kind: str
    """an event, or the schedule of a quiet run"""
    at: int
    """the step of the event; in quiet runs their number of steps"""
    steps: list[Step]

    def pulse(self, i: int, every: int) -> PulseRecord | None:
        """That a monitor takes at a step, with a pulse at every `every`-th."""
        step = self.steps[i]
        if i % every:
            return None
        return PulseRecord(i, 0, step.gain, step.curvature, step.learning_rate, step.loss)

    def rises_at(self) -> int | None:
        return risen_at([step.loss for step in self.steps], self.at)


def disturbed_runs(
    family: Family, optimizer: str, seed: int, data: Path | None, at: int = AT, every: int = EVERY
) -> list[Recorded]:
    """A run for each event; they end when the loss has been high for 20 steps, or after LONGEST steps."""
    run = Run(family, optimizer, seed, data, every=every)
    past = [run.train() for _ in range(at)]
    recorded = []
    for name, apply in EVENTS.items():
        if name == "inputs grow" and family.name in ("GPT", "ResNet"):
            continue  # there is no scale, or batch norm removes it
        twin, steps = run.copied(), list(past)
        apply(twin)
        beyond = 0
        while len(steps) < at + LONGEST and beyond < 20:
            steps.append(twin.train())
            beyond += not math.isfinite(steps[-1].loss) or risen_at([s.loss for s in steps], at) is not None
        recorded.append(Recorded(family.name, optimizer, seed, name, at, steps))
    return recorded


def quiet_run(family: Family, optimizer: str, seed: int, data: Path | None, schedule: Schedule) -> Recorded:
    run = Run(family, optimizer, seed, data, schedule)
    return Recorded(family.name, optimizer, seed, schedule, QUIET, [run.train() for _ in range(QUIET)])


def recorded(family: Family, optimizer: str, seed: int, data: Path | None, cache: Path) -> list[Recorded]:
    """All runs of a network, an optimizer and a seed, from the cache if they are there."""

    def make() -> list[Recorded]:
        quiet = [quiet_run(family, optimizer, seed, data, schedule) for schedule in SCHEDULES]
        return [*disturbed_runs(family, optimizer, seed, data), *quiet]

    return _cached(make, cache / f"{_name(family, optimizer, seed, data)}.pt")


def recorded_sparse(family: Family, optimizer: str, seed: int, data: Path | None, cache: Path) -> list[Recorded]:
    """Runs with few pulses, and events late enough to have a past nevertheless."""
    path = cache / f"{_name(family, optimizer, seed, data)}-sparse.pt"
    return _cached(lambda: disturbed_runs(family, optimizer, seed, data, SPARSE_AT, SPARSE_EVERY), path)


def _name(family: Family, optimizer: str, seed: int, data: Path | None) -> str:
    size = sum(p.numel() for p in Run(family, optimizer, seed, data).model.parameters())
    return f"{family.name}-{size}-{optimizer}-{seed}-{data.stem if data else 'digits'}"


def _cached(make: Callable[[], list[Recorded]], path: Path) -> list[Recorded]:
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save([(*run[:5], [tuple(step) for step in run.steps]) for run in make()], path)
    stored: Any = torch.load(path, weights_only=True)
    return [Recorded(*head, [Step(*step) for step in steps]) for *head, steps in stored]

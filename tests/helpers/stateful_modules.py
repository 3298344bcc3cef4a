"""Modules that keep things of their own: generators, counters, caches, hooks, iterators."""

from __future__ import annotations

import itertools
import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.helpers.side_effects import Batch, Plain


class GlobalRandomness(Plain):
    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        x = batch[0] * random.uniform(0.9, 1.1) + np.random.normal(scale=0.01)
        x = x + 0.01 * torch.randn_like(x)
        if random.random() < 0.5:
            x = x.flip(0).flip(0) + float(np.random.rand())
        return F.cross_entropy(self(x[torch.randperm(len(x)).argsort()]), batch[1])


class Jitter:
    """An augmentation that is no module, with its own generators."""

    def __init__(self) -> None:
        self.random, self.calls = random.Random(4), 0

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.random.uniform(0.9, 1.1)


class OwnRandomness(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.python, self.numpy = random.Random(1), np.random.default_rng(2)
        self.legacy = np.random.RandomState(5)
        self.torch = torch.Generator().manual_seed(3)
        self.jitter = Jitter()

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        x = self.jitter(batch[0]) * self.python.uniform(0.9, 1.1) + self.numpy.normal() + self.legacy.normal()
        return F.cross_entropy(self(x + 0.01 * torch.randn(x.shape, generator=self.torch)), batch[1])


class AverageMeter:
    def __init__(self) -> None:
        self.sum, self.count, self.values = torch.zeros(()), 0, [0.0]

    def update(self, value: Tensor) -> None:
        self.sum += value
        self.count += 1
        self.values.append(value.item())


@dataclass
class Progress:
    seen: int = 0
    by_label: dict[int, int] = field(default_factory=dict)


class Counters(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"changed": 0})
        self.calls = 0
        self.losses: list[Any] = []
        self.last: dict[str, Any] = {"out": None}
        self.labels: Counter[int] = Counter()
        self.groups: defaultdict[int, list[int]] = defaultdict(list)
        self.recent: deque[float] = deque(maxlen=3)
        self.distinct: set[int] = set()
        self.total = torch.zeros(3)
        self.histogram = np.zeros(3)
        self.meter = AverageMeter()
        self.progress = Progress()
        self.space = SimpleNamespace(calls=0)
        self.register_buffer("ema", torch.zeros(3))

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        out = self(batch[0])
        loss = F.cross_entropy(out, batch[1])
        self.calls += 1
        self.losses.append(loss.detach())
        self.last["out"] = out.detach()
        for label in batch[1].tolist():
            self.labels[label] += 1
            self.groups[label].append(self.calls)
            self.histogram[label] += 1
            self.progress.by_label[label] = self.progress.by_label.get(label, 0) + 1
        self.recent.append(loss.item())
        self.distinct.add(self.calls)
        self.total += out.detach().mean(0)
        self.ema.mul_(0.9).add_(out.detach().mean(0))  # type: ignore[operator]
        self.meter.update(loss.detach())
        self.progress.seen += 1
        self.space.calls += 1
        self.hparams.changed += 1
        self.new_attribute = self.calls
        return loss


class Inner(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        out = self.net(x)
        self.log("inner", out.detach().mean())
        return out


class Nested(Plain):
    """A LightningModule within another, which counts, and logs through the outer one."""

    def network(self) -> nn.Module:
        inner = Inner()
        inner.log = self.log  # type: ignore[method-assign]
        return inner


class LazyCache(Plain):
    """Tables that are made when they are first needed; in Trainer.validate they are inference tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[int, Tensor] = {}
        self.scale: Tensor | None = None

    def forward(self, x: Tensor) -> Any:
        if not self.training:
            if self.scale is None:
                self.scale = torch.ones(4)
            if len(x) not in self.tables:
                self.tables[len(x)] = torch.linspace(0.9, 1.1, 4)
            x = x * self.tables[len(x)] * self.scale
        return self.net(x)


class CollectsFeatures(Plain):
    """Forward hooks that write into a list of the user's."""

    def __init__(self) -> None:
        super().__init__()
        features: list[Any] = []
        latest: dict[str, Any] = {}
        self.net[1].register_forward_hook(lambda module, args, out: features.append(out.detach()))  # type: ignore[index]
        self.net[1].register_forward_hook(lambda module, args, out: latest.update(out=out.detach()))  # type: ignore[index]
        self.look = lambda: (features, latest)

    def on_train_epoch_end(self) -> None:
        self.counted = len(self.look()[0])

    def on_train_batch_end(self, *args: Any) -> None:
        self.kept = list(self.look()[1].values())


class GradientHooks(Plain):
    fired: list[Any] = []  # noqa: RUF012 - of the class, where nothing puts it back
    so_far: list[Any]

    def __init__(self) -> None:
        super().__init__()
        GradientHooks.fired = []
        first, second = self.net[0], self.net[2]  # type: ignore[index]
        first.weight.register_hook(lambda grad: self._fired(grad.clone()))
        first.weight.register_post_accumulate_grad_hook(lambda parameter: self._fired("accumulated"))
        second.register_full_backward_hook(lambda module, by_input, by_output: self._fired(by_output[0].clone()))
        second.register_full_backward_pre_hook(lambda module, by_output: self._fired("before"))

    def _fired(self, what: Any) -> None:
        GradientHooks.fired.append(what)

    def on_train_batch_end(self, *args: Any) -> None:
        self.so_far = list(GradientHooks.fired)


class Draws(Plain):
    """The step takes something from an iterator that the module holds: unlabelled data, say."""

    def __init__(self, make: Callable[[], Iterator[Any]]) -> None:
        super().__init__()
        self.make, self.unlabelled = make, make()

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        drawn = next(self.unlabelled)
        return F.cross_entropy(self(batch[0] + torch.as_tensor(drawn).float().mean()), batch[1])


ITERATORS: dict[str, Callable[[], Iterator[Any]]] = {
    "generator": lambda: (float(i) for i in range(100)),
    "list": lambda: iter([0.1 * i for i in range(100)]),
    "count": lambda: itertools.count(),
    "loader": lambda: iter(DataLoader([0.1 * i for i in range(100)])),  # type: ignore[arg-type]
}


class FailsInEval(Plain):
    """The step does not survive eval mode: a measurement fails in its n-th forward pass, training does not."""

    passes = 0
    """of the class: nothing puts it back"""

    def __init__(self, at: int, error: type[BaseException]) -> None:
        super().__init__()
        self.calls, self.at, self.error = 0, at, error
        FailsInEval.passes = 0

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        self.calls += 1
        hidden = self.net[0](batch[0])  # type: ignore[index]
        if not self.training:
            FailsInEval.passes += 1
            if FailsInEval.passes == self.at:
                raise self.error("not in eval mode")
        return F.cross_entropy(self.net[1:](hidden), batch[1])  # type: ignore[index]

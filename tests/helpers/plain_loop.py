"""A training loop as people write them, with dropout, batch norm and a scheduler, and a `Monitor` in it or none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvmon

Batch = tuple[Tensor, Tensor]
STEPS, EVERY = 30, 10


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def network() -> nn.Module:
    torch.manual_seed(0)
    hidden = nn.Linear(6, 12), nn.BatchNorm1d(12), nn.GELU(), nn.Dropout(0.2), nn.Linear(12, 12), nn.Tanh()
    return nn.Sequential(*hidden, nn.Linear(12, 3))


def batches(count: int = STEPS) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(32, 6, generator=generator), torch.randint(3, (32,), generator=generator)) for _ in range(count)
    ]


class Loop:
    """A loop as people write them; `monitor` None: the same without."""

    def __init__(self, monitor: curvmon.Monitor | None, **attached: Any) -> None:
        self.model, self.monitor = network(), monitor
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 10, 0.5)
        self.losses: list[Tensor] = []
        self.done = 0
        if monitor is not None:
            monitor.attach(self.model, self.optimizer, loss, scheduler=self.scheduler, **attached)

    def run(self, data: list[Batch], accumulate: int = 1, after: Callable[[Loop], None] | None = None) -> Loop:
        monitor = self.monitor
        for i, batch in enumerate(data):
            if monitor is not None:
                monitor.observe(batch)
            value = loss(self.model, batch)
            value.backward()
            self.losses.append(value.detach())
            if (i + 1) % accumulate:
                continue
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.done += 1
            if monitor is not None:
                monitor.step(self.done, loss=value)
                if self.done % EVERY == 0:
                    monitor.measure(self.done, {"val_loss": value.item()})
            if after is not None:
                after(self)
        return self

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "training": [module.training for module in self.model.modules()],
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "gradients": [p.grad for p in self.model.parameters()],
            "losses": torch.stack(self.losses),
            "random": torch.get_rng_state(),
            "hooks": [len(module._forward_hooks) for module in self.model.modules()],
        }


def unlimited(log: Any = None, **settings: Any) -> curvmon.Monitor:
    return curvmon.Monitor(log, **{"max_overhead": None, **settings})

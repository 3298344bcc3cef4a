"""Learning rate and training loss between two measurements, from what Lightning hands to callbacks anyway."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor


class Pace:
    """The mean loss adds up on the device: no batch waits for a number to arrive on the host.

    The learning rate is the largest: what was too large for an epoch may be back in its place when it is measured.
    """

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._count = 0
        self._rate = -math.inf

    @torch.no_grad()
    def see(self, outputs: Any, optimizers: Iterable[Any], accumulated: int = 1) -> None:
        """What `training_step` returned, as `on_train_batch_end` gets it; a step without a loss in it has none.

        Lightning divides the loss by the number of batches whose gradients are accumulated.
        """
        self._rate = max(self._rate, _largest_rate(optimizers, on_host=True))
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            return
        value = loss.detach().reshape(()).float() * accumulated
        self._sum = value if self._sum is None else self._sum.to(value.device) + value
        self._count += 1

    def take(self, optimizers: Iterable[Any]) -> tuple[float, float]:
        """Rate and mean loss since they were last taken; not finite where there was none."""
        mean = math.nan if self._sum is None else self._sum.item() / self._count
        rate = max(self._rate, _largest_rate(optimizers, on_host=False))
        self._sum, self._count, self._rate = None, 0, -math.inf
        return rate, mean


def _largest_rate(optimizers: Iterable[Any], on_host: bool) -> float:
    """-inf if there is none; `on_host`: not those that are tensors on a device, which would have to be waited for."""
    rates = [group.get("lr") for optimizer in optimizers for group in optimizer.param_groups]
    # an optimizer of the user's own may keep anything there
    numbers = [r for r in rates if isinstance(r, (int, float)) or (isinstance(r, Tensor) and r.numel() == 1)]
    there = [float(r) for r in numbers if not (on_host and isinstance(r, Tensor) and not r.is_cpu)]
    return max(there, default=-math.inf)

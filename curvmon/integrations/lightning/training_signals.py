"""Learning rate and training loss between two measurements, from what Lightning passes to callbacks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor


class TrainingSignals:
    """Mean loss and largest learning rate since they were last collected.

    The loss is summed on its device, so that no step waits for a transfer. The largest learning rate: one that was too
    large for part of an epoch may be small again when the epoch ends.
    """

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._count = 0
        self._rate = -math.inf

    @torch.no_grad()
    def observe(self, outputs: Any, optimizers: Iterable[Any], accumulated: int = 1) -> None:
        """`outputs` of `training_step` as `on_train_batch_end` receives them; steps without a loss are skipped.

        Lightning divides the loss by the number of batches whose gradients are accumulated.
        """
        self._rate = max(self._rate, _largest_rate(optimizers, on_host=True))
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            return
        value = loss.detach().reshape(()).float() * accumulated
        self._sum = value if self._sum is None else self._sum.to(value.device) + value
        self._count += 1

    def collect(self, optimizers: Iterable[Any]) -> tuple[float, float]:
        """(learning rate, mean loss), then starts again; not finite where there was none."""
        mean = math.nan if self._sum is None else self._sum.item() / self._count
        rate = max(self._rate, _largest_rate(optimizers, on_host=False))
        self._sum, self._count, self._rate = None, 0, -math.inf
        return rate, mean


def _largest_rate(optimizers: Iterable[Any], on_host: bool) -> float:
    """-inf if there is none; `on_host`: without those that are tensors on a device, which would need a transfer."""
    rates = [group.get("lr") for optimizer in optimizers for group in optimizer.param_groups]
    # a custom optimizer may keep anything there
    numbers = [r for r in rates if isinstance(r, (int, float)) or (isinstance(r, Tensor) and r.numel() == 1)]
    readable = [float(r) for r in numbers if not (on_host and isinstance(r, Tensor) and not r.is_cpu)]
    return max(readable, default=-math.inf)

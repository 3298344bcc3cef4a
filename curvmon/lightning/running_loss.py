"""The mean training loss between two measurements, from what Lightning hands to callbacks anyway."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class RunningLoss:
    """Adds up on the device: no batch waits for a number to arrive on the host."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._count = 0

    @torch.no_grad()
    def see(self, outputs: Any) -> None:
        """What `training_step` returned, as `on_train_batch_end` gets it; without a loss in it, nothing happens."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            return
        value = loss.detach().reshape(()).float()
        self._sum = value if self._sum is None else self._sum.to(value.device) + value
        self._count += 1

    def take(self) -> float:
        """The mean since it was last taken; NaN if there was no loss."""
        mean = math.nan if self._sum is None else self._sum.item() / self._count
        self._sum, self._count = None, 0
        return mean

"""Small networks of several kinds for images of 12 x 12 pixels and three classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers.networks import ResidualMLP, RowAttention


def convolutions() -> nn.Module:
    """ReLU, in place as well, and max-pool: kinks everywhere."""
    stem = nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2)
    return nn.Sequential(*stem, nn.Conv2d(8, 8, 3), nn.LeakyReLU(0.1), nn.Flatten(), nn.Linear(8 * 9, 3))


def attention() -> nn.Module:
    return nn.Sequential(nn.Flatten(1, 2), nn.Linear(12, 3), RowAttention(), nn.Flatten(), nn.Linear(36, 3))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.LSTM(12, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x[:, 0])[0][:, -1])


MODELS: dict[str, Callable[[], nn.Module]] = {
    "convolutions": convolutions,
    "attention": attention,
    "LSTM": Recurrent,
    "residual": lambda: nn.Sequential(nn.Flatten(), ResidualMLP(inputs=144, width=16, depth=3, classes=3)),
}
BATCH = (
    torch.randn(16, 1, 12, 12, generator=torch.Generator().manual_seed(0)),
    torch.arange(16) % 3,
)


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])

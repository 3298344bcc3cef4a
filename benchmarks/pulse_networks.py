"""Small networks of four families, their data and sensible learning rates: what `pulse_runs` trains.

Thresholds are tuned on TUNED and reported on REPORTED: other sizes, activations and depths, and a family that no
threshold has seen (LSTM).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from benchmarks.networks import Decoder
from tests.helpers.networks import ResidualMLP

Batch = tuple[Tensor, Tensor]
OPTIMIZERS = ("SGD", "momentum", "AdamW")


class Residual(nn.Module):
    """y = act(x + norm(conv(act(norm(conv(x)))))."""

    def __init__(self, width: int, activation: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            activation(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.activation = activation()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.activation(x + self.branch(x))
        return y


def resnet(channels: int, width: int, blocks: int, activation: Callable[[], nn.Module]) -> nn.Module:
    stem = nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), activation()
    body = [Residual(width, activation) for _ in range(blocks)]
    return nn.Sequential(*stem, nn.AvgPool2d(2), *body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


class RowLSTM(nn.Module):
    """Reads an image row by row."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.inner, self.head = nn.LSTM(inputs, width, batch_first=True), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.transpose(1, 2).flatten(2)
        y: Tensor = self.head(self.inner(rows)[0][:, -1])
        return y


def mlp(inputs: int, width: int) -> nn.Module:
    layers = nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 10)
    return nn.Sequential(nn.Flatten(), *layers)


def residual_mlp(inputs: int, width: int) -> nn.Module:
    network = ResidualMLP(inputs=inputs, width=width, depth=4, classes=10)
    for block in network.blocks:
        block.dropout = nn.Identity()  # its noise would come from the global generator
    return nn.Sequential(nn.Flatten(), network)


class Family(NamedTuple):
    """A kind of network with its data.

    `rates`: for SGD, SGD with momentum, AdamW, about half of the rate with the lowest loss after 400 steps.
    """

    name: str
    make: Callable[[Tensor], nn.Module]
    """takes one sample"""
    batch: int
    rates: tuple[float, float, float]
    pixels: int = 0
    """side of the images; 0: text"""


def _decoder(layers: int, width: int, heads: int) -> Callable[[Tensor], nn.Module]:
    return lambda ids: Decoder(layers, width, heads, tokens=len(ids), vocabulary=VOCABULARY)


TOKENS, VOCABULARY = 32, 96

TUNED = {
    family.name: family
    for family in (
        Family("GPT", _decoder(2, 32, 2), 16, (0.5, 0.05, 3e-3)),
        Family("ResNet", lambda x: resnet(len(x), 8, 2, nn.ReLU), 32, (0.1, 0.01, 3e-3), 16),
        Family("MLP", lambda x: mlp(x.numel(), 64), 32, (0.1, 0.01, 2e-3), 8),
    )
}
REPORTED = {
    family.name: family
    for family in (
        Family("GPT", _decoder(2, 64, 4), 8, (0.5, 0.05, 3e-3)),
        Family("ResNet", lambda x: resnet(len(x), 12, 3, nn.SiLU), 32, (0.1, 0.02, 2e-3), 8),
        Family("LSTM", lambda x: RowLSTM(len(x) * x.shape[-1], 64), 32, (0.5, 0.05, 3e-3), 16),
        Family("MLP", lambda x: residual_mlp(x.numel(), 48), 32, (0.05, 0.005, 1e-3), 8),
    )
}


@cache
def images(pixels: int, data: Path | None) -> Batch:
    """CIFAR-10 averaged down to `pixels` x `pixels`; without the file, scikit-learn's digits, scaled up if need be."""
    if data is None:
        digits = load_digits()
        x = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
        return F.interpolate(x, size=(pixels, pixels)), torch.tensor(digits.target)
    arrays = np.load(data)
    x = torch.tensor(arrays["x_train"]).float() / 64 - 2
    return F.avg_pool2d(x, x.shape[-1] // pixels), torch.tensor(arrays["y_train"]).long()


@cache
def text() -> Tensor:
    """Characters of Python's own documentation, as integers."""
    from pydoc_data.topics import topics

    joined = "".join(topics[key] for key in sorted(topics))
    return torch.tensor([min(max(ord(c) - 31, 0), VOCABULARY - 1) for c in joined[:300_000]])


def loss(model: Any, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())

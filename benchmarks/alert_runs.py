"""A small residual network on scikit-learn's digits, and events that disturb its training.

Tests of the Lightning callback and other benchmarks use them; those of alerts have families and events of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

BATCH = 64
PROBE = 32
HELD_OUT = 300


class Block(nn.Module):
    def __init__(self, width: int, activation: nn.Module) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.activation = activation
        self.skip = True

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(self.activation(self.norm1(self.conv1(x)))))
        return self.activation(x + y if self.skip else y)


class Network(nn.Module):
    """Stem, four residual blocks, mean over pixels, linear head."""

    def __init__(self, width: int = 8, activation: Callable[[], nn.Module] = nn.ReLU) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), activation())
        self.blocks = nn.ModuleList(Block(width, activation()) for _ in range(4))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


NODES = ["stem", "blocks.0", "blocks.1", "blocks.2", "blocks.3"]


def digits(seed: int) -> tuple[Tensor, Tensor]:
    """Images between 0 and 1 and their classes, in an order of the seed's."""
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(seed))
    return torch.tensor(data.images, dtype=torch.float32)[order].unsqueeze(1) / 16, torch.tensor(data.target)[order]


class Run(Protocol):
    """What an event can change."""

    model: Network
    x: Tensor
    y: Tensor
    factor: float
    """of the learning rate"""
    generator: torch.Generator


def learning_rate(run: Run) -> None:
    run.factor = 20.0


def labels_shuffled(run: Run) -> None:
    run.y = run.y[torch.randperm(len(run.y), generator=run.generator)]


@torch.no_grad()
def weights_zeroed(run: Run) -> None:
    weight = run.model.blocks[1].conv1.weight
    weight[torch.rand(weight.shape, generator=run.generator) < 0.5] = 0


def statistics_frozen(run: Run) -> None:
    """As after loading weights without buffers: running statistics at their initial values, and they stay there."""
    for module in run.model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.reset_running_stats()
            module.momentum = 0.0


def skip_cut(run: Run) -> None:
    run.model.blocks[2].skip = False


def activation_exchanged(run: Run) -> None:
    run.model.blocks[1].activation = nn.Tanh()


def data_shifted(run: Run) -> None:
    """Training images arrive inverted."""
    run.x = 1 - run.x


@torch.no_grad()
def not_a_number(run: Run) -> None:
    run.model.blocks[0].conv1.weight[0, 0, 0, 0] = float("nan")


class Event(NamedTuple):
    apply: Callable[[Run], None]
    place: str | None
    """the node at whose output or in whose forward it happens; None: everywhere"""
    when: Literal["start", "middle", "end"] = "start"
    """of the epoch before the measurement; "end" if training would undo it"""


EVENTS = {
    "learning rate x 20": Event(learning_rate, None),
    "labels shuffled": Event(labels_shuffled, None),
    "half of a layer's weights zeroed": Event(weights_zeroed, "blocks.1", "end"),
    "batch norm statistics reset and frozen": Event(statistics_frozen, None, "middle"),
    "skip connection cut": Event(skip_cut, "blocks.2", "middle"),
    "activation exchanged": Event(activation_exchanged, "blocks.1", "middle"),
    "data shifted": Event(data_shifted, None),
    "NaN in a weight": Event(not_a_number, None),
}

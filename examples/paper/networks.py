"""The first paper's networks: MLPs on flattened images, a diamond of two branches, and ResNet-18.

Each draws its weights from torch's global generator in the paper's order, so that `seeded(PlainMLP, 42, ...)` has the
paper's very weights. A projection from the image to the width comes before the blocks that are measured; the paper's
text does not mention it, its figures need it (docs/reproduction.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

PIXELS = 3 * 32 * 32
Module = TypeVar("Module", bound=nn.Module)


def seeded(kind: Callable[..., Module], seed: int, **arguments: Any) -> Module:
    """The network that `torch.manual_seed(seed)` gives; the global generator is left as it was."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return kind(**arguments).eval()


class Block(nn.Module):
    """Linear, LayerNorm where asked for, activation."""

    def __init__(
        self, inputs: int, outputs: int, activation: type[nn.Module], layer_norm: bool = True, spectral: bool = False
    ) -> None:
        super().__init__()
        linear = nn.Linear(inputs, outputs)
        self.linear = spectral_norm(linear) if spectral else linear
        self.norm = nn.LayerNorm(outputs) if layer_norm else nn.Identity()
        self.activation = activation()

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.norm(self.linear(x)))


class ResidualBlock(nn.Module):
    def __init__(self, width: int, activation: type[nn.Module], scale: float) -> None:
        super().__init__()
        self.linear, self.activation, self.scale = nn.Linear(width, width), activation(), scale

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.activation(self.linear(x))


class PlainMLP(nn.Module):
    """`widths` are those of the blocks' outputs: all alike, or one of them a bottleneck."""

    def __init__(
        self,
        widths: list[int],
        classes: int = 10,
        activation: type[nn.Module] = nn.ReLU,
        layer_norm: bool = True,
        spectral: bool = False,
        projection: bool = True,
    ) -> None:
        super().__init__()
        how = activation, layer_norm, spectral
        inputs = [widths[0], *widths[:-1]] if projection else [PIXELS, *widths[:-1]]
        self.projection = Block(PIXELS, widths[0], *how) if projection else nn.Identity()
        self.blocks = nn.Sequential(*(Block(i, o, *how) for i, o in zip(inputs, widths)))
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.projection(x.flatten(1))))


class ResidualMLP(nn.Module):
    """x + activation(Linear(x)) / sqrt(depth) in every block, without LayerNorm."""

    def __init__(self, width: int, depth: int, classes: int = 10, activation: type[nn.Module] = nn.ReLU) -> None:
        super().__init__()
        self.projection = Block(PIXELS, width, activation)
        self.blocks = nn.Sequential(*(ResidualBlock(width, activation, depth**-0.5) for _ in range(depth)))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.projection(x.flatten(1))))


class DiamondMLP(nn.Module):
    """Stem, two branches of `depth` blocks, joined by their sum over sqrt 2 or by concatenation, Linear, activation."""

    def __init__(self, width: int, depth: int, merge: str, activation: type[nn.Module], classes: int = 10) -> None:
        super().__init__()
        self.stem = Block(PIXELS, width, activation)
        self.a, self.b = (nn.Sequential(*(Block(width, width, activation) for _ in range(depth))) for _ in range(2))
        self.merge = nn.Sequential(nn.Linear(2 * width, width), activation()) if merge == "cat" else None
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        stem = self.stem(x.flatten(1))
        a, b = self.a(stem), self.b(stem)
        return self.head((a + b) / 2**0.5 if self.merge is None else self.merge(torch.cat([a, b], dim=1)))


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, activation: type[nn.Module], skip: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.activation, self.skip = activation(), skip
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        h = self.bn2(self.conv2(self.activation(self.bn1(self.conv1(x)))))
        return self.activation(h + self.shortcut(x) if self.skip else h)


class ResNet18(nn.Module):
    """With the stem for ImageNet and fan-out Kaiming convolutions; without `skip`, the same without its shortcuts."""

    def __init__(self, activation: type[nn.Module] = nn.ReLU, skip: bool = True, width: int = 64) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1, self.activation, self.maxpool = nn.BatchNorm2d(width), activation(), nn.MaxPool2d(3, 2, 1)
        stages, inputs = [], width
        for i in range(4):
            outputs, stride = width * 2**i, 1 if i == 0 else 2
            first = BasicBlock(inputs, outputs, stride, activation, skip)
            stages.append(nn.Sequential(first, BasicBlock(outputs, outputs, 1, activation, skip)))
            inputs = outputs
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.fc = nn.Linear(inputs, 10)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.activation(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(x.mean((2, 3)))

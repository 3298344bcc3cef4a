"""ResNet-18 as in He et al. (2016), by default with the ImageNet stem; torchvision has no CPU build to test with."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.activation = activation
        self.downsample = (
            nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
            if stride != 1 or inputs != outputs
            else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.bn2(self.conv2(self.activation(self.bn1(self.conv1(x)))))
        return self.activation(h + self.downsample(x))


class ResNet(nn.Module):
    def __init__(self, classes: int, activation: Callable[[Tensor], Tensor], cifar_stem: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 3, 1, 1, bias=False) if cifar_stem else nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.activation = activation
        self.maxpool = nn.Identity() if cifar_stem else nn.MaxPool2d(3, 2, 1)
        widths = [64, 64, 128, 256, 512]
        for i in range(4):
            stage = [
                BasicBlock(widths[i], widths[i + 1], 1 if i == 0 else 2, activation),
                BasicBlock(widths[i + 1], widths[i + 1], 1, activation),
            ]
            setattr(self, f"layer{i + 1}", nn.Sequential(*stage))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(512, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.activation(self.bn1(self.conv1(x))))
        for i in range(4):
            x = getattr(self, f"layer{i + 1}")(x)
        return self.fc(self.avgpool(x).flatten(1))


def resnet18(
    classes: int = 10, activation: Callable[[Tensor], Tensor] = F.relu, seed: int = 0, cifar_stem: bool = False
) -> ResNet:
    """Fan-out Kaiming convolutions, as the papers' networks are initialised."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = ResNet(classes, activation, cifar_stem)
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model

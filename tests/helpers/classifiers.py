"""Small classifiers, and the random batches that go with them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

SAMPLES, OUTPUTS = 8, 5
MANY = 40
"""outputs, more than there are exact Gauss-Newton factors for"""


def relu_net(outputs: int = OUTPUTS, width: int = 30) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, outputs))


def smooth_net(outputs: int = OUTPUTS) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 30), nn.SiLU(), nn.Linear(30, 28), nn.Tanh(), nn.Linear(28, outputs))


def drawn(*shape: int, high: int | None = None) -> Tensor:
    g = torch.Generator().manual_seed(2)
    return torch.randn(*shape, generator=g) if high is None else torch.randint(high, shape, generator=g)


CLASSES = drawn(SAMPLES, high=OUTPUTS)

"""Small networks and losses with their dense Hessians in float64."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

Loss = Callable[[Any, Any], Tensor]


def dense_hessian(model: nn.Module, batch: Any, loss: Loss) -> Tensor:
    """d²L/dθ² by `torch.autograd.functional.hessian`, in float64."""
    model = in_double(model)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    shapes = [dict(model.named_parameters())[name].shape for name in names]
    flat = torch.cat([dict(model.named_parameters())[name].detach().reshape(-1) for name in names])
    batch = [x.double() if x.is_floating_point() else x for x in batch]

    def value(theta: Tensor) -> Tensor:
        parts = torch.split(theta, [shape.numel() for shape in shapes])
        state = {name: part.reshape(shape) for name, part, shape in zip(names, parts, shapes)}
        return loss(lambda *args: functional_call(model, state, args, tie_weights=True), batch)

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return torch.autograd.functional.hessian(value, flat)


def in_double(model: nn.Module) -> nn.Module:
    """A copy in float64 and eval mode."""
    return copy.deepcopy(model).double().eval()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.MultiheadAttention(6, 2, batch_first=True), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x, x, x)[0].mean(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x)[0][:, -1])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.head = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 2)
        self.other.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.other(torch.tanh(self.one(x)))))


def mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), nn.GELU()]
    return nn.Sequential(*layers[:-1])


def frozen() -> nn.Sequential:
    model = mlp(5, 8, 2)
    model[0].requires_grad_(False)
    return model


def convolutional() -> nn.Sequential:
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(),
        nn.Conv2d(3, 2, 3), nn.BatchNorm2d(2), nn.SiLU(), nn.Flatten(), nn.Linear(8, 2),
    )  # fmt: skip
    model(torch.randn(64, 2, 6, 6))  # running statistics
    return model


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: mlp(5, 8, 6, 2), (5,)),
    "convolution and batch norm": (convolutional, (2, 6, 6)),
    "attention": (Attention, (4, 6)),
    "lstm": (Recurrent, (5, 3)),
    "shared weights": (Tied, (5,)),
    "frozen parameters": (frozen, (5,)),
}
LOSSES: dict[str, Loss] = {
    "cross-entropy": lambda model, b: F.cross_entropy(model(b[0]), b[1]),
    "mse": lambda model, b: F.mse_loss(model(b[0]), F.one_hot(b[1], 2).to(b[0])),
}


def make(name: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    build, shape = CASES[name]
    return build(), [torch.randn(24, *shape), torch.randint(2, (24,))]


class Through(nn.Module):
    """Layers, and a function that calls them."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor], **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)
        self._forward = forward

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(self, x)


class Quadratic(nn.Module):
    """L = ½ θ^T A θ with the given eigenvalues of A, at θ = 0; its loss is `energy`."""

    def __init__(self, values: Tensor, seed: int = 0) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        q = torch.linalg.qr(torch.randn(len(values), len(values), generator=g, dtype=torch.float64)).Q
        self.register_buffer("matrix", (q * values.double()) @ q.T)
        self.theta = nn.Parameter(torch.zeros(len(values), dtype=torch.float64))


def energy(model: Any, batch: Any) -> Tensor:
    return model.theta @ (model.matrix @ model.theta) / 2

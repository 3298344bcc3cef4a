"""The second paper's small networks: linear, ReLU and self-attention, with scalar inputs."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]


def half_mean_square(model: nn.Module, batch: Batch) -> Tensor:
    """1/(2n) Σ (f(x) - y)²"""
    return F.mse_loss(model(batch[0]), batch[1]) / 2


class TwoLayers(nn.Module):
    """f(x) = <w, v> x, or <w, relu(v x)>, for numbers x."""

    def __init__(self, v: Tensor, w: Tensor, relu: bool = False) -> None:
        super().__init__()
        self.v, self.w, self.relu = nn.Parameter(v), nn.Parameter(w), relu

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.outer(x, self.v)
        return (hidden.relu() if self.relu else hidden) @ self.w


class SelfAttention(nn.Module):
    """f(x) = w_V softmax(x <w_Q, w_K> x^T / sqrt d) x, for a sequence x of numbers."""

    def __init__(self, value: Tensor, query: Tensor, key: Tensor) -> None:
        super().__init__()
        self.value, self.query, self.key = nn.Parameter(value), nn.Parameter(query), nn.Parameter(key)

    def attention(self, x: Tensor) -> Tensor:
        return (torch.outer(x, x) * self.query.dot(self.key) / math.sqrt(len(self.query))).softmax(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.value * (self.attention(x) @ x)


def standard(inputs: int, outputs: int, generator: torch.Generator) -> Tensor:
    """Weights with variance 1 / inputs: the standard parametrisation."""
    return torch.randn(outputs, inputs, dtype=torch.float64, generator=generator) / math.sqrt(inputs)


def dense_hessian(model: nn.Module, batch: Batch) -> Tensor:
    """All of d²L/dθ², for the figures that show every eigenvalue of networks with high multiplicities."""
    names = [name for name, _ in model.named_parameters()]
    shapes = [parameter.shape for parameter in model.parameters()]

    def loss(flat: Tensor) -> Tensor:
        parts = flat.split([shape.numel() for shape in shapes])
        weights = {name: part.view(shape) for name, part, shape in zip(names, parts, shapes)}
        return F.mse_loss(torch.func.functional_call(model, weights, (batch[0],)), batch[1]) / 2

    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return torch.func.jacrev(torch.func.grad(loss), chunk_size=256)(flat)

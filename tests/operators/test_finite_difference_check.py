"""Custom autograd functions: a second derivative that is not one is found out."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvmon

Batch = tuple[Tensor, Tensor]


@pytest.fixture
def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))


@pytest.fixture
def batch() -> Batch:
    torch.manual_seed(1)
    return torch.randn(8, 5), torch.randint(3, (8,))


class Detached(torch.autograd.Function):
    """exp whose backward hides that it depends on x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.x = x.detach()
        return x.exp()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.x.exp()


class Saved(torch.autograd.Function):
    """exp as it should be."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0].exp()


@pytest.mark.parametrize(
    "run", [partial(curvmon.measure, derivative="double"), curvmon.exact], ids=["measure", "exact"]
)
@pytest.mark.parametrize(
    ("function", "verdict"),
    [(Detached, "suspect: a Hessian-vector product is off by"), (Saved, "(Saved): agree with finite differences")],
)
def test_custom_functions_are_checked_by_finite_differences(
    run: Any, function: Any, verdict: str, model: nn.Sequential, batch: Batch
) -> None:
    def loss(m: Any, b: Batch) -> Tensor:
        return F.cross_entropy(m[4](function.apply(m[2](F.relu(m[0](b[0]))))), b[1])

    found = run(model, batch, loss=loss, nodes=["0", "2"])
    assert any(verdict in note for note in found.notes), found.notes


def test_a_custom_function_for_single_precision_only(model: nn.Sequential, batch: Batch) -> None:
    def loss(m: Any, b: Batch) -> Tensor:
        h = m[0](b[0])
        assert h.dtype == torch.float32
        return F.cross_entropy(m[4](Saved.apply(h)), b[1])

    found = curvmon.measure(model, batch, loss=loss, nodes=["0"])
    assert any("(Saved): not checked in double precision (AssertionError)" in note for note in found.notes)

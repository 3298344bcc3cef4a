"""Blocks of products with the Hessian w.r.t. the parameters and with its Gauss-Newton part, against dense truth."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from curvmon.errors import InputError, NonFiniteError
from curvmon.operators.parameter_hessian import open_parameters
from tests.helpers.kernel_counts import KernelCounts
from tests.helpers.networks import RowAttention


def network() -> nn.Module:
    torch.manual_seed(0)
    stem = nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2), nn.ReLU(inplace=True), nn.Conv2d(2, 2, 1), nn.GELU()
    model = nn.Sequential(*stem, RowAttention(), nn.Flatten(), nn.Linear(18, 3)).double()
    model[1].running_mean.normal_()
    model[1].running_var.uniform_(0.5, 2)
    return model.eval()


BATCH = (
    torch.randn(5, 1, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)),
    torch.tensor([0, 1, 2, 1, 0]),
)
LOSSES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "cross-entropy": F.cross_entropy,
    "two terms": lambda out, y: F.cross_entropy(out, y) + 0.1 * F.mse_loss(out, F.one_hot(y, 3).double()),
    "linear": lambda out, y: F.l1_loss(out, F.one_hot(y, 3).double()),
}


def rows(values: Tensor, variables: list[Tensor]) -> Tensor:
    """The Jacobian, row by row; with a graph."""
    options: dict[str, Any] = {"create_graph": True, "allow_unused": True, "materialize_grads": True}
    gradients = (torch.autograd.grad(value, variables, **options) for value in values.reshape(-1))
    return torch.stack([torch.cat([g.reshape(-1) for g in each]) for each in gradients])


def dense(model: nn.Module, loss: Callable[[Any, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """H and J^T S J by torch's own operations."""
    parameters = list(model.parameters())
    with sdpa_kernel(SDPBackend.MATH):
        out = model(BATCH[0].clone())
    value = loss(out, BATCH[1])
    hessian, jacobian = rows(rows(value, parameters), parameters), rows(out, parameters)
    slope = rows(value, [out])
    curvature = rows(slope, [out]) if slope.requires_grad else torch.zeros(out.numel(), out.numel(), dtype=out.dtype)
    return hessian.detach(), (jacobian.T @ curvature @ jacobian).detach()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("batched", [True, False])
def test_blocks_of_products(name: str, batched: bool) -> None:
    model, loss = network(), LOSSES[name]
    H, ggn = dense(model, loss)
    with open_parameters(model, [BATCH], loss=lambda m, b: loss(m(b[0]), b[1]), batched=batched) as operator:
        z = torch.randn(operator.size, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
        torch.testing.assert_close(operator.matmat(z), H @ z)
        torch.testing.assert_close(operator.ggn(z), ggn @ z)
        torch.testing.assert_close(operator.ggn(z[:, 0]), ggn @ z[:, 0])
        torch.testing.assert_close(operator.hessian_and_ggn(z), (H @ z, ggn @ z))
        torch.testing.assert_close(operator.matvec(z[:, 1]), H @ z[:, 1])
        assert operator.products == 4 + 4 + 1 + 4 + 1


def test_blocks_of_products_over_several_batches() -> None:
    model = network()
    H, ggn = dense(model, F.cross_entropy)
    batches = [(BATCH[0][:2], BATCH[1][:2]), (BATCH[0][2:], BATCH[1][2:])]
    for batched in (True, False):
        with open_parameters(model, batches, loss=lambda m, b: F.cross_entropy(m(b[0]), b[1]), batched=batched) as op:
            z = torch.randn(op.size, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
            torch.testing.assert_close(op.hessian_and_ggn(z), (H @ z, ggn @ z))


def kernels(batched: bool, columns: int) -> tuple[int, int]:
    with (
        open_parameters(
            network(), [BATCH], loss=lambda m, b: F.cross_entropy(m(b[0]), b[1]), batched=batched
        ) as operator,
        KernelCounts() as counts,
    ):
        operator.matmat(torch.ones(operator.size, columns, dtype=torch.float64))
    return counts.kernels.total(), counts.synchronisations.total()


def test_kernels_and_synchronisations_of_a_block() -> None:
    """In one launch, six products take less than twice the kernels of one, and no more than for sixty."""
    assert kernels(False, 6)[0] > 5 * kernels(False, 1)[0]
    assert kernels(True, 6)[0] < 2 * kernels(False, 1)[0]
    assert kernels(True, 6) == kernels(True, 60)
    assert kernels(True, 6)[1] == kernels(False, 6)[1] == 1


def test_width_of_a_block_is_bounded_by_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    loss = LOSSES["cross-entropy"]
    H, _ = dense(network(), loss)
    with open_parameters(network(), [BATCH], loss=lambda m, b: loss(m(b[0]), b[1]), batched=True) as operator:
        entries = 5 * (2 * 9 * 5)  # of the stem's five results
        assert operator.width >= 4
    monkeypatch.setattr("curvmon.operators.parameter_hessian.BATCHED_BYTES", 3 * 8 * entries)
    with open_parameters(network(), [BATCH], loss=lambda m, b: loss(m(b[0]), b[1]), batched=True) as operator:
        assert operator.width <= 2
        torch.testing.assert_close(operator.matmat(torch.eye(len(H), dtype=H.dtype)), H)


class Unbatched(torch.autograd.Function):
    """x³, with a backward pass that reads a number: impossible for several vectors at once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * 3 * x**2 if torch.is_grad_enabled() or gradient.sum().item() < math.inf else gradient


def test_products_without_batching_rule_are_computed_one_by_one() -> None:
    def loss(model: Any, batch: Any) -> Tensor:
        return F.mse_loss(Unbatched.apply(model(batch[0])), F.one_hot(batch[1], 3).double())

    found = []
    for batched in (True, False):
        with open_parameters(network(), [BATCH], loss=loss, batched=batched) as operator:
            found.append(operator.matmat(torch.eye(operator.size, dtype=torch.float64)))
            assert operator.width == 1
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("batched", [True, False])
def test_products_that_are_not_finite(batched: bool) -> None:
    with open_parameters(
        network(), [BATCH], loss=lambda m, b: F.cross_entropy(m(b[0]), b[1]), batched=batched
    ) as operator:
        z = torch.ones(operator.size, 3, dtype=torch.float64)
        operator.matmat(z * 1e300)  # finite, and so is its image
        z[0, 1] = math.nan
        with pytest.raises(InputError, match="NaN"):
            operator.matmat(z)
    with (
        open_parameters(
            nn.Linear(2, 1),
            [torch.zeros(3, 2)],
            loss=lambda m, x: (m(x) - m(x).detach()).abs().sqrt().sum(),
            batched=batched,
        ) as operator,
        pytest.raises(NonFiniteError),
    ):
        operator.matmat(torch.ones(operator.size, 3))

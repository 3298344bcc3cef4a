"""Products from differences of gradients against those from second derivatives, and where they are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvmon.operators import gradient_differences
from curvmon.operators.gradient_differences import TOLERATED, DifferenceOperator, DifferencesError
from curvmon.operators.parameter_hessian import open_parameters
from tests.helpers.kernel_counts import KernelCounts
from tests.helpers.networks import ResidualMLP


def convolutions() -> nn.Module:
    """ReLU, in place as well, and max-pool: kinks everywhere."""
    stem = nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2)
    return nn.Sequential(*stem, nn.Conv2d(8, 8, 3), nn.LeakyReLU(0.1), nn.Flatten(), nn.Linear(8 * 9, 3))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(3), nn.Linear(3, 9)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        return x + F.scaled_dot_product_attention(q, k, v, is_causal=True)


def attention() -> nn.Module:
    return nn.Sequential(nn.Flatten(1, 2), nn.Linear(12, 3), Block(), nn.Flatten(), nn.Linear(36, 3))


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


def vectors(size: int, gradient: Tensor) -> Tensor:
    random = torch.randn(size, 2, generator=torch.Generator().manual_seed(1))
    return torch.cat([gradient.unsqueeze(1), random, torch.zeros(size, 1)], dim=1)


@pytest.mark.parametrize("scale", [1.0, 1e-9, 1e9])
@pytest.mark.parametrize("name", MODELS)
def test_agrees_with_second_derivatives(name: str, scale: float) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().eval()

    def scaled(model: nn.Module, batch: Any) -> Tensor:
        return scale * loss(model, batch)

    with open_parameters(model, [BATCH], loss=scaled) as operator:
        z = vectors(operator.size, operator.gradient)
        hessian, ggn = operator.matmat(z), operator.ggn(z)
    before = copy.deepcopy(model.state_dict())
    with open_parameters(model, [BATCH], loss=scaled, kind=DifferenceOperator) as operator:
        assert isinstance(operator, DifferenceOperator)
        found = operator.matmat(z)
        found_ggn = operator.ggn(z)
        assert operator.products == 2 * z.shape[1]
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values()))
    norm = hessian[:, 0].norm() / z[:, 0].norm()
    assert operator.error < TOLERATED
    for i in range(3):
        assert (found - hessian)[:, i].norm() <= TOLERATED * norm * z[:, i].norm()
        assert (found_ggn - ggn)[:, i].norm() <= TOLERATED * norm * z[:, i].norm()
    assert not found[:, 3].any()


def test_several_batches_are_weighted() -> None:
    torch.manual_seed(0)
    model = convolutions().eval()
    parts = [tuple(t[:4] for t in BATCH), tuple(t[4:] for t in BATCH)]
    with open_parameters(model, [BATCH], loss=loss, kind=DifferenceOperator) as whole:
        z = vectors(whole.size, whole.gradient)
        together, ggn = whole.matmat(z), whole.ggn(z)
    with open_parameters(model, parts, loss=loss, kind=DifferenceOperator) as operator:
        torch.testing.assert_close(operator.matmat(z), together, rtol=1e-2, atol=1e-2 * together.abs().max().item())
        torch.testing.assert_close(operator.ggn(z), ggn, rtol=1e-2, atol=1e-2 * ggn.abs().max().item())


def test_a_product_is_one_pass() -> None:
    torch.manual_seed(0)
    model = convolutions().eval()
    parameters = list(model.parameters())
    with KernelCounts() as one:
        torch.autograd.grad(loss(model, BATCH), parameters)
    with open_parameters(model, [BATCH], loss=loss, kind=DifferenceOperator) as operator:
        operator.hessian(operator.gradient)
        with KernelCounts() as counts:
            operator.hessian(operator.gradient)
    # a few more for the vectors, and copies of the batch
    assert counts.totals[0] <= one.totals[0] + 20
    assert counts.totals[1] <= 1, "the check for finite values alone may read a number"


class Cached(nn.Module):
    """Computes a function of its weight once, and keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.kept = nn.Linear(144, 3), {}

    def forward(self, x: Tensor) -> Tensor:
        value = self.kept.setdefault("tanh", torch.tanh(self.linear.weight))
        return F.linear(x.flatten(1), value + 0.1 * self.linear.weight**2)


class Kinked(nn.Module):
    """Kinks of its own making, close to each other, for which no piece is recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(144, 64), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x.flatten(1))
        return self.second(torch.where((3000 * hidden).frac().abs() < 0.5, hidden, -3 * hidden))


class Counting(nn.Module):
    """Another function in every pass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(144, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x.flatten(1)) ** (1 + self.calls % 3)


class Branching(nn.Module):
    """Calls another activation in every second pass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(144, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.linear(x.flatten(1))
        return F.relu(x) if self.calls % 2 else F.relu(F.relu(x))


@pytest.mark.parametrize("kind", [Cached, Kinked, Counting, Branching])
def test_a_model_that_is_no_smooth_function_is_refused(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = kind().eval()
    before = copy.deepcopy(model.state_dict())
    with (
        pytest.raises(DifferencesError),
        open_parameters(model, [BATCH], loss=loss, kind=DifferenceOperator) as operator,
    ):
        operator.hessian(operator.gradient)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values()))


def test_no_curvature_is_refused() -> None:
    model = nn.Linear(144, 1)
    with (
        pytest.raises(DifferencesError, match="error of"),
        open_parameters(
            model, [BATCH], loss=lambda m, b: m(b[0].flatten(1)).mean(), kind=DifferenceOperator
        ) as operator,
    ):
        operator.hessian(operator.gradient)


def test_the_step_is_chosen_from_few() -> None:
    """The error is a ε + b / ε: from two steps to the best one."""
    a, b = 40.0, 1e-7
    tried: dict[float, float] = {}
    step: float | None = 3e-3
    while step is not None:
        tried[step] = a * step + b / step
        step = gradient_differences._next_step(tried)
    assert len(tried) == 3
    assert min(tried.values()) == pytest.approx(2 * (a * b) ** 0.5)
    assert gradient_differences._next_step({1e-3: 1e-3}) is None

"""Piecewise linear operations stay on their pieces: shifted passes are those of the piece, whatever the input."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvmon.graph.fixed_pieces import ChangedCallsError, FixedPieces

ELEMENTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "method": lambda x: x.relu(),
    "in place": lambda x: F.relu(x * 1, inplace=True),
    "leaky": lambda x: F.leaky_relu(x, 0.1),
    "leaky in place": lambda x: F.leaky_relu(x * 1, 0.1, inplace=True),
    "module": nn.ReLU6(),
    "hardtanh": lambda x: F.hardtanh(x, -0.5, 0.7),
    "threshold": lambda x: F.threshold(x, 0.3, -1.0),
    "hardsigmoid": F.hardsigmoid,
    "abs": abs,
    "clamp": lambda x: x.clamp(min=-0.2),
    "clamp in place": lambda x: (x * 1).clamp_(-0.2, 0.4),
    "clip": lambda x: torch.clip(x, -0.1, 0.6),
    "hardshrink": lambda x: F.hardshrink(x, 0.3),
    "where": lambda x: torch.where(x > 0.2, 2 * x, -x),
    "method where": lambda x: x.where(x > 0.2, 0.5 * x),
    "prelu": lambda x: F.prelu(x, torch.tensor([0.3], dtype=x.dtype)),
    "maximum": lambda x: torch.maximum(x, 0.5 * x - 0.1),
    "smaller of two": lambda x: torch.min(x, torch.zeros_like(x)),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_the_piece_is_the_linear_extension(name: str) -> None:
    function = ELEMENTWISE[name]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, dtype=torch.float64, generator=generator).requires_grad_()
    shift = torch.randn(50, dtype=torch.float64, generator=generator)
    pieces = FixedPieces()
    with pieces():
        first = function(x)
    expected = function(x)
    assert torch.equal(first, expected)
    (slope,) = torch.autograd.grad(expected, x, torch.ones_like(expected))
    with pieces():
        moved = function(x + shift)
    torch.testing.assert_close(moved, expected + slope * shift)  # also where the shift crosses a kink
    torch.testing.assert_close(torch.autograd.grad(moved, x, torch.ones_like(moved))[0], slope)


@pytest.mark.parametrize(
    "pool",
    [
        nn.MaxPool2d(2),
        nn.MaxPool2d(3, stride=1, padding=1, dilation=1),
        nn.AdaptiveMaxPool2d(2),
        nn.MaxPool2d(2, ceil_mode=True),
    ],
)
@pytest.mark.parametrize("lead", [(3, 2), (2,)])
def test_a_pool_takes_the_same_entries(pool: nn.Module, lead: tuple[int, ...]) -> None:
    x = torch.arange(25.0).reshape(5, 5).expand(*lead, 5, 5).clone().requires_grad_()
    pieces = FixedPieces()
    with pieces():
        first = pool(x)
    assert torch.equal(first, pool(x))
    with pieces():
        reversed_order = pool(-x)  # the largest entries are now the smallest
    assert torch.equal(reversed_order, -first)


def test_pools_of_other_dimensions() -> None:
    for dims in (1, 3):
        pool = [nn.MaxPool1d, nn.MaxPool3d][dims // 3](2)
        x = torch.randn(2, 3, *[4] * dims).requires_grad_()
        pieces = FixedPieces()
        with pieces():
            first = pool(x)
        with pieces():
            assert torch.equal(pool(-x), -first)


def test_other_calls_are_an_error() -> None:
    x, pieces = torch.randn(3, requires_grad=True), FixedPieces()
    with pieces():
        F.relu(x)
    with pytest.raises(ChangedCallsError, match="0 piecewise linear operations, and 1 before"), pieces():
        pass
    with pytest.raises(ChangedCallsError, match="is called where it was not before"), pieces():
        F.relu(x), F.relu(x)
    with pytest.raises(ChangedCallsError, match="is called where it was not before"), pieces():
        x.abs()
    with pytest.raises(ChangedCallsError, match="is called where it was not before"), pieces():
        F.relu(x[:2])


def test_a_trained_slope_and_both_arguments_get_gradients() -> None:
    x = torch.randn(2, 3, 4, dtype=torch.float64).requires_grad_()
    weight = torch.rand(3, dtype=torch.float64).requires_grad_()
    other = torch.randn(2, 3, 4, dtype=torch.float64).requires_grad_()
    pieces = FixedPieces()

    def function() -> Tensor:
        return F.prelu(x, weight).sum() + torch.maximum(x, other).square().sum()

    with pieces():
        expected = torch.autograd.grad(function(), [x, weight, other])
    with pieces():
        for one, two in zip(torch.autograd.grad(function(), [x, weight, other]), expected):
            torch.testing.assert_close(one, two)


def test_a_bound_that_is_trained_is_left_alone() -> None:
    x, bound = torch.tensor([-1.0, 2.0], requires_grad=True), torch.zeros(2, requires_grad=True)
    pieces = FixedPieces()
    for _ in range(2):
        with pieces():
            y = x.clamp(min=bound)
        assert torch.autograd.grad(y.sum(), bound)[0].any()


def test_constants_and_returned_indices_are_left_alone() -> None:
    x, pieces = torch.randn(1, 1, 4, requires_grad=True), FixedPieces()
    with pieces():
        F.relu(x.detach())
        F.max_pool1d(x, 2, return_indices=True)
    with pieces():
        pass

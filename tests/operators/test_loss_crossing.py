"""Where a loss along a step is again what it was: closed forms, bisection, and networks."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvmon.operators.loss_crossing import LARGEST_FACTOR, MOST_TRIES, REACH, TOLERANCE, first_crossing
from curvmon.operators.loss_differences import open_loss_along_step


class Counted:
    """A function of t, and the values that it was called with."""

    def __init__(self, f: Callable[[float], float]) -> None:
        self.f, self.tried = f, list[float]()

    def __call__(self, t: float) -> float:
        self.tried.append(t)
        return self.f(t)


def search(loss: Callable[[Tensor], Tensor], tolerance: float = TOLERANCE) -> tuple[float, list[float]]:
    """With exact derivatives, from t = 0."""
    t = torch.zeros((), dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(loss(t), t, create_graph=True)
    second = torch.autograd.grad(slope, t)[0].item() if slope.requires_grad else 0.0
    f = Counted(lambda t: loss(torch.tensor(t, dtype=torch.float64)).item())
    return first_crossing(f, loss(t).item(), -slope.item(), second, tolerance), f.tried


@pytest.mark.parametrize("minimum", [1e-3, 1.0, 20.0])
@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e9])
def test_one_value_is_enough_on_a_quadratic(scale: float, minimum: float) -> None:
    crossing, tried = search(lambda t: scale * ((t - minimum) ** 2 + 0.1 * minimum**2))
    assert len(tried) == 1 and crossing == pytest.approx(2 * minimum, rel=1e-9)


@pytest.mark.parametrize("minimum", [1e2, 1e4])
def test_after_very_short_steps_it_is_approached(minimum: float) -> None:
    crossing, tried = search(lambda t: (t - minimum) ** 2)
    assert tried[0] == REACH and all(b <= LARGEST_FACTOR * a for a, b in pairwise(tried))
    assert crossing == pytest.approx(2 * minimum, rel=1e-6) and len(tried) <= MOST_TRIES
    f = Counted(lambda t: (t - minimum) ** 2)
    assert first_crossing(f, minimum**2, 2 * minimum, 2.0, reach=3 * minimum) == 2 * minimum and len(f.tried) == 1


SYMMETRIC: dict[str, Callable[[Tensor], Tensor]] = {
    "saturates": lambda x: torch.log(1 + x**2 / 4),
    "saturates, without positive curvature": lambda x: torch.log(1 + 4 * x**2),
    "bends upwards": lambda x: x**4,
    "an exponential": lambda x: torch.cosh(3 * x),
    "a narrow valley in a wide one": lambda x: x**2 / 4 + torch.log(1 + 50 * x**2),
    "a hinge": lambda x: torch.sqrt(x**2 + 1e-4),
}
"""around a minimum at t = 1: they cross at 2, wherever their second derivatives say"""


@pytest.mark.parametrize("name", SYMMETRIC)
def test_losses_that_are_not_quadratic(name: str) -> None:
    crossing, tried = search(lambda t: SYMMETRIC[name](t - 1))
    assert crossing == pytest.approx(2, rel=0.05) and 1 < len(tried) <= MOST_TRIES


def test_a_quadratic_model_is_wrong_where_the_crossing_is_right() -> None:
    """log(1 + x²/4) at x = -1: g = -0.4, H = 0.24."""
    loss = lambda t: torch.log(1 + (t - 1) ** 2 / 4)  # noqa: E731
    crossing, _ = search(loss)
    at, half, twice, quadratic = (loss(torch.tensor(t)) for t in (0.0, crossing / 2, 2 * crossing, 2 * 0.4 / 0.24))
    assert half < at < twice and at < quadratic


def skewed(rng: random.Random) -> Callable[[Tensor], Tensor]:
    """Valleys whose two sides differ, with minima near 1."""
    square, fourth, wide, narrow = (math.exp(rng.uniform(-3, 0)) for _ in range(4))
    depth, skew = math.exp(rng.uniform(-1, 2)), rng.uniform(-0.4, 0.4)

    def loss(t: Tensor) -> Tensor:
        x = (t - 1) * (1 + skew * torch.tanh(t - 1))
        return square * x**2 + fourth * x**4 + wide * torch.log(1 + depth * x**2) + narrow * torch.cosh(x)

    return loss


def bisected(loss: Callable[[Tensor], Tensor]) -> float:
    at, low, high = loss(torch.zeros((), dtype=torch.float64)), 1e-3, 1e3
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if loss(torch.tensor(middle, dtype=torch.float64)) >= at else (middle, high)
    return high


def test_passes_and_accuracy_on_many_losses() -> None:
    rng = random.Random(0)
    errors, counts = [], []
    for _ in range(200):
        loss = skewed(rng)
        crossing, tried = search(loss)
        errors.append(abs(math.log(crossing / bisected(loss))))
        counts.append(len(tried))
    assert sum(error < 0.05 for error in errors) >= 0.95 * len(errors)
    assert 2 < sum(counts) / len(counts) < 4 and max(counts) <= MOST_TRIES


def test_fewer_passes_with_a_larger_tolerance() -> None:
    rng, counts = random.Random(1), []
    for loss in [skewed(rng) for _ in range(20)]:
        close, loose = (search(loss, tolerance)[1] for tolerance in (TOLERANCE, math.log(2)))
        counts.append((len(loose), len(close)))
        assert close[: len(loose)] == loose
    assert sum(loose for loose, _ in counts) < 0.7 * sum(close for _, close in counts)


@pytest.mark.parametrize(
    "loss", [lambda t: 1 - t, lambda t: torch.exp(-t), lambda t: -(t**2) - t, lambda t: 1e-12 * t**2 - t]
)
def test_a_loss_that_falls_on_and_on(loss: Callable[[Tensor], Tensor]) -> None:
    """Or nearly so: the last one has its minimum after 5e11 steps."""
    crossing, tried = search(loss)
    assert crossing == math.inf and len(tried) <= MOST_TRIES
    assert all(b <= LARGEST_FACTOR * a for a, b in pairwise(tried))


@pytest.mark.parametrize(
    ("gain", "curvature"), [(0.0, 1.0), (-1.0, 1.0), (math.nan, 1.0), (1.0, math.nan), (math.inf, 1.0), (1e-7, 1.0)]
)
def test_nothing_is_tried_where_the_loss_does_not_fall(gain: float, curvature: float) -> None:
    """In the last case by less than its rounding in single precision."""
    f = Counted(lambda t: 1.0)
    assert math.isnan(first_crossing(f, 1.0, gain, curvature)) and f.tried == []


def test_a_gain_that_no_step_has() -> None:
    """The derivative says that the loss falls, but it rises however short the step is."""
    assert math.isnan(first_crossing(lambda t: 1 + t, 1.0, 1.0, 1.0))


@pytest.mark.parametrize("beyond", [math.nan, math.inf])
@pytest.mark.parametrize("wall", [0.3, 0.9, 1.7])
def test_what_is_not_finite_has_risen(wall: float, beyond: float) -> None:
    f = Counted(lambda t: (t - 1) ** 2 if t < wall else beyond)
    assert first_crossing(f, 1.0, 2.0, 2.0) == pytest.approx(wall, rel=0.05) and len(f.tried) <= MOST_TRIES


# ---- networks ----


def stepped(model: nn.Module, loss: Callable[..., Tensor], batch: Any, rate: float) -> list[Tensor]:
    """Make a gradient step; the parameters before it."""
    before = [p.detach().clone() for p in model.parameters()]
    gradients = torch.autograd.grad(loss(model, batch), list(model.parameters()))
    with torch.no_grad():
        for p, g in zip(model.parameters(), gradients):
            p.sub_(rate * g)
    return before


def test_a_quadratic_network_takes_one_more_forward_pass() -> None:
    torch.manual_seed(0)
    net, batch, passes = nn.Linear(5, 2).double(), (torch.randn(40, 5).double(), torch.randn(40, 2).double()), [0]

    def square(model: nn.Module, batch: Any) -> Tensor:
        passes[0] += 1
        return F.mse_loss(model(batch[0]), batch[1])

    before = stepped(net, square, batch, 0.1)
    after = copy.deepcopy(net.state_dict())
    with open_loss_along_step(net, batch, loss=square, before=before) as along:
        found = along.differences(1.0)
        taken = passes[0]
        crossing = along.crossing(along.gain(), found.curvature)
    assert passes[0] == taken + 2  # one for the exact gain
    assert all(torch.equal(value, after[name]) for name, value in net.state_dict().items())
    u = [b - p.detach() for b, p in zip(before, net.parameters())]
    with torch.no_grad():
        for p, b, part in zip(net.parameters(), before, u):
            p.copy_(b - crossing * part)
    assert square(net, batch).item() == pytest.approx(along.loss, rel=1e-6)


class Hinge(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.at = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return (F.relu(1 - self.at) + 0.5 * F.relu(self.at - 1)).sum() + 0 * x.sum()


def test_kinks_are_crossed() -> None:
    """Held on its pieces, this loss would fall forever: 1 - t. It is max(1 - t, (t - 1) / 2), and 1 again at t = 3."""
    model = Hinge()
    before = stepped(model, lambda model, x: model(x), torch.ones(2), 1.0)
    with open_loss_along_step(model, torch.ones(2), loss=lambda model, x: model(x), before=before) as along:
        found = along.differences(1.0)
        assert along.value(2.0) == pytest.approx(-1.0) and found.curvature == pytest.approx(0.0, abs=1e-3)
        assert along.crossing(found.gain, found.curvature) == pytest.approx(3.0, rel=0.05)


def test_a_loss_that_refuses_parameters_far_away_has_risen() -> None:
    """Its first value is asked for at twice the step."""

    def asserting(model: nn.Module, x: Tensor) -> Tensor:
        assert model.weight.abs().max() < 1.5, "diverged"
        return (model(x) - 1).square().sum()

    model, x = nn.Linear(1, 1, bias=False), torch.ones(1, 1)
    with torch.no_grad():
        model.weight.zero_()
    before = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        model.weight.fill_(1.0)
    with open_loss_along_step(model, x, loss=asserting, before=before) as along:
        assert along.crossing(2.0, 2.0) == pytest.approx(1.5, rel=0.05)
        assert along.value(0.5) == pytest.approx(0.25)


def test_between_parameters_that_are_given() -> None:
    torch.manual_seed(0)
    net, batch = nn.Linear(5, 2), torch.randn(40, 5)
    square = lambda model, x: model(x).square().mean()  # noqa: E731
    before = stepped(net, square, batch, 0.1)
    after = [p.detach().clone() for p in net.parameters()]
    with open_loss_along_step(net, batch, loss=square, before=before) as along:
        expected = [along.value(t) for t in (0.0, 0.5, 1.0)]
    with torch.no_grad():
        for p in net.parameters():
            p.fill_(7.0)
    with open_loss_along_step(net, batch, loss=square, before=before, after=after) as along:
        assert [along.value(t) for t in (0.0, 0.5, 1.0)] == expected
    assert all(bool((p == 7).all()) for p in net.parameters())

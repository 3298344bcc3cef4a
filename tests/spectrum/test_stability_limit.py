"""The largest stable sharpness: just below it a quadratic loss shrinks, just above it grows."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import curvmon
from curvmon import stability_limit
from tests.helpers.spectrum_cases import Quadratic, energy

SGD: list[dict[str, Any]] = [
    {"lr": 0.1},
    {"lr": 0.1, "momentum": 0.9},
    {"lr": 0.05, "momentum": 0.8, "nesterov": True},
    {"lr": 0.1, "momentum": 0.9, "dampening": 0.5},
    {"lr": 0.1, "weight_decay": 3.0},
    {"lr": 0.1, "momentum": 0.5, "weight_decay": 3.0},
]


def grows(optimizer: torch.optim.Optimizer, weight: nn.Parameter, curvature: float, steps: int) -> bool:
    """Whether ½ λ w² grows under the optimizer."""
    sizes = []
    for _ in range(steps):
        optimizer.zero_grad()
        (curvature * weight.square() / 2).sum().backward()
        optimizer.step()
        sizes.append(weight.abs().item())
    return max(sizes[-10:]) > max(sizes[:10])


@pytest.mark.parametrize("options", SGD, ids=str)
def test_sgd_limit(options: dict[str, Any]) -> None:
    for share, expected in ((0.97, False), (1.03, True)):
        weight = nn.Parameter(torch.ones(1, dtype=torch.float64))
        optimizer = torch.optim.SGD([weight], **options)
        rule = stability_limit(optimizer)
        limit = rule.limit
        if rule.preconditioner is not None:
            limit = rule.limit * rule.preconditioner[weight].item() - rule.decay[weight].item()
        assert grows(optimizer, weight, share * limit, 400) == expected


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "RMSprop", "Adagrad", "amsgrad"])
def test_adaptive_limits(kind: str) -> None:
    """With constant second moments, the preconditioned curvature decides."""
    for share, expected in ((0.97, False), (1.03, True)):
        weight = nn.Parameter(torch.ones(1, dtype=torch.float64))
        if kind == "RMSprop":
            optimizer: torch.optim.Optimizer = torch.optim.RMSprop([weight], lr=0.01, alpha=1 - 1e-6, momentum=0.5)
        elif kind == "Adagrad":
            optimizer = torch.optim.Adagrad([weight], lr=0.01)
        else:
            name = "Adam" if kind == "amsgrad" else kind
            options = {"betas": (0.9, 1 - 1e-6), "weight_decay": 0.0, "amsgrad": kind == "amsgrad"}
            optimizer = getattr(torch.optim, name)([weight], lr=0.01, **options)
        weight.grad = torch.ones_like(weight)
        assert math.isnan(stability_limit(optimizer).limit) and "not taken a step" in stability_limit(optimizer).reason
        optimizer.step()
        state = optimizer.state[weight]
        for key in ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum"):
            if key in state:
                state[key].fill_(1.0)
        state["step"] = torch.tensor(1e9)  # without bias correction
        rule = stability_limit(optimizer)
        assert rule.preconditioner is not None
        curvature = share * rule.limit * rule.preconditioner[weight].item()
        with torch.no_grad():
            weight.fill_(1e-9)
        for key in ("exp_avg", "momentum_buffer"):
            if key in state:
                state[key].zero_()
        assert grows(optimizer, weight, curvature, 40) == expected, kind  # few steps, so that the moments hardly change


def test_learning_rates_of_groups_become_a_preconditioner() -> None:
    one, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    rule = stability_limit(torch.optim.SGD([{"params": [one], "lr": 0.1}, {"params": [other], "lr": 0.5}]))
    assert rule.limit == 2 and rule.preconditioner is not None
    torch.testing.assert_close(rule.preconditioner[one], torch.full((2,), 10.0))
    torch.testing.assert_close(rule.preconditioner[other], torch.full((3,), 2.0))


def test_reason_if_there_is_no_limit() -> None:
    weight = nn.Parameter(torch.ones(1))
    assert "no limit is known for LBFGS" in stability_limit(torch.optim.LBFGS([weight])).reason
    assert "no parameter is updated" in stability_limit(torch.optim.SGD([weight], lr=0.0)).reason
    assert "maximises" in stability_limit(torch.optim.SGD([weight], lr=0.1, maximize=True)).reason
    groups = [{"params": [weight], "momentum": 0.9}, {"params": [nn.Parameter(torch.ones(1))]}]
    assert "momentum differs" in stability_limit(torch.optim.SGD(groups, lr=0.1)).reason
    with pytest.raises(curvmon.InputError, match="takes a torch optimizer, not float"):
        stability_limit(0.1)  # type: ignore[arg-type]


def test_no_limit_for_dampening_above_one() -> None:
    """The momentum term then reverses the sign of the gradient: ½ λ w² grows for the smallest positive λ."""
    options = {"lr": 0.1, "momentum": 0.9, "dampening": 1.5}
    weight, other = nn.Parameter(torch.ones(1, dtype=torch.float64)), nn.Parameter(torch.ones(1))
    damped = torch.optim.SGD([weight], **options)
    rule = stability_limit(damped)
    assert math.isnan(rule.limit) and "no limit is known for a dampening above one" in rule.reason
    assert grows(damped, weight, 1e-2, 4000)
    mixed = stability_limit(torch.optim.SGD([{"params": [other], "lr": 0.1}, {"params": [weight], **options}], lr=0.1))
    assert math.isnan(mixed.limit) and "dampening above one" in mixed.reason
    # torch ignores dampening without momentum
    assert stability_limit(torch.optim.SGD([weight], lr=0.1, dampening=1.5)).limit == pytest.approx(20)


def test_stability_ratio_of_sgd() -> None:
    values = torch.tensor([4.0, 3, 2, 1, -1])
    model = Quadratic(values)
    result = curvmon.spectrum(model, torch.zeros(1), loss=energy, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    assert result.stability_limit == pytest.approx(20) and result.stability_ratio == pytest.approx(0.2)
    assert "of the stability limit 0.2" in str(result)


def test_stability_ratio_of_adam() -> None:
    """λ_1 of D^-1/2 H D^-1/2 against a dense computation."""
    torch.manual_seed(0)
    model = Quadratic(torch.tensor([4.0, 3, 2, 1, -1]))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(3):
        model.theta.grad = torch.randn_like(model.theta)
        optimizer.step()
    result = curvmon.spectrum(model, torch.zeros(1), loss=energy, optimizer=optimizer, rtol=1e-8)
    moments = optimizer.state[model.theta]["exp_avg_sq"] / (1 - 0.999**3)
    root = ((moments.sqrt() + 1e-8) / 0.1).rsqrt()
    true = torch.linalg.eigvalsh(root.unsqueeze(1) * model.matrix * root)[-1].item()
    assert result.stability_ratio == pytest.approx(true / (2 * 1.9 / 0.1), rel=1e-6)


class Blocks(nn.Module):
    """Two parameters with curvatures 100 and 1."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))


def blocks(model: Any, batch: Any) -> torch.Tensor:
    return 50 * model.a.square().sum() + 0.5 * model.b.square().sum()


def test_frozen_and_decayed_parameters() -> None:
    def ratio(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
        return curvmon.spectrum(model, torch.zeros(1), loss=blocks, optimizer=optimizer, ggn=False).stability_ratio

    model = Blocks()
    assert ratio(model, torch.optim.SGD([model.b], lr=0.1)) == pytest.approx(0.05)
    groups = [{"params": [model.a], "lr": 0.0}, {"params": [model.b], "lr": 0.1, "weight_decay": 18.0}]
    assert ratio(model, torch.optim.SGD(groups, lr=0.1)) == pytest.approx(0.95)
    assert ratio(model, torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=20.0)) == pytest.approx(6.0)
    assert math.isnan(ratio(model, torch.optim.SGD(Blocks().parameters(), lr=0.1)))
    assert "no effect" in stability_limit(torch.optim.SGD([model.a], lr=0.1, momentum=0.9, dampening=1.0)).reason
    adam = torch.optim.Adam(model.parameters(), lr=0.1)
    model.b.grad = torch.ones(3)
    adam.step()
    assert ratio(model, adam) == pytest.approx(0.1 / 38)  # a has no gradient yet
    adagrad = torch.optim.Adagrad([model.b], lr=0.1, lr_decay=1.0)
    for _ in range(4):
        adagrad.step()
    assert ratio(model, adagrad) == pytest.approx(0.1 / 4 / 2 / 2)


def test_preconditioned_eigenvector_differs_from_that_of_the_hessian() -> None:
    values = torch.full((1000,), 1e-3)
    values[0], values[1] = 10.0, 1.0
    theta = nn.Parameter(torch.zeros(1000))
    model = nn.ParameterDict({"theta": theta})
    adam = torch.optim.Adam([theta], lr=1e-3)
    theta.grad = torch.ones(1000)
    theta.grad[0], theta.grad[1] = 10.0, 0.5
    adam.step()
    result = curvmon.spectrum(
        model,
        torch.zeros(1),
        loss=lambda m, b: (values * m["theta"].square()).sum() / 2,
        k=2,
        optimizer=adam,
        ggn=False,
    )
    assert result.stability_ratio == pytest.approx(2e-3 / 38, rel=1e-3)


def test_density_moments() -> None:
    """The weights add up to one, and four random vectors estimate the second moment."""
    values = torch.cat([torch.full((5,), 10.0), torch.linspace(-1, 1, 400)])
    result = curvmon.spectrum(Quadratic(values), torch.zeros(1), loss=energy, density=True, verify=False)
    assert result.density is not None
    assert result.density.weights.sum().item() == pytest.approx(1)
    second = (result.density.weights * result.density.values.square()).sum().item()
    assert second == pytest.approx(values.square().mean().item(), rel=0.5)
    grid, curve = result.density.smoothed()
    assert torch.trapezoid(curve, grid).item() == pytest.approx(1, rel=1e-2)
    bulk = curve[(grid > -1.5) & (grid < 1.5)].sum() / curve.sum()
    assert 0.95 < bulk < 1


def test_bias_before_batch_norm_is_skipped() -> None:
    """In training its gradient and Adam's second moment are rounding errors; in eval mode it has curvature."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    x, y = torch.randn(32, 1, 8, 8), torch.randint(3, (32,))
    for _ in range(20):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    limit = curvmon.stability_limit(optimizer)
    assert limit.preconditioner is not None
    assert model[0].bias not in limit.preconditioner and model[0].weight in limit.preconditioner
    assert "1 tensors with vanishing gradients skipped" in limit.reason
    result = curvmon.spectrum(model, (x, y), loss=lambda m, b: F.cross_entropy(m(b[0]), b[1]), k=1, optimizer=optimizer)
    assert 0 < result.stability_ratio < 10

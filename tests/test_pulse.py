"""Gain and curvature along a step, against exact values."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvmon
from curvmon import InputError, Pulse
from curvmon.pulse import mean_pulse, pulse_at
from tests.helpers.small_classifiers import BATCH, MODELS, loss
from tests.helpers.spectrum_cases import dense_hessian


def gradient_step(model: nn.Module, rate: float) -> list[Tensor]:
    value = loss(model, BATCH)
    return [rate * g for g in torch.autograd.grad(value, [p for p in model.parameters() if p.requires_grad])]


@pytest.mark.parametrize("name", ["convolutions", "attention", "LSTM"])
def test_gain_and_curvature_are_those_of_the_dense_hessian(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    step = gradient_step(model, 0.3)
    u = torch.cat([part.reshape(-1) for part in step]).double()
    hessian = dense_hessian(model, BATCH, loss).double()
    found = curvmon.pulse(model, BATCH, loss=loss, step=step)
    assert found.gain == pytest.approx((u.square().sum() / 0.3).item(), rel=1e-4)
    assert found.curvature == pytest.approx((u @ hessian @ u).item(), rel=1e-3)
    assert found.ratio == found.curvature / (2 * found.gain)
    assert found.loss == pytest.approx(loss(model, BATCH).item(), rel=1e-6)


@pytest.mark.parametrize("rate", [0.5, 0.99, 1.01, 2.0])
def test_the_critical_learning_rate_of_a_quadratic_is_exact(rate: float) -> None:
    """A step with `rate` times the critical learning rate lowers the loss exactly if it is below 1."""
    torch.manual_seed(0)
    net, x, y = nn.Linear(5, 2).double(), torch.randn(40, 5).double(), torch.randn(40, 2).double()

    def square(model: nn.Module, batch: Any) -> Tensor:
        return F.mse_loss(model(batch[0]), batch[1])

    before = square(net, (x, y))
    gradient = torch.autograd.grad(before, list(net.parameters()))
    critical = 1 / curvmon.pulse(net, (x, y), loss=square, step=gradient).ratio
    with torch.no_grad():
        for parameter, g in zip(net.parameters(), gradient):
            parameter.sub_(rate * critical * g)
    after = square(net, (x, y))
    assert (after < before) == (rate < 1)
    step = [rate * critical * g for g in gradient]
    assert curvmon.pulse(copy.deepcopy(net), (x, y), loss=square, step=step).gain != 0


def test_the_measured_crossing_of_a_quadratic_is_exact() -> None:
    """It is 1 / ratio; and it is measured on demand only."""
    torch.manual_seed(0)
    net, batch = nn.Linear(5, 2).double(), (torch.randn(40, 5).double(), torch.randn(40, 2).double())
    passes = [0]

    def square(model: nn.Module, batch: Any) -> Tensor:
        passes[0] += 1
        return F.mse_loss(model(batch[0]), batch[1])

    step = [0.1 * g for g in torch.autograd.grad(square(net, batch), list(net.parameters()))]
    plain, taken = curvmon.pulse(net, batch, loss=square, step=step), passes[0]
    found = curvmon.pulse(net, batch, loss=square, step=step, critical=True)
    assert math.isnan(plain.critical) and passes[0] == 2 * taken - 1 + 3  # before the step, again, and at the crossing
    assert found.critical == pytest.approx(1 / found.ratio, rel=1e-12)
    assert (found.gain, found.curvature, found.loss) == (plain.gain, plain.curvature, plain.loss)


@pytest.mark.parametrize("name", ["convolutions", "attention", "LSTM"])
@pytest.mark.parametrize("rate", [1e-3, 0.3])
def test_the_measured_crossing_leaves_the_loss_as_it_is(name: str, rate: float) -> None:
    """5 % before it the loss is lower, 5 % beyond higher; and the model is as before."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    step, state = gradient_step(model, rate), copy.deepcopy(model.state_dict())
    found = curvmon.pulse(model, BATCH, loss=loss, step=step, critical=True)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())

    def at(t: float) -> float:
        shifted = copy.deepcopy(model)
        with torch.no_grad():
            for p, u in zip(shifted.parameters(), step):
                p.sub_(t * u)
        return loss(shifted, BATCH).item()

    assert at(0.95 * found.critical) < at(0.0) < at(1.05 * found.critical)


@pytest.mark.parametrize("sharpness", [0.25, 4.0])
def test_the_measured_crossing_of_a_saturating_loss(sharpness: float) -> None:
    """log(1 + s (w - 1)²) from w = 0: again the same at w = 2. To second order, at 3.3 for s = 1/4, never for s = 4."""
    net = nn.Linear(1, 1, bias=False).double()
    with torch.no_grad():
        net.weight.zero_()

    def saturating(model: nn.Module, x: Tensor) -> Tensor:
        return torch.log(1 + sharpness * (model(x) - 1).square()).sum()

    found = curvmon.pulse(
        net, torch.ones(1, 1).double(), loss=saturating, step=[torch.full((1, 1), -0.1)], critical=True
    )
    assert found.critical == pytest.approx(20, rel=0.05)
    assert found.ratio < 0 if sharpness == 4 else 1 / found.ratio == pytest.approx(100 / 3)


def test_a_step_uphill_has_no_crossing() -> None:
    torch.manual_seed(0)
    model = MODELS["LSTM"]().eval()
    step = [-part for part in gradient_step(model, 0.1)]
    assert math.isnan(curvmon.pulse(model, BATCH, loss=loss, step=step, critical=True).critical)


def test_a_loss_with_noise_of_its_own_has_no_crossing() -> None:
    torch.manual_seed(0)
    model, noise = MODELS["LSTM"]().eval(), torch.Generator().manual_seed(0)

    def noisy(model: nn.Module, batch: Any) -> Tensor:
        return loss(model, batch) * (1 + 1e-4 * torch.rand((), generator=noise))

    found = curvmon.pulse(model, BATCH, loss=noisy, step=gradient_step(model, 0.1), critical=True)
    assert found.gain > 0 and math.isnan(found.critical)


def test_a_pulse_at_earlier_parameters_finds_the_same_crossing() -> None:
    torch.manual_seed(0)
    model = MODELS["attention"]().eval()
    step = gradient_step(model, 0.3)
    expected = curvmon.pulse(model, BATCH, loss=loss, step=step, critical=True)
    before = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for p, u in zip(model.parameters(), step):
            p.sub_(u)
    found = pulse_at(before, model, BATCH, loss=loss, critical=True)
    assert found.critical == pytest.approx(expected.critical, rel=1e-3)


def test_the_mean_over_batches() -> None:
    """Of quadratic losses the crossing is that of the mean loss; one in three has none, or a wrong one."""
    pulses = [Pulse(1.0, 0.5, 1.0, 4.0), Pulse(3.0, 0.5, 2.0, 12.0), Pulse(2.0, 1.0, 6.0, 4.0)]
    mean = mean_pulse(pulses)
    assert (mean.gain, mean.curvature, mean.loss) == (2.0, pytest.approx(2 / 3), 3.0)
    assert mean.critical == pytest.approx(1 / mean.ratio)
    for odd in (math.nan, math.inf, 0.1):
        assert mean_pulse([*pulses[:2], replace(pulses[2], critical=odd)]).critical == pytest.approx(1 / mean.ratio)
    flat = [Pulse(1.0, -0.5, 1.0, 4.0), Pulse(1.0, -0.1, 1.0, 6.0), Pulse(-1.0, 0.1, 1.0)]
    assert mean_pulse(flat).critical == 5.0
    assert math.isnan(mean_pulse([replace(p, critical=math.nan) for p in pulses]).critical)
    assert mean_pulse(pulses[:1]) == pulses[0]


class Noisy(nn.Module):
    """Batch norm and dropout, which are something else in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(144, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.dropout(torch.tanh(self.norm(self.first(x.flatten(1)))), 0.5, self.training))


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_of_the_model_is_kept_and_nothing_changes(training: bool) -> None:
    """By differences of the loss itself, with the same noise every time; the model and all generators are as before."""
    torch.manual_seed(0)
    model = Noisy().double().train(training)
    batch = BATCH[0].double(), BATCH[1]
    step = [1e-2 * torch.randn_like(p) for p in model.parameters()]
    state, noise = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    found = curvmon.pulse(model, batch, loss=loss, step=step, critical=True)
    assert torch.equal(torch.get_rng_state(), noise) and model.training == training
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())

    def at(share: float) -> float:
        shifted = copy.deepcopy(model)
        with torch.no_grad():
            for p, u in zip(shifted.parameters(), step):
                p.sub_(share * u)
        return curvmon.pulse(shifted, batch, loss=loss, step=step).loss

    h = 1e-2
    assert found.loss == at(0.0)
    assert found.gain == pytest.approx((at(-h) - at(h)) / (2 * h), rel=1e-4)
    assert found.curvature == pytest.approx((at(h) - 2 * at(0.0) + at(-h)) / h**2, rel=1e-2)


def test_frozen_parameters_have_no_part() -> None:
    torch.manual_seed(0)
    model = MODELS["LSTM"]().eval()
    model.head.requires_grad_(False)
    found = curvmon.pulse(model, BATCH, loss=loss, step=gradient_step(model, 0.1))
    assert found.gain > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda step: step[:-1], "step has 5 tensors, which do not fit the 6 trainable parameters"),
        (lambda step: [*step[:1], step[1].T, *step[2:]], "the first that differs is inner.weight_hh_l0"),
        (lambda step: [part * math.nan for part in step], "NaN or infinite"),
        (lambda step: torch.cat([part.reshape(-1) for part in step]), "must be a list of tensors"),
    ],
)
def test_a_step_that_does_not_fit(change: Any, message: str) -> None:
    model = MODELS["LSTM"]()
    step = [torch.ones_like(p) for p in model.parameters()]
    with pytest.raises(InputError, match=message):
        curvmon.pulse(model, BATCH, loss=loss, step=change(step))


def test_the_ratio_where_there_is_no_gain() -> None:
    assert math.isnan(Pulse(0.0, 0.0).ratio)
    assert Pulse(0.0, 2.0).ratio == math.inf and Pulse(0.0, -2.0).ratio == -math.inf
    assert Pulse(-1.0, 2.0).ratio == -1.0

"""Gain and curvature from three forward passes, against dense Hessians and second derivatives."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvmon.errors import DivergedError, InputError, NonFiniteError
from curvmon.operators.loss_differences import MOST_SPACING, ChangingLossError, LossDifferences, open_loss_along_step
from curvmon.pulse import pulse_at
from tests.helpers.small_classifiers import BATCH, MODELS, loss
from tests.helpers.spectrum_cases import dense_hessian


def stepped(model: nn.Module, rate: float, of: Any = loss, batch: Any = BATCH) -> list[Tensor]:
    """Make a gradient step; the parameters before it."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    before = [p.detach().clone() for p in parameters]
    gradients = torch.autograd.grad(of(model, batch), parameters)
    with torch.no_grad():
        for p, g in zip(parameters, gradients):
            p.sub_(rate * g)
    return before


def along(model: nn.Module, before: list[Tensor], of: Any = loss, batch: Any = BATCH, h: float = 1.0) -> Any:
    with open_loss_along_step(model, batch, loss=of, before=before) as line:
        return line.differences(h)


@pytest.mark.parametrize("name", ["convolutions", "attention", "LSTM"])
@pytest.mark.parametrize("rate", [1e-4, 0.3])
def test_against_the_dense_hessian(name: str, rate: float) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    original = copy.deepcopy(model)
    before = stepped(model, rate)
    u = torch.cat([(b - a.detach()).reshape(-1) for b, a in zip(before, model.parameters())]).double()
    found = along(model, before)
    curvature = (u @ dense_hessian(original, BATCH, loss).double() @ u).item()
    assert found.gain == pytest.approx((u.square().sum() / rate).item(), rel=0.02)
    assert found.curvature == pytest.approx(curvature, rel=0.02)
    assert found.loss == pytest.approx(loss(original, BATCH).item(), rel=1e-6)


class Kinks(nn.Module):
    """ReLU, max-pool and batch norm with the statistics of the batch."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width)
        self.hidden, self.out = nn.Linear(width * 36, 32), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.conv(x.reshape(-1, 1, 12, 12)))), 2)
        return self.out(F.dropout(F.relu(self.hidden(x.flatten(1))), 0.2, self.training))


def test_kinks_are_not_crossed() -> None:
    """Crossing them changes the curvature several-fold: pieces are held, dropout and batch statistics too."""
    torch.manual_seed(0)
    model = Kinks().train()
    before = stepped(model, 0.3)
    exact = pulse_at(before, model, BATCH, loss=loss)
    state = copy.deepcopy(model.state_dict())
    found = along(model, before)
    assert found.gain == pytest.approx(exact.gain, rel=0.02)
    assert found.curvature == pytest.approx(exact.curvature, rel=0.02)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("h", [1e-4, 1e3])
def test_the_spacing_is_found_from_anywhere(h: float) -> None:
    torch.manual_seed(0)
    model = MODELS["attention"]().eval()
    before = stepped(model, 0.3)
    usual, found = along(model, before), along(model, before, h=h)
    assert found.curvature == pytest.approx(usual.curvature, rel=0.02)
    again = along(model, before, h=found.next_spacing)
    assert again.spacing == found.next_spacing  # accepted at once


@pytest.mark.parametrize("factor", [1e-6, 1e6])
def test_the_scale_of_the_loss_does_not_matter(factor: float) -> None:
    torch.manual_seed(0)
    model = MODELS["attention"]().eval()
    before = stepped(model, 0.3)

    def scaled(model: nn.Module, batch: Any) -> Tensor:
        return factor * loss(model, batch)

    usual, found = along(model, before), along(model, before, of=scaled)
    assert found.gain / factor == pytest.approx(usual.gain, rel=1e-3)
    assert found.curvature / factor == pytest.approx(usual.curvature, rel=1e-2)


def test_a_loss_that_takes_gradients_itself() -> None:
    torch.manual_seed(0)
    model = MODELS["attention"]().eval()

    def penalized(model: nn.Module, batch: Any) -> Tensor:
        x = batch[0].clone().requires_grad_()
        value = F.cross_entropy(model(x), batch[1])
        (slope,) = torch.autograd.grad(value, x, create_graph=True)
        return value + slope.square().sum()

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        before = stepped(model, 0.1, of=penalized)
    exact = pulse_at(before, model, BATCH, loss=penalized)
    found = along(model, before, of=penalized)
    assert found.curvature == pytest.approx(exact.curvature, rel=0.02)


def test_what_is_taken_for_a_constant_shows_in_the_gain() -> None:
    """The gradient does not see the target move; differences of the loss do."""
    torch.manual_seed(0)
    model = MODELS["attention"]().eval()

    def to_itself(model: nn.Module, batch: Any) -> Tensor:
        out = model(batch[0])
        return F.mse_loss(out, 2 * out.detach() + 1)

    before = stepped(model, 0.01, of=to_itself)
    with open_loss_along_step(model, BATCH, loss=to_itself, before=before) as line:
        found = line.differences(1.0)
        assert line.takes_constants and line.gain() > 0
        assert abs(line.gain() - found.gain) > 0.5 * line.gain()


def test_the_gain_from_the_gradient() -> None:
    torch.manual_seed(0)
    model = Kinks().train()
    before = stepped(model, 0.1)
    with open_loss_along_step(model, BATCH, loss=loss, before=before) as line:
        assert line.gain() == pytest.approx(line.differences(1.0).gain, rel=1e-2)
        line.check_repeats()


def test_a_loss_with_a_memory_is_noticed() -> None:
    model = MODELS["attention"]().eval()
    noise = torch.Generator().manual_seed(0)

    def noisy(model: nn.Module, batch: Any) -> Tensor:
        return loss(model, batch) * (1 + 0.01 * torch.rand((), generator=noise))

    before = stepped(model, 0.1)
    with (
        open_loss_along_step(model, BATCH, loss=noisy, before=before) as line,
        pytest.raises(ChangingLossError, match="of the same batch"),
    ):
        line.check_repeats()


def test_other_operations_are_noticed() -> None:
    model, calls = Kinks().eval(), []

    def branching(model: nn.Module, batch: Any) -> Tensor:
        calls.append(1)
        return loss(model, batch) + (F.relu(model.out.bias).sum() if len(calls) > 2 else 0.0)

    before = stepped(model, 0.1)
    with pytest.raises(ChangingLossError, match=r"piecewise linear|where it was not before"):
        along(model, before, of=branching)


def test_a_step_to_nowhere() -> None:
    torch.manual_seed(0)
    model = MODELS["attention"]().eval()
    before = stepped(model, math.nan)
    with pytest.raises(NonFiniteError):
        along(model, before)
    with pytest.raises(DivergedError, match="the loss is nan"):
        along(model, [math.nan * value for value in before])


def test_scripted_parameters_are_not_touched() -> None:
    model = torch.jit.script(nn.Sequential(nn.Linear(4, 3)))
    before = [p.detach() + 1 for p in model.parameters()]
    weights = [p.detach().clone() for p in model.parameters()]
    batch = torch.randn(5, 4), torch.randint(3, (5,))
    for compute in (along, lambda model, before, of, batch: pulse_at(before, model, batch, loss=of)):
        with pytest.raises(InputError, match="scripted module cannot be copied"):
            compute(model, before, lambda m, b: F.cross_entropy(m(b[0]), b[1]), batch)
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters()))


def test_a_step_along_which_nothing_changes() -> None:
    model = nn.Linear(4, 3)

    def constant(model: nn.Module, batch: Any) -> Tensor:
        return model.weight.sum() * 0 + 1

    found = along(model, [p.detach() + 1 for p in model.parameters()], of=constant)
    assert found.gain == found.curvature == 0.0 and isinstance(found, LossDifferences)


def test_a_loss_of_zero_keeps_the_spacing() -> None:
    """Nothing says which one would be better, and the next pulse begins with it."""
    model = torch.nn.Linear(3, 1)
    before = [p.detach() + 0.1 for p in model.parameters()]
    x = torch.randn(8, 3)
    spacing = 1.0
    for _ in range(5):
        with open_loss_along_step(model, x, loss=lambda m, x: m(x).sum() * 0, before=before) as along:
            found = along.differences(spacing)
        assert found.gain == found.curvature == 0
        spacing = found.next_spacing
    assert spacing == 1.0


@pytest.mark.parametrize("size", [1e-9, 1e9])
def test_the_spacing_is_bounded(size: float) -> None:
    model = torch.nn.Linear(3, 1, bias=False)
    before = [p.detach() + size for p in model.parameters()]
    x = torch.randn(8, 3)
    spacing = 1.0
    for _ in range(5):
        with open_loss_along_step(model, x, loss=lambda m, x: m(x).square().mean() + 1, before=before) as along:
            spacing = along.differences(spacing).next_spacing
        assert 1 / MOST_SPACING <= spacing <= MOST_SPACING

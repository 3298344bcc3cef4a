"""The starting vector of the search: sketches of per-sample gradients against the gradients themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import curvmon
from curvmon.operators.parameter_hessian import ParameterOperator, open_parameters
from curvmon.spectrum import starting_vector
from curvmon.spectrum.starting_vector import GradientSketches, start_cotangents
from curvmon.spectrum.trace import gauss_newton_trace, trace_of_parts
from tests.helpers.spectrum_cases import dense_hessian

SAMPLES, CLASSES = 6, 3


class Tokens(nn.Module):
    """A linear layer at several positions, and convolutions of one and two dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, stride=2, padding=1, bias=False)
        self.each = nn.Linear(9, 5, bias=False)
        self.along = nn.Conv1d(4, 3, 2, bias=False)
        self.last = nn.Linear(12, CLASSES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x)).flatten(2)
        return self.last(torch.tanh(self.along(torch.tanh(self.each(h)))).flatten(1))


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def make() -> tuple[nn.Module, list[Tensor]]:
    torch.manual_seed(0)
    return Tokens().double(), [torch.randn(SAMPLES, 2, 5, 5).double(), torch.randint(CLASSES, (SAMPLES,))]


def dense_ggn(model: nn.Module, batch: list[Tensor]) -> Tensor:
    names = [name for name, _ in model.named_parameters()]

    def outputs(*parameters: Tensor) -> Tensor:
        return functional_call(model, dict(zip(names, parameters)), (batch[0],))

    jacobians = torch.autograd.functional.jacobian(outputs, tuple(model.parameters()))
    jacobian = torch.cat([j.reshape(SAMPLES, CLASSES, -1) for j in jacobians], dim=2).detach()
    p = model(batch[0]).softmax(1).detach()
    curvature = (torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)) / SAMPLES
    return torch.einsum("bip,bij,bjq->pq", jacobian, curvature, jacobian)


def sketches_of(operator: ParameterOperator, seed: int) -> GradientSketches | None:
    estimate = trace_of_parts(operator.layered(), torch.Generator().manual_seed(seed), sketched=True)
    assert estimate is not None
    return estimate.sketches


def cotangents_of(operator: ParameterOperator, k: int, seed: int) -> list[Tensor] | None:
    sketches = sketches_of(operator, seed)
    return None if sketches is None else start_cotangents(sketches, k)


def test_inner_products_of_sketches_are_those_of_gradients() -> None:
    """The mean over 200 seeds, every entry within 4.5 standard errors of the truth."""
    model, batch = make()
    with open_parameters(model, [batch], loss=loss) as operator:
        ((_, layered),) = operator.layered()
        grams = []
        for seed in range(200):
            estimate = gauss_newton_trace(layered, torch.Generator(), sketch_seed=seed)
            assert estimate is not None and estimate.sketches is not None
            grams.append(estimate.sketches.rows @ estimate.sketches.rows.T)
        (columns,) = estimate.sketches.roots
        gradients = []
        for _, column, sample in estimate.sketches.origins.tolist():
            rows = torch.zeros_like(columns[0])
            rows[sample] = columns[column, sample]
            gradients.append(operator.pullback([rows]))
    exact = torch.stack(gradients) @ torch.stack(gradients).T
    assert exact.trace().item() == pytest.approx(dense_ggn(model, batch).trace().item(), rel=1e-6)
    stacked = torch.stack(grams)
    errors = (stacked.mean(0) - exact).abs() / (stacked.std(0) / 200**0.5)
    assert errors.max().item() < 4.5


def share_of_leading(model: nn.Module, batch: list[Tensor], seed: int) -> tuple[float, float]:
    """The share of ‖v‖² in the span of the three leading Gauss-Newton eigenvectors, v the start and the gradient."""
    leading = torch.linalg.eigh(dense_ggn(model, batch)).eigenvectors[:, -3:]
    with open_parameters(model, [batch], loss=loss) as operator:
        cotangents = cotangents_of(operator, 3, seed)
        assert cotangents is not None
        start, gradient = operator.pullback(cotangents), operator.gradient
    shares = [((leading.T @ v).square().sum() / v.square().sum()).item() for v in (start, gradient)]
    return shares[0], shares[1]


@pytest.mark.parametrize("seed", range(4))
def test_start_lies_in_the_leading_eigenspace(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A larger share than that of the gradient, and above 95 % if the sketch is wide."""
    model, batch = make()
    narrow, gradient = share_of_leading(model, batch, seed)
    assert narrow > gradient
    monkeypatch.setattr(starting_vector, "WIDTH", 8 * starting_vector.WIDTH)
    wide, _ = share_of_leading(model, batch, seed)
    assert wide > 0.95


def test_start_of_several_batches_is_that_of_one() -> None:
    model, batch = make()
    parts = [[t[:2] for t in batch], [t[2:] for t in batch]]
    starts = []
    for batches in ([batch], parts):
        with open_parameters(model, batches, loss=loss) as operator:
            cotangents = cotangents_of(operator, 1, 0)
            assert cotangents is not None
            starts.append(operator.pullback(cotangents))
    one, several = starts
    several = several * one.dot(several).sign()  # that of an eigenvector is arbitrary
    torch.testing.assert_close(several, one, rtol=1e-6, atol=1e-9)


def test_largest_sketches_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = make()
    with open_parameters(model, [batch], loss=loss) as operator:
        complete = sketches_of(operator, 0)
        monkeypatch.setattr(starting_vector, "MAX_SKETCHES", 7)
        kept = sketches_of(operator, 0)
    assert complete is not None and kept is not None and len(kept.origins) == 7
    assert start_cotangents(kept, 1) is not None
    sizes = complete.rows.norm(dim=1).sort(descending=True).values
    torch.testing.assert_close(kept.rows.norm(dim=1).sort(descending=True).values, sizes[:7])


def test_no_start_with_too_many_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = make()
    monkeypatch.setattr(starting_vector, "MAX_SKETCHES", SAMPLES - 1)
    with open_parameters(model, [batch], loss=loss) as operator:
        assert cotangents_of(operator, 1, 0) is None


def test_no_start_with_too_many_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = make()
    monkeypatch.setattr(starting_vector, "MAX_ENTRIES", SAMPLES * starting_vector.WIDTH - 1)
    with open_parameters(model, [batch], loss=loss) as operator:
        assert cotangents_of(operator, 1, 0) is None
    assert curvmon.spectrum(model, batch, loss=loss, k=2).converged.all()


def test_no_start_if_samples_interact() -> None:
    model, batch = make()

    def interacting(m: nn.Module, b: Any) -> Tensor:
        out = m(b[0])
        return F.cross_entropy(out - out.mean(0), b[1])

    with open_parameters(model, [batch], loss=interacting) as operator:
        assert cotangents_of(operator, 2, 0) is None


def test_negative_loss_curvature_is_skipped() -> None:
    """Rounding alone gives confident samples some; the starting vector is computed all the same."""
    model, batch = make()

    def saddle(m: nn.Module, b: Any) -> Tensor:
        out = m(b[0])
        return F.cross_entropy(out, b[1]) - 0.05 * F.mse_loss(out, torch.ones_like(out))

    with open_parameters(model, [batch], loss=saddle) as operator:
        cotangents = cotangents_of(operator, 2, 0)
    with open_parameters(model, [batch], loss=loss) as operator:
        convex = cotangents_of(operator, 2, 0)
    assert cotangents is not None and convex is not None
    # the two losses are two outputs: the second, concave one, is not pulled back
    torch.testing.assert_close(cotangents[0][:, :CLASSES], convex[0])
    assert not cotangents[0][:, CLASSES:].any()
    true = torch.linalg.eigvalsh(dense_hessian(model, batch, saddle)).flip(0)
    result = curvmon.spectrum(model, batch, loss=saddle, k=2)
    assert result.converged.all() and (result.eigenvalues - true[:2]).abs().max() < 1e-4 * true[0]

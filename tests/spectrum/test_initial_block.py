"""Where a search begins: sketches of per-sample gradients against the gradients themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import curvmon
from curvmon.operators.parameter_hessian import ParameterOperator, open_parameters
from curvmon.spectrum import initial_block as beginning
from curvmon.spectrum.initial_block import Beginning
from curvmon.spectrum.trace import gauss_newton_trace, trace_of_parts
from tests.spectrum.test_spectrum import dense

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


def begun(operator: ParameterOperator, k: int, seed: int) -> Beginning:
    generator = torch.Generator().manual_seed(seed)
    found = Beginning(k, generator)
    assert trace_of_parts(operator.layered(), generator, found) is not None
    return found


def test_inner_products_of_sketches_are_those_of_gradients() -> None:
    """The mean over 200 seeds, every entry within 4.5 standard errors of the truth."""
    model, batch = make()
    with open_parameters(model, [batch], loss=loss) as operator:
        ((_, layered),) = operator.layered()
        grams = []
        for seed in range(200):
            generator = torch.Generator().manual_seed(seed)
            found = Beginning(1, generator)
            gauss_newton_trace(layered, generator, found)
            assert found._sketches is not None
            grams.append(found._sketches @ found._sketches.T)
        columns = found._batches[0].columns
        gradients = []
        for _, column, sample in found._origins.tolist():
            rows = torch.zeros_like(columns[0])
            rows[sample] = columns[column, sample]
            gradients.append(operator.pullback([rows]))
    exact = torch.stack(gradients) @ torch.stack(gradients).T
    assert exact.trace().item() == pytest.approx(dense_ggn(model, batch).trace().item(), rel=1e-6)
    stacked = torch.stack(grams)
    errors = (stacked.mean(0) - exact).abs() / (stacked.std(0) / 200**0.5)
    assert errors.max().item() < 4.5


def share_of_leading(model: nn.Module, batch: list[Tensor], seed: int) -> tuple[float, float]:
    """How much of the start's square lies along the first three eigenvectors of Gauss-Newton, and of the gradient's."""
    leading = torch.linalg.eigh(dense_ggn(model, batch)).eigenvectors[:, -3:]
    with open_parameters(model, [batch], loss=loss) as operator:
        cotangents = begun(operator, 3, seed).cotangents(1)
        assert cotangents is not None
        start, gradient = operator.pullback(cotangents), operator.gradient
    shares = [((leading.T @ v).square().sum() / v.square().sum()).item() for v in (start, gradient)]
    return shares[0], shares[1]


@pytest.mark.parametrize("seed", range(4))
def test_the_start_lies_along_the_leading_eigenvectors(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than the gradient does, and all of it if the sketch is wide: what is missing falls with the width."""
    model, batch = make()
    narrow, gradient = share_of_leading(model, batch, seed)
    assert narrow > gradient
    monkeypatch.setattr(beginning, "WIDTH", 8 * beginning.WIDTH)
    wide, _ = share_of_leading(model, batch, seed)
    assert wide > 0.95


def test_batches_begin_where_all_samples_together_do() -> None:
    model, batch = make()
    parts = [[t[:2] for t in batch], [t[2:] for t in batch]]
    starts = []
    for batches in ([batch], parts):
        with open_parameters(model, batches, loss=loss) as operator:
            cotangents = begun(operator, 1, 0).cotangents(len(batches))
            assert cotangents is not None
            starts.append(operator.pullback(cotangents))
    together, apart = starts
    apart = apart * together.dot(apart).sign()  # that of an eigenvector is arbitrary
    torch.testing.assert_close(apart, together, rtol=1e-6, atol=1e-9)


def test_only_the_largest_gradients_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = make()
    with open_parameters(model, [batch], loss=loss) as operator:
        everything = begun(operator, 1, 0)._sketches
        monkeypatch.setattr(beginning, "MOST_ROWS", 7)
        kept = begun(operator, 1, 0)
        assert kept.cotangents(1) is not None
    assert everything is not None and kept._sketches is not None and len(kept._origins) == 7
    sizes = everything.norm(dim=1).sort(descending=True).values
    torch.testing.assert_close(kept._sketches.norm(dim=1).sort(descending=True).values, sizes[:7])


def test_too_many_samples_have_no_such_start(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = make()
    monkeypatch.setattr(beginning, "MOST_ROWS", SAMPLES - 1)
    with open_parameters(model, [batch], loss=loss) as operator:
        assert begun(operator, 1, 0).cotangents(1) is None


def test_no_room_for_positions_means_no_start(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = make()
    monkeypatch.setattr(beginning, "MOST_ENTRIES", SAMPLES * beginning.WIDTH - 1)
    with open_parameters(model, [batch], loss=loss) as operator:
        assert begun(operator, 1, 0).cotangents(1) is None
    assert curvmon.spectrum(model, batch, loss=loss, k=2).converged.all()


def test_samples_that_meet_have_no_such_start() -> None:
    model, batch = make()

    def meeting(m: nn.Module, b: Any) -> Tensor:
        out = m(b[0])
        return F.cross_entropy(out - out.mean(0), b[1])

    with open_parameters(model, [batch], loss=meeting) as operator:
        assert begun(operator, 2, 0).cotangents(1) is None


def test_negative_curvature_of_the_loss_is_left_out() -> None:
    """Confident samples have some by rounding alone: no reason to give up the start."""
    model, batch = make()

    def saddle(m: nn.Module, b: Any) -> Tensor:
        out = m(b[0])
        return F.cross_entropy(out, b[1]) - 0.05 * F.mse_loss(out, torch.ones_like(out))

    with open_parameters(model, [batch], loss=saddle) as operator:
        cotangents = begun(operator, 2, 0).cotangents(1)
    with open_parameters(model, [batch], loss=loss) as operator:
        convex = begun(operator, 2, 0).cotangents(1)
    assert cotangents is not None and convex is not None
    # the two losses are two outputs: the second, concave one, is not pulled back
    torch.testing.assert_close(cotangents[0][:, :CLASSES], convex[0])
    assert not cotangents[0][:, CLASSES:].any()
    true = torch.linalg.eigvalsh(dense(model, batch, saddle)).flip(0)
    found = curvmon.spectrum(model, batch, loss=saddle, k=2)
    assert found.converged.all() and (found.eigenvalues - true[:2]).abs().max() < 1e-4 * true[0]

"""Losses and models whose spectrum would be silently wrong without a check."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import curvmon
from curvmon.operators.parameter_hessian import open_parameters
from curvmon.spectrum.krylov_space import KrylovSpace
from curvmon.spectrum.layer_check import LayerCheck
from tests.helpers.spectrum_cases import Through

SAMPLES = 16
Batch = tuple[Tensor, Tensor]
Loss = Callable[[Any, Any], Tensor]


def dense(model: nn.Module, batch: Batch, loss: Loss) -> Tensor:
    """By `torch.autograd.grad`, in float64; the loss may use the model as a module, not only call it."""
    model = copy.deepcopy(model).double()
    parameters = list(model.parameters())
    batch = tuple(t.double() if t.is_floating_point() else t for t in batch)  # type: ignore[assignment]

    def joined(result: Any) -> Tensor:
        pieces = [torch.zeros_like(p) if g is None else g for g, p in zip(result, parameters)]
        return torch.cat([piece.reshape(-1) for piece in pieces])

    gradient = joined(torch.autograd.grad(loss(model, batch), parameters, create_graph=True, allow_unused=True))
    rows = [torch.autograd.grad(g, parameters, retain_graph=True, allow_unused=True) for g in gradient]
    return torch.stack([joined(row) for row in rows])


def mlp(outputs: int, activation: type[nn.Module] = nn.ReLU) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), activation(), nn.Linear(8, outputs))


def gradient_penalty(model: nn.Module, batch: Batch) -> Tensor:
    """A gradient penalty: the weights are used again in the backward pass."""
    x = batch[0].clone().requires_grad_()
    out = model(x)
    (slopes,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return F.mse_loss(out, batch[1]) + F.mse_loss(slopes.norm(dim=1), torch.ones_like(slopes[:, 0]))


def with_doubled_weights(model: nn.Module, batch: Batch) -> Tensor:
    """The layers run with other tensors in place of their parameters."""
    twice = {name: 2 * p for name, p in model.named_parameters()}
    return F.mse_loss(functional_call(model, twice, (batch[0],)), batch[1])


def around_the_mean(model: nn.Module, batch: Batch) -> Tensor:
    """Samples interact, but not in the first columns of the loss curvature."""
    out = model(batch[0])
    return F.mse_loss(out, batch[1]) + 0.2 * F.mse_loss(out, out.mean(0, keepdim=True).expand_as(out))


def loss_of_a_loss(model: nn.Module, batch: Batch) -> Tensor:
    each = F.mse_loss(model(batch[0]), batch[1], reduction="none").mean(1)
    return F.smooth_l1_loss(each, torch.zeros_like(each), beta=10.0)


def mse(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


class Shift(nn.Module):
    """out = W x + exp(a - b): T = [[1, -1], [-1, 1]] w.r.t. a and b, where the entries of a sign probe cancel."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)
        self.a, self.b = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.tensor(0.2))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + torch.exp(self.a - self.b)


HAZARDS: dict[str, tuple[Callable[[], nn.Module], int, Loss]] = {
    "gradient penalty": (lambda: mlp(1), 1, gradient_penalty),
    "other parameters": (lambda: mlp(3), 3, with_doubled_weights),
    "samples interact in later columns": (lambda: mlp(3), 3, around_the_mean),
    "a loss of a loss": (lambda: mlp(4, nn.Tanh), 4, loss_of_a_loss),
    "signs that cancel": (Shift, 4, mse),
}


@pytest.mark.parametrize("name", HAZARDS)
def test_trace_agrees_with_dense_hessian(name: str) -> None:
    build, width, loss = HAZARDS[name]
    torch.manual_seed(0)
    model, batch = build(), (torch.randn(SAMPLES, 6), 3 * torch.randn(SAMPLES, width))
    true = dense(model, batch, loss)
    for seed in range(8):
        result = curvmon.spectrum(model, batch, loss=loss, k=1, seed=seed)
        assert abs(result.trace - true.trace().item()) < 5 * result.trace_stderr + 1e-4 * abs(result.trace), seed
        assert result.sharpness == pytest.approx(torch.linalg.eigvalsh(true)[-1].item(), rel=1e-3)


def test_ggn_of_a_loss_of_a_loss() -> None:
    torch.manual_seed(0)
    model, batch = mlp(4, nn.Tanh), (torch.randn(SAMPLES, 6), torch.randn(SAMPLES, 4))
    result = curvmon.spectrum(model, batch, loss=loss_of_a_loss, k=1, trace=False)
    # GGN = J^T S J with S the curvature of everything behind the network, in float64
    whole = copy.deepcopy(model).double()
    x, y = (t.double() for t in batch)
    parameters = dict(whole.named_parameters())
    jacobian = torch.func.jacrev(lambda p: functional_call(whole, p, (x,)))(parameters)
    j = torch.cat([part.reshape(SAMPLES * 4, -1) for part in jacobian.values()], dim=1).detach()

    def behind(out: Tensor) -> Tensor:
        return loss_of_a_loss(lambda _: out.reshape(SAMPLES, 4), (x, y))

    s = torch.autograd.functional.hessian(behind, whole(x).detach().reshape(-1))
    assert result.ggn_eigenvalue == pytest.approx(torch.linalg.eigvalsh(j.T @ s @ j)[-1].item(), rel=1e-3)


class Counting(nn.Module):
    """Computes another function in every forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp(3)
        self.passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        out: Tensor = self.inner(self.passes * x)
        return out


@pytest.mark.parametrize(("model", "expected"), [(lambda: mlp(3), True), (Counting, False)])
def test_layer_check(model: Callable[[], nn.Module], expected: bool) -> None:
    torch.manual_seed(0)
    batch = torch.randn(SAMPLES, 6), torch.randn(SAMPLES, 3)
    with open_parameters(model(), [batch], loss=mse) as operator:
        check = LayerCheck(operator)
        assert not check.passed()  # no graph so far
        ((_, layered),) = check.graphs()
        assert len(layered.layers) == 2 and check.passed() == expected


def test_note_if_layers_do_not_make_up_the_network() -> None:
    torch.manual_seed(0)
    batch = torch.randn(SAMPLES, 6), torch.randn(SAMPLES, 3)
    result = curvmon.spectrum(Counting(), batch, loss=mse, k=1)
    assert any("the layers do not make up the network" in note for note in result.notes)


def test_weights_that_are_used_again_in_a_backward_pass() -> None:
    torch.manual_seed(0)
    model, batch = mlp(1), (torch.randn(SAMPLES, 6), torch.randn(SAMPLES, 1))
    true = dense(model, batch, gradient_penalty).trace().item()
    result = curvmon.spectrum(model, batch, loss=gradient_penalty, k=1)
    assert result.trace_stderr > 0 and abs(result.trace - true) < 4 * result.trace_stderr


def test_stateful_model() -> None:
    torch.manual_seed(0)
    model, batch = Counting(), (torch.randn(SAMPLES, 6), torch.randn(SAMPLES, 3))
    true = dense(model, batch, mse)  # of the first pass
    result = curvmon.spectrum(model, batch, loss=mse, k=1)
    assert result.sharpness == pytest.approx(torch.linalg.eigvalsh(true)[-1].item(), rel=1e-3)
    assert abs(result.trace - true.trace().item()) < 4 * result.trace_stderr
    with pytest.raises(curvmon.LossError, match="state or a random generator of its own"):
        curvmon.spectrum(model, batch, more_batches=[batch], loss=mse, k=1)


def split(batch: Batch, wrap: Callable[[Tensor, Tensor], Any]) -> list[Any]:
    return [wrap(*(t[:11] for t in batch)), wrap(*(t[11:] for t in batch))]


WRAPPED: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], Batch]]] = {
    "objects": (lambda x, y: SimpleNamespace(x=x, y=y), lambda b: (b.x, b.y)),
    "class weights in the batch": (
        lambda x, y: {"one": torch.ones(3), "x": x, "y": y, "z": y},
        lambda b: (b["x"], b["y"]),
    ),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_batches_are_weighted_by_their_samples(name: str) -> None:
    wrap, unwrap = WRAPPED[name]
    torch.manual_seed(0)
    model, batch = mlp(3), (torch.randn(SAMPLES, 6), torch.randn(SAMPLES, 3))
    first, *others = split(batch, wrap)
    result = curvmon.spectrum(model, first, more_batches=others, loss=lambda m, b: mse(m, unwrap(b)), k=2)
    true = torch.linalg.eigvalsh(dense(model, batch, mse))[-2:].flip(0)
    torch.testing.assert_close(result.eigenvalues, true, rtol=1e-3, atol=0)


def test_ambiguous_batch_sizes_raise() -> None:
    torch.manual_seed(0)
    model, batch = mlp(3), (torch.randn(SAMPLES, 6), torch.randn(SAMPLES, 3))
    first, *others = split(batch, lambda x, y: {"one": torch.ones(3), "other": torch.ones(3), "x": x, "y": y})
    with pytest.raises(curvmon.InputError, match="how many samples each batch has is not clear"):
        curvmon.spectrum(model, first, more_batches=others, loss=lambda m, b: mse(m, (b["x"], b["y"])), k=1)


@pytest.mark.parametrize("scale", [1e20, 1e-22])
def test_losses_whose_squares_overflow_in_float32(scale: float) -> None:
    torch.manual_seed(0)
    model, batch = mlp(3), (torch.randn(SAMPLES, 6), torch.randn(SAMPLES, 3))
    true = torch.linalg.eigvalsh(dense(model, batch, mse))[-3:].flip(0)
    result = curvmon.spectrum(model, batch, loss=lambda m, b: scale * mse(m, b), k=3, ggn=False, trace=False)
    torch.testing.assert_close(result.eigenvalues / scale, true, rtol=1e-3, atol=0)
    assert result.converged.all()


def test_note_if_products_are_not_symmetric() -> None:
    """scale_grad_by_freq gives gradients that belong to no function, so their derivative is not symmetric."""
    torch.manual_seed(0)
    ids, y = torch.randint(5, (SAMPLES, 3)), torch.randint(3, (SAMPLES,))

    def network(by_frequency: bool) -> nn.Module:
        torch.manual_seed(1)
        return Through(
            lambda m, x: m.head(m.embed(x).sum(1).tanh()),
            embed=nn.Embedding(5, 4, scale_grad_by_freq=by_frequency),
            head=nn.Linear(4, 3),
        )

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    noted = {
        scaled: any("not symmetric" in note for note in curvmon.spectrum(network(scaled), (ids, y), loss=loss).notes)
        for scaled in (True, False)
    }
    assert noted == {True: True, False: False}


@pytest.mark.parametrize("capacity", [5, 40])
def test_asymmetry_is_measured_across_restarts(capacity: int) -> None:
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(60, 60, generator=generator)
    for h, wrong in ((matrix + matrix.T, False), (matrix + matrix.T + 0.1 * matrix, True)):
        space = KrylovSpace(lambda z, h=h: h @ z, torch.randn(1, 60, generator=generator))
        for _ in range(30):
            if len(space.basis) >= capacity:
                space.restart(space.ritz_pairs().coefficients[:, [0, -2, -1]])
            space.expand()
        assert (space.asymmetry > 1e-2) if wrong else (space.asymmetry < 1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_hvps": 0}, "max_hvps must be at least 1"),
        ({"max_hvps": None}, "max_hvps must be an integer"),
        ({"groups": {"a": []}}, "group 'a' is empty"),
        ({"groups": [1]}, "names of modules or parameters"),
        ({"start": [1, 2]}, "takes an earlier Spectrum or a tensor"),
        ({"start": torch.zeros(83)}, "no direction"),
        ({"start": torch.full((83,), torch.nan)}, "no direction"),
    ],
)
def test_invalid_arguments_raise(options: dict[str, Any], message: str) -> None:
    with pytest.raises(curvmon.InputError, match=message):
        curvmon.spectrum(mlp(3), (torch.randn(4, 6), torch.randn(4, 3)), loss=mse, **options)


def test_start_without_eigenvectors_and_scalar_batch() -> None:
    model, batch = mlp(3), (torch.randn(4, 6), torch.randn(4, 3))
    result = curvmon.spectrum(model, batch, loss=mse, k=1)
    with pytest.raises(curvmon.InputError, match="has no eigenvectors"):
        curvmon.spectrum(model, batch, loss=mse, start=result.without_vectors())
    scaled = curvmon.spectrum(model, torch.tensor(2.0), loss=lambda m, b: b * mse(m, batch), k=1)
    assert scaled.sharpness == pytest.approx(2 * result.sharpness, rel=1e-3)


def test_sparse_gradients_raise() -> None:
    model = Through(lambda m, x: m.head(m.embed(x).sum(1)), embed=nn.Embedding(5, 4, sparse=True), head=nn.Linear(4, 3))
    batch = torch.randint(5, (6, 2)), torch.randn(6, 3)
    with pytest.raises(curvmon.InputError, match="sparse=False"):
        curvmon.spectrum(model, batch, loss=mse, k=1)

"""`curvmon.spectrum` against dense Hessians in float64 and against closed forms."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import curvmon
from curvmon import closed_form
from curvmon.operators.parameter_hessian import open_parameters
from curvmon.spectrum.krylov_space import KrylovSpace
from tests.helpers.spectrum_cases import CASES, LOSSES, Quadratic, dense_hessian, energy, in_double, make, mlp


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_dense_hessian(name: str, kind: str) -> None:
    model, batch = make(name)
    true = torch.linalg.eigvalsh(dense_hessian(model, batch, LOSSES[kind])).flip(0)
    scale = true.abs().max().item()
    result = curvmon.spectrum(model, batch, loss=LOSSES[kind])
    assert result.converged.all() and result.smallest_converged
    assert (result.eigenvalues - true[:5]).abs().max().item() < 1e-4 * scale
    assert abs(result.smallest - true[-1].item()) < 1e-4 * scale
    assert abs(result.trace - true.sum().item()) < 4 * result.trace_stderr + 1e-5 * scale
    assert result.largest_magnitude == pytest.approx(true[true.abs().argmax()].item(), rel=1e-3)
    overlap = result.eigenvectors.T @ result.eigenvectors
    torch.testing.assert_close(overlap, torch.eye(5), rtol=0, atol=1e-3)


@pytest.mark.parametrize("name", ["mlp", "convolution and batch norm"])
def test_ggn_eigenvalue(name: str) -> None:
    """GGN = J^T S J from a dense Jacobian."""
    model, batch = make(name)
    loss = LOSSES["cross-entropy"]
    result = curvmon.spectrum(model, batch, loss=loss, trace=False)
    model = in_double(model)
    names = [n for n, _ in model.named_parameters()]
    x, y = batch[0].double(), batch[1]

    def outputs(*parameters: Tensor) -> Tensor:
        return functional_call(model, dict(zip(names, parameters)), (x,))

    jacobians = torch.autograd.functional.jacobian(outputs, tuple(model.parameters()))
    jacobian = torch.cat([j.reshape(48, -1) for j in jacobians], dim=1)
    curvature = torch.autograd.functional.hessian(lambda out: F.cross_entropy(out, y), model(x)).reshape(48, 48)
    true = torch.linalg.eigvalsh(jacobian.T @ curvature @ jacobian)[-1].item()
    assert result.ggn_eigenvalue == pytest.approx(true, rel=1e-4)
    assert result.ggn_error == pytest.approx(abs(result.sharpness - true) / result.sharpness, abs=1e-3)


class Linear(nn.Module):
    """<w, v> x, as in `closed_form.linear_network`."""

    def __init__(self, m: int) -> None:
        super().__init__()
        self.v, self.w = (nn.Parameter(torch.randn(m, dtype=torch.float64)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.w.dot(self.v) * x


def half_square(model: Any, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1]) / 2


@pytest.mark.parametrize("seed", range(5))
def test_multiple_eigenvalues_of_linear_network(seed: int) -> None:
    """The bulk has multiplicity m - 1 = 7: all copies are there, and the eigenvectors are those of the paper."""
    torch.manual_seed(seed)
    model, x, y = Linear(8), torch.randn(20, dtype=torch.float64), torch.randn(20, dtype=torch.float64)
    truth = closed_form.linear_network(model.w, model.v, x, y)
    result = curvmon.spectrum(model, (x, y), loss=half_square, k=7, rtol=1e-8)
    assert result.converged.all()
    torch.testing.assert_close(result.eigenvalues, truth.eigenvalues[:7], rtol=1e-8, atol=1e-10)
    assert result.smallest == pytest.approx(truth.eigenvalues[-1].item(), rel=1e-8)
    assert truth.eigenvectors is not None
    assert abs(result.eigenvectors[:, 0].dot(truth.eigenvectors[:, 0]).item()) == pytest.approx(1, abs=1e-6)


class SelfAttention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.randn(1, dtype=torch.float64))
        self.q, self.k = (nn.Parameter(torch.randn(width, dtype=torch.float64)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.value * (x.unsqueeze(1) * self.q.dot(self.k) * x / math.sqrt(len(self.q))).softmax(1) @ x


@pytest.mark.parametrize("seed", range(5))
def test_self_attention(seed: int) -> None:
    torch.manual_seed(seed)
    model, x, y = SelfAttention(5), torch.randn(6, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    truth = closed_form.self_attention(model.value, model.q, model.k, x, y)
    result = curvmon.spectrum(model, (x, y), loss=half_square, k=5, rtol=1e-8)
    assert result.converged.all()
    torch.testing.assert_close(result.eigenvalues, truth.eigenvalues[:5], rtol=1e-7, atol=1e-9)


SPECTRA = {
    "close pair": [1.0, 0.998, 0.9, *[0.5] * 40, -0.2],
    "cluster": [1.0, 0.9999, 0.9998, 0.9997, 0.5, *torch.linspace(0.3, -0.3, 60).tolist()],
    "triple": [3.0, 3, 3, 2, 2, 1, *[0.0] * 50, -1, -1],
    "identity": [2.0] * 12,
    "negative": [-1.0, -2, -3, -4, -5, -6, -7],
    "flat": torch.linspace(1, -1, 200).tolist(),
    "two": [1.0, -1.0],
}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", SPECTRA)
def test_converged_eigenvalues_are_correct(name: str, seed: int) -> None:
    """Close, multiple, evenly spaced and negative eigenvalues, with multiplicity."""
    true = torch.tensor(SPECTRA[name], dtype=torch.float64).sort(descending=True).values
    scale = true.abs().max().item()
    result = curvmon.spectrum(Quadratic(true, seed), torch.zeros(1), loss=energy, seed=seed)
    assert len(result.eigenvalues) == min(5, len(true))
    off = (result.eigenvalues - true[: len(result.eigenvalues)]).abs()
    assert (off[result.converged] <= 1.1e-4 * scale).all(), result
    if result.smallest_converged:
        assert abs(result.smallest - true[-1].item()) <= 1.1e-4 * scale


class Diagonal(nn.Module):
    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.full_like(values, 0.1))
        self.register_buffer("values", values)


def diagonal_energy(model: Any, batch: Any) -> Tensor:
    return (model.values * model.theta.square()).sum() / 2


@pytest.mark.parametrize("seed", range(12))
def test_smallest_eigenvalue_with_large_bulk(seed: int) -> None:
    """A single eigenvalue of -1 among 1006: its component in a random starting vector is small."""
    values = torch.cat([torch.tensor([100.0, 50, 20, 10, 5]), torch.zeros(1000), torch.tensor([-1.0])])
    result = curvmon.spectrum(Diagonal(values), torch.zeros(1), loss=diagonal_energy, k=1, seed=seed, ggn=False)
    assert result.smallest_converged and result.smallest == pytest.approx(-1, abs=0.02)
    assert abs(result.trace - values.sum().item()) < 5 * result.trace_stderr


def test_ggn_eigenvector_differs_from_that_of_the_hessian() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.square, self.rest = (nn.Parameter(f(n)) for f, n in zip(FILLS, (1, 1, 1000)))

        def forward(self) -> Tensor:
            return torch.cat([2**0.5 * self.linear, self.square**2, 0.1 * self.rest])

    target = torch.zeros(1002)
    target[1] = 2.5
    result = curvmon.spectrum(Model(), target, loss=lambda m, b: F.mse_loss(m(), b, reduction="sum") / 2, k=2)
    assert result.ggn_eigenvalue == pytest.approx(4, rel=1e-4)


FILLS = (torch.zeros, torch.ones, torch.zeros)


def test_complex_parameters_raise() -> None:
    model = nn.ParameterDict({"z": nn.Parameter(torch.tensor([1 + 2j, 3]))})
    with pytest.raises(curvmon.InputError, match="complex parameters"):
        curvmon.spectrum(model, torch.zeros(1), loss=lambda m, b: m["z"].abs().square().sum())


def test_note_without_verification() -> None:
    result = curvmon.spectrum(Quadratic(torch.arange(30.0)), torch.zeros(1), loss=energy, verify=False, trace=False)
    assert any("not verified" in note for note in result.notes)


def test_note_if_max_hvps_is_too_small() -> None:
    result = curvmon.spectrum(Quadratic(torch.linspace(1, -1, 300)), torch.zeros(1), loss=energy, max_hvps=12)
    assert not result.converged.all()
    assert any("have not converged" in note for note in result.notes)
    assert result.hvps <= 12 + 10  # plus the probes of the trace


def test_warm_start_takes_fewer_products() -> None:
    model, batch = make("mlp")
    loss = LOSSES["cross-entropy"]
    options = {"loss": loss, "ggn": False, "trace": False, "verify": False, "rtol": 1e-2}
    cold = curvmon.spectrum(model, batch, **options)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.01)
    again = curvmon.spectrum(model, batch, **options)
    warm = curvmon.spectrum(model, batch, start=cold, **options)
    assert warm.hvps < again.hvps
    torch.testing.assert_close(warm.eigenvalues[:1], again.eigenvalues[:1], rtol=2e-2, atol=0)
    with pytest.raises(curvmon.InputError, match="start= is the spectrum of another model"):
        curvmon.spectrum(mlp(5, 3, 2), batch, loss=loss, start=cold)


@pytest.mark.parametrize("name", CASES)
def test_warm_start_at_the_same_weights_takes_one_product_per_vector(name: str) -> None:
    model, batch = make(name)
    options: dict[str, Any] = {"loss": LOSSES["cross-entropy"], "k": 3, "ggn": False, "trace": False, "verify": False}
    cold = curvmon.spectrum(model, batch, **options)
    for start in (cold, cold.start_vectors()):
        warm = curvmon.spectrum(model, batch, start=start, **options)
        assert warm.hvps == 3 + 1 < cold.hvps and warm.converged.all() and warm.smallest_converged
        torch.testing.assert_close(warm.eigenvalues, cold.eigenvalues, rtol=1e-5, atol=0)
        assert warm.smallest == pytest.approx(cold.smallest, abs=1e-5 * cold.sharpness)


@pytest.mark.parametrize("name", CASES)
def test_batched_products_give_the_same(name: str) -> None:
    model, batch = make(name)
    options: dict[str, Any] = {"loss": LOSSES["cross-entropy"], "k": 3}
    one, several = (curvmon.spectrum(model, batch, batched=batched, **options) for batched in (False, True))
    torch.testing.assert_close(several.eigenvalues, one.eigenvalues, rtol=1e-4, atol=1e-6)
    assert several.smallest == pytest.approx(one.smallest, abs=1e-4 * one.sharpness)
    assert several.ggn_eigenvalue == pytest.approx(one.ggn_eigenvalue, rel=1e-3)
    assert abs(several.trace - one.trace) <= 4 * math.hypot(several.trace_stderr, one.trace_stderr) + 1e-5


def restarted(space: KrylovSpace, capacity: int, top: int, bottom: int) -> None:
    """As a search restarts: with the largest and the smallest Ritz vectors."""
    if len(space.basis) >= capacity:
        coefficients = space.ritz_pairs().coefficients
        space.restart(torch.cat([coefficients[:, -top:], coefficients[:, :bottom]], dim=1))


def test_memory_of_a_krylov_space_is_bounded() -> None:
    """At most k + 20 vectors of the size of the parameters at any time, apart from those of the products."""
    matrix = torch.linspace(1, -1, 400, dtype=torch.float64)
    space = KrylovSpace(lambda z: matrix.unsqueeze(1) * z, torch.ones(1, 400, dtype=torch.float64))
    sizes = []
    for _ in range(120):
        restarted(space, 5 + 17, 8, 2)
        space.expand()
        sizes.append(sum(len(block) for block in space.basis.filled()) + len(space.front))
    assert max(sizes) <= 5 + 18
    ritz = space.ritz_pairs()
    extremal = [0, *range(-5, 0)]
    assert (ritz.residuals[extremal] < 1e-2).all()
    for value in ritz.values[extremal]:
        assert (matrix - value).abs().min() < 1e-2


@pytest.mark.parametrize("starts", [1, 4])
def test_restarts_keep_krylov_relation(starts: int) -> None:
    """H Q = Q T + F C, from which the residuals follow, holds after expansions in chosen directions and restarts."""
    torch.manual_seed(0)
    matrix = torch.randn(80, 80, dtype=torch.float64)
    matrix = matrix + matrix.T
    space = KrylovSpace(lambda z: matrix @ z, torch.randn(starts, 80, dtype=torch.float64))
    space.expand()
    for _ in range(31):
        restarted(space, 12, 4, 2)
        space.expand(space.ritz_pairs().directions[:, -1:])
    ritz = space.ritz_pairs()
    vectors = torch.cat(space.basis.filled()).T @ ritz.coefficients
    residuals = torch.linalg.vector_norm(matrix @ vectors - vectors * ritz.values, dim=0)
    torch.testing.assert_close(residuals, ritz.residuals, rtol=1e-6, atol=1e-10)
    assert len(space.front) == starts
    both = torch.cat([*space.basis.filled(), space.front])
    torch.testing.assert_close(both @ both.T, torch.eye(len(both), dtype=torch.float64), rtol=0, atol=1e-10)


def test_invariant_starting_vectors_take_one_product_each() -> None:
    """Dependent ones are left out, and nothing remains to be expanded."""
    matrix = torch.diag(torch.tensor([3.0, 2, 1, 0, 0, 0, 0, 0]))
    starts = torch.cat([torch.eye(8)[:3], torch.eye(8)[:2] + torch.eye(8)[1:3], torch.eye(8)[6:7]])
    space = KrylovSpace(lambda z: matrix @ z, starts)
    space.expand()
    assert space.products == 4 and space.exhausted
    torch.testing.assert_close(space.ritz_pairs().values, torch.tensor([0.0, 1, 2, 3]).double(), rtol=1e-6, atol=1e-6)


def test_trace_stderr_is_calibrated() -> None:
    """The 95 % interval covers the truth for about 95 % of the seeds."""
    values = torch.cat([torch.tensor([30.0, 20, 10]), torch.randn(150, generator=torch.Generator().manual_seed(0))])
    model, true = Quadratic(values), values.sum().item()
    options: dict[str, Any] = {"k": 2, "ggn": False, "verify": False, "rtol": 1e-2}
    inside = 0
    for seed in range(60):
        result = curvmon.spectrum(model, torch.zeros(1), loss=energy, seed=seed, **options)
        inside += abs(result.trace - true) <= 1.96 * result.trace_stderr
    assert 52 <= inside <= 60


def test_model_is_unchanged_and_half_precision_works() -> None:
    model, batch = make("convolution and batch norm")
    model.train()
    model = model.bfloat16()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    result = curvmon.spectrum(model, [batch[0].bfloat16(), batch[1]], loss=LOSSES["cross-entropy"], k=2)
    assert result.eigenvalues.dtype == torch.float64 and result.eigenvectors.dtype == torch.float32
    assert model.training and all(p.grad is None and p.requires_grad for p in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())


def test_batched_must_be_a_choice() -> None:
    model, batch = make("mlp")
    with pytest.raises(curvmon.InputError, match='batched must be True, False or "auto"'):
        curvmon.spectrum(model, batch, loss=LOSSES["mse"], batched="yes")  # type: ignore[arg-type]


def test_invalid_arguments_raise() -> None:
    model, batch = make("mlp")
    with pytest.raises(curvmon.InputError, match="k must be at least 1"):
        curvmon.spectrum(model, batch, loss=LOSSES["mse"], k=0)
    with pytest.raises(curvmon.InputError, match="no parameter that requires gradients"):
        curvmon.spectrum(model.requires_grad_(False), batch, loss=LOSSES["mse"])
    with pytest.raises(curvmon.LossError, match="does not depend on any trainable parameter"):
        curvmon.spectrum(mlp(5, 2), batch, loss=lambda m, b: b[0].sum().requires_grad_())


def test_ggn_is_nan_with_hand_written_loss_term() -> None:
    model, batch = make("mlp")

    def regularised(m: Any, b: Any) -> Tensor:
        return LOSSES["mse"](m, b) + 0.1 * m[0].weight.square().sum()

    result = curvmon.spectrum(model, batch, loss=regularised)
    assert math.isnan(result.ggn_eigenvalue)
    assert any("ggn_eigenvalue is NaN" in note for note in result.notes)
    assert "GGN" in str(result) and result.to_dict()["hvps"] == result.hvps


def test_the_basis_stays_orthogonal_where_few_eigenvalues_are_not_zero() -> None:
    """A softmax regression: H has rank 32 of 435. An error in one product must not grow in the next ones."""
    torch.manual_seed(0)
    model, batch = nn.Linear(144, 3), (torch.randn(16, 144), torch.arange(16) % 3)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    with open_parameters(model, [batch], loss=loss) as operator:
        space = KrylovSpace(operator.unchecked, operator.gradient.unsqueeze(0) + 0.1 * torch.randn(1, operator.size))
        for _ in range(40):
            space.expand()
        rows = torch.cat(space.basis.rows()).reshape(len(space.basis), -1)
    assert (rows @ rows.T - torch.eye(len(rows))).abs().max() < 1e-5
    found = curvmon.spectrum(model, batch, loss=loss)
    truth = torch.linalg.eigvalsh(dense_hessian(model, batch, lambda m, b: F.cross_entropy(m(b[0]), b[1])))
    torch.testing.assert_close(found.eigenvalues, truth.flip(0)[:5], rtol=1e-4, atol=0)
    assert not any("suspect" in note for note in found.notes)

"""`spectrum` against dense Hessians in float64 and against closed forms."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import curvmon
from curvmon import closed_form
from curvmon.spectrum.lanczos import Lanczos

Loss = Callable[[Any, Any], Tensor]


def dense(model: nn.Module, batch: Any, loss: Loss) -> Tensor:
    """d²L/dθ² by torch's own functions, in float64."""
    model = _double(model)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    shapes = [dict(model.named_parameters())[name].shape for name in names]
    flat = torch.cat([dict(model.named_parameters())[name].detach().reshape(-1) for name in names])
    batch = [x.double() if x.is_floating_point() else x for x in batch]

    def value(theta: Tensor) -> Tensor:
        parts = torch.split(theta, [shape.numel() for shape in shapes])
        state = {name: part.reshape(shape) for name, part, shape in zip(names, parts, shapes)}
        return loss(lambda *args: functional_call(model, state, args, tie_weights=True), batch)

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return torch.autograd.functional.hessian(value, flat)


def _double(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).double().eval()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.MultiheadAttention(6, 2, batch_first=True), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x, x, x)[0].mean(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x)[0][:, -1])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.head = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 2)
        self.other.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.other(torch.tanh(self.one(x)))))


def mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), nn.GELU()]
    return nn.Sequential(*layers[:-1])


def frozen() -> nn.Sequential:
    model = mlp(5, 8, 2)
    model[0].requires_grad_(False)
    return model


def convolutional() -> nn.Sequential:
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(),
        nn.Conv2d(3, 2, 3), nn.BatchNorm2d(2), nn.SiLU(), nn.Flatten(), nn.Linear(8, 2),
    )  # fmt: skip
    model(torch.randn(64, 2, 6, 6))  # running statistics
    return model


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: mlp(5, 8, 6, 2), (5,)),
    "convolution and batch norm": (convolutional, (2, 6, 6)),
    "attention": (Attention, (4, 6)),
    "lstm": (Recurrent, (5, 3)),
    "shared weights": (Tied, (5,)),
    "frozen parameters": (frozen, (5,)),
}
LOSSES: dict[str, Loss] = {
    "cross-entropy": lambda model, b: F.cross_entropy(model(b[0]), b[1]),
    "mse": lambda model, b: F.mse_loss(model(b[0]), F.one_hot(b[1], 2).to(b[0])),
}


def make(name: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    build, shape = CASES[name]
    return build(), [torch.randn(24, *shape), torch.randint(2, (24,))]


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_a_dense_hessian(name: str, kind: str) -> None:
    model, batch = make(name)
    true = torch.linalg.eigvalsh(dense(model, batch, LOSSES[kind])).flip(0)
    scale = true.abs().max().item()
    found = curvmon.spectrum(model, batch, loss=LOSSES[kind])
    assert found.converged.all() and found.smallest_converged
    assert (found.eigenvalues - true[:5]).abs().max().item() < 1e-4 * scale
    assert abs(found.smallest - true[-1].item()) < 1e-4 * scale
    assert abs(found.trace - true.sum().item()) < 4 * found.trace_stderr + 1e-5 * scale
    assert found.largest_magnitude == pytest.approx(true[true.abs().argmax()].item(), rel=1e-3)
    overlap = found.eigenvectors.T @ found.eigenvectors
    torch.testing.assert_close(overlap, torch.eye(5), rtol=0, atol=1e-3)


@pytest.mark.parametrize("name", ["mlp", "convolution and batch norm"])
def test_the_gauss_newton_part(name: str) -> None:
    """GGN = J^T S J from a dense Jacobian."""
    model, batch = make(name)
    loss = LOSSES["cross-entropy"]
    found = curvmon.spectrum(model, batch, loss=loss, trace=False)
    model = _double(model)
    names = [n for n, _ in model.named_parameters()]
    x, y = batch[0].double(), batch[1]

    def outputs(*parameters: Tensor) -> Tensor:
        return functional_call(model, dict(zip(names, parameters)), (x,))

    jacobians = torch.autograd.functional.jacobian(outputs, tuple(model.parameters()))
    jacobian = torch.cat([j.reshape(48, -1) for j in jacobians], dim=1)
    curvature = torch.autograd.functional.hessian(lambda out: F.cross_entropy(out, y), model(x)).reshape(48, 48)
    true = torch.linalg.eigvalsh(jacobian.T @ curvature @ jacobian)[-1].item()
    assert found.ggn_eigenvalue == pytest.approx(true, rel=1e-4)
    assert found.ggn_error == pytest.approx(abs(found.sharpness - true) / found.sharpness, abs=1e-3)


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
def test_a_linear_network_with_its_multiple_eigenvalues(seed: int) -> None:
    """The bulk has multiplicity m - 1 = 7: every copy is found, and the vectors of the outliers are the paper's."""
    torch.manual_seed(seed)
    model, x, y = Linear(8), torch.randn(20, dtype=torch.float64), torch.randn(20, dtype=torch.float64)
    truth = closed_form.linear_network(model.w, model.v, x, y)
    found = curvmon.spectrum(model, (x, y), loss=half_square, k=7, rtol=1e-8)
    assert found.converged.all()
    torch.testing.assert_close(found.eigenvalues, truth.eigenvalues[:7], rtol=1e-8, atol=1e-10)
    assert found.smallest == pytest.approx(truth.eigenvalues[-1].item(), rel=1e-8)
    assert truth.eigenvectors is not None
    assert abs(found.eigenvectors[:, 0].dot(truth.eigenvectors[:, 0]).item()) == pytest.approx(1, abs=1e-6)


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
    found = curvmon.spectrum(model, (x, y), loss=half_square, k=5, rtol=1e-8)
    assert found.converged.all()
    torch.testing.assert_close(found.eigenvalues, truth.eigenvalues[:5], rtol=1e-7, atol=1e-9)


class Quadratic(nn.Module):
    """L = ½ θ^T A θ: a Hessian with any spectrum."""

    def __init__(self, values: Tensor, seed: int = 0) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        q = torch.linalg.qr(torch.randn(len(values), len(values), generator=g, dtype=torch.float64)).Q
        self.register_buffer("matrix", (q * values.double()) @ q.T)
        self.theta = nn.Parameter(torch.zeros(len(values), dtype=torch.float64))


def energy(model: Any, batch: Any) -> Tensor:
    return model.theta @ (model.matrix @ model.theta) / 2


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
def test_nothing_converged_is_wrong(name: str, seed: int) -> None:
    """Close, multiple, flat and negative eigenvalues: whatever is called converged is one, with its multiplicity."""
    true = torch.tensor(SPECTRA[name], dtype=torch.float64).sort(descending=True).values
    scale = true.abs().max().item()
    found = curvmon.spectrum(Quadratic(true, seed), torch.zeros(1), loss=energy, seed=seed)
    assert len(found.eigenvalues) == min(5, len(true))
    off = (found.eigenvalues - true[: len(found.eigenvalues)]).abs()
    assert (off[found.converged] <= 1.1e-4 * scale).all(), found
    if found.smallest_converged:
        assert abs(found.smallest - true[-1].item()) <= 1.1e-4 * scale


class Diagonal(nn.Module):
    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.full_like(values, 0.1))
        self.register_buffer("values", values)


def diagonal_energy(model: Any, batch: Any) -> Tensor:
    return (model.values * model.theta.square()).sum() / 2


@pytest.mark.parametrize("seed", range(12))
def test_a_small_eigenvalue_that_hides_behind_a_large_bulk(seed: int) -> None:
    """One of 1006 directions has -1, the others 0 and more: its share of a start vector is small."""
    values = torch.cat([torch.tensor([100.0, 50, 20, 10, 5]), torch.zeros(1000), torch.tensor([-1.0])])
    found = curvmon.spectrum(Diagonal(values), torch.zeros(1), loss=diagonal_energy, k=1, seed=seed, ggn=False)
    assert found.smallest_converged and found.smallest == pytest.approx(-1, abs=0.02)
    assert abs(found.trace - values.sum().item()) < 5 * found.trace_stderr


def test_the_top_of_gauss_newton_is_not_where_that_of_the_hessian_is() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.square, self.rest = (nn.Parameter(f(n)) for f, n in zip(FILLS, (1, 1, 1000)))

        def forward(self) -> Tensor:
            return torch.cat([2**0.5 * self.linear, self.square**2, 0.1 * self.rest])

    target = torch.zeros(1002)
    target[1] = 2.5
    found = curvmon.spectrum(Model(), target, loss=lambda m, b: F.mse_loss(m(), b, reduction="sum") / 2, k=2)
    assert found.ggn_eigenvalue == pytest.approx(4, rel=1e-4)


FILLS = (torch.zeros, torch.ones, torch.zeros)


def test_complex_parameters_are_refused() -> None:
    model = nn.ParameterDict({"z": nn.Parameter(torch.tensor([1 + 2j, 3]))})
    with pytest.raises(curvmon.InputError, match="complex parameters"):
        curvmon.spectrum(model, torch.zeros(1), loss=lambda m, b: m["z"].abs().square().sum())


def test_without_verification_a_note_says_what_was_not_looked_for() -> None:
    found = curvmon.spectrum(Quadratic(torch.arange(30.0)), torch.zeros(1), loss=energy, verify=False, trace=False)
    assert any("not verified" in note for note in found.notes)


def test_a_budget_that_is_too_small_is_told() -> None:
    found = curvmon.spectrum(Quadratic(torch.linspace(1, -1, 300)), torch.zeros(1), loss=energy, max_hvps=12)
    assert not found.converged.all()
    assert any("have not converged" in note for note in found.notes)
    assert found.hvps <= 12 + 10  # the probes of the trace come on top


def test_a_warm_start_takes_fewer_products() -> None:
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


def test_memory_is_bounded() -> None:
    """At most k + 20 vectors of the size of the parameters at any time, products aside."""
    matrix = torch.linspace(1, -1, 400, dtype=torch.float64)
    space = Lanczos(lambda z: matrix * z, torch.ones(400, dtype=torch.float64), capacity=5 + 17)
    sizes = []
    for _ in range(120):
        space.step(8, 2)
        sizes.append(len(space.basis) + 1)
    assert max(sizes) <= 5 + 18
    ritz = space.ends(5, 1)
    assert (ritz.residuals < 1e-2).all()
    for value in ritz.values:
        assert (matrix - value).abs().min() < 1e-2


def test_restarts_keep_what_was_known() -> None:
    """The Krylov relation H Q = Q T + β q e^T, on which the residuals rest, holds after restarts."""
    torch.manual_seed(0)
    matrix = torch.randn(80, 80, dtype=torch.float64)
    matrix = matrix + matrix.T
    space = Lanczos(lambda z: matrix @ z, torch.randn(80, dtype=torch.float64), capacity=12)
    for _ in range(31):
        space.step(4, 2)
    ritz = space.ends(3, 2)
    vectors = torch.stack(space.basis, dim=1) @ ritz.coefficients
    residuals = torch.linalg.vector_norm(matrix @ vectors - vectors * ritz.values, dim=0)
    torch.testing.assert_close(residuals, ritz.residuals, rtol=1e-6, atol=1e-10)


def test_trace_errors_are_honest() -> None:
    """z-scores over seeds: the 95 % interval covers in about 95 % of them."""
    values = torch.cat([torch.tensor([30.0, 20, 10]), torch.randn(150, generator=torch.Generator().manual_seed(0))])
    model, true = Quadratic(values), values.sum().item()
    inside = 0
    for seed in range(60):
        found = curvmon.spectrum(model, torch.zeros(1), loss=energy, k=2, seed=seed, ggn=False, verify=False, rtol=1e-2)
        inside += abs(found.trace - true) <= 1.96 * found.trace_stderr
    assert 52 <= inside <= 60


def test_leaves_no_trace_and_takes_half_precision() -> None:
    model, batch = make("convolution and batch norm")
    model.train()
    model = model.bfloat16()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    found = curvmon.spectrum(model, [batch[0].bfloat16(), batch[1]], loss=LOSSES["cross-entropy"], k=2)
    assert found.eigenvalues.dtype == torch.float64 and found.eigenvectors.dtype == torch.float32
    assert model.training and all(p.grad is None and p.requires_grad for p in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())


def test_what_cannot_be_meant_is_refused() -> None:
    model, batch = make("mlp")
    with pytest.raises(curvmon.InputError, match="k must be at least 1"):
        curvmon.spectrum(model, batch, loss=LOSSES["mse"], k=0)
    with pytest.raises(curvmon.InputError, match="no parameter that requires gradients"):
        curvmon.spectrum(model.requires_grad_(False), batch, loss=LOSSES["mse"])
    with pytest.raises(curvmon.LossError, match="does not depend on any trainable parameter"):
        curvmon.spectrum(mlp(5, 2), batch, loss=lambda m, b: b[0].sum().requires_grad_())


def test_a_hand_written_term_makes_the_gauss_newton_part_unknown() -> None:
    model, batch = make("mlp")

    def regularised(m: Any, b: Any) -> Tensor:
        return LOSSES["mse"](m, b) + 0.1 * m[0].weight.square().sum()

    found = curvmon.spectrum(model, batch, loss=regularised)
    assert math.isnan(found.ggn_eigenvalue)
    assert any("ggn_eigenvalue is NaN" in note for note in found.notes)
    assert "GGN" in str(found) and found.to_dict()["hvps"] == found.hvps

"""Closed forms against dense float64 Hessians."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import curvmon
from curvmon import closed_form

SEEDS = range(8)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def dense(network: Callable[..., Tensor], parameters: tuple[Tensor, ...], y: Tensor) -> Tensor:
    """The Hessian of 1/(2n) Σ (f - y)² w.r.t. the concatenated parameters."""
    shapes, sizes = [p.shape for p in parameters], [p.numel() for p in parameters]

    def loss(flat: Tensor) -> Tensor:
        parts = (part.reshape(shape) for part, shape in zip(torch.split(flat, sizes), shapes))
        return (network(*parts) - y).square().sum() / (2 * len(y))

    return torch.autograd.functional.hessian(loss, torch.cat([p.reshape(-1) for p in parameters]))


def assert_equal(form: closed_form.ClosedForm, hessian: Tensor) -> None:
    true = torch.linalg.eigvalsh(hessian).flip(0)
    scale = true.abs().max().item()
    torch.testing.assert_close(form.eigenvalues, true, rtol=0, atol=1e-10 * scale)
    assert len(form.kinds) == len(true)
    assert form.trace == pytest.approx(hessian.trace().item(), abs=1e-10 * scale)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("m", [1, 2, 7])
def test_linear_network(m: int, seed: int) -> None:
    w, v, x, y = (
        normal(m, seed=seed),
        normal(m, seed=seed + 50),
        normal(20, seed=seed + 100),
        normal(20, seed=seed + 150),
    )
    form = closed_form.linear_network(w, v, x, y)
    hessian = dense(lambda v, w: w.dot(v) * x, (v, w), y)
    assert_equal(form, hessian)
    assert form.kinds.count("outlier") == 2 and len(form.bulk) == 2 * (m - 1)
    assert form.eigenvectors is not None
    images = hessian @ form.eigenvectors
    torch.testing.assert_close(images, form.eigenvectors * form.outliers, rtol=1e-9, atol=1e-10)
    assert form.outliers.sum().item() == pytest.approx(form.trace)


def degenerate_cases(m: int) -> dict[str, tuple[Tensor, Tensor, Tensor, Tensor]]:
    """w, v, x, y for which outliers coincide with the bulk or with each other, or w and v do not span a plane."""
    w, v, x, y = normal(m, seed=0), normal(m, seed=1), normal(9, seed=2), normal(9, seed=3)
    size, none = w.dot(w), torch.zeros(m, dtype=torch.float64)
    return {
        "random": (w, v, x, y),
        "w = v": (w, w, x, y),
        "v = -w": (w, -w, x, y),
        "w = 2v": (w, w / 2, x, y),
        "v = -2w": (w, -2 * w, x, y),
        "almost parallel": (w, w + 1e-12 * v, x, y),
        "w = v, d = 0": (w, w, x, size * x),
        "v = -w, d = 0": (w, -w, x, -size * x),
        "d = 0": (w, v, x, w.dot(v) * x),
        "L+ = L-": (w, -w, x, -2 * size * x),
        "v = 0": (w, none, x, y),
        "w = 0": (none, v, x, y),
        "w = v = 0": (none, none, x, y),
        "tiny weights": (1e-160 * w, 1e-160 * v, x, y),
        "H = 0": (none, none, x, 0 * y),
    }


@pytest.mark.parametrize("m", [1, 2, 5])
@pytest.mark.parametrize("case", degenerate_cases(1))
def test_eigenvectors_of_the_linear_network(case: str, m: int) -> None:
    """Unit, orthogonal, and H u = L u, wherever the outliers are."""
    w, v, x, y = degenerate_cases(m)[case]
    form = closed_form.linear_network(w, v, x, y)
    hessian = dense(lambda v, w: w.dot(v) * x, (v, w), y)
    assert_equal(form, hessian)
    u = form.eigenvectors
    assert u is not None
    torch.testing.assert_close(u.T @ u, torch.eye(2, dtype=torch.float64), rtol=0, atol=1e-14)
    scale = torch.linalg.eigvalsh(hessian).abs().max().item()
    torch.testing.assert_close(hessian @ u, u * form.outliers, rtol=0, atol=1e-10 * scale)


def test_eigenvectors_of_parallel_weights() -> None:
    """w = v: L+ along (w, w), and L- = -d along (w, -w)."""
    w, x = torch.tensor([1, 0.5, -0.5]).double(), torch.tensor([-1, 0, 1]).double()
    form = closed_form.linear_network(w, w, x, 2 * x)
    true = torch.stack([torch.cat([w, w]), torch.cat([w, -w])], 1) / math.sqrt(3)
    assert form.eigenvectors is not None
    torch.testing.assert_close((form.eigenvectors.T @ true).abs(), torch.eye(2, dtype=torch.float64))


def test_phases_of_the_linear_network() -> None:
    """<w, v> on its way to t = mean(xy) / mean(x²) = 3, or to -3."""
    x = normal(10, seed=0)
    w = torch.tensor([1.0, 0.0])
    for sign in (1, -1):
        phases = [closed_form.linear_network(w, sign * r * w, x, sign * 3 * x).phase for r in (-1, 0.9, 1.1, 2.9, 3.1)]
        assert phases == ["early", "early", "late", "late", "divergent"]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("m", [1, 2, 7])
def test_exact_solution_is_late(m: int, seed: int) -> None:
    """<w, v> = t up to rounding: zero residual, H of rank one with its trace as the only eigenvalue."""
    w, v, x = normal(m, seed=seed), normal(m, seed=seed + 50), normal(20, seed=seed + 100)
    for y in (w.dot(v) * x, (x.unsqueeze(1) * v) @ w, (w * v).flip(0).sum() * x):
        form = closed_form.linear_network(w, v, x, y)
        assert form.phase == "late"
        expected = torch.zeros(2 * m, dtype=torch.float64)
        expected[0] = x.square().mean() * (w.square().sum() + v.square().sum())
        torch.testing.assert_close(form.eigenvalues, expected, rtol=0, atol=1e-14 * expected[0].item())


def test_zero_weights_solve_zero_targets() -> None:
    zeros = torch.zeros(3)
    assert closed_form.linear_network(zeros, zeros, torch.ones(4), torch.zeros(4)).phase == "late"
    assert closed_form.linear_network(zeros, zeros, torch.ones(4), torch.ones(4)).phase == "early"


@pytest.mark.parametrize("sign", [1, -1])
def test_phase_gives_the_sign_of_the_smaller_outlier(sign: int) -> None:
    """L- >= 0 and L+ <= trace in the late phase, the opposite in the others; the bulk is |d| = s² |t - <w, v>|."""
    w, v, x = normal(4, seed=0), normal(4, seed=1), normal(10, seed=2)
    power = x.square().mean()
    for ratio in torch.linspace(-2, 3, 60, dtype=torch.float64).tolist():  # <w, v> / t; neither 1/3 nor 1
        scaled = sign * ratio * 3 / w.dot(v) * v
        form = closed_form.linear_network(w, scaled, x, sign * 3 * x)
        upper, lower = form.outliers.tolist()
        assert form.phase == ("early" if ratio < 1 / 3 else "late" if ratio < 1 else "divergent")
        assert (lower > 0) == (form.phase == "late") == (upper < form.trace)
        assert form.bulk.max().item() == pytest.approx(power.item() * 3 * abs(1 - ratio), rel=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
def test_relu_network(seed: int) -> None:
    w, v, x, y = normal(5, seed=seed), normal(5, seed=seed + 50), normal(9, seed=seed + 100), normal(9, seed=seed + 150)
    hessian = dense(lambda v, w: torch.relu(x.unsqueeze(1) * v) @ w, (v, w), y)
    assert_equal(closed_form.relu_network(w, v, x, y), hessian)


def test_relu_network_with_a_cell_without_samples() -> None:
    w, v, x, y = normal(4, seed=0), torch.tensor([1.0, -1, -2, 3]).double(), normal(9, seed=1).abs(), normal(9, seed=2)
    hessian = dense(lambda v, w: torch.relu(x.unsqueeze(1) * v) @ w, (v, w), y)
    form = closed_form.relu_network(w, v, x, y)
    assert_equal(form, hessian)
    with pytest.raises(curvmon.InputError, match="v has zeros"):
        closed_form.relu_network(w, torch.zeros(4), x, y)


def biased(m: int, seed: int) -> tuple[Tensor, ...]:
    """Weights and data that meet the assumptions."""
    w, frame = normal(m, seed=seed), torch.linalg.qr(normal(m, 2, seed=seed + 50)).Q * 1.3
    data = torch.linalg.qr(torch.cat([torch.ones(16, 1), normal(16, 2, seed=seed + 100)], 1).double()).Q[:, 1:] * 4
    return w, frame[:, 0], frame[:, 1], data[:, 0], 0.7 * data[:, 1]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("m", [2, 3, 6])
def test_linear_network_with_bias(m: int, seed: int) -> None:
    w, v, b, x, y = biased(m, seed)
    hessian = dense(lambda v, b, w: (x.unsqueeze(1) * v + b) @ w, (v, b, w), y)
    form = closed_form.linear_network_with_bias(w, v, b, x, y)
    assert_equal(form, hessian)
    assert form.kinds.count("outlier") == 5


@pytest.mark.parametrize("m", [3, 6])
def test_linear_network_with_bias_and_a_double_root(m: int) -> None:
    """w orthogonal to v and b, or zero: q = 0, and the cubic is l²(l - N)."""
    w, v, b, x, y = biased(m, 0)
    for across in (w - (w.dot(v) * v + w.dot(b) * b) / v.dot(v), 0 * w):
        hessian = dense(lambda v, b, w: (x.unsqueeze(1) * v + b) @ w, (v, b, across), y)
        assert_equal(closed_form.linear_network_with_bias(across, v, b, x, y), hessian)


def test_error_names_violated_assumption() -> None:
    w, v, b, x, y = biased(4, 0)
    for what, arguments in {
        "<v, b> = 0": (w, v, b + 0.1 * v, x, y),
        r"\|v\| = \|b\|": (w, v, 2 * b, x, y),
        "mean x = 0": (w, v, b, x + 1, y),
        "mean x² = 1": (w, v, b, 2 * x, y),
        "mean y = 0": (w, v, b, x, y + 1),
        "mean xy = 0": (w, v, b, x, y + x),
    }.items():
        with pytest.raises(curvmon.InputError, match=f"assumes {what}"):
            closed_form.linear_network_with_bias(*arguments)
    with pytest.raises(curvmon.InputError, match="mean x_d x_e = 0"):
        closed_form.linear_network_of_inputs(
            normal(2, 3, seed=0), normal(2, 3, seed=1), torch.ones(4, 2), torch.ones(4)
        )


@pytest.mark.parametrize("seed", SEEDS)
def test_several_inputs_and_outputs(seed: int) -> None:
    w, v = normal(3, 4, seed=seed), normal(3, 4, seed=seed + 50)
    x = torch.linalg.qr(normal(12, 3, seed=seed + 100)).Q * torch.tensor([1.0, 2.0, 0.5])
    y = normal(12, seed=seed + 150)
    hessian = dense(lambda v, w: x @ (w * v).sum(1), (v, w), y)
    assert_equal(closed_form.linear_network_of_inputs(w, v, x, y), hessian)
    many = normal(12, 3, seed=seed + 200)
    hessian = dense(lambda v, w: x[:, :1] * (w * v).sum(1), (v, w), many)
    assert_equal(closed_form.linear_network_of_outputs(w, v, x[:, 0], many), hessian)


def attention(x: Tensor, value: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return value * (x.unsqueeze(1) * q.dot(k) * x / math.sqrt(len(q))).softmax(1) @ x


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("width", [1, 2, 6])
def test_self_attention(width: int, seed: int) -> None:
    value, q, k = normal(1, seed=seed), normal(width, seed=seed + 50), normal(width, seed=seed + 100)
    x, y = normal(7, seed=seed + 150), normal(7, seed=seed + 200)
    hessian = dense(lambda value, q, k: attention(x, value, q, k), (value, q, k), y)
    form = closed_form.self_attention(value, q, k, x, y)
    assert_equal(form, hessian)
    assert form.kinds.count("outlier") == 3 and len(form.bulk) == 2 * (width - 1)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("width", [1, 2, 6])
@pytest.mark.parametrize("case", ["one token", "equal tokens", "q = k", "k = -q", "q = 0", "q = k = 0", "value 0"])
def test_self_attention_with_multiple_roots(case: str, width: int, seed: int) -> None:
    value, q, k = normal(1, seed=seed), normal(width, seed=seed + 50), normal(width, seed=seed + 100)
    n = 1 if case == "one token" else 7
    x, y = normal(n, seed=seed + 150), normal(n, seed=seed + 200)
    if case == "equal tokens":
        x = x[0].repeat(7)
    value = 0 * value if case == "value 0" else value
    q = 0 * q if case in ("q = 0", "q = k = 0") else q
    k = {"q = k": q, "k = -q": -q, "q = k = 0": 0 * k}.get(case, k)
    hessian = dense(lambda value, q, k: attention(x, value, q, k), (value, q, k), y)
    assert_equal(closed_form.self_attention(value, q, k, x, y), hessian)


def test_non_finite_weights_give_nan() -> None:
    """Plots of a diverged training run still work."""
    bad, x = torch.tensor([math.nan, 1.0]), torch.ones(2)
    assert closed_form.linear_network(bad, bad, x, x).outliers.isnan().all()
    assert closed_form.self_attention(1.0, bad, bad, x, x).outliers.isnan().all()


def calls() -> dict[str, tuple[Tensor, ...]]:
    """Arguments for each closed form."""
    w, v, x, y = (
        normal(3, 4, seed=0),
        normal(3, 4, seed=1),
        torch.linalg.qr(normal(12, 3, seed=2)).Q,
        normal(12, seed=3),
    )
    return {
        "linear_network": (w[0], v[0], x[:, 0], y),
        "relu_network": (w[0], v[0], x[:, 0], y),
        "linear_network_with_bias": biased(4, 0),
        "linear_network_of_inputs": (w, v, x, y),
        "linear_network_of_outputs": (w, v, y, x),
        "self_attention": (torch.tensor(0.3).double(), w[0], v[0], x[:, 0], y),
    }


@pytest.mark.parametrize("name", calls())
def test_lists_and_arrays_become_float64(name: str) -> None:
    form, arguments = getattr(closed_form, name), calls()[name]
    true = form(*arguments).eigenvalues
    assert true.equal(form(*(tensor.tolist() for tensor in arguments)).eigenvalues)
    assert true.equal(form(*(tensor.numpy() for tensor in arguments)).eigenvalues)
    assert true.equal(form(*(tensor.clone().requires_grad_() for tensor in arguments)).eigenvalues)


@pytest.mark.parametrize(
    "bad", [None, "text", [[1.0, 2.0], [3.0]], {"a": 1}, torch.ones(2) * 1j, np.ones(2) * 1j, [1j]]
)
@pytest.mark.parametrize("name", calls())
def test_error_names_argument_that_is_no_tensor(name: str, bad: Any) -> None:
    form, arguments = getattr(closed_form, name), list(calls()[name])
    names = list(form.__annotations__)
    for i in range(len(arguments)):
        message = rf"^{names[i]} is (a vector|a matrix|one number); {type(bad).__name__} does not convert to a real"
        with pytest.raises(curvmon.InputError, match=message):
            form(*arguments[:i], bad, *arguments[i + 1 :])


@pytest.mark.parametrize("name", calls())
def test_error_names_argument_with_wrong_number_of_dimensions(name: str) -> None:
    form, arguments = getattr(closed_form, name), list(calls()[name])
    names = list(form.__annotations__)
    for i in range(len(arguments)):
        for shape in ((2, 2, 2), (0,)):
            with pytest.raises(curvmon.InputError, match=f"^{names[i]} is (a vector|a matrix|one number); got shape"):
                form(*arguments[:i], torch.ones(shape), *arguments[i + 1 :])


def test_error_names_mismatched_shapes() -> None:
    one = torch.ones(2)
    with pytest.raises(curvmon.InputError, match=r"w_value is one number; got shape \(2,\)"):
        closed_form.self_attention(one, one, one, one, one)
    with pytest.raises(curvmon.InputError, match=r"w_query and w_key have the same length"):
        closed_form.self_attention(1.0, one, torch.ones(3), one, one)
    with pytest.raises(curvmon.InputError, match=r"x and y have the same length"):
        closed_form.self_attention(1.0, one, one, one, torch.ones(3))
    with pytest.raises(curvmon.InputError, match=r"w and v have the same length; got w \(2,\), v \(3,\)"):
        closed_form.linear_network(torch.ones(2), torch.ones(3), torch.ones(4), torch.ones(4))
    with pytest.raises(curvmon.InputError, match=r"w is a vector; got shape \(2, 2\)"):
        closed_form.linear_network(torch.ones(2, 2), torch.ones(2), torch.ones(4), torch.ones(4))

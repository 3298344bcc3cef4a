"""Closed forms against dense float64 Hessians."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import curvmon
from curvmon import closed_form

SEEDS = range(8)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def dense(network: Callable[..., Tensor], parameters: tuple[Tensor, ...], y: Tensor) -> Tensor:
    """The Hessian of 1/(2n) Σ (f - y)² by the parameters, concatenated."""
    shapes, sizes = [p.shape for p in parameters], [p.numel() for p in parameters]

    def loss(flat: Tensor) -> Tensor:
        parts = (part.reshape(shape) for part, shape in zip(torch.split(flat, sizes), shapes))
        return (network(*parts) - y).square().sum() / (2 * len(y))

    return torch.autograd.functional.hessian(loss, torch.cat([p.reshape(-1) for p in parameters]))


def assert_equal(found: closed_form.ClosedForm, hessian: Tensor) -> None:
    true = torch.linalg.eigvalsh(hessian).flip(0)
    scale = true.abs().max().item()
    torch.testing.assert_close(found.eigenvalues, true, rtol=0, atol=1e-10 * scale)
    assert len(found.kinds) == len(true)
    assert found.trace == pytest.approx(hessian.trace().item(), abs=1e-10 * scale)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("m", [1, 2, 7])
def test_linear_network(m: int, seed: int) -> None:
    w, v, x, y = (
        normal(m, seed=seed),
        normal(m, seed=seed + 50),
        normal(20, seed=seed + 100),
        normal(20, seed=seed + 150),
    )
    found = closed_form.linear_network(w, v, x, y)
    hessian = dense(lambda v, w: w.dot(v) * x, (v, w), y)
    assert_equal(found, hessian)
    assert found.kinds.count("outlier") == 2 and len(found.bulk) == 2 * (m - 1)
    assert found.eigenvectors is not None
    images = hessian @ found.eigenvectors
    torch.testing.assert_close(images, found.eigenvectors * found.outliers, rtol=1e-9, atol=1e-10)
    assert found.outliers.sum().item() == pytest.approx(found.trace)


def test_phases_of_the_linear_network() -> None:
    """<w, v> on its way to t = mean(xy) / mean(x²) = 3, or to -3."""
    x = normal(10, seed=0)
    w = torch.tensor([1.0, 0.0])
    for sign in (1, -1):
        phases = [closed_form.linear_network(w, sign * r * w, x, sign * 3 * x).phase for r in (-1, 0.9, 1.1, 2.9, 3.1)]
        assert phases == ["early", "early", "late", "late", "divergent"]


@pytest.mark.parametrize("seed", SEEDS)
def test_relu_network(seed: int) -> None:
    w, v, x, y = normal(5, seed=seed), normal(5, seed=seed + 50), normal(9, seed=seed + 100), normal(9, seed=seed + 150)
    hessian = dense(lambda v, w: torch.relu(x.unsqueeze(1) * v) @ w, (v, w), y)
    assert_equal(closed_form.relu_network(w, v, x, y), hessian)


def test_a_relu_network_with_a_cell_that_sees_no_samples() -> None:
    w, v, x, y = normal(4, seed=0), torch.tensor([1.0, -1, -2, 3]).double(), normal(9, seed=1).abs(), normal(9, seed=2)
    hessian = dense(lambda v, w: torch.relu(x.unsqueeze(1) * v) @ w, (v, w), y)
    found = closed_form.relu_network(w, v, x, y)
    assert_equal(found, hessian)
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
    found = closed_form.linear_network_with_bias(w, v, b, x, y)
    assert_equal(found, hessian)
    assert found.kinds.count("outlier") == 5


def test_violated_assumptions_are_named() -> None:
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
    found = closed_form.self_attention(value, q, k, x, y)
    assert_equal(found, hessian)
    assert found.kinds.count("outlier") == 3 and len(found.bulk) == 2 * (width - 1)


def test_shapes_that_do_not_fit_are_named() -> None:
    with pytest.raises(curvmon.InputError, match=r"w and v have the same length; got w \(2,\), v \(3,\)"):
        closed_form.linear_network(torch.ones(2), torch.ones(3), torch.ones(4), torch.ones(4))
    with pytest.raises(curvmon.InputError, match=r"w is a vector; got shape \(2, 2\)"):
        closed_form.linear_network(torch.ones(2, 2), torch.ones(2), torch.ones(4), torch.ones(4))

"""Where factors would be wrong they are noticed, and the products take over."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvmon
from tests.helpers.classifiers import CLASSES, MANY, OUTPUTS, SAMPLES, drawn, relu_net, smooth_net


@pytest.fixture
def x() -> Tensor:
    return torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1))


class Centred(nn.Module):
    """Every sample sees the others: factors by sample are wrong."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 20), nn.Linear(20, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(F.relu(x - x.mean(0)))


@pytest.mark.parametrize("outputs", [OUTPUTS, MANY])
def test_samples_that_interact_are_noticed(outputs: int, x: Tensor) -> None:
    options: dict[str, Any] = {"loss": lambda m, x: F.cross_entropy(m(x), CLASSES), "nodes": ["first"]}
    found, truth = (run(Centred(outputs), x, **options) for run in (curvmon.measure, curvmon.exact))
    assert any("no Gauss-Newton factors" in note for note in found.notes)
    assert abs(found.resonance - truth.resonance).item() <= 4 * found.stderr["resonance"].item()


class TwoViews(nn.Module):
    """Sample i sees sample i + B/2 and no other."""

    def __init__(self, outputs: int, strength: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.strength = strength
        self.first, self.last = nn.Linear(6, 20), nn.Linear(20, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        return self.last(x + self.strength * x.roll(len(x) // 2, 0))


@pytest.mark.parametrize("outputs", [OUTPUTS, MANY])
@pytest.mark.parametrize("strength", [0.5, 1e-3])
def test_two_views_that_interact_are_noticed(outputs: int, strength: float, x: Tensor) -> None:
    options: dict[str, Any] = {"loss": lambda m, x: F.cross_entropy(m(x), CLASSES), "nodes": ["first"]}
    found = curvmon.measure(TwoViews(outputs, strength), x, **options)
    assert any("samples interact" in note for note in found.notes)


@pytest.mark.parametrize("run", [curvmon.measure, curvmon.exact], ids=["measure", "exact"])
def test_a_term_without_gradient_still_has_curvature(run: Any, x: Tensor) -> None:
    """A penalty at its minimum bypasses the output and has no gradient: H holds it all the same."""
    model = relu_net()
    nn.init.zeros_(model[2].weight)
    nn.init.zeros_(model[2].bias)

    def loss(m: Any, x: Tensor) -> Tensor:
        h = m[2](F.relu(m[0](x)))
        return F.cross_entropy(m[4](F.relu(h)), CLASSES) + 10 * h.square().sum(1).mean()

    found = run(model, x, loss=loss, nodes=["2"])
    assert found.resonance.item() == pytest.approx(20 * math.sqrt(30), rel=0.02)


@pytest.mark.parametrize("seed", range(4))
def test_branches_that_see_orthogonal_outputs(seed: int, x: Tensor) -> None:
    """GN[a, b] = 0 up to rounding, although both branches have curvature."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(seed)
            self.a, self.b = nn.Linear(6, 4), nn.Linear(6, 4)
            self.register_buffer("q", torch.linalg.qr(torch.randn(8, 8)).Q)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) @ self.q[:4] + self.b(x) @ self.q[4:]

    found = curvmon.measure(
        Branches(), x, loss=lambda m, x: F.mse_loss(m(x), drawn(SAMPLES, 8).to(x)), nodes=["a", "b"]
    )
    assert found.resonance[0, 1] <= 1e-6 * found.resonance[0, 0]


@pytest.mark.parametrize("samples", [4, 8])
def test_sketched_pairs_of_linear_and_smooth_nodes_cover_the_truth(samples: int, x: Tensor) -> None:
    """The basis must not come from the sketch that then estimates the rest."""
    x = x[:samples]
    options: dict[str, Any] = {
        "loss": lambda m, x: F.cross_entropy(m(x), CLASSES[: len(x)]),
        "nodes": ["0", "3"],
    }
    truth = curvmon.exact(smooth_net(MANY), x, **options)
    z = []
    for seed in range(40):
        found = curvmon.measure(smooth_net(MANY), x, **options, max_hvps=40, seed=seed)
        z.append(((found.resonance - truth.resonance) / found.stderr["resonance"])[[0, 0, 1], [0, 1, 1]])
    z = torch.stack(z)
    assert (z.abs() <= 1.96).float().mean() >= 0.88
    assert (z.mean(0).abs() < 0.7).all()  # six standard errors of the mean of forty


def test_a_loss_without_a_factor_is_measured_all_the_same(x: Tensor) -> None:
    """Samples that interact in the loss, with many outputs: neither diagonal nor softmax."""

    def loss(m: Any, x: Tensor) -> Tensor:
        out = m(x)
        return F.cross_entropy(out @ out.T, torch.arange(len(x)))

    options: dict[str, Any] = {"loss": loss, "nodes": ["0", "2"], "output": ""}
    found, truth = (run(smooth_net(MANY), x, **options) for run in (curvmon.measure, curvmon.exact))
    assert any("no Gauss-Newton factors" in note for note in found.notes)
    assert ((found.resonance - truth.resonance).abs() <= 4 * found.stderr["resonance"]).all()

"""Figures of the papers, reproduced: toy attention against a ReLU MLP (first paper, experiment 5, its table 7)."""

from __future__ import annotations

import statistics

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvmon

WIDTH, LENGTH, SEEDS = 16, 8, range(42, 47)


class ToyAttention(nn.Module):
    """softmax(Q K^T / sqrt d) V, mean over positions, Linear(16, 1); 785 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        weights = (self.query(x) @ self.key(x).transpose(1, 2) / WIDTH**0.5).softmax(-1)
        return self.head((weights @ self.value(x)).mean(1)).squeeze(-1)


class ToyReluMLP(nn.Module):
    """Three times Linear + ReLU at every position, mean over positions, Linear(16, 1); 833 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(3)))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x).mean(1)).squeeze(-1)


def validation_batch() -> tuple[Tensor, Tensor]:
    """The teacher's data: y = mean_s tanh(x_s W) w + noise, standardised on the training split."""
    g = torch.Generator().manual_seed(0)
    w_t = torch.randn(WIDTH, WIDTH, generator=g) / WIDTH**0.5
    w_r = torch.randn(WIDTH, generator=g) / WIDTH**0.5
    x = torch.randn(2048 + 512, LENGTH, WIDTH, generator=g)
    y = (torch.tanh(x @ w_t) @ w_r).mean(1) + 0.1 * torch.randn(len(x), generator=g)
    train = y[:2048]
    y = (y - train.mean()) / train.std()
    return x[2048 : 2048 + 64], y[2048 : 2048 + 64]


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def seeded(kind: type[nn.Module], seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return kind()


def test_the_toy_models_have_the_papers_sizes() -> None:
    assert [sum(p.numel() for p in kind().parameters()) for kind in (ToyAttention, ToyReluMLP)] == [785, 833]


def test_attention_gap_at_initialisation_is_the_papers() -> None:
    """Paper: gap of (Q, K) 57.5 ± 16.4 over seeds 42..46; the GN part is less than 2 % of the block."""
    found = [
        curvmon.exact(seeded(ToyAttention, s), validation_batch(), loss=loss, nodes=["query", "key"]) for s in SEEDS
    ]
    gaps = [m.gn_gap[0, 1].item() for m in found]
    assert statistics.mean(gaps) == pytest.approx(57.5, abs=16.4)
    assert 16.4 / 3 < statistics.stdev(gaps) < 3 * 16.4
    assert statistics.mean(m.resonance[0, 1].item() for m in found) == pytest.approx(9.2e-3, rel=0.5)


@pytest.mark.parametrize("seed", SEEDS)
def test_measure_sees_the_attention_gap(seed: int) -> None:
    model, batch = seeded(ToyAttention, seed), validation_batch()
    truth = curvmon.exact(model, batch, loss=loss, nodes=["query", "key"])
    found = curvmon.measure(model, batch, loss=loss, nodes=["query", "key"], max_hvps=160, seed=seed)
    assert abs(found.gn_gap - truth.gn_gap)[0, 1] < 4 * found.stderr["gn_gap"][0, 1]
    assert found.gn_gap[0, 1] > 10


@pytest.mark.parametrize("seed", SEEDS)
def test_relu_mlp_has_no_gap(seed: int) -> None:
    """Paper: 9.6e-8 for (block 0, block 1), in float32."""
    found = curvmon.measure(seeded(ToyReluMLP, seed), validation_batch(), loss=loss, nodes=["blocks.0", "blocks.1"])
    assert found.gn_gap.max() < 1e-6

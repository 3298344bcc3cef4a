"""A default measurement takes at most 150 HVPs, whatever the state of the network.

Counted twice: by the operators, and where vector-Jacobian products are computed, so that none escapes. An HVP takes at
most three of those: GGN z = J^T (S (J z)).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvmon.graph.autograd as autograd
from benchmarks.networks import Decoder, next_token_loss
from curvmon.monitor import pairs_and_spectrum
from curvmon.monitor.pairs_and_spectrum import measure_pairs, measure_spectrum
from curvmon.monitor.settings import Settings
from curvmon.operators import gradient_differences
from curvmon.spectrum.eigenvalue_search import Accuracy

MOST = 150
PASSES = 3
"""most vector-Jacobian products of one HVP"""
UNCOUNTED = 40
"""passes that are not HVPs and whose number does not depend on the search: checks, factors of the loss, traces"""
FACTORS = 10
"""most HVPs that stand for the passes of Gauss-Newton factors, which are not reported as they are made"""
Case = tuple[nn.Module, Any, Callable[[Any, Any], Tensor]]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.LSTM(8, 32, num_layers=2, batch_first=True), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x)[0][:, -1])


def classification(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def regression(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def perceptron(activation: type[nn.Module], scale: float = 1.0) -> Case:
    widths = [32, 48, 48, 48, 10]
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), activation()]
    model = nn.Sequential(*layers[:-1])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= scale
    return model, [torch.randn(32, 32), torch.randint(10, (32,))], classification


def diverged() -> Case:
    """Every prediction is certain, and most are wrong."""
    model, batch, loss = perceptron(nn.ReLU, scale=6.0)
    assert 50 < loss(model, batch).item() < 1000
    return model, batch, loss


def recurrent() -> Case:
    return Recurrent(), [torch.randn(16, 12, 8), torch.randint(10, (16,))], classification


def decoder() -> Case:
    model = Decoder(layers=2, width=32, heads=2, tokens=16, vocabulary=64)
    return model, torch.randint(64, (8, 17)), next_token_loss


def flat() -> Case:
    """All eigenvalues are of the same size: XX^T is a multiple of the identity."""
    x = torch.linalg.qr(torch.randn(64, 64)).Q
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.SiLU(), nn.Linear(64, 64, bias=False))
    return model, [8 * x, torch.randn(64, 64)], regression


def constant() -> Case:
    """The outputs depend on no parameter but the last bias."""
    model, batch, loss = perceptron(nn.SiLU)
    nn.init.zeros_(model[-1].weight)
    nn.init.zeros_(model[-3].weight)
    nn.init.zeros_(model[-3].bias)
    return model, batch, loss


CASES: dict[str, Callable[[], Case]] = {
    "diverged, saturated softmax": diverged,
    "silu at initialisation": lambda: perceptron(nn.SiLU),
    "lstm": recurrent,
    "decoder": decoder,
    "flat spectrum": flat,
    "constant outputs": constant,
}


class Passes:
    """Vector-Jacobian products, one for each cotangent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        original = autograd.differentiate

        def differentiate(functions: Any, variables: Any, cotangents: Any = None, *options: bool, **more: bool) -> Any:
            batched = more.get("batched", options[1:2] == (True,))
            self.count += len(cotangents[0]) if batched else 1
            return original(functions, variables, cotangents, *options, **more)

        for module in (autograd, gradient_differences):
            monkeypatch.setattr(module, "differentiate", differentiate)


class Totals(NamedTuple):
    pairs: int
    spectrum: int
    reported: int
    passes: int

    @property
    def total(self) -> int:
        return self.pairs + self.spectrum


def measured(case: Case, optimizer: Callable[..., torch.optim.Optimizer], monkeypatch: pytest.MonkeyPatch) -> Totals:
    """HVPs of a first measurement."""
    model, batch, loss = case
    stepped = optimizer(model.parameters(), lr=1e-6)
    loss(model, batch).backward()
    stepped.step()
    passes, reported = Passes(monkeypatch), list[int]()
    pairs = measure_pairs(Settings(), model, [batch], loss, on_product=reported.append)
    spectrum, _ = measure_spectrum(
        Settings(), model, [batch], loss, optimizer=stepped, pair_hvps=pairs.hvps, on_product=reported.append
    )
    return Totals(pairs.hvps, spectrum.hvps, sum(reported), passes.count)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("name", CASES)
def test_measurement_takes_at_most_150_hvps(
    name: str, optimizer: Callable[..., torch.optim.Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    assert measured(CASES[name](), optimizer, monkeypatch).total <= MOST


@pytest.mark.parametrize("name", CASES)
def test_no_product_escapes_the_count(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    counts = measured(CASES[name](), torch.optim.Adam, monkeypatch)
    assert counts.passes <= PASSES * counts.total + UNCOUNTED
    assert counts.total - FACTORS <= counts.reported <= counts.total


@pytest.mark.parametrize("name", CASES)
def test_limit_holds_where_no_eigenvalue_converges(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every search runs to its limit."""
    monkeypatch.setattr(pairs_and_spectrum, "ACCURACY", Accuracy(0.0, 0.0, 0.0))
    torch.manual_seed(0)
    assert measured(CASES[name](), torch.optim.Adam, monkeypatch).total <= MOST

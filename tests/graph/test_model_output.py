"""The output is detected wherever the loss is computed; GN does not depend on how the loss is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvmon

CLASSES = 4
Batch = tuple[Tensor, Tensor, Tensor]
Loss = Callable[[Any, Batch], Tensor]


@pytest.fixture
def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.SiLU(), nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, CLASSES))


@pytest.fixture
def batch() -> Batch:
    g = torch.Generator().manual_seed(1)
    return (
        torch.randn(9, 6, generator=g),
        torch.randint(CLASSES, (9,), generator=g),
        torch.rand(9, CLASSES, generator=g),
    )


def gap(model: nn.Module, batch: Any, loss: Loss, **options: Any) -> Tensor:
    return curvmon.exact(model, batch, loss=loss, nodes=["0", "2"], **options).gn_gap


def ce(m: Any, b: Batch) -> Tensor:
    return F.cross_entropy(m(b[0]), b[1])


def bce(m: Any, b: Batch) -> Tensor:
    return F.binary_cross_entropy_with_logits(m(b[0]), b[2])


def in_two_chunks(out: Tensor, target: Tensor) -> Tensor:
    parts = (F.cross_entropy(out[i], target[i], reduction="sum") for i in (slice(4), slice(4, 9)))
    return sum(parts, torch.zeros(())) / 9


CROSS_ENTROPY: dict[str, Loss] = {
    "module": lambda m, b: nn.CrossEntropyLoss()(m(b[0]), b[1]),
    "log_softmax + nll": lambda m, b: F.nll_loss(F.log_softmax(m(b[0]), -1), b[1]),
    "method + module": lambda m, b: nn.NLLLoss()(m(b[0]).log_softmax(-1), b[1]),
    "module + nll": lambda m, b: F.nll_loss(nn.LogSoftmax(-1)(m(b[0])), b[1]),
    "with a view": lambda m, b: F.nll_loss(F.log_softmax(m(b[0]).view(3, 3, -1), -1).view(9, -1), b[1]),
    "with indexing": lambda m, b: F.nll_loss(F.log_softmax(m(b[0]), -1)[:, :], b[1]),
    "log of softmax": lambda m, b: F.nll_loss(torch.log(m(b[0]).softmax(-1)), b[1]),
    "log of clamped softmax": lambda m, b: F.nll_loss(torch.log(m(b[0]).softmax(-1).clamp_min(1e-12)), b[1]),
    "log of shifted softmax": lambda m, b: F.nll_loss(torch.log(m(b[0]).softmax(-1) + 1e-16), b[1]),
    "keyword": lambda m, b: F.nll_loss(input=F.log_softmax(m(b[0]), dim=-1), target=b[1]),
    "kl_div": lambda m, b: F.kl_div(
        F.log_softmax(m(b[0]), -1), F.one_hot(b[1], CLASSES).double(), reduction="batchmean"
    ),
    "in two chunks": lambda m, b: in_two_chunks(m(b[0]), b[1]),
    "without reduction": lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="none").mean(),
    "scaled and shifted": lambda m, b: 3 * F.cross_entropy(m(b[0]), b[1]) + 1,
}


@pytest.mark.parametrize("how", CROSS_ENTROPY)
def test_cross_entropy_spellings(how: str, model: nn.Module, batch: Batch) -> None:
    torch.testing.assert_close(gap(model, batch, CROSS_ENTROPY[how]), gap(model, batch, ce), rtol=1e-8, atol=1e-12)


BINARY: dict[str, Loss] = {
    "sigmoid + bce": lambda m, b: F.binary_cross_entropy(torch.sigmoid(m(b[0])), b[2]),
    "method": lambda m, b: F.binary_cross_entropy(m(b[0]).sigmoid(), b[2]),
    "modules": lambda m, b: nn.BCELoss()(nn.Sigmoid()(m(b[0])), b[2]),
    "clamped": lambda m, b: F.binary_cross_entropy(torch.sigmoid(m(b[0])).clamp(1e-9, 1 - 1e-9), b[2]),
}


@pytest.mark.parametrize("how", BINARY)
def test_binary_cross_entropy_spellings(how: str, model: nn.Module, batch: Batch) -> None:
    torch.testing.assert_close(gap(model, batch, BINARY[how]), gap(model, batch, bce), rtol=1e-6, atol=1e-12)


def test_model_that_computes_its_own_loss(model: nn.Module, batch: Batch) -> None:
    class OwnLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.criterion = model, nn.CrossEntropyLoss()

        def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
            logits = self.net(x)
            return {"loss": self.criterion(logits, y), "logits": logits}

    result = curvmon.exact(OwnLoss(), batch, loss=lambda m, b: m(b[0], b[1])["loss"], nodes=["net.0", "net.2"])
    torch.testing.assert_close(result.gn_gap, gap(model, batch, ce))


def test_gauss_newton_of_several_terms_is_their_sum(model: nn.Module, batch: Batch) -> None:
    """Two losses of the same logits: the Gauss-Newton parts add."""

    def both(m: Any, b: Batch) -> Tensor:
        out = m(b[0])
        return F.cross_entropy(out, b[1]) + 0.3 * F.mse_loss(out, b[2])

    parts = [
        curvmon.exact(model, batch, loss=f, nodes=["0"]).gauss_newton["0", "0"]
        for f in (both, ce, lambda m, b: F.mse_loss(m(b[0]), b[2]))
    ]
    torch.testing.assert_close(parts[0], parts[1] + 0.3 * parts[2])


def test_probabilities_without_logits_are_noted(model: nn.Module, batch: Batch) -> None:
    result = curvmon.exact(
        model, batch, loss=lambda m, b: F.nll_loss(torch.cat([m(b[0]).log_softmax(-1)]), b[1]), nodes=["0"]
    )
    assert any("splits at the probabilities that enter nll_loss" in note for note in result.notes)


def test_activation_before_the_logits_belongs_to_the_network(model: nn.Module, batch: Batch) -> None:
    """sigmoid, then cross-entropy: the output is what enters the softmax, however that is written."""
    one = gap(model, batch, lambda m, b: F.cross_entropy(m(b[0]).sigmoid(), b[1]))
    two = gap(model, batch, lambda m, b: F.nll_loss(F.log_softmax(m(b[0]).sigmoid(), -1), b[1]))
    torch.testing.assert_close(one, two, rtol=1e-8, atol=1e-12)


def in_place_logits(m: Any, b: Batch) -> Tensor:
    logits = m(b[0]) * 1.0
    p = F.log_softmax(logits, -1)
    logits.zero_()
    return F.nll_loss(p, b[1])


def in_place_carrier(m: Any, b: Batch) -> Tensor:
    p = F.log_softmax(m(b[0]), -1) * 1.0
    p *= 0.5
    return F.nll_loss(p, b[1])


@pytest.mark.parametrize(("loss", "factor"), [(in_place_carrier, 0.5), (in_place_logits, 1.0)])
def test_changes_in_place_are_kept(loss: Loss, factor: float, model: nn.Module, batch: Batch) -> None:
    """The steps between logits and loss are replayed only where nothing was overwritten since."""
    result = curvmon.exact(model, batch, loss=loss, nodes=["0", "2"])
    truth = curvmon.exact(model, batch, loss=ce, nodes=["0", "2"])
    assert result.loss == pytest.approx(factor * truth.loss)
    torch.testing.assert_close(result.resonance, factor * truth.resonance)


def test_output_argument_overrides_detection(model: nn.Module, batch: Batch) -> None:
    """The network after node 2 counts as loss: T at node 2 is zero."""
    assert gap(model, batch, ce, output="2")[1, 1] < 1e-12
    assert gap(model, batch, ce)[1, 1] > 1e-3
    torch.testing.assert_close(gap(model, batch, ce, output="4"), gap(model, batch, ce))
    torch.testing.assert_close(gap(model, batch, ce, output=""), gap(model, batch, ce))


def by_hand(m: Any, b: Batch) -> Tensor:
    return (m(b[0]) - b[2]).square().mean()


def test_loss_written_by_hand_needs_output(model: nn.Module, batch: Batch) -> None:
    truth = curvmon.exact(model, batch, loss=lambda m, b: F.mse_loss(m(b[0]), b[2]), nodes=["0", "2"])
    for run in (curvmon.exact, curvmon.measure):
        result = run(model, batch, loss=by_hand, nodes=["0", "2"])
        assert torch.isnan(result.gn_gap).all() and torch.isnan(result.stderr["gn_gap"]).all()
        assert any('pass output="' in note for note in result.notes)
        torch.testing.assert_close(result.resonance, truth.resonance, rtol=1e-4, atol=0)
    torch.testing.assert_close(gap(model, batch, by_hand, output=""), truth.gn_gap)


def test_term_written_by_hand_with_a_torch_loss(model: nn.Module, batch: Batch) -> None:
    """GN of a part of the loss is not GN: say so, and give a number only where the rest is negligible."""

    def mixed(weight: float) -> Loss:
        return lambda m, b: ce(m, b) + weight * m[0](b[0]).square().mean()

    large = curvmon.exact(model, batch, loss=mixed(1.0), nodes=["0.call1", "0.call2"])
    assert torch.isnan(large.gn_gap).all() and any("does not pass through the output" in n for n in large.notes)
    small = curvmon.exact(model, batch, loss=mixed(1e-3), nodes=["0.call1", "0.call2"])
    assert torch.isfinite(small.gn_gap[0, 0]) and any("approximate" in n for n in small.notes)


def test_output_that_the_loss_does_not_use(model: nn.Module, batch: Batch) -> None:
    class Aux(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.aux = model, nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            self.aux(x)
            return self.net(x)

    result = curvmon.exact(Aux(), batch, loss=ce, nodes=["net.0"], output="aux")
    assert torch.isnan(result.gn_gap).all()
    assert any("does not depend on the output of 'aux'" in note for note in result.notes)


def test_metric_under_no_grad_is_no_output(model: nn.Module, batch: Batch) -> None:
    def loss(m: Any, b: Batch) -> Tensor:
        out = m(b[0])
        with torch.no_grad():
            F.mse_loss(out, b[2])
        return F.cross_entropy(out, b[1])

    torch.testing.assert_close(gap(model, batch, loss), gap(model, batch, ce))


def test_tensor_twice_in_an_output_is_tapped_in_both_places(batch: Batch) -> None:
    class Features(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 5)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            h = self.linear(x)
            return {"before": h, "feature": h}

    model = nn.ModuleDict({"features": Features(), "head": nn.Linear(5, CLASSES)})
    result = curvmon.exact(
        model,
        batch,
        loss=lambda m, b: F.cross_entropy(m["head"](m["features"](b[0])["feature"].tanh()), b[1]),
        nodes=["features"],
    )
    assert result.resonance.item() > 0

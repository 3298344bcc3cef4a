"""Gauss-Newton from factors: exact for few outputs, unbiased for many, dropped where samples interact."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvmon
from curvmon.graph import loss_curvature as losses
from curvmon.operators import node_blocks as operators
from curvmon.operators.session import open_session
from curvmon.pairs import gauss_newton
from curvmon.pairs import gauss_newton_factors as factors
from curvmon.pairs.singular_values import RightFactors, leading_pairs
from tests.helpers.classifiers import CLASSES, MANY, OUTPUTS, SAMPLES, drawn, relu_net, smooth_net

Loss = Callable[[Any, Any], Tensor]


@pytest.fixture
def x() -> Tensor:
    return torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1))


VALUES = drawn(SAMPLES, OUTPUTS)
IGNORED = torch.where(torch.arange(SAMPLES) < 3, -100, CLASSES)
SHARES = VALUES.softmax(1)
WEIGHTS = torch.tensor([0.5, 2.0, 1.0, 0.1, 3.0])


def two_terms(out: Tensor) -> Tensor:
    return F.cross_entropy(out[:, :3], CLASSES % 3) + 0.3 * F.mse_loss(out[:, 3:], VALUES[:, 3:].to(out))


LOSSES: dict[str, Loss] = {
    "cross-entropy": lambda m, x: F.cross_entropy(m(x), CLASSES),
    "summed": lambda m, x: F.cross_entropy(m(x), CLASSES, reduction="sum"),
    "label smoothing": lambda m, x: F.cross_entropy(m(x), CLASSES, label_smoothing=0.2),
    "class weights": lambda m, x: F.cross_entropy(m(x), CLASSES, weight=WEIGHTS.to(x)),
    "weights and smoothing": lambda m, x: F.cross_entropy(m(x), CLASSES, weight=WEIGHTS.to(x), label_smoothing=0.1),
    "ignore_index": lambda m, x: F.cross_entropy(m(x), IGNORED),
    "soft targets": lambda m, x: F.cross_entropy(m(x), SHARES.to(x)),
    "log_softmax + nll": lambda m, x: F.nll_loss(m(x).log_softmax(-1), CLASSES),
    "divergence": lambda m, x: F.kl_div(m(x).log_softmax(-1), SHARES.to(x), reduction="batchmean"),
    "mse": lambda m, x: F.mse_loss(m(x), VALUES.to(x)),
    "bce": lambda m, x: F.binary_cross_entropy_with_logits(m(x), SHARES.to(x)),
    "bce with weights": lambda m, x: F.binary_cross_entropy_with_logits(m(x), SHARES.to(x), pos_weight=WEIGHTS.to(x)),
    "huber": lambda m, x: F.huber_loss(m(x), VALUES.to(x), delta=0.5),
    "poisson": lambda m, x: F.poisson_nll_loss(m(x), SHARES.to(x)),
    "two terms": lambda m, x: two_terms(m(x)),
}
every_loss = pytest.mark.parametrize("loss", list(LOSSES.values()), ids=list(LOSSES))


@every_loss
def test_a_piecewise_linear_network_is_exact_without_probes(loss: Loss, x: Tensor) -> None:
    """All pairs, all metrics, from one joint product: float32 against dense float64 blocks."""
    model = relu_net()
    found, truth = (run(model, x, loss=loss, nodes=["0", "2"]) for run in (curvmon.measure, curvmon.exact))
    assert found.hvps == 2
    assert any("Gauss-Newton exactly" in note for note in found.notes)
    for metric in ("resonance", "coupling", "stable_rank", "gn_norm", "spectral_norm"):
        torch.testing.assert_close(getattr(found, metric), getattr(truth, metric), rtol=2e-5, atol=0)
    assert (found.gn_gap == 0).all()


@every_loss
def test_a_smooth_network_has_an_exact_gauss_newton_part(loss: Loss, x: Tensor) -> None:
    model = smooth_net()
    found, truth = (run(model, x, loss=loss, nodes=["0", "2"]) for run in (curvmon.measure, curvmon.exact))
    torch.testing.assert_close(found.gn_norm, truth.gn_norm, rtol=2e-5, atol=0)
    assert ((found.resonance - truth.resonance).abs() <= 4 * found.stderr["resonance"]).all()


def indefinite(out: Tensor) -> Tensor:
    return (out.cos().sum(1) * out[:, 0]).mean()


def test_indefinite_loss_curvature_keeps_its_signs(x: Tensor) -> None:
    """S indefinite, and not a torch loss: the factor is computed numerically and keeps its signs."""
    options: dict[str, Any] = {
        "loss": lambda m, x: indefinite(m(x)),
        "nodes": ["0", "2"],
        "output": "",
    }
    found, truth = (run(relu_net(), x, **options) for run in (curvmon.measure, curvmon.exact))
    assert found.hvps == 2
    torch.testing.assert_close(found.resonance, truth.resonance, rtol=2e-5, atol=0)
    torch.testing.assert_close(found.stable_rank, truth.stable_rank, rtol=2e-5, atol=0)


def test_factors_are_dropped_when_parts_of_an_indefinite_loss_cancel(x: Tensor) -> None:
    """GN = 0 for the second call by the cancellation of eigenvalues ± a: a difference of squares would be rounding."""
    options: dict[str, Any] = {
        "loss": lambda m, x: (m(x).cos().sum(1) * m(x)[:, 0]).mean(),
        "nodes": ["0", "2"],
        "output": "",
    }
    found, truth = (run(relu_net(), x, **options) for run in (curvmon.measure, curvmon.exact))
    assert any("parts of an indefinite loss cancel" in note for note in found.notes)
    assert ((found.resonance - truth.resonance).abs() <= 4 * found.stderr["resonance"] + 1e-6).all()


@pytest.mark.parametrize("scale", [1e-9, 1e9])
def test_a_scaled_loss_changes_r_alone(scale: float, x: Tensor) -> None:
    one, other = (
        curvmon.measure(relu_net(), x, loss=lambda m, x, s=s: s * F.cross_entropy(m(x), CLASSES), nodes=["0", "2"])
        for s in (1.0, scale)
    )
    torch.testing.assert_close(other.resonance, scale * one.resonance, rtol=1e-4, atol=0)
    torch.testing.assert_close(other.stable_rank, one.stable_rank, rtol=1e-4, atol=0)


# ---- many outputs: sketches ------------------------------------------------------------------------------------------
MANY_LOSSES: dict[str, tuple[str, Loss]] = {
    "cross-entropy": ("softmax", lambda m, x: F.cross_entropy(m(x), CLASSES, label_smoothing=0.1)),
    "soft targets": ("softmax", lambda m, x: F.cross_entropy(m(x), drawn(SAMPLES, MANY).softmax(1).to(x))),
    "mse": ("elementwise", lambda m, x: F.mse_loss(m(x), drawn(SAMPLES, MANY).to(x))),
    "bce": ("elementwise", lambda m, x: F.binary_cross_entropy_with_logits(m(x), drawn(SAMPLES, MANY).sigmoid().to(x))),
    "classes in the middle": ("softmax", lambda m, x: F.cross_entropy(m(x).view(-1, 5, 8), drawn(SAMPLES, 8, high=5))),
    "classes last": ("softmax", lambda m, x: F.cross_entropy(m(x).view(-1, 5), drawn(SAMPLES * 8, high=5))),
}


@pytest.mark.parametrize(("form", "loss"), list(MANY_LOSSES.values()), ids=list(MANY_LOSSES))
def test_random_cotangents_have_the_curvature_of_the_loss(form: str, loss: Loss, x: Tensor) -> None:
    """E[c c^T] = S, entry by entry in standard errors of its mean."""
    with open_session(
        relu_net(MANY), x, loss=loss, nodes=["0"], output=None, batch_dim=0, dtype=torch.float64
    ) as session:
        operator = session.operator
        found = losses.sketch(
            losses.Layout(operator.graph.outputs, SAMPLES, 0), operator.graph.outputs, operator.output_curvature
        )
        assert found is not None and form in found.form
        out = operator.graph.outputs[0]
        units = torch.eye(out.numel(), dtype=torch.float64)[:60]
        curvature = torch.stack([operator.output_curvature([unit.view_as(out)])[0].flatten() for unit in units])
        generator = torch.Generator().manual_seed(0)
        draws = torch.stack([found.draw(generator)[0].flatten() for _ in range(4000)])
    products = draws[:, :60, None] * draws[:, None, :]
    mean, error = products.mean(0), products.std(0) / math.sqrt(len(draws))
    # 60 x 320 entries: the largest of so many normal deviates is about 4; some products are always the same
    assert ((mean - curvature).abs() <= 6 * error + 1e-6 * curvature.abs().max()).all()


def test_sketches_are_unbiased_with_correct_errors(x: Tensor) -> None:
    model, loss = relu_net(MANY), MANY_LOSSES["cross-entropy"][1]
    truth = curvmon.exact(model, x, loss=loss, nodes=["0", "2"])
    runs = [curvmon.measure(model, x, loss=loss, nodes=["0", "2"], seed=seed, rtol=0.2) for seed in range(60)]
    assert any("random backward passes (softmax" in note for note in runs[0].notes)
    squares = torch.stack([run.resonance.square() for run in runs])
    error = squares.std(0) / math.sqrt(len(runs))
    assert ((squares.mean(0) - truth.resonance.square()).abs() < 4 * error).all()
    inside = [
        (getattr(run, metric) - getattr(truth, metric)).abs() <= 1.96 * run.stderr[metric]
        for run in runs
        for metric in ("resonance", "stable_rank")
    ]
    assert torch.stack(inside).float().mean() >= 0.9


def test_more_sketches_for_a_smaller_tolerance(x: Tensor) -> None:
    model, loss = relu_net(MANY), MANY_LOSSES["cross-entropy"][1]
    loose, tight = (curvmon.measure(model, x, loss=loss, nodes=["0", "2"], rtol=rtol) for rtol in (0.3, 0.05))
    assert (tight.stderr["resonance"] < loose.stderr["resonance"]).all()
    assert (tight.stderr["resonance"] < 0.05 * tight.resonance).all()


class Sequence(nn.Module):
    """Tokens of a small language model, with or without the batch in front."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.batch_first = batch_first
        self.embed, self.mix, self.head = nn.Embedding(50, 10), nn.Linear(10, 10), nn.Linear(10, 50)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head(F.relu(self.mix(x)).cumsum(1 if self.batch_first else 0))


@pytest.mark.parametrize("batch_first", [True, False])
def test_tokens_may_be_folded_into_the_samples(batch_first: bool) -> None:
    """B T x V and T B x V: a sample owns other rows of the logits, and its factors are right for both."""
    ids = drawn(4, 7, high=50)
    options: dict[str, Any] = {
        "loss": lambda m, ids: F.cross_entropy(m(ids).flatten(0, 1), ids.roll(1).flatten()),
        "nodes": ["mix"],
        "batch_dim": 0 if batch_first else 1,
    }
    model, batch = Sequence(batch_first), ids if batch_first else ids.T.contiguous()
    found, truth = (run(model, batch, **options) for run in (curvmon.measure, curvmon.exact))
    assert any("random backward passes" in note for note in found.notes)
    assert abs(found.resonance - truth.resonance).item() <= 3 * found.stderr["resonance"].item()
    assert found.stderr["resonance"].item() < 0.05 * found.resonance.item()


@pytest.mark.parametrize("net", [relu_net, smooth_net])
def test_factors_above_the_memory_limit_are_built_in_groups(
    net: Callable[[], nn.Module], x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"loss": LOSSES["cross-entropy"], "nodes": ["0", "2"]}
    whole = curvmon.measure(net(), x, **options)
    monkeypatch.setattr(factors, "MAX_BYTES", 1000)
    turns = curvmon.measure(net(), x, **options)
    truth = curvmon.exact(net(), x, **options)
    assert ((turns.resonance - truth.resonance).abs() <= 4 * turns.stderr["resonance"]).all()
    torch.testing.assert_close(turns.gn_norm, whole.gn_norm, rtol=0.05, atol=0)


def test_nodes_before_a_linear_head_need_no_probes(x: Tensor) -> None:
    """T = 0 in front of a linear head: the pairs of the last node are exact, those of the first are not."""
    found = curvmon.measure(smooth_net(), x, loss=LOSSES["cross-entropy"], nodes=["0", "3"])
    truth = curvmon.exact(smooth_net(), x, loss=LOSSES["cross-entropy"], nodes=["0", "3"])
    torch.testing.assert_close(found.resonance[1], truth.resonance[1], rtol=2e-5, atol=0)
    assert found.gn_gap[0, 1] == found.gn_gap[1, 1] == 0 < found.gn_gap[0, 0]


def test_batched_products_are_the_same(x: Tensor) -> None:
    options: dict[str, Any] = {"loss": LOSSES["cross-entropy"], "nodes": ["0", "2"]}
    batched, one_by_one = (curvmon.measure(smooth_net(), x, **options, batched=flag) for flag in (True, False))
    for metric in ("resonance", "coupling", "stable_rank", "gn_gap"):
        torch.testing.assert_close(getattr(batched, metric), getattr(one_by_one, metric), rtol=1e-3, atol=0)
    assert batched.hvps == one_by_one.hvps


def test_batched_must_be_a_choice(x: Tensor) -> None:
    with pytest.raises(curvmon.InputError, match='batched must be True, False or "auto"'):
        curvmon.measure(smooth_net(), x, loss=LOSSES["cross-entropy"], nodes=["0"], batched="yes")  # type: ignore[arg-type]


def leading_pair(matrix: Tensor) -> tuple[Tensor, float]:
    vectors, values = leading_pairs(matrix.T, RightFactors([torch.eye(matrix.shape[1], dtype=matrix.dtype)]))
    return vectors[0], values[0].item()


def test_leading_pair_of_a_large_matrix() -> None:
    """Subspace iteration where it converges, a full decomposition where the spectrum is flat."""
    g = torch.Generator().manual_seed(0)
    for decay in (1.0, 0.0):
        matrix = torch.randn(100, 90, generator=g, dtype=torch.float64) * torch.arange(1, 91) ** -decay
        vector, value = leading_pair(matrix)
        assert value == pytest.approx(torch.linalg.matrix_norm(matrix, 2).item(), rel=1e-7)
        assert torch.linalg.vector_norm(matrix.T @ vector).item() == pytest.approx(value, rel=1e-7)


def test_leading_pair_when_the_first_columns_are_zero() -> None:
    matrix = torch.zeros(100, 100, dtype=torch.float64)
    matrix[:, 50:] = torch.randn(100, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    vector, value = leading_pair(matrix)
    assert value == pytest.approx(torch.linalg.matrix_norm(matrix, 2).item(), rel=1e-7)
    assert torch.isfinite(vector).all()


def test_few_outputs_are_exact_and_many_are_not(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same network both ways."""
    options: dict[str, Any] = {"loss": LOSSES["class weights"], "nodes": ["0", "2"]}
    exact = curvmon.measure(relu_net(), x, **options)
    monkeypatch.setattr(gauss_newton, "MAX_COLUMNS", 0)
    sketched = curvmon.measure(relu_net(), x, **options)
    assert any("random backward passes (softmax cross-entropy)" in note for note in sketched.notes)
    assert ((sketched.resonance - exact.resonance).abs() <= 4 * sketched.stderr["resonance"]).all()
    assert (sketched.resonance != exact.resonance).any()

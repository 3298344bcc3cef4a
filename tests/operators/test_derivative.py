"""Operations that cannot be differentiated twice: measured within their errors, or refused with the reason."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvmon
from curvmon.operators.block_differences import BlockDifferences
from curvmon.operators.session import open_session
from curvmon.records import METRICS
from tests.helpers.differentiated_once import CASES, Apply, Case, KinkedOnce, classifier, cross_entropy

zoo = pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))


def double(model: nn.Module, batch: Any) -> tuple[nn.Module, Any]:
    return copy.deepcopy(model).double(), tuple(x.double() if x.is_floating_point() else x for x in batch)


@zoo
@pytest.mark.parametrize("derivative", ["auto", "differences"])
def test_pairs_are_within_their_errors(case: Case, derivative: Any) -> None:
    (model, plain), batch = case.models(), case.batch()
    nodes = [name for name, module in model.named_children() if list(module.parameters())][:-1]
    found = curvmon.measure(model, batch, loss=case.loss, nodes=nodes, derivative=derivative)
    truth = curvmon.exact(plain, batch, loss=case.plain_loss, nodes=nodes, output="")
    for metric in METRICS:
        value, wanted, error = getattr(found, metric), getattr(truth, metric), found.stderr[metric]
        known = wanted.isfinite()
        assert known.any() and value[known].isfinite().all(), metric
        assert ((value - wanted).abs() <= 4 * error + 1e-6 * wanted.abs())[known].all(), metric
    assert (found.stderr["resonance"] < 0.1 * found.resonance).all(), "the errors say nothing"
    if derivative == "auto" and case.names:
        assert any("differences of gradients" in note and case.names in note for note in found.notes)


@zoo
def test_spectrum_is_within_its_errors(case: Case) -> None:
    (model, plain), batch = case.models(), case.batch()
    found = curvmon.spectrum(model, batch, loss=case.loss, k=3)
    truth = curvmon.spectrum(*double(plain, batch), loss=case.plain_loss, k=3)
    assert found.converged.all()
    allowed = found.residuals + truth.residuals + 1e-6 * truth.eigenvalues[0]
    assert ((found.eigenvalues - truth.eigenvalues).abs() <= allowed).all()
    assert abs(found.smallest - truth.smallest) <= found.smallest_residual + truth.smallest_residual + 1e-6
    assert abs(found.trace - truth.trace) <= 4 * found.trace_stderr + 1e-5 * abs(truth.trace)
    if case.loss is cross_entropy:  # CTC written by hand has no output that is recognised
        assert abs(found.ggn_eigenvalue / truth.ggn_eigenvalue - 1) < 0.05
    if case.names and case.names != "Attention":
        assert any("differences of gradients" in note and case.names in note for note in found.notes)


@pytest.mark.parametrize("name", [name for name in CASES if name != "custom attention"])
def test_pulse_agrees(name: str) -> None:
    """Not of a function that hides its second derivative: a single product does not show that."""
    case = CASES[name]
    (model, plain), batch = case.models(), case.batch()
    step = [0.01 * torch.randn_like(p) for p in model.parameters()]
    found = curvmon.pulse(model, batch, loss=case.loss, step=step)
    truth = curvmon.pulse(*double(plain, batch), loss=case.plain_loss, step=[u.double() for u in step])
    assert found.gain == pytest.approx(truth.gain, rel=1e-3)
    assert found.curvature == pytest.approx(truth.curvature, rel=2e-2, abs=1e-3 * abs(truth.gain))


def test_gauss_newton_of_ctc() -> None:
    """Whose loss curvature comes from differences, too: by all entries of the nodes."""
    case = CASES["CTC"]
    (model, plain), batch = case.models(), case.batch()
    truth = curvmon.exact(plain, batch, loss=case.plain_loss, nodes=["0", "2"], output="")
    options: dict[str, Any] = {"nodes": ["0", "2"], "output": None, "batch_dim": 0, "way": "differences"}
    with open_session(model, batch, loss=case.loss, dtype=torch.float64, **options) as session:
        assert isinstance(session.operator, BlockDifferences)
        columns = session.operator.columns(1, torch.eye(session.operator.templates[1].numel(), dtype=torch.float64))
    assert columns.gauss_newton is not None
    for v, name in enumerate(["0", "2"]):
        for image, wanted in (
            (columns.gauss_newton[v], truth.gauss_newton[name, "2"]),
            (columns.hessian(v), truth.blocks[name, "2"]),
        ):
            assert torch.linalg.norm(image - wanted) <= 1e-5 * torch.linalg.norm(wanted)


def kinked(width: int, samples: int) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    wide = nn.Sequential(nn.Linear(6, width), Apply(KinkedOnce.apply), nn.Linear(width, 6))
    return classifier(wide), (torch.randn(samples, 6), torch.randint(3, (samples,)))


def test_kinks_between_layers_are_refused_with_the_reason() -> None:
    model, batch = kinked(64, 256)
    reason = r"two step sizes disagree by \d+%.*kinks"
    with pytest.raises(curvmon.DoubleBackwardError, match=f"KinkedOnce between.*{reason}"):
        curvmon.measure(model, batch, loss=cross_entropy, nodes=["0", "2.0"])
    with pytest.raises(curvmon.DifferencesError, match=reason):
        curvmon.measure(model, batch, loss=cross_entropy, nodes=["0", "2.0"], derivative="differences")
    behind = curvmon.measure(model, batch, loss=cross_entropy, nodes=["4"])
    assert behind.resonance.isfinite().all() and not any("differences" in note for note in behind.notes)


def test_kinks_of_the_parameters_are_refused_or_not_crossed() -> None:
    """Steps are short: with few units no kink is crossed, and the Hessian is that of the piece."""
    model, batch = kinked(64, 256)
    plain = copy.deepcopy(model)
    plain[2][1] = nn.ReLU()
    found, truth = (curvmon.spectrum(each, batch, loss=cross_entropy, k=2) for each in (model, plain))
    assert ((found.eigenvalues - truth.eigenvalues).abs() <= found.residuals + truth.residuals).all()
    with pytest.raises(curvmon.DoubleBackwardError, match=r"KinkedOnce .*differences of gradients are not symmetric"):
        model, batch = kinked(256, 1024)
        curvmon.spectrum(model, batch, loss=cross_entropy, k=2)


def test_kinks_of_torch_are_no_obstacle() -> None:
    """They are held: the Hessian is that of the piece, and T = 0 to rounding."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3))
    batch = torch.randn(64, 6), torch.randint(3, (64,))
    found = curvmon.measure(model, batch, loss=cross_entropy, nodes=["0", "2"], derivative="differences")
    truth = curvmon.exact(model, batch, loss=cross_entropy, nodes=["0", "2"])
    assert ((found.resonance - truth.resonance).abs() <= 4 * found.stderr["resonance"] + 1e-4 * truth.resonance).all()
    assert (found.gn_gap.nan_to_num() < 1e-3).all()


def test_a_straight_through_estimator_stays_suspect() -> None:
    class Rounded(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return (4 * x).round() / 4

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient

    torch.manual_seed(0)
    model = classifier(Apply(Rounded.apply))
    found = curvmon.measure(model, (torch.randn(64, 6), torch.randint(3, (64,))), loss=cross_entropy, nodes=["0"])
    assert any(note.startswith("suspect") for note in found.notes)


def test_derivative_is_checked() -> None:
    with pytest.raises(curvmon.InputError, match='"auto", "double" or "differences"'):
        curvmon.measure(nn.Linear(2, 1), torch.randn(4, 2), loss=lambda m, x: F.relu(m(x)).sum(), derivative="forward")

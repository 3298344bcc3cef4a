"""Spectra of groups of parameters, the share of curvature between them, and the loss of several batches."""

from __future__ import annotations

import math
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvmon
from curvmon.operators import parameter_hessian as parameters
from curvmon.spectrum.parameter_groups import resolve_groups
from tests.helpers.spectrum_cases import LOSSES, dense_hessian, make, mlp

NAMES = ["stem.weight", "layer1.0.weight", "layer1.1.bias", "layer2.0.weight", "head.bias"]


def test_resolve_groups() -> None:
    assert resolve_groups(NAMES, ["stem", "layer*"]) == {"stem": [0], "layer1": [1, 2], "layer2": [3]}
    assert resolve_groups(NAMES, {"early": ["stem", "layer1"], "late": "head.bias"}) == {
        "early": [0, 1, 2],
        "late": [4],
    }
    assert resolve_groups(["_orig_mod.stem.weight"], "stem") == {"stem": [0]}


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (["layer3"], "did you mean 'layer2'"),
        (["layer1", "layer1.0"], "'layer1.0.weight' is in two groups"),
        ([], "groups is empty"),
    ],
)
def test_invalid_groups_raise(groups: list[str], message: str) -> None:
    with pytest.raises(curvmon.InputError, match=message):
        resolve_groups(NAMES, groups)


def indices_of(model: nn.Module, groups: dict[str, list[str]]) -> dict[str, Tensor]:
    """Indices of the entries of each group in the flat vector of parameters."""
    entries: dict[str, Tensor] = {}
    start = 0
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            entries[name] = torch.arange(start, start + parameter.numel())
            start += parameter.numel()
    return {group: torch.cat([entries[name] for name in members]) for group, members in groups.items()}


@pytest.mark.parametrize("name", ["mlp", "convolution and batch norm", "lstm"])
def test_groups_agree_with_dense_hessian(name: str) -> None:
    model, batch = make(name)
    loss = LOSSES["cross-entropy"]
    hessian = dense_hessian(model, batch, loss)
    names = [n for n, _ in model.named_parameters()]
    groups = {"front": names[: len(names) // 2], "back": names[len(names) // 2 :]}
    result = curvmon.spectrum(model, batch, loss=loss, groups=groups, ggn=False, trace=False)
    scale = torch.linalg.matrix_norm(hessian, 2).item()
    within = 0.0
    for group, indices in indices_of(model, groups).items():
        block = hessian[indices][:, indices]
        true = torch.linalg.eigvalsh(block).flip(0)
        ours = result.groups[group]
        assert ours.converged.all() and ours.verified and ours.size == len(indices)
        assert (ours.eigenvalues - true[:5]).abs().max().item() < 1e-4 * scale
        assert abs(ours.smallest - true[-1].item()) < 1e-4 * scale
        within += block.square().sum().item()
    phi = 1 - within / hessian.square().sum().item()
    assert abs(result.phi - phi) < 4 * result.phi_stderr
    assert result.phi_stderr < 0.2 * phi
    assert "Φ" in str(result) and "group front" in str(result)
    again = curvmon.Spectrum.from_dict(result.to_dict())
    assert again.groups["back"].eigenvalues.equal(result.groups["back"].eigenvalues) and again.phi == result.phi


def test_phi_is_relative_to_the_parameters_of_all_groups() -> None:
    model, batch = make("mlp")
    loss = LOSSES["mse"]
    groups = {"0": ["0.weight", "0.bias"], "4": ["4.weight", "4.bias"]}
    hessian = dense_hessian(model, batch, loss)
    indices = indices_of(model, groups)
    both = torch.cat(list(indices.values()))
    within = sum(hessian[i][:, i].square().sum().item() for i in indices.values())
    true = 1 - within / hessian[both][:, both].square().sum().item()
    result = curvmon.spectrum(model, batch, loss=loss, groups=["0", "4"], k=2, ggn=False, trace=False)
    assert abs(result.phi - true) < 4 * result.phi_stderr


@pytest.mark.slow
def test_phi_stderr_is_calibrated() -> None:
    """The 95 % interval covers the truth for about 95 % of the seeds."""
    model, batch = make("mlp")
    loss = LOSSES["cross-entropy"]
    groups = {f"{i}": [f"{i}.weight", f"{i}.bias"] for i in (0, 2, 4)}
    hessian = dense_hessian(model, batch, loss)
    within = sum(hessian[i][:, i].square().sum().item() for i in indices_of(model, groups).values())
    true = 1 - within / hessian.square().sum().item()
    options: dict[str, Any] = {"ggn": False, "trace": False, "verify": False, "rtol": 1e-2}
    results = [curvmon.spectrum(model, batch, loss=loss, groups=groups, seed=s, **options) for s in range(60)]
    assert 52 <= sum(abs(r.phi - true) <= 1.96 * r.phi_stderr for r in results) <= 60


def test_phi_of_a_single_group_is_zero() -> None:
    model, batch = make("mlp")
    result = curvmon.spectrum(model, batch, loss=LOSSES["mse"], groups={"all": "**"}, k=1, ggn=False, trace=False)
    assert result.phi == pytest.approx(0, abs=1e-6)
    assert result.groups["all"].eigenvalues[0].item() == pytest.approx(result.sharpness, rel=1e-3)


def test_phi_is_nan_without_groups() -> None:
    model, batch = make("mlp")
    result = curvmon.spectrum(model, batch, loss=LOSSES["mse"], k=1, ggn=False, trace=False)
    assert math.isnan(result.phi) and not result.groups and "Φ" not in str(result)


def test_several_batches_agree_with_one() -> None:
    """Batches of 7, 12 and 5 samples: the Hessian of the mean loss over all 24."""
    model, batch = make("convolution and batch norm")
    loss = LOSSES["cross-entropy"]
    parts = [list(part) for part in zip(*(x.split([7, 12, 5]) for x in batch))]
    options: dict[str, Any] = {"loss": loss, "k": 3, "groups": ["0", "7"]}
    whole = curvmon.spectrum(model, batch, **options)
    result = curvmon.spectrum(model, parts[0], more_batches=parts[1:], **options)
    assert result.loss == pytest.approx(whole.loss, rel=1e-6)
    torch.testing.assert_close(result.eigenvalues, whole.eigenvalues, rtol=1e-3, atol=0)
    assert result.smallest == pytest.approx(whole.smallest, rel=1e-2)
    assert result.ggn_eigenvalue == pytest.approx(whole.ggn_eigenvalue, rel=1e-3)
    assert abs(result.trace - whole.trace) < 4 * math.hypot(result.trace_stderr, whole.trace_stderr)
    for name in ("0", "7"):
        torch.testing.assert_close(
            result.groups[name].eigenvalues, whole.groups[name].eigenvalues, rtol=1e-2, atol=1e-4
        )


def test_one_graph_in_memory_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of one batch: a graph is freed before the next is built."""
    original = parameters.BatchGraph
    most: list[int] = []
    live: weakref.WeakSet[Any] = weakref.WeakSet()

    class Tracked(original):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any) -> None:
            live.add(self)
            most.append(len(live))
            super().__init__(*args)

    monkeypatch.setattr(parameters, "BatchGraph", Tracked)
    model, batch = make("mlp")
    curvmon.spectrum(model, batch, loss=LOSSES["mse"], more_batches=[batch, batch], k=1, trace=False, ggn=False)
    assert max(most) <= 2  # the new one, and the one that it replaces


def test_flat_vector_as_start() -> None:
    model, batch = make("mlp")
    options: dict[str, Any] = {"loss": LOSSES["mse"], "k": 1, "ggn": False, "trace": False, "verify": False}
    first = curvmon.spectrum(model, batch, **options)
    second = curvmon.spectrum(model, batch, start=first.start_vectors()[:, 0], **options)
    assert second.sharpness == pytest.approx(first.sharpness, rel=1e-3)
    assert first.without_vectors().eigenvectors.numel() == 0
    with pytest.raises(curvmon.InputError, match="start= has shape"):
        curvmon.spectrum(mlp(5, 3, 2), batch, start=first.start_vectors()[:, 0], **options)


def test_batches_that_use_different_parameters() -> None:
    """Each batch uses one of two layers: zeros for the other, no error."""
    model = nn.ModuleList([nn.Linear(3, 1), nn.Linear(3, 1)])
    torch.manual_seed(0)
    x = torch.randn(8, 3)

    def loss(m: Any, b: Any) -> Tensor:
        return F.mse_loss(m[int(b[1][0])](b[0]), b[0][:, :1])

    one, other = (x, torch.zeros(8)), (x, torch.ones(8))
    result = curvmon.spectrum(model, one, more_batches=[other], loss=loss, k=2, groups=["0", "1"])
    assert abs(result.phi) < 4 * result.phi_stderr  # eigenvectors of equal eigenvalues mix the groups: not exactly zero
    assert result.groups["0"].eigenvalues[0].item() == pytest.approx(result.groups["1"].eigenvalues[0].item(), rel=1e-3)

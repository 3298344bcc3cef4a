"""Spectra of groups of parameters, what lies between them, and the loss of several batches."""

from __future__ import annotations

import math
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvmon
from curvmon.operators import hessian as parameters
from curvmon.spectrum.parameter_groups import resolve_groups
from tests.spectrum.test_spectrum import LOSSES, dense, make, mlp

NAMES = ["stem.weight", "layer1.0.weight", "layer1.1.bias", "layer2.0.weight", "head.bias"]


def test_patterns_name_groups() -> None:
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
def test_groups_that_cannot_be_meant(groups: list[str], message: str) -> None:
    with pytest.raises(curvmon.InputError, match=message):
        resolve_groups(NAMES, groups)


def blocks_of(model: nn.Module, groups: dict[str, list[str]], hessian: Tensor) -> dict[str, Tensor]:
    """Indices of the entries of each group in the flat vector of parameters."""
    sizes = [(name, p.numel()) for name, p in model.named_parameters() if p.requires_grad]
    found, start = {}, 0
    where: dict[str, Tensor] = {}
    for name, size in sizes:
        where[name] = torch.arange(start, start + size)
        start += size
    for group, members in groups.items():
        found[group] = torch.cat([where[name] for name in members])
    return found


@pytest.mark.parametrize("name", ["mlp", "convolution and batch norm", "lstm"])
def test_groups_agree_with_a_dense_hessian(name: str) -> None:
    model, batch = make(name)
    loss = LOSSES["cross-entropy"]
    hessian = dense(model, batch, loss)
    names = [n for n, _ in model.named_parameters()]
    groups = {"front": names[: len(names) // 2], "back": names[len(names) // 2 :]}
    found = curvmon.spectrum(model, batch, loss=loss, groups=groups, ggn=False, trace=False)
    scale = torch.linalg.matrix_norm(hessian, 2).item()
    within = 0.0
    for group, indices in blocks_of(model, groups, hessian).items():
        block = hessian[indices][:, indices]
        true = torch.linalg.eigvalsh(block).flip(0)
        ours = found.groups[group]
        assert ours.converged.all() and ours.verified and ours.size == len(indices)
        assert (ours.eigenvalues - true[:5]).abs().max().item() < 1e-4 * scale
        assert abs(ours.smallest - true[-1].item()) < 1e-4 * scale
        within += block.square().sum().item()
    phi = 1 - within / hessian.square().sum().item()
    assert abs(found.phi - phi) < 4 * found.phi_stderr
    assert found.phi_stderr < 0.2 * phi
    assert "Φ" in str(found) and "group front" in str(found)
    again = curvmon.Spectrum.from_dict(found.to_dict())
    assert again.groups["back"].eigenvalues.equal(found.groups["back"].eigenvalues) and again.phi == found.phi


def test_phi_of_some_of_the_parameters_is_that_of_their_own_hessian() -> None:
    model, batch = make("mlp")
    loss = LOSSES["mse"]
    groups = {"0": ["0.weight", "0.bias"], "4": ["4.weight", "4.bias"]}
    indices = blocks_of(model, groups, hessian := dense(model, batch, loss))
    both = torch.cat(list(indices.values()))
    within = sum(hessian[i][:, i].square().sum().item() for i in indices.values())
    true = 1 - within / hessian[both][:, both].square().sum().item()
    found = curvmon.spectrum(model, batch, loss=loss, groups=["0", "4"], k=2, ggn=False, trace=False)
    assert abs(found.phi - true) < 4 * found.phi_stderr


def test_errors_of_phi_are_honest() -> None:
    """z-scores over seeds: the 95 % interval covers in about 95 % of them."""
    model, batch = make("mlp")
    loss = LOSSES["cross-entropy"]
    groups = {f"{i}": [f"{i}.weight", f"{i}.bias"] for i in (0, 2, 4)}
    hessian = dense(model, batch, loss)
    within = sum(hessian[i][:, i].square().sum().item() for i in blocks_of(model, groups, hessian).values())
    true = 1 - within / hessian.square().sum().item()
    options: dict[str, Any] = {"ggn": False, "trace": False, "verify": False, "rtol": 1e-2}
    found = [curvmon.spectrum(model, batch, loss=loss, groups=groups, seed=s, **options) for s in range(60)]
    assert 52 <= sum(abs(f.phi - true) <= 1.96 * f.phi_stderr for f in found) <= 60


def test_one_group_has_nothing_outside() -> None:
    model, batch = make("mlp")
    found = curvmon.spectrum(model, batch, loss=LOSSES["mse"], groups={"all": "**"}, k=1, ggn=False, trace=False)
    assert found.phi == pytest.approx(0, abs=1e-6)
    assert found.groups["all"].eigenvalues[0].item() == pytest.approx(found.sharpness, rel=1e-3)


def test_without_groups_there_is_no_phi() -> None:
    model, batch = make("mlp")
    found = curvmon.spectrum(model, batch, loss=LOSSES["mse"], k=1, ggn=False, trace=False)
    assert math.isnan(found.phi) and not found.groups and "Φ" not in str(found)


def test_several_batches_are_one() -> None:
    """Of 7, 12 and 5 samples: the Hessian of their mean loss is that of all 24."""
    model, batch = make("convolution and batch norm")
    loss = LOSSES["cross-entropy"]
    parts = [list(part) for part in zip(*(x.split([7, 12, 5]) for x in batch))]
    options: dict[str, Any] = {"loss": loss, "k": 3, "groups": ["0", "7"]}
    whole = curvmon.spectrum(model, batch, **options)
    found = curvmon.spectrum(model, parts[0], more_batches=parts[1:], **options)
    assert found.loss == pytest.approx(whole.loss, rel=1e-6)
    torch.testing.assert_close(found.eigenvalues, whole.eigenvalues, rtol=1e-3, atol=0)
    assert found.smallest == pytest.approx(whole.smallest, rel=1e-2)
    assert found.ggn_eigenvalue == pytest.approx(whole.ggn_eigenvalue, rel=1e-3)
    assert abs(found.trace - whole.trace) < 4 * math.hypot(found.trace_stderr, whole.trace_stderr)
    for name in ("0", "7"):
        torch.testing.assert_close(found.groups[name].eigenvalues, whole.groups[name].eigenvalues, rtol=1e-2, atol=1e-4)


def test_only_one_graph_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is that of one batch: a graph is gone before the next is built."""
    original = parameters._GraphProducts
    most: list[int] = []
    live: weakref.WeakSet[Any] = weakref.WeakSet()

    class Tracked(original):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any) -> None:
            live.add(self)
            most.append(len(live))
            super().__init__(*args)

    monkeypatch.setattr(parameters, "_GraphProducts", Tracked)
    model, batch = make("mlp")
    curvmon.spectrum(model, batch, loss=LOSSES["mse"], more_batches=[batch, batch], k=1, trace=False, ggn=False)
    assert max(most) <= 2  # the new one, and the one it takes the place of


def test_a_flat_vector_is_a_start() -> None:
    model, batch = make("mlp")
    options: dict[str, Any] = {"loss": LOSSES["mse"], "k": 1, "ggn": False, "trace": False, "verify": False}
    first = curvmon.spectrum(model, batch, **options)
    second = curvmon.spectrum(model, batch, start=first.start_vector(), **options)
    assert second.sharpness == pytest.approx(first.sharpness, rel=1e-3)
    assert first.without_vectors().eigenvectors.numel() == 0
    with pytest.raises(curvmon.InputError, match="start= has shape"):
        curvmon.spectrum(mlp(5, 3, 2), batch, start=first.start_vector(), **options)


def test_a_loss_of_two_batches_that_do_not_depend_on_the_same_parts() -> None:
    """Only one of them reaches the second layer: zeros elsewhere, no error."""
    model = nn.ModuleList([nn.Linear(3, 1), nn.Linear(3, 1)])
    torch.manual_seed(0)
    x = torch.randn(8, 3)

    def loss(m: Any, b: Any) -> Tensor:
        return F.mse_loss(m[int(b[1][0])](b[0]), b[0][:, :1])

    one, other = (x, torch.zeros(8)), (x, torch.ones(8))
    found = curvmon.spectrum(model, one, more_batches=[other], loss=loss, k=2, groups=["0", "1"])
    assert abs(found.phi) < 4 * found.phi_stderr  # eigenvectors of equal eigenvalues mix the groups: not exactly zero
    assert found.groups["0"].eigenvalues[0].item() == pytest.approx(found.groups["1"].eigenvalues[0].item(), rel=1e-3)

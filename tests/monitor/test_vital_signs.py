"""Norms and what is not finite, on the host and, for large models, where the parameters are."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from curvmon.monitor import vital_signs
from curvmon.monitor.vital_signs import TensorNorms


def network() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 2, dtype=torch.bfloat16))
    model.register_buffer("mask", torch.full((3, 3), -math.inf).triu(1))
    model[0].bias.requires_grad_(False)
    return model


@pytest.fixture(params=[False, True], ids=["small", "large"])
def large(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param:
        monkeypatch.setattr(vital_signs, "MOST_COPIED", 10)
    return bool(request.param)


def test_norms(large: bool) -> None:
    model, norms = network(), TensorNorms()
    trainable = [p for p in model.parameters() if p.requires_grad]
    weight_norm, update_norm, odd, _ = norms.look(model)
    assert weight_norm == pytest.approx(math.hypot(*(p.float().norm().item() for p in trainable)), rel=1e-6)
    assert math.isnan(update_norm) and odd == ()
    with torch.no_grad():
        trainable[0].add_(0.5)
    update_norm = norms.look(model).update_norm
    assert math.isnan(update_norm) if large else update_norm == pytest.approx(0.5 * math.sqrt(30), rel=1e-5)


def test_what_is_not_finite(large: bool) -> None:
    """A mask was infinite from the first look on; a parameter and running statistics were not."""
    model, norms = network(), TensorNorms()
    norms.look(model)
    with torch.no_grad():
        model[0].weight[0, 0] = math.nan
        model[1].running_mean[1] = math.inf
        model[2].weight[0, 0] = -math.inf
    assert norms.look(model).not_finite == ("0.weight", "2.weight", "1.running_mean")


def test_another_model_has_no_update(large: bool) -> None:
    norms = TensorNorms()
    norms.look(network())
    assert math.isnan(norms.look(nn.Linear(3, 3)).update_norm)


def test_a_model_without_trainable_parameters(large: bool) -> None:
    weight_norm, update_norm, odd, _ = TensorNorms().look(nn.Linear(3, 3).requires_grad_(False))
    assert weight_norm == 0 and math.isnan(update_norm) and odd == ()


def test_norms_of_every_tensor(large: bool) -> None:
    """Half-precision norms do not overflow; tensors of fewer than eight entries have none."""
    net, norms = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)).double(), TensorNorms()
    net.half_precise = nn.Parameter(torch.full((70_000,), 60_000.0, dtype=torch.float16))
    first = norms.look(net).norms
    assert first["weights", "0.weight"] == pytest.approx(net[0].weight.norm().item())
    assert first["statistics", "1.running_var"] == pytest.approx(math.sqrt(8))
    assert first["weights", "half_precise"] == pytest.approx(60_000 * math.sqrt(70_000), rel=1e-3)
    assert not any(kind == "update" for kind, _ in first) and ("statistics", "1.num_batches_tracked") not in first
    with torch.no_grad():
        net[0].weight[:4] = 0
        net[0].bias.mul_(2)
    second = norms.look(net).norms
    if large:
        assert not any(kind in ("update", "zeros") for kind, _ in second)
        return
    assert second["zeros", "0.weight"] == 0.5 and second["zeros", "0.bias"] == 0
    assert second["update", "0.bias"] == pytest.approx(0.5) and second["update", "half_precise"] == 0

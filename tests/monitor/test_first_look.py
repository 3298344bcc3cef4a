"""The first look at a network is one at a few samples: what it finds out, and where it cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvmon.monitor.pairs_and_spectrum import FEW_SAMPLES, measure_spectrum
from curvmon.monitor.settings import Settings
from curvmon.operators.gradient_differences import DifferenceOperator
from curvmon.spectrum.findings import Findings

SAMPLES = 16


def classifier(*activations: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(6, 8)]
    for activation in activations:
        layers += [activation, nn.Linear(8, 8)]
    return nn.Sequential(*layers)


def batch(samples: int = SAMPLES) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(samples, 6, generator=generator), torch.randint(8, (samples,), generator=generator)


def cross_entropy(model: Any, data: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(data[0]), data[1])


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of samples of every comparison with second derivatives."""
    seen: list[int] = []
    original = DifferenceOperator._compared_with_second_derivatives

    def recorded(operator: DifferenceOperator, *arguments: Any) -> str:
        seen.append(max(len(output) for _, graph in operator._graphs() for output in graph.outputs()))
        return original(operator, *arguments)

    monkeypatch.setattr(DifferenceOperator, "_compared_with_second_derivatives", recorded)
    return seen


def measure(model: nn.Module, data: Any, loss: Any = cross_entropy, times: int = 1) -> Findings:
    findings = Findings()
    for _ in range(times):
        measure_spectrum(Settings(eigenvalues=2), model, [data], loss, findings=findings)
    return findings


def test_once_and_on_a_few_samples(compared: list[int]) -> None:
    findings = measure(classifier(nn.GELU()), batch(), times=2)
    assert compared == [FEW_SAMPLES]
    assert findings.verdict == "" and not findings.detaches


def test_a_batch_that_cannot_be_sliced_is_compared_as_a_whole(compared: list[int]) -> None:
    x, y = batch()
    findings = measure(classifier(nn.GELU()), (x, y, torch.ones(3)), times=2)  # lengths differ
    assert compared == [SAMPLES] and findings.verdict == ""


def test_a_model_that_insists_on_its_samples_is_compared_as_a_whole(compared: list[int]) -> None:
    def loss(model: Any, data: tuple[Tensor, Tensor]) -> Tensor:
        assert len(data[0]) == SAMPLES
        return cross_entropy(model, data)

    assert measure(classifier(nn.GELU()), batch(), loss).verdict == ""
    assert compared == [SAMPLES]


def test_a_loss_that_detaches_is_compared_in_every_measurement(compared: list[int]) -> None:
    def distilled(model: Any, data: tuple[Tensor, Tensor]) -> Tensor:
        logits = model(data[0])
        return F.cross_entropy(logits, data[1]) * (1 + logits.detach().mean())

    findings = measure(classifier(nn.GELU()), batch(), distilled, times=2)
    # differences shift what is taken for a constant: second derivatives take over after the first comparison
    assert compared == [FEW_SAMPLES]
    assert findings.no_differences is not None and "differ" in findings.no_differences


def test_a_detached_constant_that_does_not_matter_is_compared_in_every_measurement(compared: list[int]) -> None:
    def logged(model: Any, data: tuple[Tensor, Tensor]) -> Tensor:
        loss = cross_entropy(model, data)
        float(loss.detach())
        return loss

    findings = measure(classifier(nn.GELU()), batch(), logged, times=3)
    assert compared == [FEW_SAMPLES] * 3
    assert findings.detaches and findings.verdict == ""


def test_an_efficient_cross_entropy_does_not_count_as_detaching() -> None:
    assert not measure(classifier(nn.ReLU()), batch()).detaches


def test_smooth_networks_are_known_not_to_have_a_trace_by_layers() -> None:
    assert measure(classifier(nn.GELU()), batch()).layerwise is False
    assert measure(classifier(nn.ReLU()), batch()).layerwise is True

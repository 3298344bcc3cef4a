"""The largest eigenvalue from three HVPs that start at an earlier eigenvector, against dense truth."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import curvmon
from curvmon.monitor.vital_signs import probe_loss
from curvmon.spectrum.findings import Findings
from curvmon.spectrum.warm_sharpness import HVPS, warm_sharpness
from tests.helpers.small_classifiers import BATCH, MODELS, loss
from tests.helpers.spectrum_cases import dense_hessian


def train(model: nn.Module, steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model, BATCH).backward()
        optimizer.step()


def truth_of(model: nn.Module) -> torch.Tensor:
    return torch.linalg.eigvalsh(dense_hessian(model, BATCH, loss))


@pytest.mark.parametrize("second_derivatives", [False, True])
@pytest.mark.parametrize("name", ["convolutions", "attention", "LSTM"])
def test_a_few_steps_later(name: str, second_derivatives: bool) -> None:
    """Within a few percent of the truth; every value is an eigenvalue within its error bar."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    train(model, 20)
    start = curvmon.spectrum(model, BATCH, loss=loss, k=1, trace=False).eigenvectors[:, 0]
    findings = Findings()
    findings.belong_to(name for name, _ in model.named_parameters())
    if second_derivatives:
        findings.no_differences = "for this test"
    else:
        findings.verdict = ""
    close = 0
    for _ in range(2):
        train(model, 3)
        before = copy.deepcopy(model.state_dict())
        found = warm_sharpness(model, [BATCH], loss=loss, start=start, findings=findings)
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
        values = truth_of(model)
        assert (values - found.value).abs().min() <= found.error + 1e-5
        assert values[-1] - 2 * found.error - 1e-5 <= found.value <= values[-1] + found.error
        close += abs(found.value / values[-1] - 1) <= 0.05
        assert found.hvps <= HVPS + 1
        assert found.loss == pytest.approx(loss(model, BATCH).item(), rel=1e-5)
        start = found.vector
    assert close >= 1


@pytest.mark.parametrize("parts", [1, 2])
def test_the_loss_of_the_probe_batch(parts: int) -> None:
    torch.manual_seed(0)
    model = MODELS["LSTM"]().eval()
    batches = [tuple(x[i::parts] for x in BATCH) for i in range(parts)]
    assert probe_loss(model, batches, loss) == pytest.approx(loss(model, BATCH).item(), rel=1e-5)


def test_a_loss_that_takes_gradients_itself() -> None:
    def penalty(model: nn.Module, batch: object) -> torch.Tensor:
        value = loss(model, BATCH)
        return value + torch.autograd.grad(value, next(model.parameters()), create_graph=True)[0].square().sum()

    torch.manual_seed(0)
    model = MODELS["residual"]().eval()
    assert probe_loss(model, [BATCH], penalty) == pytest.approx(penalty(model, BATCH).item(), rel=1e-5)

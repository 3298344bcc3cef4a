"""The monitor's eigenvalues against dense truth: residuals are error bars, and warm starts are as good as cold ones."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from curvmon.monitor.pairs_and_spectrum import ACCURACY, measure_spectrum
from curvmon.monitor.settings import Settings
from curvmon.records import Spectrum
from tests.helpers.spectrum_cases import CASES, LOSSES, dense_hessian, make

STEPS = (0, 5, 20, 20, 20)
"""of training, between one measurement and the next, which starts at its vectors"""
ROUNDING = 1e-5
DOUBLE = ("frozen parameters", "mse")
"""H has every eigenvalue twice: one layer is trained, and the two outputs do not interact"""


def trained(model: nn.Module, batch: Any, loss: Any, steps: int) -> None:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()


def test_residuals_are_error_bars() -> None:
    """For at least 95 % of the values of both ends, over networks, losses and the measurements of a run.

    Compared by rank: λ_2 with the second eigenvalue. The frozen network with the MSE is left to the next test.
    """
    inside: list[bool] = []
    accurate: list[bool] = []
    for name, kind in itertools.product(CASES, LOSSES):
        if (name, kind) == DOUBLE:
            continue
        for found, truth in measurements(name, kind):
            values, bars, count = *both_ends(found), len(found.eigenvalues)
            errors = (values - torch.cat([truth[:count], truth[-1:]])).abs()
            inside += (errors <= bars + ROUNDING * truth.abs().max()).tolist()
            accurate += (errors <= ACCURACY.tolerances(values, count)).tolist()
    assert len(inside) >= 300
    assert sum(inside) >= 0.95 * len(inside)
    assert sum(accurate) >= 0.95 * len(accurate)


def test_an_eigenvalue_lies_within_every_residual() -> None:
    """A double eigenvalue may be listed once, as the note says, but every value is one."""
    for found, truth in measurements(*DOUBLE):
        assert torch.allclose(truth[0:8:2], truth[1:8:2], rtol=1e-6)
        values, bars = both_ends(found)
        nearest = (values.unsqueeze(1) - truth).abs().min(1).values
        assert (nearest <= bars + ROUNDING * truth.abs().max()).all()
        assert any("an eigenvalue of multiplicity two may be listed once" in note for note in found.notes)


def measurements(name: str, kind: str) -> Iterator[tuple[Spectrum, Tensor]]:
    """The monitor's results in a run, and all eigenvalues in descending order."""
    (model, batch), loss, start = make(name), LOSSES[kind], None
    for steps in STEPS:
        trained(model, batch, loss, steps)
        found, start = measure_spectrum(Settings(), model, [batch], loss, start=start)
        yield found, torch.linalg.eigvalsh(dense_hessian(model, batch, loss)).flip(0)


def both_ends(found: Spectrum) -> tuple[Tensor, Tensor]:
    """Eigenvalues with their residuals, the smallest one last."""
    values = torch.tensor([*found.eigenvalues.tolist(), found.smallest], dtype=torch.float64)
    return values, torch.tensor([*found.residuals.tolist(), found.smallest_residual], dtype=torch.float64)

"""`CurvatureMonitor(metrics=[], eigenvalues=1)` takes the HVPs of λ_1 and no others."""

from __future__ import annotations

import math
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import curvmon
from curvmon import CurvatureMonitor
from curvmon.monitor.pairs_and_spectrum import measure_spectrum
from curvmon.monitor.settings import Settings
from curvmon.records import Snapshot, Spectrum
from curvmon.reporting.figures import spectrum_over_time
from curvmon.reporting.scalars import scalars
from curvmon.spectrum.findings import Findings
from tests.helpers.lightning_runs import QUIET
from tests.helpers.module_zoo import BATCH, REGRESSION, REGRESSION_VAL, Regression

ONLY, ALL = Settings(pairs=False, eigenvalues=1), Settings(pairs=False, eigenvalues=5)


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def network() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 10))
    return model, (torch.randn(64, 16), torch.randint(10, (64,)))


def stepped(kind: type[torch.optim.Optimizer], model: nn.Module, batch: Any, **options: Any) -> torch.optim.Optimizer:
    """After one step with a learning rate that changes nothing, which is then a usual one."""
    optimizer = kind(model.parameters(), lr=1e-12, **options)
    loss(model, batch).backward()
    optimizer.step()
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    return optimizer


def measured(settings: Settings, optimizer: Any = None, times: int = 2) -> list[Spectrum]:
    """The first measurement, and warm ones at the same weights."""
    model, batch = network()
    start, findings, results = None, Findings(), []
    own = None if optimizer is None else optimizer(model, batch)
    for _ in range(times):
        result, start = measure_spectrum(settings, model, [batch], loss, optimizer=own, start=start, findings=findings)
        results.append(result)
    return results


def test_it_is_the_largest_eigenvalue() -> None:
    model, batch = network()
    exact = curvmon.spectrum(model, batch, loss=loss, k=1, rtol=1e-6).sharpness
    for result in measured(ONLY):
        assert abs(result.sharpness - exact) <= result.residuals[0].item() + 1e-4 * exact
        assert result.converged.all() and result.residuals[0] <= 0.02 * exact


def test_nothing_else_is_measured() -> None:
    for result in measured(ONLY):
        nothing = (result.smallest, result.smallest_residual, result.trace, result.ggn_eigenvalue, result.ggn_error)
        assert all(math.isnan(value) for value in nothing) and not result.smallest_converged
        assert any("λ_1 alone" in note for note in result.notes)
        assert Spectrum.from_dict(result.to_dict()).to_dict().keys() == result.to_dict().keys()
        assert "smallest" in str(result)


def test_it_takes_fewer_hvps() -> None:
    first, warm = (result.hvps for result in measured(ONLY))
    all_first, all_warm = (result.hvps for result in measured(ALL))
    assert warm <= 10 and first <= 20
    assert warm <= all_warm / 2 and first <= all_first / 2


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}, {"momentum": 0.9, "weight_decay": 5e-4}], ids=str)
def test_stability_ratio_of_sgd_is_free(options: dict[str, Any]) -> None:
    plain = measured(ONLY)
    compared = measured(ONLY, lambda model, batch: stepped(torch.optim.SGD, model, batch, **options))
    assert [r.hvps for r in compared] == [r.hvps for r in plain]
    for result in compared:
        limit = 2 * (1 + options.get("momentum", 0.0)) / 0.1
        expected = (result.sharpness + options.get("weight_decay", 0.0)) / limit
        assert result.stability_ratio == pytest.approx(expected, rel=1e-6)


def test_stability_ratio_that_takes_hvps_is_not_measured() -> None:
    plain = measured(ONLY)
    compared = measured(ONLY, lambda model, batch: stepped(torch.optim.AdamW, model, batch))
    assert [r.hvps for r in compared] == [r.hvps for r in plain]
    assert all(math.isnan(r.stability_ratio) for r in compared)
    assert math.isfinite(
        measured(ALL, lambda model, batch: stepped(torch.optim.AdamW, model, batch))[0].stability_ratio
    )


def test_a_run_logs_no_other_key() -> None:
    monitor = CurvatureMonitor(metrics=[], eigenvalues=1, max_overhead=None, heatmaps=False)
    torch.manual_seed(0)
    trainer = pl.Trainer(callbacks=[monitor], **{**QUIET, "max_epochs": 3})
    trainer.fit(Regression(), DataLoader(REGRESSION, BATCH), DataLoader(REGRESSION_VAL, BATCH))
    assert len(monitor.spectra) == 4 and not monitor.history and not monitor.alerts
    full = CurvatureMonitor(eigenvalues=1, max_overhead=None, heatmaps=False)
    torch.manual_seed(0)
    pl.Trainer(callbacks=[full], **QUIET).fit(
        Regression(), DataLoader(REGRESSION, BATCH), DataLoader(REGRESSION_VAL, BATCH)
    )
    for snapshot in monitor.snapshots:
        values = scalars(snapshot).for_callbacks()
        assert all(math.isfinite(value) for value in values.values())
        other = {key for key in values if any(word in key for word in ("min", "trace", "ggn", "resonance", "coupling"))}
        assert not other and any("lambda_1" in key for key in values)
    assert any(
        "trace" in key for key in scalars(full.snapshots[0]).for_callbacks()
    )  # the words above are those of the keys


def test_its_picture_has_no_curve_of_the_smallest() -> None:
    result = measured(ONLY, times=1)[0]
    figure = spectrum_over_time([Snapshot(step=step, epoch=0, spectrum=result) for step in (0, 1)], "", [])
    labels = figure.axes[0].get_legend_handles_labels()[1]
    assert labels == ["λ₁"]

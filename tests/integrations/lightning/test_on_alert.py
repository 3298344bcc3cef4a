"""`on_alert="stop"` and "checkpoint" say what they did; what the Trainer does in spite of it is not hidden."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
from torch.utils.data import DataLoader

from curvmon import AlertRules, CurvatureMonitor
from tests.helpers.lightning_runs import QUIET, seeded
from tests.helpers.module_zoo import BATCH, REGRESSION, REGRESSION_VAL

RULES = AlertRules(changes=False, coupling_above=None, edge_of_stability=None, far_beyond_stability=1e-9, lasting=2)
"""one alert, at the second measurement: that of the first epoch"""
PER_EPOCH = len(REGRESSION) // BATCH


def fit(epochs: int, on_alert: Any, rules: AlertRules = RULES, **options: Any) -> tuple[CurvatureMonitor, pl.Trainer]:
    monitor = CurvatureMonitor(
        alerts=rules, on_alert=on_alert, metrics=[], eigenvalues=1, heatmaps=False, max_overhead=None
    )
    trainer = pl.Trainer(callbacks=[monitor], **{**QUIET, "max_epochs": epochs, **options})
    trainer.fit(seeded(), DataLoader(REGRESSION, BATCH), DataLoader(REGRESSION_VAL, BATCH))
    return monitor, trainer


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "curvmon"]


def test_stop_says_that_it_stopped_the_run_and_why(caplog: pytest.LogCaptureFixture) -> None:
    monitor, trainer = fit(5, "stop")
    (alert,) = monitor.alerts
    assert trainer.global_step == PER_EPOCH and trainer.current_epoch == 1
    assert said(caplog) == [
        f"curvmon: {alert.message}",
        f"curvmon stopped this run at step {alert.step}: {alert.headline}; on_alert='stop'",
    ]


def test_stop_names_the_minimum_that_comes_first(caplog: pytest.LogCaptureFixture) -> None:
    monitor, trainer = fit(5, "stop", min_epochs=3)
    (alert,) = monitor.alerts
    assert trainer.current_epoch == 3
    assert said(caplog)[1:] == [
        f"curvmon will stop this run once min_epochs=3 is reached (alert at step {alert.step}: {alert.headline}; "
        "on_alert='stop')"
    ]


def test_a_run_that_ends_anyway_was_not_stopped(caplog: pytest.LogCaptureFixture) -> None:
    monitor, trainer = fit(1, "stop")
    (alert,) = monitor.alerts
    assert trainer.global_step == PER_EPOCH and said(caplog) == [f"curvmon: {alert.message}"]


def test_a_notice_neither_stops_nor_saves(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    rules = AlertRules(changes=False, edge_of_stability=1e-9, far_beyond_stability=None, coupling_above=None, lasting=1)
    for on_alert in ("stop", "checkpoint"):
        monitor, trainer = fit(2, on_alert, rules, default_root_dir=tmp_path)
        assert len(monitor.notices) == 1 and not monitor.alerts
        assert trainer.current_epoch == 2
    assert not said(caplog) and not list(tmp_path.rglob("*.ckpt"))


def test_checkpoint_says_where_it_wrote(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    monitor, trainer = fit(3, "checkpoint", default_root_dir=tmp_path)
    (alert,) = monitor.alerts
    (path,) = tmp_path.rglob("*.ckpt")
    assert trainer.current_epoch == 3
    assert said(caplog)[1:] == [f"curvmon wrote {path}: {alert.headline}; on_alert='checkpoint'"]

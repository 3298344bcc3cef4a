"""The W&B workspace is built without a server, from the keys that a monitor logs."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from typing import Any

import pytest

from curvmon.records import METRICS, PulseRecord
from curvmon.reporting.charts import sections
from curvmon.reporting.dashboards import wandb_workspace
from curvmon.reporting.scalars import picture_keys, pulse_scalars, scalars
from tests.helpers.synthetic_records import synthetic_measurement, synthetic_spectra

PICTURES = picture_keys()


def keys() -> list[str]:
    (snapshot,) = synthetic_spectra(1)
    shown = scalars(replace(snapshot, measurement=synthetic_measurement(3), overhead=0.01, seconds=0.1)).shown
    pulse = PulseRecord(7, 0, 0.5, 0.2, learning_rate=0.1, step_ratio=0.2, critical_lr=0.5)
    return [*shown, *pulse_scalars(pulse).shown]


@pytest.fixture(params=["", "fold.1/"])
def prefix(request: pytest.FixtureRequest) -> str:
    pytest.importorskip("wandb_workspaces")
    return str(request.param)


def sections_of(workspace: Any) -> dict[str, list[Any]]:
    return {section.name: section.panels for section in workspace.sections}


def test_sections(prefix: str) -> None:
    workspace = wandb_workspace("me", "my-project", prefix=prefix)
    assert (workspace.entity, workspace.project, workspace.name) == ("me", "my-project", "curvature")
    names = ["loss, accuracy, alerts", "curvmon", "spectrum of the Hessian", "by distance between layers", "pictures"]
    assert list(sections_of(workspace)) == [f"{prefix}{name}" for name in names]


def test_plots_match_logged_keys(prefix: str) -> None:
    workspace = wandb_workspace("me", "my-project", prefix=prefix)
    logged = [f"{prefix}{key}" for key in keys()] + [f"other/{key}" for key in keys()]
    lines = {
        panel.title: {key.removeprefix(prefix) for key in logged if re.search(panel.metric_regex, key)}
        for name, panels in sections_of(workspace).items()
        if not name.endswith("pictures")
        for panel in panels
    }
    assert all(lines.values())
    assert lines["resonance by distance"] == {f"curvmon_distance/resonance/{d}" for d in range(3)}
    assert lines["coupling by distance"] == {"curvmon_distance/coupling/1", "curvmon_distance/coupling/2"}
    assert lines["top eigenvalues"] == {"curvmon/lambda_1", *(f"curvmon_spectrum/lambda_{i}" for i in range(2, 6))}
    assert lines["smallest eigenvalue λ_min"] == {"curvmon/lambda_min"}
    assert lines["step ratio"] == {"curvmon/step_ratio"}
    assert lines["critical learning rate"] == {"curvmon/critical_lr"}
    assert lines["overhead"] == {"curvmon/overhead"}
    assert lines["loss"] == {"curvmon/probe_loss"} and lines["accuracy, alerts so far"] == {"curvmon/alerts"}


def test_pictures_match_logged_keys(prefix: str) -> None:
    panels = sections_of(wandb_workspace("me", "my-project", prefix=prefix))[f"{prefix}pictures"]
    assert [key for panel in panels for key in panel.media_keys] == [f"{prefix}{key}" for key in PICTURES]
    assert {f"curvmon_pictures/{name}" for name in (*METRICS, "by_distance", "eigenvalues")} == set(PICTURES)


def test_serialized_specification(prefix: str) -> None:
    """The specification as W&B stores it: our axis everywhere, R and the gap logarithmic."""
    section = wandb_workspace("me", "my-project", prefix=prefix)._to_model().spec.section
    panels = [panel for bank in section.panel_bank_config.sections for panel in bank.panels]
    plots = [panel.config for panel in panels if panel.view_type == "Run History Line Plot"]
    assert len(plots) == sum(map(len, sections().values())) >= 17 and all(
        plot.x_axis == "trainer/global_step" for plot in plots
    )
    assert all(plot.use_metric_regex for plot in plots)
    logarithmic = {plot.chart_title for plot in plots if plot.y_log_scale}
    assert logarithmic >= {
        "top eigenvalue λ₁", "resonance R", "GN-Gap", "top eigenvalues", "resonance by distance", "GN-Gap by distance",
    }  # fmt: skip
    assert not logarithmic & {"loss", "coupling C", "stability ratio", "coupling by distance", "trace tr H"}


def test_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "wandb_workspaces"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    with pytest.raises(ImportError, match="pip install wandb-workspaces"):
        wandb_workspace("me", "my-project")

"""The W&B workspace is built without a server, from the keys that a monitor logs."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from typing import Any

import pytest

from curvmon.records import METRICS
from curvmon.reporting.dashboards import wandb_workspace
from curvmon.reporting.scalars import picture_keys, scalars
from tests.helpers.synthetic_records import synthetic_measurement, synthetic_spectra

PICTURES = picture_keys()


def keys() -> list[str]:
    (snapshot,) = synthetic_spectra(1)
    return list(scalars(replace(snapshot, measurement=synthetic_measurement(3), overhead=0.01, seconds=0.1)))


@pytest.fixture(params=["", "fold.1/"])
def prefix(request: pytest.FixtureRequest) -> str:
    pytest.importorskip("wandb_workspaces")
    return str(request.param)


def sections_of(workspace: Any) -> dict[str, list[Any]]:
    return {section.name: section.panels for section in workspace.sections}


def test_sections(prefix: str) -> None:
    workspace = wandb_workspace("me", "my-project", prefix=prefix)
    assert (workspace.entity, workspace.project, workspace.name) == ("me", "my-project", "curvature")
    names = ["curvature between layers", "spectrum of the Hessian", "alerts", "pictures", "cost"]
    assert list(sections_of(workspace)) == [f"{prefix}{name}" for name in names]
    assert [section.is_open for section in workspace.sections] == [True, True, True, True, False]


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
    assert lines["resonance by distance"] == {f"resonance/mean_d{d}" for d in range(3)}
    assert lines["coupling by distance"] == {"coupling/mean_d1", "coupling/mean_d2"}
    assert lines["top eigenvalues"] == {f"hessian/lambda_{i}" for i in range(1, 6)}
    assert lines["smallest eigenvalue"] == {"hessian/lambda_min"}
    assert lines["overhead"] == {"curvmon/overhead"}


def test_pictures_match_logged_keys(prefix: str) -> None:
    panels = sections_of(wandb_workspace("me", "my-project", prefix=prefix))[f"{prefix}pictures"]
    assert [key for panel in panels for key in panel.media_keys] == [f"{prefix}{key}" for key in PICTURES]
    assert {f"heatmap/{metric}" for metric in METRICS} | {"by_distance", "spectrum"} == set(PICTURES)


def test_serialized_specification(prefix: str) -> None:
    """The specification as W&B stores it: our axis everywhere, R and the gap logarithmic."""
    section = wandb_workspace("me", "my-project", prefix=prefix)._to_model().spec.section
    panels = [panel for bank in section.panel_bank_config.sections for panel in bank.panels]
    plots = [panel.config for panel in panels if panel.view_type == "Run History Line Plot"]
    assert len(plots) == 12 and all(plot.x_axis == "trainer/global_step" for plot in plots)
    assert all(plot.use_metric_regex for plot in plots)
    logarithmic = [plot.chart_title for plot in plots if plot.y_log_scale]
    assert logarithmic == ["resonance by distance", "GN-Gap by distance"]


def test_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "wandb_workspaces"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    with pytest.raises(ImportError, match="pip install wandb-workspaces"):
        wandb_workspace("me", "my-project")

"""A W&B workspace with curvmon's keys arranged: sections of line plots, and the pictures beside them.

Needs the package wandb-workspaces; `save()` of what is returned needs a W&B server.
"""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any

from curvmon.reporting.loggers import CHARTS, PICTURES

STEP = "trainer/global_step"
"""the x-axis of WandbLogger"""
_LOGARITHMIC = ("resonance/", "gn_gap/")


def wandb_workspace(entity: str, project: str, name: str = "curvature", prefix: str = "") -> Any:
    """A `wandb_workspaces.workspaces.Workspace` for runs of CurvatureMonitor; `.save()` puts it on the server.

    Args:
        entity: user or team.
        project: whose runs it shows.
        name: of the workspace.
        prefix: the `log_key_prefix` of the monitor.

    Example:
        wandb_workspace("me", "my-project").save()
    """
    try:
        panels: Any = import_module("wandb_workspaces.reports.v2")
        ws: Any = import_module("wandb_workspaces.workspaces")
    except ImportError as error:
        raise ImportError("wandb_workspace needs wandb-workspaces: pip install wandb-workspaces") from error

    def plot(title: str, keys: str) -> Any:
        return panels.LinePlot(
            title=title,
            x=STEP,
            # lines are found by their names: how many there are depends on the network
            metric_regex=f"^{re.escape(prefix)}{keys}$",
            log_y=keys.startswith(_LOGARITHMIC) or None,
        )

    def picture(key: str) -> Any:
        return panels.MediaBrowser(title=key, media_keys=[f"{prefix}{key}"], num_columns=1)

    def section(title: str, contents: list[Any], is_open: bool = True) -> Any:
        return ws.Section(
            name=f"{prefix}{title}",
            panels=contents,
            is_open=is_open,
            layout_settings=ws.SectionLayoutSettings(columns=min(3, len(contents)), rows=2),
            panel_settings=ws.SectionPanelSettings(x_axis=STEP),
        )

    charts = {title: [plot(*chart) for chart in found.items()] for title, found in CHARTS.items()}
    cost = charts.pop("cost")
    return ws.Workspace(
        entity=entity,
        project=project,
        name=name,
        sections=[
            *(section(title, contents) for title, contents in charts.items()),
            section("pictures", [picture(key) for key in PICTURES]),
            section("cost", cost, is_open=False),
        ],
        settings=ws.WorkspaceSettings(x_axis=STEP),
    )

"""A W&B workspace for curvmon's keys: sections of line plots, and the pictures.

Needs the package wandb-workspaces; `save()` of what is returned needs a W&B server.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from curvmon.metrics.registry import COST
from curvmon.reporting.dashboards import STEP, Chart, sections
from curvmon.reporting.keys import Keys, picture_keys


def wandb_workspace(entity: str, project: str, name: str = "curvature", prefix: str = "") -> Any:
    """A `wandb_workspaces.workspaces.Workspace` for runs of CurvatureMonitor; `.save()` puts it on the server.

    Args:
        entity: user or organization.
        project: its runs are shown.
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

    keys = Keys(prefix)

    def plot(chart: Chart) -> Any:
        return panels.LinePlot(
            title=chart.title,
            x=STEP,
            # a regular expression: the number of lines depends on the network
            metric_regex=f"^{keys.pattern(chart.names)}",
            log_y=chart.log_scale or None,
        )

    def picture(name: str) -> Any:
        return panels.MediaBrowser(title=name, media_keys=[keys(name)], num_columns=1)

    def section(title: str, contents: list[Any], is_open: bool = True) -> Any:
        return ws.Section(
            name=keys(title),
            panels=contents,
            is_open=is_open,
            layout_settings=ws.SectionLayoutSettings(columns=min(3, len(contents)), rows=2),
            panel_settings=ws.SectionPanelSettings(x_axis=STEP),
        )

    plots = {title: [plot(chart) for chart in charts] for title, charts in sections().items()}
    cost = plots.pop(COST)
    return ws.Workspace(
        entity=entity,
        project=project,
        name=name,
        sections=[
            *(section(title, contents) for title, contents in plots.items()),
            section("pictures", [picture(name) for name in picture_keys()]),
            section(COST, cost, is_open=False),
        ],
        settings=ws.WorkspaceSettings(x_axis=STEP),
    )

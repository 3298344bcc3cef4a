"""How dashboards arrange the keys: TensorBoard's custom scalars, the x-axis of W&B, a W&B workspace.

The first two are set up once for a logger. The workspace needs the package wandb-workspaces, and a W&B server to be
saved.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from curvmon.metrics.registry import COST, all_metrics
from curvmon.reporting.scalars import Keys, groups, picture_keys


def wandb_workspace(entity: str, project: str, name: str = "curvature", prefix: str = "") -> Any:
    """A `wandb_workspaces.workspaces.Workspace` for runs of CurvatureMonitor; `.save()` puts it on the server.

    Args:
        entity: user or organization.
        project: its runs are shown.
        name: name of the workspace.
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


STEP = "trainer/global_step"
"""the x-axis of WandbLogger"""


class Chart(NamedTuple):
    """One chart of a dashboard.

    Attributes:
        title: title above it.
        names: regular expression; the keys that match are its lines.
        log_scale: whether the y-axis is logarithmic.
    """

    title: str
    names: str
    log_scale: bool


def sections() -> dict[str, list[Chart]]:
    """The charts of a dashboard by section, from the metric registry; metrics with one chart title share it."""
    arranged: dict[str, dict[str, Chart]] = {}
    for spec in all_metrics():
        if spec.chart:
            charts = arranged.setdefault(spec.section, {})
            shared = charts.get(spec.chart)
            names = spec.chart_keys if shared is None else f"({shared.names}|{spec.chart_keys})"
            charts[spec.chart] = Chart(spec.chart, names, spec.log_scale)
    return {section: list(charts.values()) for section, charts in arranged.items()}


def set_up(logger: Any, kind: str, keys: Keys) -> None:
    """Lay out the charts of one monitor in a logger, once; `kind` is the name of the logger's class."""
    if kind not in ("TensorBoardLogger", "WandbLogger"):
        return
    # stored where all monitors of a trainer, and of later ones with the same logger, see it
    prefixes: list[str] = logger.experiment.__dict__.setdefault("_curvmon_prefixes", [])
    own = Keys(f"{logger_prefix(logger)}{keys.prefix}")
    if own.prefix in prefixes:
        return
    prefixes.append(own.prefix)
    if kind == "TensorBoardLogger":
        if len(prefixes) > 1 or not _has_layout(logger):
            logger.experiment.add_custom_scalars(tensorboard_layout(prefixes))
    elif not logger._wandb_init.get("sync_tensorboard"):
        # WandbLogger does so itself only for a run that it has begun
        logger.experiment.define_metric(STEP)
        for group in groups():
            logger.experiment.define_metric(own(group), step_metric=STEP)


def tensorboard_layout(prefixes: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Custom scalars. TensorBoard has a single layout: with several monitors the last one must name all charts."""
    return {
        f"{section} ({prefix.rstrip('/')})" if prefix else section: {
            chart.title: ["Multiline", [Keys(prefix).pattern(chart.names)]] for chart in charts
        }
        for prefix in prefixes
        for section, charts in sections().items()
    }


def logger_prefix(logger: Any) -> str:
    """What the logger itself puts before the keys of numbers, `TensorBoardLogger(prefix="fold1")`."""
    prefix = getattr(logger, "_prefix", "")
    return f"{prefix}{logger.LOGGER_JOIN_CHAR}" if prefix else ""


def _has_layout(logger: Any) -> bool:
    """A user's own layout, which ours would replace, or that of the run that is resumed here."""
    logger.experiment.flush()
    for path in Path(logger.log_dir).glob("events.out.tfevents.*"):
        if path.stat().st_size:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                if content.find(b"custom_scalars__config__") >= 0:
                    return True
    return False

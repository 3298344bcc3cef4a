"""How dashboards arrange the keys: TensorBoard's custom scalars, the x-axis of W&B, a W&B workspace.

The first two are set up by the monitor. The workspace needs the package wandb-workspaces, and a W&B server to be saved.
"""

from __future__ import annotations

import json
import mmap
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import quote

from curvmon.reporting.charts import Chart, sections
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
        # a regular expression: the number of lines depends on the network
        lines = f"^{keys.pattern(chart.names)}"
        return panels.LinePlot(
            title=chart.title,
            x=STEP,
            metric_regex=f"(^{chart.own}$)|({lines})" if chart.own else lines,
            log_y=chart.log_scale or None,
        )

    def picture(name: str) -> Any:
        return panels.MediaBrowser(title=name.split("/")[-1], media_keys=[keys(name)], num_columns=1)

    def section(title: str, contents: list[Any]) -> Any:
        return ws.Section(
            name=keys(title),
            panels=contents,
            is_open=True,
            layout_settings=ws.SectionLayoutSettings(columns=min(3, len(contents)), rows=2),
            panel_settings=ws.SectionPanelSettings(x_axis=STEP),
        )

    return ws.Workspace(
        entity=entity,
        project=project,
        name=name,
        sections=[
            *(section(title, [plot(chart) for chart in charts]) for title, charts in sections().items()),
            section("pictures", [picture(name) for name in picture_keys()]),
        ],
        settings=ws.WorkspaceSettings(x_axis=STEP),
    )


STEP = "trainer/global_step"
"""the x-axis of WandbLogger"""


def tensorboard_link(*tags: str, address: str = "http://localhost:6006/") -> str:
    """A link to TensorBoard's first tab with some tags pinned, above the groups, which it sorts by name.

    Args:
        tags: names of scalars.
        address: of the TensorBoard.

    Example:
        >>> from curvmon.reporting.dashboards import tensorboard_link
        >>> link = tensorboard_link("train_loss", "val_loss", "curvmon/lambda_1")
    """
    pinned = [{"plugin": "scalars", "tag": tag} for tag in tags]
    return f"{address}?pinnedCards={quote(json.dumps(pinned, separators=(',', ':')))}#timeseries"


def set_up(logger: Any, kind: str, keys: Keys, names: Collection[str]) -> None:
    """Arrange the charts of one monitor in a logger; `kind`: name of the logger's class, `names`: what it gets now."""
    if kind == "TensorBoardLogger":
        _lay_out(logger, keys, names)
    elif kind == "WandbLogger":
        _define_axis(logger, keys)


def _define_axis(logger: Any, keys: Keys) -> None:
    """WandbLogger does so itself only for a run that it has begun."""
    # stored where all monitors of a trainer, and of later ones with the same logger, see it
    prefixes: list[str] = vars(logger.experiment).setdefault("_curvmon_prefixes", [])
    own = Keys(f"{logger_prefix(logger)}{keys.prefix}")
    if own.prefix in prefixes:
        return
    prefixes.append(own.prefix)
    if not logger._wandb_init.get("sync_tensorboard"):
        logger.experiment.define_metric(STEP)
        for group in groups():
            logger.experiment.define_metric(own(group), step_metric=STEP)


@dataclass
class _Layouts:
    """What all monitors have written to one TensorBoardLogger: their keys by prefix, and the layouts."""

    names: dict[str, frozenset[str]] = field(default_factory=dict)
    latest: dict[str, Any] | None = None
    count: int = 0


def _lay_out(logger: Any, keys: Keys, names: Collection[str]) -> None:
    """A layout of the charts that have lines; again where new ones come up, of which TensorBoard shows the latest."""
    written: _Layouts = vars(logger.experiment).setdefault("_curvmon_layouts", _Layouts())
    earlier = written.names.get(keys.prefix, frozenset())
    if earlier.issuperset(names):
        return
    every = {**written.names, keys.prefix: earlier.union(names)}
    layout = tensorboard_layout(every, logger_prefix(logger))
    # a user's own layout, or that of the run which is resumed here, is not replaced
    if layout != written.latest and _layouts_in(logger) == written.count:
        logger.experiment.add_custom_scalars(layout)
        written.latest, written.count = layout, _layouts_in(logger)
    written.names = every


def tensorboard_layout(names: Mapping[str, Collection[str]], logger_prefix: str = "") -> dict[str, dict[str, Any]]:
    """Custom scalars: section -> title of a chart -> its lines. TensorBoard has a single layout for all monitors.

    It has no logarithmic axes: where these belong, charts show logarithms.

    Args:
        names: keys that have values, by `log_key_prefix`; charts without lines are omitted.
        logger_prefix: what the logger puts before all keys.
    """
    own, *further = sections().items()
    layout: dict[str, dict[str, Any]] = {own[0]: {}}
    for chart in own[1]:
        lines = [Keys(f"{logger_prefix}{prefix}").pattern(chart.names) for prefix in names]
        layout[own[0]][chart.title] = ["Multiline", [Keys(logger_prefix).pattern(chart.own), *lines]]
    for prefix, keys in names.items():
        for section, charts in further:
            with_lines = {}
            for chart in charts:
                lines_of = chart.logarithms or chart.names
                if any(re.match(Keys(prefix).pattern(lines_of), key) for key in keys):
                    title = f"{chart.title}, log10" if chart.logarithms else chart.title
                    with_lines[title] = ["Multiline", [Keys(f"{logger_prefix}{prefix}").pattern(lines_of)]]
            if with_lines:
                layout[f"{section} ({prefix.rstrip('/')})" if prefix else section] = with_lines
    return layout


def logger_prefix(logger: Any) -> str:
    """What the logger itself puts before the keys of numbers, `TensorBoardLogger(prefix="fold1")`."""
    prefix = getattr(logger, "_prefix", "")
    return f"{prefix}{logger.LOGGER_JOIN_CHAR}" if prefix else ""


def _layouts_in(logger: Any) -> int:
    """How often a layout is mentioned in the files of a run."""
    logger.experiment.flush()
    count = 0
    for path in Path(logger.log_dir).glob("events.out.tfevents.*"):
        if path.stat().st_size:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                place = content.find(LAYOUT)
                while place >= 0:
                    count += 1
                    place = content.find(LAYOUT, place + 1)
    return count


LAYOUT = b"custom_scalars__config__"
"""tag of a layout in TensorBoard's files"""

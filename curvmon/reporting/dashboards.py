"""How dashboards arrange the keys: TensorBoard's custom scalars, and the x-axis of W&B.

Both are set up once for a logger. `wandb_workspace.py` builds a W&B workspace from the same sections.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from curvmon.metrics.registry import all_metrics
from curvmon.reporting.keys import Keys, groups

STEP = "trainer/global_step"
"""the x-axis of WandbLogger"""


class Chart(NamedTuple):
    """One chart of a dashboard.

    Attributes:
        title: above it.
        names: regular expression; the keys that match are its lines.
        log_scale: of the y-axis.
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

"""Where the numbers and pictures go: the Trainer's loggers, each in its own way. One that fails never stops a run.

Loggers are told by the names of their classes: W&B's exists twice (pytorch_lightning and lightning), and nothing
optional is imported before there is a logger that needs it.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from curvmon.errors import warn
from curvmon.records import METRICS
from curvmon.reporting.canvas import pixels, plain

CHARTS = {
    "curvature between layers": {
        "resonance by distance": r"resonance/mean_d\d+",
        "coupling by distance": r"coupling/mean_d\d+",
        "stable rank by distance": r"stable_rank/mean_d\d+",
        "GN-Gap by distance": r"gn_gap/mean_d\d+",
    },
    "spectrum of the Hessian": {
        "top eigenvalues": r"hessian/lambda_\d+",
        "smallest eigenvalue": r"hessian/lambda_min",
        "distance from the edge of stability": r"hessian/stability_ratio",
        "trace": r"hessian/trace",
        "error of Gauss-Newton": r"hessian/ggn_error",
    },
    "alerts": {"alerts so far": r"curvmon/alerts"},
    "cost": {"overhead": r"curvmon/overhead", "seconds": r"curvmon/seconds"},
}
"""sections of a dashboard, their charts, and which keys are the lines of a chart: the end of a regular expression"""
HEATMAPS = tuple(f"heatmap/{metric}" for metric in METRICS)
PICTURES = (*HEATMAPS, "by_distance", "spectrum")
_GROUPS = (*(f"{group}/*" for group in (*METRICS, "hessian", "curvmon", "heatmap")), "by_distance", "spectrum")
Draw = Callable[[], Any]
"""makes a figure"""


def kind_of(logger: Any) -> str:
    names = {base.__name__ for base in type(logger).__mro__}
    known = ("TensorBoardLogger", "WandbLogger", "CSVLogger", "MLFlowLogger")
    return next((name for name in known if name in names), "other")


def takes_pictures(logger: Any) -> bool:
    """The known ones, and any with a `log_image` like W&B's. Lightning's DummyLogger has every attribute."""
    return kind_of(logger) != "other" or hasattr(type(logger), "log_image")


class Sinks:
    """Writes the numbers and pictures of one monitor to all loggers of a trainer; remembers which of them failed."""

    def __init__(self, prefix: str = "") -> None:
        self._prefix = prefix
        self._failed: set[str] = set()

    def write(self, trainer: Any, scalars: Mapping[str, float], pictures: Mapping[str, Draw], step: int) -> None:
        """Every picture is drawn once, if any logger takes it."""
        drawn: dict[str, Any] | None = None
        for i, logger in enumerate(trainer.loggers):
            name = type(logger).__name__ if len(trainer.loggers) == 1 else f"{type(logger).__name__} (logger {i + 1})"
            self._guarded(f"{name} did not take the layout", _set_up, logger, self._prefix)
            if not self._guarded(f"{name} did not take the numbers", _scalars, logger, scalars, step):
                continue  # a lost connection would keep training waiting for every picture as well
            if pictures and takes_pictures(logger):
                drawn = self._drawn(pictures) if drawn is None else drawn
                self._guarded(f"{name} did not take the pictures", _pictures, logger, drawn, step)

    def _drawn(self, pictures: Mapping[str, Draw]) -> dict[str, Any]:
        """Height x width x RGB arrays of bytes."""
        found: dict[str, Any] = {}
        for key, draw in pictures.items():
            self._guarded("a picture could not be drawn", _draw, found, key, draw)
        return found

    def _guarded(self, what: str, action: Callable[..., None], *arguments: Any) -> bool:
        """A logger that raises (a full disk, a lost connection) is warned of once, and tried again next time."""
        try:
            action(*arguments)
        except Exception as error:
            if what not in self._failed:
                self._failed.add(what)
                warn(f"{what} ({type(error).__name__}: {error}); training goes on, and so does measuring")
            return False
        return True


def _draw(found: dict[str, Any], key: str, draw: Draw) -> None:
    with plain():
        found[key] = pixels(draw()).numpy()


def _scalars(logger: Any, scalars: Mapping[str, float], step: int) -> None:
    logger.log_metrics(dict(scalars), step=step)
    logger.save()


def _pictures(logger: Any, images: Mapping[str, Any], step: int) -> None:
    kind = kind_of(logger)
    if kind == "WandbLogger":
        import wandb

        # one call is one row; `log_image` would make one of every picture
        logger.log_metrics({key: [wandb.Image(image)] for key, image in images.items()}, step=step)
        return
    for key, image in images.items():
        file = f"{key}/step_{step:08d}.png"
        if kind == "TensorBoardLogger":
            logger.experiment.add_image(f"{_own_prefix(logger)}{key}", image, global_step=step, dataformats="HWC")
        elif kind == "MLFlowLogger":
            logger.experiment.log_image(logger.run_id, image, file)
        elif kind == "CSVLogger":
            _save_png(image, f"{logger.log_dir}/{file}")
        else:
            logger.log_image(key, [image], step=step)


def _save_png(image: Any, path: str) -> None:
    """Beside metrics.csv, which may be in a bucket."""
    from fsspec.core import url_to_fs  # type: ignore[import-untyped]
    from PIL import Image

    files, place = url_to_fs(path)
    files.makedirs(place.rsplit("/", 1)[0], exist_ok=True)
    with files.open(place, "wb") as file:
        Image.fromarray(image).save(file, format="png")


def _own_prefix(logger: Any) -> str:
    """That a logger puts in front of the keys of numbers, `TensorBoardLogger(prefix="fold1")`."""
    prefix = getattr(logger, "_prefix", "")
    return f"{prefix}{logger.LOGGER_JOIN_CHAR}" if prefix else ""


# ---- dashboards: what is set up once for a logger ----


def _set_up(logger: Any, prefix: str) -> None:
    kind = kind_of(logger)
    if kind not in ("TensorBoardLogger", "WandbLogger"):
        return
    # remembered where all monitors of a trainer, and of later ones with the same logger, see it
    known: list[str] = logger.experiment.__dict__.setdefault("_curvmon_prefixes", [])
    prefix = f"{_own_prefix(logger)}{prefix}"
    if prefix in known:
        return
    known.append(prefix)
    if kind == "TensorBoardLogger":
        if len(known) > 1 or not _has_layout(logger):
            logger.experiment.add_custom_scalars(layout(known))
    elif not logger._wandb_init.get("sync_tensorboard"):
        # WandbLogger does so itself only for a run that it has begun
        logger.experiment.define_metric("trainer/global_step")
        for group in _GROUPS:
            logger.experiment.define_metric(f"{prefix}{group}", step_metric="trainer/global_step")


def layout(prefixes: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Of TensorBoard's custom scalars. It has one: of several monitors the last must name the charts of all."""
    return {
        f"{section} ({prefix.rstrip('/')})" if prefix else section: {
            title: ["Multiline", [f"{re.escape(prefix)}{keys}$"]] for title, keys in charts.items()
        }
        for prefix in prefixes
        for section, charts in CHARTS.items()
    }


def _has_layout(logger: Any) -> bool:
    """A user's own, which ours would replace, or that of the run that is resumed here."""
    logger.experiment.flush()
    for path in Path(logger.log_dir).glob("events.out.tfevents.*"):
        if path.stat().st_size:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                if content.find(b"custom_scalars__config__") >= 0:
                    return True
    return False


def publish(trainer: Any, scalars: Mapping[str, float]) -> None:
    """Into `callback_metrics`, on every process: what EarlyStopping and ModelCheckpoint can monitor.

    The dict behind that property: asking the property itself computes the epoch's metrics at once, and what the module
    adds to them in its own `on_train_epoch_end` would be missing from its log.
    """
    held = getattr(getattr(trainer, "_logger_connector", None), "_callback_metrics", None)
    held = trainer.callback_metrics if held is None else held
    held.update({key: torch.tensor(value) for key, value in scalars.items()})

"""Writes numbers and pictures to the loggers of a training loop. A logger that fails never stops a run.

Loggers are recognised by the names of their classes: W&B's exists twice (pytorch_lightning and lightning), and no
optional package is imported before there is a logger that needs it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from curvmon.errors import warn
from curvmon.reporting.canvas import pixels, plain
from curvmon.reporting.dashboards import logger_prefix, set_up
from curvmon.reporting.scalars import Keys, Scalars

Draw = Callable[[], Any]
"""makes a figure"""


def kind_of(logger: Any) -> str:
    """The name of the class that a logger is, is derived from or acts as; "other" for a user's own."""
    names = {getattr(type(logger), "acts_as", ""), *(base.__name__ for base in type(logger).__mro__)}
    supported = ("TensorBoardLogger", "WandbLogger", "CSVLogger", "MLFlowLogger")
    return next((name for name in supported if name in names), "other")


def takes_pictures(logger: Any) -> bool:
    """The supported ones, and any with a `log_image` like W&B's. Lightning's DummyLogger has every attribute."""
    return kind_of(logger) != "other" or hasattr(type(logger), "log_image")


def run_folder(loop: Any) -> Path | None:
    """Where the files of a run are, on this machine: that of the first logger that has a folder for it.

    A logger without `log_dir` (W&B, MLflow) has the folder that Lightning makes for checkpoints. None in a bucket:
    there are no files to append to.
    """
    if loop.folder is not None:
        return Path(loop.folder)
    for find in (_log_dir, _checkpoints_of):
        for logger in loop.loggers:
            with suppress(Exception):  # a user's own logger
                place = find(loop, logger)
                if place and "://" not in place:
                    return Path(place)
    return None


def _log_dir(loop: Any, logger: Any) -> str | None:
    folder = getattr(logger, "log_dir", None)
    return folder if isinstance(folder, str) else None  # Lightning's DummyLogger has a function by every name


def _checkpoints_of(loop: Any, logger: Any) -> str | None:
    """DummyLogger has no version, and no folder."""
    folder, version = logger.save_dir or loop.default_root_dir, logger.version
    if version in (None, "") or not isinstance(folder, (str, os.PathLike)):
        return None
    return os.path.join(folder, str(logger.name), version if isinstance(version, str) else f"version_{version}")


def _name(loop: Any, place: int) -> str:
    kind = type(loop.loggers[place]).__name__
    return kind if len(loop.loggers) == 1 else f"{kind} (logger {place + 1})"


def log_place(logger: Any) -> str:
    """`TensorBoard in lightning_logs/version_0`: which logger, and where it writes if that is a folder."""
    name, folder = type(logger).__name__.removesuffix("Logger"), getattr(logger, "log_dir", None)
    if not isinstance(folder, str):
        return name
    return f"{name} in {os.path.relpath(folder) if Path.cwd() in Path(folder).resolve().parents else folder}"


class Loggers:
    """All loggers of a training loop, for one monitor; remembers which of them failed."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._failed: set[str] = set()
        self._lost: set[int] = set()
        """places of the loggers that did not take the last numbers"""

    def write(self, loop: Any, scalars: Scalars, epoch: int, step: int) -> None:
        for i, logger in enumerate(loop.loggers):
            name, kind = _name(loop, i), kind_of(logger)
            values = scalars.for_logger(kind)
            if not values:  # all of them are details
                continue
            self._guarded(f"{name} did not take the layout", set_up, logger, kind, self._keys, values.keys())
            if loop.counts_epochs:
                values["epoch"] = float(epoch)
            taken = self._guarded(f"{name} did not take the numbers", _write_scalars, logger, values, step)
            (self._lost.discard if taken else self._lost.add)(i)

    def draw(self, loop: Any, pictures: Mapping[str, Draw], step: int) -> None:
        """Every picture is drawn once, if any logger takes pictures."""
        images: dict[str, Any] | None = None
        for i, logger in enumerate(loop.loggers):
            # a lost connection would keep training waiting for every picture
            if takes_pictures(logger) and i not in self._lost:
                images = self._images(pictures) if images is None else images
                self._guarded(f"{_name(loop, i)} did not take the pictures", _write_images, logger, images, step)

    def _images(self, pictures: Mapping[str, Draw]) -> dict[str, Any]:
        """Height x width x RGB arrays of bytes, by key; pictures that cannot be drawn are skipped."""
        images: dict[str, Any] = {}
        for key, draw in pictures.items():
            self._guarded("a picture could not be drawn", _draw, images, key, draw)
        return images

    def _guarded(self, what: str, action: Callable[..., None], *arguments: Any) -> bool:
        """False if the action raised (a full disk, a lost connection): warns once, and retries next time."""
        try:
            action(*arguments)
        except Exception as error:
            if what not in self._failed:
                self._failed.add(what)
                warn(f"{what} ({type(error).__name__}: {error}); training goes on, and so does measuring")
            return False
        return True


def _draw(images: dict[str, Any], key: str, draw: Draw) -> None:
    with plain():
        images[key] = pixels(draw()).numpy()


def _write_scalars(logger: Any, scalars: Mapping[str, float], step: int) -> None:
    logger.log_metrics(dict(scalars), step=step)
    logger.save()


def _write_images(logger: Any, images: Mapping[str, Any], step: int) -> None:
    kind = kind_of(logger)
    if kind == "WandbLogger":
        import wandb

        # one call is one row; `log_image` would make one of every picture
        logger.log_metrics({key: [wandb.Image(image)] for key, image in images.items()}, step=step)
        return
    for key, image in images.items():
        file = f"{key}/step_{step:08d}.png"
        if kind == "TensorBoardLogger":
            logger.experiment.add_image(f"{logger_prefix(logger)}{key}", image, global_step=step, dataformats="HWC")
        elif kind == "MLFlowLogger":
            logger.experiment.log_image(logger.run_id, image, file)
        elif kind == "CSVLogger":
            _save_png(image, f"{logger.log_dir}/{file}")
        else:
            logger.log_image(key, [image], step=step)


def _save_png(image: Any, path: str) -> None:
    """In the folder of metrics.csv, which may be in a bucket."""
    from fsspec.core import url_to_fs  # type: ignore[import-untyped]
    from PIL import Image

    files, place = url_to_fs(path)
    files.makedirs(place.rsplit("/", 1)[0], exist_ok=True)
    with files.open(place, "wb") as file:
        Image.fromarray(image).save(file, format="png")

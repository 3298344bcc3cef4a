"""Where the numbers and pictures go: the Trainer's loggers, each in its own way. One that fails never stops a run.

Loggers are told by the names of their classes: W&B's exists twice (pytorch_lightning and lightning), and nothing
optional is imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from curvmon.lightning.base import warn

LAYOUT = {
    "curvature between layers": {
        "resonance by distance": ["Multiline", [r"resonance/mean_d\d+$"]],
        "coupling by distance": ["Multiline", [r"coupling/mean_d\d+$"]],
        "stable rank by distance": ["Multiline", [r"stable_rank/mean_d\d+$"]],
        "GN-Gap by distance": ["Multiline", [r"gn_gap/mean_d\d+$"]],
    },
    "spectrum of the Hessian": {
        "top eigenvalues": ["Multiline", [r"hessian/lambda_\d+$"]],
        "smallest eigenvalue": ["Multiline", [r"hessian/lambda_min$"]],
        "distance from the edge of stability": ["Multiline", [r"hessian/stability_ratio$"]],
        "trace": ["Multiline", [r"hessian/trace$"]],
        "error of Gauss-Newton": ["Multiline", [r"hessian/ggn_error$"]],
    },
    "cost": {"overhead": ["Multiline", [r"curvmon/overhead$"]], "seconds": ["Multiline", [r"curvmon/seconds$"]]},
}
"""of a TensorBoard custom-scalars dashboard"""


def kind_of(logger: Any) -> str:
    names = {base.__name__ for base in type(logger).__mro__}
    known = ("TensorBoardLogger", "WandbLogger", "CSVLogger", "MLFlowLogger")
    return next((name for name in known if name in names), "other")


class Sinks:
    """Writes to all loggers of a trainer; remembers which of them failed, and which have their layout."""

    def __init__(self) -> None:
        self._failed: set[str] = set()
        self._laid_out: set[int] = set()

    def write(self, trainer: Any, scalars: Mapping[str, float], pictures: Mapping[str, Any], step: int) -> None:
        for logger in trainer.loggers:
            name = type(logger).__name__
            self._guarded(f"{name} did not take the numbers", lambda: _scalars(logger, scalars, step))  # noqa: B023
            if id(logger) not in self._laid_out and kind_of(logger) == "TensorBoardLogger":
                self._laid_out.add(id(logger))
                self._guarded(f"{name} did not take the layout", lambda: logger.experiment.add_custom_scalars(LAYOUT))  # noqa: B023
            for key, figure in pictures.items():
                self._guarded(f"{name} did not take a picture", lambda: _picture(logger, key, figure, step))  # noqa: B023

    def _guarded(self, what: str, action: Callable[[], Any]) -> None:
        """A logger that raises (a full disk, a lost connection) is warned of once, and tried again next time."""
        try:
            action()
        except Exception as error:
            if what not in self._failed:
                self._failed.add(what)
                warn(f"{what} ({type(error).__name__}: {error}); training goes on, and so does measuring")


def _scalars(logger: Any, scalars: Mapping[str, float], step: int) -> None:
    logger.log_metrics(dict(scalars), step=step)
    logger.save()


def _picture(logger: Any, key: str, figure: Any, step: int) -> None:
    kind = kind_of(logger)
    if kind == "TensorBoardLogger":
        logger.experiment.add_image(key, pixels(figure), global_step=step, dataformats="HWC")
    elif kind == "WandbLogger":
        logger.log_image(key, [pixels(figure).numpy()], step=step)
    elif kind == "MLFlowLogger":
        logger.experiment.log_figure(logger.run_id, figure, f"{key}/step_{step:08d}.png")
    elif kind == "CSVLogger":
        folder = Path(logger.log_dir) / key
        folder.mkdir(parents=True, exist_ok=True)
        figure.savefig(folder / f"step_{step:08d}.png")
    elif hasattr(logger, "log_image"):
        logger.log_image(key, [pixels(figure).numpy()], step=step)


def pixels(figure: Any) -> Tensor:
    """Height x width x RGB, bytes."""
    figure.canvas.draw()
    return torch.frombuffer(bytearray(figure.canvas.buffer_rgba()), dtype=torch.uint8).reshape(
        *figure.canvas.get_width_height()[::-1], 4
    )[:, :, :3]


def publish(trainer: Any, scalars: Mapping[str, float]) -> None:
    """Into `callback_metrics`, on every process: what EarlyStopping and ModelCheckpoint can monitor."""
    trainer.callback_metrics.update({key: torch.tensor(value) for key, value in scalars.items()})

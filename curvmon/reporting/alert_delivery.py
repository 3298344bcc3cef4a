"""Delivers an alert: to the Python log, to W&B and TensorBoard, and to what `on_alert` asks for."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from curvmon.errors import warn
from curvmon.records import Alert
from curvmon.reporting.loggers import kind_of

log = logging.getLogger("curvmon")
_LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
WANDB_LEVELS = {"info": "INFO", "warning": "WARN", "error": "ERROR"}
WANDB_WAIT = 300
"""seconds before W&B sends a second message with the same title"""


def deliver(trainer: Any, alert: Alert, key: str) -> None:
    """On rank 0: to the Python log, and to the loggers that take text."""
    log.log(_LEVELS[alert.level], "%s", alert.message)
    for logger in trainer.loggers:
        kind = kind_of(logger)
        try:
            if kind == "WandbLogger" and alert.level != "info":
                logger.experiment.alert(
                    title=f"curvmon: {alert.kind.replace('_', ' ')}",
                    text=alert.message,
                    level=WANDB_LEVELS[alert.level],
                    wait_duration=WANDB_WAIT,
                )
            elif kind == "TensorBoardLogger":
                text = f"**{alert.kind.replace('_', ' ')}** ({alert.level}): {alert.message}"
                logger.experiment.add_text(key, text, global_step=alert.step)
                logger.save()
        except Exception as error:
            warn(f"{type(logger).__name__} did not take an alert ({type(error).__name__}: {error})")


def act(trainer: Any, alert: Alert, on_alert: Callable[[Alert], Any] | str | None) -> None:
    """What `on_alert` asks for, on every rank; a callable is called on rank 0 only."""
    if on_alert == "stop":
        trainer.should_stop = True
    elif on_alert == "checkpoint":
        folder = getattr(trainer.checkpoint_callback, "dirpath", None) if trainer.checkpoint_callback else None
        folder = str(folder or trainer.default_root_dir).rstrip("/")  # not a Path: it may be the URL of a bucket
        try:
            trainer.save_checkpoint(f"{folder}/curvmon-alert-step={alert.step}.ckpt")
        except Exception as error:  # a full disk, for instance
            trainer.strategy.barrier("Trainer.save_checkpoint")  # where the other ranks wait for this one
            warn(f"no checkpoint of an alert was written ({type(error).__name__}: {error}); training goes on")
    elif callable(on_alert) and trainer.is_global_zero:
        try:
            on_alert(alert)
        except Exception as error:
            warn(f"on_alert raised {type(error).__name__}: {error}; training goes on")

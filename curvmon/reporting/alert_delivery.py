"""How an alert reaches people: the Python log, W&B, TensorBoard, and what the user wants done."""

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
    """On the first process: to the Python log and to the loggers that have a place for text."""
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


def act(trainer: Any, alert: Alert, wanted: Callable[[Alert], Any] | str | None) -> None:
    """What `on_alert` asks for, on every process; a callable is called on the first one only."""
    if wanted == "stop":
        trainer.should_stop = True
    elif wanted == "checkpoint":
        checkpoints = getattr(trainer.checkpoint_callback, "dirpath", None) if trainer.checkpoint_callback else None
        folder = str(checkpoints or trainer.default_root_dir).rstrip("/")  # may be a bucket: no Path
        try:
            trainer.save_checkpoint(f"{folder}/curvmon-alert-step={alert.step}.ckpt")
        except Exception as error:  # a full disk, say
            trainer.strategy.barrier("Trainer.save_checkpoint")  # where the other processes wait for this one
            warn(f"no checkpoint of an alert was written ({type(error).__name__}: {error}); training goes on")
    elif callable(wanted) and trainer.is_global_zero:
        try:
            wanted(alert)
        except Exception as error:
            warn(f"on_alert raised {type(error).__name__}: {error}; training goes on")

"""What a monitor needs to know of a training loop, and what it asks of it. Each integration has a `Loop` of its own."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from curvmon.monitor.target import Target
from curvmon.records import Alert

log = logging.getLogger("curvmon")


class Loop(ABC):
    """The state of a training loop, as it is when an attribute is read.

    Without a default: `model`, its `optimizers`, `loggers` as Lightning has them (`log_metrics(numbers, step)` and
    `save()`, see `reporting/loggers.py`), the number of optimizer `steps` so far, and `step`, the place on the x-axis
    of the loggers.

    What has a default here is optional: a loop that does not know its end is measured as often as the time so far
    allows, one without schedulers has no scheduled rate, and so on.

    Attributes:
        is_global_zero: this process writes; False on all others of a distributed run.
        log_every_n_steps: how often the loggers take numbers of training steps.
        progress_bar_callback: Lightning's; None without one.
        default_root_dir: where loggers without a folder write; None for nowhere.
        accumulated: what a training loss is multiplied with, as it was divided by the number of batches of a step.
        counts_every_step: `steps` grows with every optimizer step; False where some are made elsewhere.
        has_validation: measurements follow validations, not epochs.
        counts_epochs: loggers get the epoch with every number.
        folder: where `history.jsonl` goes; None: the folder of the first logger that has one.
    """

    model: nn.Module
    optimizers: Sequence[Any]
    loggers: Sequence[Any]
    steps: int
    step: int
    is_global_zero: bool = True
    log_every_n_steps: int = 1
    progress_bar_callback: Any = None
    default_root_dir: Any = None
    accumulated: int = 1
    counts_every_step: bool = True
    has_validation: bool = True
    counts_epochs: bool = False
    folder: Path | None = None

    @property
    def epoch(self) -> int:
        return 0

    @property
    def progress(self) -> float | None:
        """The share of the run that is done; None if its end is not known."""
        return None

    @property
    def batches_ahead(self) -> float | None:
        """Training batches until the end of the run; None if it is not known."""
        return None

    @property
    def scheduled_rate(self) -> float | None:
        """The largest learning rate that schedulers have set last; None without any."""
        return None

    @abstractmethod
    def target(self) -> Target:
        """The model under its loss."""

    def validation_metrics(self) -> Mapping[str, float]:
        """What the validation that has just ended has logged. All ranks call it together."""
        return {}

    def publish(self, scalars: Mapping[str, float], stale: Iterable[str] = ()) -> None:
        """To callbacks such as EarlyStopping, on every rank; `stale`: earlier keys that were not measured this time."""
        return None

    def say(self, text: str) -> None:
        """A line about the monitor's own plans."""
        if self.is_global_zero:
            log.info(text)

    def announce(self, text: str) -> None:
        """What follows from an alert, as visible as the alert."""
        if self.is_global_zero:
            log.warning(text)

    @abstractmethod
    def stop(self, alert: Alert) -> None:
        """`on_alert="stop"`: end training."""

    @abstractmethod
    def save_checkpoint(self, alert: Alert) -> None:
        """`on_alert="checkpoint"`: write one."""


def largest_scheduled(schedulers: Iterable[Any]) -> float | None:
    """The largest learning rate that schedulers have set last; None without any. Not all have `get_last_lr`."""
    rates = [rate for scheduler in schedulers for rate in getattr(scheduler, "_last_lr", ())]
    numbers = [float(rate) for rate in rates if isinstance(rate, (int, float))]
    return max(numbers, default=None)

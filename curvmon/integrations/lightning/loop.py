"""A Lightning Trainer as the `Loop` of a monitor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from curvmon.errors import warn
from curvmon.integrations.lightning.compatibility import (
    batches_ahead,
    batches_that_stepped,
    has_validation,
    progress_of,
    publish,
    say,
    scheduled_rate,
    validation_metrics,
)
from curvmon.integrations.lightning.training_step import isolated_step, step_loss
from curvmon.monitor.target import Target
from curvmon.recorder.loop import Loop
from curvmon.records import Alert

if TYPE_CHECKING:
    import pytorch_lightning as pl


class LightningLoop(Loop):
    """Made again in every hook, so that a callback keeps no reference to its Trainer.

    Args:
        loss: `loss(module, batch)`; None: the module's training_step.
    """

    def __init__(self, trainer: pl.Trainer, module: pl.LightningModule, loss: Callable[..., Any] | None = None) -> None:
        self._trainer, self._module, self._loss = trainer, module, loss
        self.model = module
        self.optimizers = trainer.optimizers
        self.loggers = trainer.loggers
        self.steps = trainer.global_step
        self.step = batches_that_stepped(trainer)
        self.is_global_zero = trainer.is_global_zero
        self.log_every_n_steps = trainer.log_every_n_steps  # type: ignore[attr-defined]
        self.progress_bar_callback = trainer.progress_bar_callback
        self.default_root_dir = trainer.default_root_dir
        # with manual optimization any batch may have stepped, with optimizers that the Trainer does not know, too
        self.counts_every_step = module.automatic_optimization
        self.accumulated = trainer.accumulate_grad_batches if module.automatic_optimization else 1
        self.has_validation = has_validation(trainer)
        self.counts_epochs = True

    @property
    def epoch(self) -> int:
        return self._trainer.current_epoch

    @property
    def progress(self) -> float | None:
        return progress_of(self._trainer)

    @property
    def batches_ahead(self) -> float | None:
        return batches_ahead(self._trainer)

    @property
    def scheduled_rate(self) -> float | None:
        return scheduled_rate(self._trainer)

    @property
    def sanity_check_is_incomplete(self) -> bool:
        """It has run on fewer batches than a validation."""
        trainer = self._trainer
        return trainer.enable_validation and trainer.num_sanity_val_batches[:1] < trainer.num_val_batches[:1]

    def target(self) -> Target:
        optimizers = self._trainer.optimizers
        return Target(
            model=self._module,
            loss=self._loss or step_loss(self._module),
            device=self._module.device,
            optimizer=optimizers[0] if len(optimizers) == 1 else None,
            isolation=partial(isolated_step, self._trainer, self._module),
        )

    def validation_metrics(self) -> Mapping[str, float]:
        return validation_metrics(self._trainer)

    def publish(self, scalars: Mapping[str, float], stale: Iterable[str] = ()) -> None:
        publish(self._trainer, scalars, stale)

    def say(self, text: str) -> None:
        say(self._trainer, text)

    def stop(self, alert: Alert) -> None:
        """Lightning stops after this step or epoch, but not before `min_epochs` and `min_steps`."""
        trainer = self._trainer
        if trainer.should_stop or self.progress == 1.0:  # it ends here in any case
            return
        trainer.should_stop = True
        left = [
            f"{name}={least}"
            for name, least, done in (
                ("min_epochs", trainer.min_epochs, trainer.current_epoch + 1),
                ("min_steps", trainer.min_steps, trainer.global_step),
            )
            if least is not None and least > done
        ]
        reason = f"at step {alert.step}: {alert.headline}; on_alert='stop'"
        if left:
            verb = "is" if len(left) == 1 else "are"
            self.announce(f"curvmon will stop this run once {' and '.join(left)} {verb} reached (alert {reason})")
        else:
            self.announce(f"curvmon stopped this run {reason}")

    def save_checkpoint(self, alert: Alert) -> None:
        trainer = self._trainer
        folder = getattr(trainer.checkpoint_callback, "dirpath", None) if trainer.checkpoint_callback else None
        folder = str(folder or trainer.default_root_dir).rstrip("/")  # not a Path: it may be the URL of a bucket
        path = f"{folder}/curvmon-alert-step={alert.step}.ckpt"
        try:
            trainer.save_checkpoint(path)
        except Exception as error:  # a full disk, for instance
            trainer.strategy.barrier("Trainer.save_checkpoint")  # where the other ranks wait for this one
            warn(f"no checkpoint of an alert was written ({type(error).__name__}: {error}); training goes on")
        else:
            self.announce(f"curvmon wrote {path}: {alert.headline}; on_alert='checkpoint'")

"""What differs between Lightning packages, their private names that curvmon uses, and which runs can be monitored.

| name in Lightning | used in | because |
|---|---|---|
| `trainer.fit_loop.epoch_loop._batches_that_stepped` | `batches_that_stepped` | the x-axis of Lightning's own metrics |
| `trainer._logger_connector._callback_metrics` | `publish` | the property computes the epoch's metrics early |
| `trainer._results` | `validation_metrics` | metrics of this validation alone |
| `scheduler._last_lr` | `scheduled_rate` | not all schedulers have `get_last_lr` |
| `module._trainer` | `attached_trainer` | the property raises where there is none |
| `trainer.strategy._lightning_optimizers` | `isolation/trainer_state.py` | what `self.optimizers()` returns |
| `WandbLogger._wandb_init` | `reporting/dashboards.py` | whether W&B mirrors TensorBoard |
| module `core.module` | `_overrides` | base class of either package |

`tests/integrations/lightning/test_compatibility.py` checks that the installed packages have them.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from curvmon.recorder.loop import largest_scheduled

if TYPE_CHECKING:
    import pytorch_lightning as pl

PACKAGES = ("pytorch_lightning", "lightning.pytorch")
_UNSUPPORTED_STRATEGIES = {
    "FSDPStrategy": "FSDP shards parameters below autograd",
    "DeepSpeedStrategy": "DeepSpeed shards parameters below autograd",
    "ModelParallelStrategy": "model parallelism (FSDP2, tensor parallelism) shards parameters below autograd",
    "XLAStrategy": "second derivatives on XLA devices are untested",
}


def _installed() -> list[Any]:
    return [
        importlib.import_module(name) for name in PACKAGES if importlib.util.find_spec(name.split(".")[0]) is not None
    ]


if TYPE_CHECKING:

    class CallbackBase(pl.Callback):
        """A Callback of every installed Lightning: some Trainers and every LightningCLI accept their own only."""

else:
    _packages = _installed()
    if not _packages:
        raise ImportError("CurvatureMonitor needs pytorch-lightning or lightning: pip install pytorch-lightning")
    CallbackBase = type("CallbackBase", tuple(package.Callback for package in _packages), {})


def unsupported(trainer: pl.Trainer, module: pl.LightningModule, has_loss: bool) -> str | None:
    """Why this run cannot be monitored, and what to do about it; None if it can."""
    for base in type(trainer.strategy).__mro__:
        if base.__name__ in _UNSUPPORTED_STRATEGIES:
            reason = _UNSUPPORTED_STRATEGIES[base.__name__]
            return f"{reason}; use DDP or one device, or measure a checkpoint with curvmon.measure"
    if has_loss:
        return None
    if not module.automatic_optimization:
        return "training_step of a module with manual optimisation steps its optimizers; pass loss=..."
    if not _overrides(module, "training_step"):
        return "the module has no training_step; pass loss=..."
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        return "training_step draws its batches itself (dataloader_iter); pass loss=..."
    return None


def _overrides(module: pl.LightningModule, name: str) -> bool:
    """A subclass of LightningModule, of whichever package, defines it."""
    return not type(module).__dict__.get(name, getattr(type(module), name)).__module__.endswith("core.module")


def has_validation(trainer: pl.Trainer) -> bool:
    """A loader without batches is never run, and calls no hook."""
    batches = trainer.num_val_batches  # empty until the loaders have been set up
    return bool(trainer.enable_validation) and (not batches or any(batches))


def ranks_may_skip_validation(trainer: pl.Trainer, module: pl.LightningModule) -> bool:
    """A rank without validation batches may skip its validation: its hooks are no place for collectives."""
    allowed = "allow_zero_length_dataloader_with_multiple_devices"
    datamodule = getattr(trainer, "datamodule", None)
    return trainer.world_size > 1 and any(getattr(owner, allowed, False) for owner in (module, datamodule))


def batches_that_stepped(trainer: pl.Trainer) -> int:
    """The x-axis of Lightning's own metrics; LearningRateMonitor reads it from the same place."""
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def attached_trainer(module: Any) -> Any:
    """The Trainer of a LightningModule; None without one."""
    return getattr(module, "_trainer", None)


def publish(trainer: pl.Trainer, scalars: Mapping[str, float], stale: Iterable[str] = ()) -> None:
    """Into `callback_metrics`, on every process: what EarlyStopping and ModelCheckpoint can monitor.

    The dict behind that property: the property itself computes the epoch's metrics at once, and what the module adds
    to them in its own `on_train_epoch_end` would be missing from its log.

    A stale value is removed; `EarlyStopping(strict=False)` waits then. A ModelCheckpoint would raise, so what it
    monitors becomes NaN, which it takes for worse than any number.
    """
    metrics = getattr(getattr(trainer, "_logger_connector", None), "_callback_metrics", None)
    metrics = trainer.callback_metrics if metrics is None else metrics
    metrics.update({key: torch.tensor(value) for key, value in scalars.items()})
    needed = {getattr(callback, "monitor", None) for callback in trainer.checkpoint_callbacks}
    for key in stale:
        if key in needed:
            metrics[key] = torch.tensor(float("nan"))
        else:
            metrics.pop(key, None)


def validation_metrics(trainer: pl.Trainer) -> dict[str, float]:
    """What `validation_step` has logged in this validation, over all its batches. All ranks call it together.

    Not `callback_metrics`, which has values of the last validation and of the last training epoch as well.
    """
    results = trainer._results
    if not trainer.evaluating or results is None:
        return {}
    metrics: Mapping[str, Any] = results.metrics(on_step=False)["callback"]
    return {name: float(value) for name, value in metrics.items() if value.numel() == 1}


def scheduled_rate(trainer: pl.Trainer) -> float | None:
    """The largest learning rate that schedulers have set last; None without any."""
    schedulers = [config.scheduler for config in getattr(trainer, "lr_scheduler_configs", ())]
    return largest_scheduled(schedulers)


def progress_of(trainer: pl.Trainer) -> float | None:
    """The share of the run that is done; None if the run has no end of its own."""
    shares = []
    if trainer.max_steps is not None and trainer.max_steps > 0:
        shares.append(trainer.global_step / trainer.max_steps)
    batches = trainer.num_training_batches
    if trainer.max_epochs is not None and trainer.max_epochs > 0 and 0 < batches < float("inf"):
        batch: Any = trainer.fit_loop.epoch_loop.batch_progress.current
        shares.append((trainer.current_epoch + min(1.0, batch.processed / batches)) / trainer.max_epochs)
    for callback in getattr(trainer, "callbacks", ()):  # Trainer(max_time=...) adds a Timer
        remaining = callback.time_remaining() if hasattr(callback, "time_remaining") else None
        if remaining is not None:
            elapsed = callback.time_elapsed()
            shares.append(elapsed / max(elapsed + remaining, 1e-9))
    return min(1.0, max(shares)) if shares else None


def batches_ahead(trainer: pl.Trainer) -> float | None:
    """Training batches until the end of the run; None if it is not known, or given as a time."""
    counts: list[float] = []
    if trainer.max_steps is not None and trainer.max_steps > 0:
        counts.append((trainer.max_steps - trainer.global_step) * trainer.accumulate_grad_batches)
    batches = trainer.num_training_batches
    if trainer.max_epochs is not None and trainer.max_epochs > 0 and batches < float("inf"):
        counts.append((trainer.max_epochs - trainer.current_epoch) * batches)
    return min(counts) if counts else None


def say(trainer: pl.Trainer, text: str) -> None:
    """To where Lightning's own messages go, once for all processes."""
    if trainer.is_global_zero:
        package = type(trainer).__module__.removesuffix(".trainer.trainer")
        logging.getLogger(f"{package}.callbacks.curvmon").info(text)

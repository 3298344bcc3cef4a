"""What differs between Lightning packages, and which runs can be monitored."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.parameter import is_lazy

from curvmon.graph.nodes import check_names
from curvmon.integrations.lightning.training_step import takes_iterator

if TYPE_CHECKING:
    import pytorch_lightning as pl

PACKAGES = ("pytorch_lightning", "lightning.pytorch")
_SHARDED = {
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
        if base.__name__ in _SHARDED:
            return f"{_SHARDED[base.__name__]}; use DDP or one device, or measure a checkpoint with curvmon.measure"
    if has_loss:
        return None
    if not module.automatic_optimization:
        return "training_step of a module with manual optimisation steps its optimizers; pass loss=..."
    if not _overrides(module, "training_step"):
        return "the module has no training_step; pass loss=..."
    if takes_iterator(module):
        return "training_step draws its batches itself (dataloader_iter); pass loss=..."
    return None


def _overrides(module: pl.LightningModule, name: str) -> bool:
    """A subclass of LightningModule, of whichever package, defines it."""
    return not type(module).__dict__.get(name, getattr(type(module), name)).__module__.endswith("core.module")


def check_nodes(module: nn.Module, nodes: list[str] | None) -> None:
    """Raises NodeError for names that match no module, with the nearest ones."""
    if nodes is not None:
        check_names(module, nodes)


def has_lazy_tensors(module: nn.Module) -> bool:
    """Lazy modules get their parameters in the first forward pass."""
    return any(is_lazy(tensor) for tensor in (*module.parameters(), *module.buffers()))


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

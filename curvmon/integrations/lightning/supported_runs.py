"""What cannot be monitored, told before training starts."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from curvmon.graph.nodes import check_names
from curvmon.integrations.lightning.training_step import takes_iterator

_SHARDED = {
    "FSDPStrategy": "FSDP shards parameters below autograd",
    "DeepSpeedStrategy": "DeepSpeed shards parameters below autograd",
    "ModelParallelStrategy": "model parallelism (FSDP2, tensor parallelism) shards parameters below autograd",
    "XLAStrategy": "second derivatives on XLA devices were never tried",
}


def refusal(trainer: Any, module: Any, has_loss: bool) -> str | None:
    """Why this run cannot be monitored, with what to do about it; None where it can."""
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


def validates(trainer: Any) -> bool:
    """There is something to validate on. A loader without batches is never run, and no hook tells of it."""
    batches = trainer.num_val_batches  # empty as long as the loader has not been looked at
    return bool(trainer.enable_validation) and (not batches or any(batches))


def has_no_shape_yet(module: nn.Module) -> bool:
    """Lazy modules get their parameters in the first forward pass."""
    return any(is_lazy(tensor) for tensor in (*module.parameters(), *module.buffers()))


def validates_unevenly(trainer: Any, module: Any) -> bool:
    """A process without validation batches may skip its validation: not a moment at which all of them meet."""
    allowed = "allow_zero_length_dataloader_with_multiple_devices"
    return trainer.world_size > 1 and any(getattr(owner, allowed, False) for owner in (module, trainer.datamodule))


def _overrides(module: Any, name: str) -> bool:
    """Defined below the LightningModule of whichever package."""
    return not type(module).__dict__.get(name, getattr(type(module), name)).__module__.endswith("core.module")


def check_nodes(module: nn.Module, nodes: list[str] | None) -> None:
    """Names that no module has, while there is still time; raises NodeError with the nearest ones."""
    if nodes is not None:
        check_names(module, nodes)

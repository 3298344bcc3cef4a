"""Refuse models whose parameters are sharded over processes, before anything of them is touched.

Copies of a shard are no parameters of the whole, and the hooks that gather the shards keep handles to the originals: a
forward pass on copies fails, and leaves the originals without their memory.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from curvmon.errors import InputError

_INSTEAD = (
    "nothing was changed, and training can go on. Measure an unsharded copy: on all ranks, "
    "state = torch.distributed.checkpoint.state_dict.get_model_state_dict(model, "
    "options=StateDictOptions(full_state_dict=True, cpu_offload=True)), then on rank 0 load `state` into a new model"
)
_INSTEAD_OF_ZERO = (
    "nothing was changed, and training can go on. Measure an unsharded copy: save a checkpoint and load it with "
    "deepspeed.utils.zero_to_fp32.load_state_dict_from_zero_checkpoint into a new model"
)


def refuse_sharded(modules: Iterable[nn.Module]) -> None:
    """Raises `InputError` if a module shards its parameters: FSDP 1 and 2, tensor parallelism, DeepSpeed ZeRO-3."""
    fully_shard, wrapper, distributed = (_loaded(*name) for name in _CLASSES)
    for module in modules:
        if isinstance(module, (fully_shard, wrapper)):
            kind = "FSDP2, fully_shard" if isinstance(module, fully_shard) else "FSDP1, FullyShardedDataParallel"
            raise InputError(f"the model is sharded ({kind}), and cannot be measured as it is; {_INSTEAD}")
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            if isinstance(tensor, distributed):
                where = f"{name!r} of a {type(module).__name__} is a DTensor"
                raise InputError(f"the model is sharded ({where}), and cannot be measured as it is; {_INSTEAD}")
            if _is_partitioned(tensor):
                raise InputError(
                    f"the model is sharded (DeepSpeed ZeRO-3), and cannot be measured as it is; {_INSTEAD_OF_ZERO}"
                )


_CLASSES = (
    ("torch.distributed.fsdp", "FSDPModule"),
    ("torch.distributed.fsdp", "FullyShardedDataParallel"),
    ("torch.distributed.tensor", "DTensor"),
)


def _loaded(module: str, name: str) -> Any:
    """A class, if its module has been imported: otherwise the model has none of it, and the import takes a second."""
    return getattr(sys.modules.get(module), name, ())


def _is_partitioned(tensor: Tensor) -> bool:
    """DeepSpeed marks the parameters that it partitions, and only these, with `ds_id`."""
    return hasattr(tensor, "ds_id")

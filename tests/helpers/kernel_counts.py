"""Count what a GPU would be given: kernels launched, and synchronisations with the host. Exact on every machine."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

READS = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "_unique2", "unique_dim")
"""operations whose result the host waits for"""
EMPTY = (
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "lift_fresh", "_unsafe_view",
)  # fmt: skip
"""operations that launch nothing although they are no views"""


class KernelCounts(TorchDispatchMode):
    """While active, counts the operations on tensors by name.

    Views and allocations launch no kernel. Reading a number or a whole tensor synchronises; on the CPU only the first
    can be seen, on a device both.

    Attributes:
        kernels: launches by operation.
        synchronisations: by operation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()
        self.synchronisations: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in READS:
            self.synchronisations[name] += 1
        elif not func.is_view and name not in EMPTY:
            self.kernels[name] += 1
        result = func(*args, **(kwargs or {}))
        if name in ("_to_copy", "copy_") and _leaves_device(func, args, result):
            self.synchronisations["copy to the host"] += 1
        return result


def _leaves_device(func: Any, args: Any, result: torch.Tensor) -> bool:
    source = args[1] if func.overloadpacket.__name__ == "copy_" else args[0]
    return source.device.type != "cpu" and result.device.type == "cpu"

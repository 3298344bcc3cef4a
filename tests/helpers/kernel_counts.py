"""Count what a GPU would be given: kernels launched, and synchronisations with the host. Exact on every machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from curvmon import CurvatureMonitor

READS = (
    "_local_scalar_dense",
    "nonzero",
    "equal",
    "is_nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "_linalg_check_errors",
)
"""operations whose result the host waits for"""
EMPTY = (
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "detach",
    "lift_fresh",
    "_unsafe_view",
)
"""operations that launch nothing although they are no views"""


class KernelCounts(TorchDispatchMode):
    """While active, counts the operations on tensors of a device by name, in all threads of its backward passes.

    The one definition of both counts, on the CPU and on the pretend accelerator. Views and allocations launch no
    kernel. Reading a number, indexing by a mask and copying to the host synchronise. On the CPU copies to the host
    cannot be seen, as there are none, and algebra that would be left to the host counts too.

    Args:
        device: whose operations are counted; those of other devices are not.

    Attributes:
        kernels: launches by operation.
        synchronisations: by operation.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.device = torch.device(device).type
        self.kernels: Counter[str] = Counter()
        self.synchronisations: Counter[str] = Counter()

    @property
    def totals(self) -> tuple[int, int]:
        """(kernels, synchronisations)"""
        return self.kernels.total(), self.synchronisations.total()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        result = func(*args, **(kwargs or {}))
        if not any(x.device.type == self.device for x in _tensors((*args, *(kwargs or {}).values(), result))):
            return result
        if name in READS:
            self.synchronisations[name] += 1
        elif not func.is_view and name not in EMPTY:
            self.kernels[name] += 1
        if name in ("_to_copy", "copy_") and self.device != "cpu" and result.device.type == "cpu":
            self.synchronisations["copy to the host"] += 1
        if name.strip("_").startswith("index") and _has_mask(args):
            self.synchronisations["index by a mask"] += 1
        return result


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _has_mask(args: Any) -> bool:
    indices = args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else ()
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


def counted_measurements(monitor: CurvatureMonitor, device: torch.device | str = "cpu") -> list[KernelCounts]:
    """One entry for every measurement that the monitor makes from now on: what it measures, reports and draws."""
    found: list[KernelCounts] = []
    measure = monitor._recorder.measure

    def counted(*args: Any, **kwargs: Any) -> bool:
        with KernelCounts(device) as counts:
            found.append(counts)
            return measure(*args, **kwargs)

    monitor._recorder.measure = counted  # type: ignore[method-assign]
    return found

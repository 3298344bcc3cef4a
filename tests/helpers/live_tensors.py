"""Count the memory of tensors: exact, and the same on every machine."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class LiveTensors(TorchDispatchMode):
    """While active, counts what is made and still in use, after every operation, in backward passes too.

    Temporaries within a kernel, and what the allocator keeps, are not seen.

    Args:
        size: bytes from which on a tensor counts as large; those below a thousandth of it do not count at all.

    Attributes:
        peak: most bytes at a time.
        most: largest number of large tensors at a time.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # first those that are gone: a new one may be where they were
        self._storages = {key: entry for key, entry in self._storages.items() if not entry[0].expired()}
        if not func.is_view:
            for tensor in result if isinstance(result, (list, tuple)) else [result]:
                if isinstance(tensor, Tensor) and 1000 * tensor.nbytes > self._size:
                    storage = tensor.untyped_storage()
                    self._storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        sizes = [size for _, size in self._storages.values()]
        self.peak = max(self.peak, sum(sizes))
        self.most = max(self.most, sum(size >= self._size for size in sizes))
        return result


def live_tensors(function: Any, size: int) -> LiveTensors:
    """Of one call."""
    with LiveTensors(size) as live:
        function()
    return live

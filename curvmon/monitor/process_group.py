"""The processes of a distributed run: who measures what, and how all of them get the same result.

Collectives go through a gloo group of their own on the CPU, so that they never mix with those of the training strategy.
Every rank calls the same collectives in the same order.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from curvmon.errors import CurvmonError
from curvmon.monitor.batch_samples import fingerprint

# bound at import: a measurement replaces these names in torch.distributed; some builds of torch have none of them
all_gather_object: Any = getattr(dist, "all_gather_object", None)
broadcast_object_list: Any = getattr(dist, "broadcast_object_list", None)


class RemoteError(CurvmonError, RuntimeError):
    """Another rank failed, or has a value that cannot be sent."""


class Ranks:
    """All ranks of a run. Rank 0 measures the pairs of layers; the last rank computes eigenvalues at the same time.

    Must be constructed by all ranks together, as it creates a process group.

    Args:
        world_size: number of ranks that train together. A process group may outlive the run that created it, so
            torch.distributed alone does not say.

    Attributes:
        world_size: number of ranks; 1 where torch.distributed is not initialized.
        rank: rank of this process.
    """

    def __init__(self, world_size: int) -> None:
        distributed = world_size > 1 and dist.is_available() and dist.is_initialized()
        self.world_size = world_size if distributed else 1
        self.rank = dist.get_rank() if distributed else 0
        self._group = dist.new_group(backend="gloo") if self.world_size > 1 else None

    @property
    def spectrum_rank(self) -> int:
        return self.world_size - 1

    @property
    def measures_pairs(self) -> bool:
        return self.rank == 0

    @property
    def measures_spectrum(self) -> bool:
        return self.rank == self.spectrum_rank

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in the order of ranks, on all of them."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.world_size
        all_gather_object(values, value, group=self._group)
        return values

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """The value of rank `source`, on all ranks. Raises RemoteError on all of them if it cannot be pickled."""
        if self._group is None:
            return value
        message: list[Any] = [None]
        if self.rank == source:
            try:
                message = [pickle.dumps(value)]
            except Exception as error:  # the other ranks are waiting
                message = [f"process {source} cannot send {type(value).__name__}: {type(error).__name__}: {error}"]
        broadcast_object_list(message, src=source, group=self._group)
        if isinstance(message[0], str):
            raise RemoteError(message[0])
        return value if self.rank == source else pickle.loads(message[0])

    def all_or_none(self, error: Exception | None) -> None:
        """Raises RemoteError on all ranks if any of them has an error."""
        errors = self.gather(None if error is None else f"process {self.rank}: {type(error).__name__}: {error}")
        first = next((error for error in errors if error is not None), None)
        if first is not None:
            raise RemoteError(first)


@contextmanager
def same_buffers(ranks: Ranks, module: nn.Module) -> Iterator[None]:
    """Inside the context all ranks have the buffers of rank 0.

    Running statistics of BatchNorm differ between ranks; pairs and eigenvalues must be those of the same function.
    """
    buffers = [
        (owner._buffers, name, value)
        for owner in module.modules()
        if ranks.world_size > 1 and not isinstance(owner, torch.jit.ScriptModule)
        for name, value in owner._buffers.items()
        if value is not None
    ]
    fingerprints = ranks.gather([_fingerprint(value) for _, _, value in buffers])
    differing = [entry for entry, prints in zip(buffers, zip(*fingerprints)) if len(set(prints)) > 1]
    of_rank_0 = ranks.broadcast([value.detach().cpu() for _, _, value in differing]) if differing else []
    try:
        for (owner, name, value), replacement in zip(differing, of_rank_0):
            if ranks.rank:
                owner[name] = replacement.to(value.device)
        yield
    finally:
        for owner, name, value in differing:
            owner[name] = value


def _fingerprint(buffer: Tensor) -> str:
    """Empty for a sparse or otherwise unusual buffer, which stays as it is."""
    try:
        return fingerprint([buffer])
    except Exception:
        return ""

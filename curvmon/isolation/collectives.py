"""During a measurement a process is by itself: the others are doing something else, and would not answer."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from curvmon.errors import CurvmonError

_TALKING = (
    "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_gather_single",
    "all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "batch_isend_irecv",
    "broadcast", "broadcast_object_list", "gather", "gather_object", "irecv", "isend", "monitored_barrier", "new_group",
    "recv", "recv_object_list", "reduce", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor", "scatter",
    "scatter_object_list", "send", "send_object_list",
)  # fmt: skip


class CollectiveError(CurvmonError, RuntimeError):
    """The step waits for other processes."""


@contextmanager
def secluded(world: int) -> Iterator[None]:
    """A collective inside a training step would wait for ever: an error instead.

    `is_initialized` is False meanwhile, so that a step which asks (torchmetrics does) goes on as in a single process.
    Names in torch.distributed are replaced; what was imported by name earlier asks for the default group, and is caught
    there. Groups that are passed explicitly to such a function are not.
    """
    if world == 1:
        yield
        return
    inner: Any = dist.distributed_c10d
    original = inner._get_default_group

    def default_group() -> Any:
        caller: Any = sys._getframe(1)
        if caller.f_code.co_name == "_group_or_default_group":
            caller = caller.f_back
        return _refuse() if caller.f_code.co_name in _TALKING else original()

    before = {name: getattr(dist, name) for name in (*_TALKING, "is_initialized") if hasattr(dist, name)}
    try:
        for name in before:
            setattr(dist, name, _refuse)
        dist.is_initialized = lambda: False
        inner._get_default_group = default_group
        yield
    finally:
        inner._get_default_group = original
        for name, function in before.items():
            setattr(dist, name, function)


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise CollectiveError(
        "the training step talks to other processes (a collective of torch.distributed), which a measurement cannot; "
        "pass loss= a function without collectives"
    )

"""No communication during a measurement: the other processes do something else, and would not answer."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist

from curvmon.errors import CurvmonError
from curvmon.isolation.patches import COLLECTIVES, DEFAULT_GROUP, GROUP_OR_DEFAULT
from curvmon.isolation.torch_symbols import replaced


class CollectiveError(CurvmonError, RuntimeError):
    """The step waits for other processes."""


@contextmanager
def collectives_refused(world: int) -> Iterator[None]:
    """Collectives raise `CollectiveError`: inside a training step they would wait for ever.

    `is_initialized` is False meanwhile, so that a step which asks (torchmetrics does) runs as in a single process.
    The names in torch.distributed are replaced. A function that was imported by name earlier is caught when it asks
    for the default group, but not if a group is passed to it.
    """
    if world == 1:
        yield
        return
    names = [name for name in COLLECTIVES if hasattr(dist, name)]
    with ExitStack() as stack:
        stack.enter_context(replaced(dist, **dict.fromkeys(names, _refuse), is_initialized=lambda: False))
        place = DEFAULT_GROUP.owner()
        if place is not None:
            stack.enter_context(replaced(place[0], **{place[1]: _refusing(getattr(*place))}))
        yield


def _refusing(get_default_group: Any) -> Any:
    def default_group() -> Any:
        caller: Any = sys._getframe(1)
        if caller.f_code.co_name == GROUP_OR_DEFAULT.attribute:
            caller = caller.f_back
        return _refuse() if caller.f_code.co_name in COLLECTIVES else get_default_group()

    return default_group


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise CollectiveError(
        "the training step talks to other processes (a collective of torch.distributed), which a measurement cannot; "
        "pass loss= a function without collectives"
    )

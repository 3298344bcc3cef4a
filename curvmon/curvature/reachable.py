"""All modules that a forward pass may run: those of the model, and those that the loss function brings along."""

from __future__ import annotations

import functools
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

_DEPTH = 5
"""How many plain objects, functions and containers deep to look; a criterion is rarely further away."""
_CLOSED = ("torch", "numpy", "lightning", "pytorch_lightning", "builtins", "functools")
"""Packages whose objects hold no module of the user, or (a Trainer) far too much."""


def modules_within(model: nn.Module, loss: Callable[..., Any]) -> list[nn.Module]:
    """Modules below `model`, and below whatever `loss` refers to: its object, closure, defaults, globals it names.

    Also those kept in plain lists or objects, the usual way to hide a teacher from `parameters()`. Keyed by identity:
    the hash of a torchmetrics module changes with its state.
    """
    found: dict[int, nn.Module] = {}
    seen: dict[int, Any] = {}
    queue: deque[tuple[Any, int]] = deque([(model, 0), (loss, 0)])
    while queue:
        item, depth = queue.popleft()
        if id(item) in seen or depth > _DEPTH:
            continue
        seen[id(item)] = item
        if isinstance(item, nn.Module):
            found[id(item)] = item
            queue.extend((child, 0) for child in item.children())
            queue.extend((value, 1) for value in item.__dict__.values())
        else:
            queue.extend((value, depth + 1) for value in _held_by(item))
    return list(found.values())


def _held_by(item: Any) -> Iterator[Any]:
    """What a container, a function or a plain object refers to."""
    if type(item) in (dict, OrderedDict, defaultdict):
        yield from item.values()
    elif type(item) in (list, deque, tuple):
        yield from item
    elif isinstance(item, functools.partial):
        yield from (item.func, *item.args, *item.keywords.values())
    elif isinstance(item, types.MethodType):
        yield from (item.__self__, item.__func__)
    elif isinstance(item, types.FunctionType):
        yield from (_contents(cell) for cell in item.__closure__ or ())
        yield from item.__defaults__ or ()
        yield from (item.__globals__[name] for name in item.__code__.co_names if name in item.__globals__)
    elif not isinstance(item, (type, types.ModuleType)) and type(item).__module__.split(".")[0] not in _CLOSED:
        yield from getattr(item, "__dict__", {}).values()
        if callable(item):
            yield type(item).__call__


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet: nothing to restore
        return None

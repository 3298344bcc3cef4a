"""What a forward pass may run and change: modules of the model and of the loss function, and what the model holds."""

from __future__ import annotations

import functools
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils.data import Dataset

_DEPTH = 5
"""How many plain objects, functions and containers deep to look; a criterion is rarely further away."""
_CLOSED = ("torch", "numpy", "lightning", "lightning_fabric", "pytorch_lightning", "wandb", "builtins", "functools")
"""Packages whose objects hold no module of the user, or (a Trainer) far too much."""
_NAMESPACES = ("types", "argparse")
_BUSY = ("_thread", "threading", "queue", "multiprocessing", "concurrent", "asyncio", "socket")
"""Who holds an object from these is used by other threads, and must not change even for a moment."""
_LEAVES = (str, int, float, bool, bytes, type(None))


class Reachable(NamedTuple):
    """Modules of model and loss; plain objects (a meter, an augmentation) and containers that the model holds."""

    modules: list[nn.Module]
    objects: list[Any]
    containers: list[Any]


def reachable(model: nn.Module, loss: Callable[..., Any]) -> Reachable:
    """Everything below `model`; modules also below whatever `loss` refers to: its object, closure, defaults, globals.

    Also those kept in plain lists or objects, the usual way to hide a teacher from `parameters()`, and in the closures
    of hooks. Keyed by identity: the hash of a torchmetrics module changes with its state.
    """
    seen: dict[int, Any] = {}
    of_model = list(_below(model, seen))
    return Reachable(
        modules=[item for item in (*of_model, *_below(loss, seen)) if isinstance(item, nn.Module)],
        objects=[item for item in of_model if is_plain_object(item)],
        containers=[item for item in of_model if isinstance(item, (dict, list, deque, set))],
    )


def _below(root: Any, seen: dict[int, Any]) -> Iterator[Any]:
    queue: deque[tuple[Any, int]] = deque([(root, 0)])
    while queue:
        item, depth = queue.popleft()
        if type(item) in _LEAVES or id(item) in seen or depth > _DEPTH:
            continue
        seen[id(item)] = item
        yield item
        if isinstance(item, nn.Module):
            queue.extend((child, 0) for child in item.children())
            queue.extend((value, 1) for value in item.__dict__.values())
        else:
            queue.extend((value, depth + 1) for value in _held_by(item))


def is_plain_object(item: Any) -> bool:
    """An instance of a class of the user's, or of a library's like it, whose state is in its attributes."""
    # a class that is made at run time says "abc" (the batches of torch_geometric do): its base tells more
    root = next(name for base in type(item).__mro__ if (name := _package(base.__module__)) != "abc")
    if root in _CLOSED or (root in sys.stdlib_module_names and root not in _NAMESPACES):
        return False
    attributes = getattr(item, "__dict__", None)
    if type(attributes) is not dict or isinstance(item, (type, nn.Module, Tensor, Dataset)):
        return False
    return not any(_package(type(value).__module__) in _BUSY for value in attributes.values())


def _package(module: str) -> str:
    return module.split(".")[0]


def _is_closed(module: str) -> bool:
    return _package(module) in _CLOSED


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
        if not _is_closed(item.__globals__.get("__name__", "")):
            yield from (item.__globals__[name] for name in item.__code__.co_names if name in item.__globals__)
    elif not isinstance(item, (type, types.ModuleType, Dataset)) and not _is_closed(type(item).__module__):
        yield from getattr(item, "__dict__", {}).values()
        if callable(item):
            yield type(item).__call__


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet: nothing to restore
        return None

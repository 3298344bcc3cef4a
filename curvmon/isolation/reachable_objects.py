"""What a forward pass may run and change: modules of the model and of the loss, and objects that the model holds."""

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
"""how many plain objects, functions and containers deep to search; a criterion is rarely further away"""
_CLOSED = ("torch", "numpy", "lightning", "lightning_fabric", "pytorch_lightning", "wandb", "builtins", "functools")
"""packages whose objects are not searched: they hold no module of the user, or (a Trainer) far too much"""
_NAMESPACES = ("types", "argparse")
_CONCURRENT = ("_thread", "threading", "queue", "multiprocessing", "concurrent", "asyncio", "socket")
"""an object that holds something from these is used by other threads, and must not change even for a moment"""
_LEAVES = (str, int, float, bool, bytes, type(None))


class Reachable(NamedTuple):
    """What a measurement has to restore."""

    modules: list[nn.Module]
    """all modules of the model and of the loss"""
    objects: list[Any]
    """plain objects that the model holds: a meter, an augmentation"""
    containers: list[Any]
    """dicts, lists, deques and sets that the model holds"""


def reachable(model: nn.Module, loss: Callable[..., Any]) -> Reachable:
    """Everything below `model`, and the modules that `loss` refers to by its object, closure, defaults or globals.

    That includes modules in plain lists or objects (the usual way to hide a teacher from `parameters()`) and in
    closures of hooks. Keyed by identity: the hash of a torchmetrics module changes with its state.
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
    """An instance of the user's class, or of a library's similar one, whose state is in its attributes."""
    # a class made at run time (the batches of torch_geometric) has the module "abc": its base says more
    root = next(name for base in type(item).__mro__ if (name := _package(base.__module__)) != "abc")
    if root in _CLOSED or (root in sys.stdlib_module_names and root not in _NAMESPACES):
        return False
    attributes = getattr(item, "__dict__", None)
    if type(attributes) is not dict or isinstance(item, (type, nn.Module, Tensor, Dataset)):
        return False
    return not any(_package(type(value).__module__) in _CONCURRENT for value in attributes.values())


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

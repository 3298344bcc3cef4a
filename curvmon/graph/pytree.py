"""Nested containers of tensors: batches and module outputs of any shape."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor

from curvmon.errors import InputError
from curvmon.isolation.reachable_objects import is_plain_object


def map_tensors(
    tree: Any, function: Callable[[Tensor], Tensor], other: Callable[[Any], Any] = lambda item: item
) -> Any:
    """A copy of `tree` with function(tensor) for every tensor, and other(item) for what is no tensor or container.

    Containers keep their types.
    """
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, MutableMapping):
        return refilled(tree, {key: map_tensors(value, function, other) for key, value in tree.items()})
    if isinstance(tree, Mapping):
        return {key: map_tensors(value, function, other) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(value, function, other) for value in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(map_tensors(value, function, other) for value in tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        result = copy.copy(tree)
        for field in dataclasses.fields(tree):
            # object.__setattr__: a frozen dataclass is copied as well
            object.__setattr__(result, field.name, map_tensors(getattr(tree, field.name), function, other))
        return result
    return other(tree)


def map_all_tensors(tree: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """`map_tensors`, also in the attributes of objects: classes for graphs or lists of images."""
    copies: dict[int, tuple[Any, Any]] = {}
    """by id: the object, which is kept so that its id is not used again, and its copy"""

    def other(item: Any) -> Any:
        if id(item) not in copies:
            copied = is_plain_object(item) and _holds_tensor(item, {})
            copies[id(item)] = item, copy.copy(item) if copied else item
            if copied:
                attributes = vars(copies[id(item)][1])
                attributes.update({name: map_tensors(value, function, other) for name, value in attributes.items()})
        return copies[id(item)][1]

    return map_tensors(tree, function, other)


def _holds_tensor(item: Any, seen: dict[int, Any]) -> bool:
    if isinstance(item, Tensor) or id(item) in seen:
        return isinstance(item, Tensor)
    seen[id(item)] = item
    below: Any = ()
    if isinstance(item, Mapping):
        below = item.values()
    elif isinstance(item, (list, tuple)):
        below = item
    elif is_plain_object(item):
        below = vars(item).values()
    return any(_holds_tensor(child, seen) for child in below)


def refilled(tree: MutableMapping[Any, Any], entries: Mapping[Any, Any]) -> Any:
    """A mapping of the same class with other values, also for classes that are no dict (Hugging Face's BatchEncoding).

    A class may keep its entries in an attribute that a copy shares with the original. Writing to the copy would change
    the original, and training would continue with a measurement's values.

    Raises:
        InputError: the entries are shared all the same.
    """
    before = dict(tree.items())
    stable = {key: value for key, value in before.items() if tree[key] is value}
    result: Any = copy.copy(tree)
    if not isinstance(tree, dict) and type(getattr(result, "__dict__", None)) is dict:
        attributes = vars(result)
        attributes.update({name: copy.copy(value) for name, value in attributes.items() if type(value) in (dict, list)})
    for key, value in entries.items():
        if value is not before[key]:
            result[key] = value
    if any(tree[key] is not value for key, value in stable.items()):
        for key, value in before.items():
            tree[key] = value
        raise InputError(f"a {type(tree).__name__} shares its entries with its copies; pass batches as a dict")
    return result


def named_tensors(tree: Any, path: str = "batch", objects: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Every tensor with its path in Python syntax, `batch["image"][0]`; with `objects` also those in attributes."""
    if objects:
        yield from _named_everywhere(tree, path, {})
        return
    if isinstance(tree, Tensor):
        yield path, tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from named_tensors(value, f"{path}[{key!r}]")
    elif isinstance(tree, (list, tuple)):
        for index, value in enumerate(tree):
            yield from named_tensors(value, f"{path}[{index}]")
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for field in dataclasses.fields(tree):
            yield from named_tensors(getattr(tree, field.name), f"{path}.{field.name}")


def _named_everywhere(tree: Any, path: str, seen: dict[int, Any]) -> Iterator[tuple[str, Tensor]]:
    """Objects may refer to each other in cycles: each is visited once."""
    if isinstance(tree, Tensor):
        yield path, tree
        return
    if id(tree) in seen:
        return
    seen[id(tree)] = tree
    below: list[tuple[str, Any]] = []
    if isinstance(tree, Mapping):
        below = [(f"{path}[{key!r}]", value) for key, value in tree.items()]
    elif isinstance(tree, (list, tuple)):
        below = [(f"{path}[{index}]", value) for index, value in enumerate(tree)]
    elif is_plain_object(tree):
        below = [(f"{path}.{name}", value) for name, value in vars(tree).items()]
    for child_path, value in below:
        yield from _named_everywhere(value, child_path, seen)


def first_floating(tree: Any) -> Tensor | None:
    """The tensor that is measured as a module's output: LSTM and attention modules return tuples."""
    return next((tensor for _, tensor in named_tensors(tree) if tensor.is_floating_point()), None)


def replace_first_floating(tree: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """`tree` with its first floating tensor replaced wherever it occurs; all other tensors are the same objects."""
    first = first_floating(tree)
    if first is None:
        return tree
    replacement = function(first)
    return map_tensors(tree, lambda tensor: replacement if tensor is first else tensor)

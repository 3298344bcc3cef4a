"""Nested containers of tensors: batches and module outputs of any shape."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor


def map_tensors(tree: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """A copy of `tree` with every tensor replaced; containers keep their types, unknown objects are shared."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, MutableMapping):
        mapping = copy.copy(tree)
        for key, value in tree.items():
            mapped = map_tensors(value, function)
            if mapped is not value:
                mapping[key] = mapped
        return mapping
    if isinstance(tree, Mapping):
        return {key: map_tensors(value, function) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(value, function) for value in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(map_tensors(value, function) for value in tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        result = copy.copy(tree)
        for field in dataclasses.fields(tree):
            # object.__setattr__: a frozen dataclass is copied as well
            object.__setattr__(result, field.name, map_tensors(getattr(tree, field.name), function))
        return result
    return tree


def named_tensors(tree: Any, path: str = "batch") -> Iterator[tuple[str, Tensor]]:
    """Every tensor with its address in Python syntax: `batch["image"][0]`."""
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


def first_floating(tree: Any) -> Tensor | None:
    """The tensor that stands for a module's output: LSTM and attention modules return tuples."""
    return next((tensor for _, tensor in named_tensors(tree) if tensor.is_floating_point()), None)


def replace_first_floating(tree: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """`tree` with its first floating tensor replaced wherever it stands; the rest is the same objects."""
    first = first_floating(tree)
    if first is None:
        return tree
    replacement = function(first)
    return map_tensors(tree, lambda tensor: replacement if tensor is first else tensor)

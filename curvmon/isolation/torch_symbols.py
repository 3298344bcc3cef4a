"""A name in torch that curvmon depends on: where it is, whether it exists, and its temporary replacement."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn


class MissingError(Exception):
    """The installed torch does not have a symbol."""


class Target(NamedTuple):
    """What is measured: some rows of the table apply to certain models only."""

    modules: Collection[nn.Module]
    devices: Collection[str]


@dataclass(eq=False)
class Symbol:
    """A row of the table: one name in torch.

    Attributes:
        path: "module:attribute.attribute"; the last attribute may be one of instances, set by the class's `__init__`.
        why: what goes wrong if torch's own value is kept, or what the name is used for.
        missing: what it means for a measurement if torch does not have the name.
        versions: versions of torch in which the row was checked.
        older: the path in earlier versions of torch.
        replacement: takes torch's own value, returns the one during a measurement.
        context: instead of a replacement: takes torch's own function, returns the context manager to measure in.
        applies: whether the row matters for this target.
        is_valid: whether a value is of the kind that curvmon uses; one that is not counts as missing.
    """

    path: str
    why: str
    missing: str
    versions: str = "2.13"
    older: str = ""
    replacement: Callable[[Any], Any] | None = None
    context: Callable[[Any], AbstractContextManager[Any]] | None = None
    applies: Callable[[Target], bool] = lambda target: True
    is_valid: Callable[[Any], bool] = lambda value: True

    @property
    def attribute(self) -> str:
        return self.path.replace(":", ".").rpartition(".")[2]

    def owner(self) -> tuple[Any, str] | None:
        """The object that has the attribute, and the attribute's name; None if there is no such attribute."""
        paths = [path for path in (self.path, self.older) if path]
        return next((place for place in map(_located, paths) if place is not None), None)

    def get(self, default: Any = None) -> Any:
        place = self.owner()
        value = default if place is None else getattr(*place)
        return value if self.is_valid(value) else default

    def note(self, error: Exception) -> str:
        name = self.path.replace(":", ".")
        if isinstance(error, MissingError):
            return f"torch {torch.__version__} has no {name}: {self.missing}"
        reason = f"({type(error).__name__}: {error})"
        return f"in torch {torch.__version__} {name} does not behave as expected {reason}: {self.missing}"

    def patched(self) -> AbstractContextManager[Any]:
        """The context to measure in.

        Raises:
            MissingError: torch does not have the name.
            TypeError: it is something else than expected.
        """
        place = self.owner()
        if place is None:
            raise MissingError(self.path)
        if hasattr(*place) and not self.is_valid(getattr(*place)):
            raise TypeError(f"unexpected {type(getattr(*place)).__name__}")
        if self.replacement is not None:
            return replaced(place[0], **{place[1]: self.replacement(getattr(*place))})
        return nullcontext() if self.context is None else self.context(getattr(*place))


def _located(path: str) -> tuple[Any, str] | None:
    module, _, attributes = path.partition(":")
    *parents, name = attributes.split(".")
    try:
        owner: Any = importlib.import_module(module)
        for parent in parents:
            owner = getattr(owner, parent)
    except (ImportError, AttributeError):
        return None
    return (owner, name) if hasattr(owner, name) or (isinstance(owner, type) and _of_instances(owner, name)) else None


def _of_instances(owner: type, name: str) -> bool:
    """Whether the class declares the attribute for its instances, or `__init__` sets it."""
    # torch.compile may replace nn.Module.__init__, which leaves the annotations
    code = getattr(getattr(owner, "__init__", None), "__code__", None)
    return name in getattr(owner, "__annotations__", {}) or (code is not None and name in code.co_names)


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Attributes of `owner` set for the life of the context."""
    before = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)

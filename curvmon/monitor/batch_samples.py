"""What is measured in a run: a batch (or a few), captured as it passes and fixed from then on.

Batches are never drawn: `iter()` of a user's DataLoader consumes random numbers and wakes workers up.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from curvmon.graph.pytree import map_all_tensors, map_tensors, named_tensors, refilled

MOST_STORED = 2**26
"""bytes of a probe batch that go into a checkpoint; a larger one is only recognised again"""


def owned(batch: Any) -> Any:
    """A copy that stays as it is, also of what was made in inference mode (Trainer.validate)."""
    with torch.inference_mode(False):
        return map_all_tensors(batch, lambda tensor: tensor.detach().clone())


def samples_in(batch: Any) -> int | None:
    """How many, if all tensors agree on it by their first dimension; None where that cannot be told."""
    sizes = {tensor.shape[0] if _has_rows(tensor) else None for _, tensor in named_tensors(batch)}
    return sizes.pop() if len(sizes) == 1 else None


def _has_rows(tensor: Tensor) -> bool:
    """Not sparse and not nested: neither can be cut, and a nested one need not even have a shape."""
    return tensor.layout is torch.strided and not tensor.is_nested and tensor.ndim > 0


def first_samples(batch: Any, count: int) -> Any:
    """The first `count` samples; the whole batch where it is not larger, or not made of rows."""
    size = samples_in(batch)
    if size is not None and size > count:
        with suppress(Exception):  # a class of its own that insists on the number of its rows
            return _cut(batch, size, slice(None, count))
    return batch


def _cut(tree: Any, size: int, rows: slice) -> Any:
    return _merged([tree], [size], lambda tensors: tensors[0][rows], lambda lists: lists[0][rows])


def _merged(trees: list[Any], sizes: list[int], tensor: Callable[[Any], Any], entries: Callable[[Any], Any]) -> Any:
    """A tree like the first, its tensors made of those of all, and so its lists of names or paths, one a sample."""
    tree = trees[0]
    if isinstance(tree, Tensor):
        return tensor(trees)

    def part(of: Callable[[Any], Any]) -> Any:
        return _merged([of(other) for other in trees], sizes, tensor, entries)

    if isinstance(tree, Mapping):
        # `keys()`: iterating over a TensorDict gives its rows
        found = {key: part(lambda other: other[key]) for key in tree.keys()}  # noqa: B023, SIM118
        return refilled(tree, found) if isinstance(tree, MutableMapping) and type(tree) is not dict else found
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(part(lambda other: other[i]) for i in range(len(tree))))  # noqa: B023
    if isinstance(tree, (list, tuple)):
        if all(len(t) == size for t, size in zip(trees, sizes)) and not any(True for _ in named_tensors(tree)):
            return entries(trees)
        return type(tree)(part(lambda other: other[i]) for i in range(len(tree)))  # noqa: B023
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        result = copy.copy(tree)
        for field in dataclasses.fields(tree):
            object.__setattr__(result, field.name, part(lambda other: getattr(other, field.name)))  # noqa: B023
        return result
    return tree


def halves(batch: Any) -> tuple[Any, Any] | None:
    """The first half of the samples and the rest; None where there are no two, or the batch is not made of rows."""
    size = samples_in(batch)
    if size is not None and size > 1:
        with suppress(Exception):  # as in `first_samples`
            return _cut(batch, size, slice(None, size // 2)), _cut(batch, size, slice(size // 2, None))
    return None


def joined(first: Any, second: Any) -> Any | None:
    """The samples of both; None where they do not fit together (padded to other lengths, or not made of rows)."""
    ours, theirs = list(named_tensors(first)), list(named_tensors(second))
    if samples_in(first) is None or samples_in(second) is None or [p for p, _ in ours] != [p for p, _ in theirs]:
        return None
    if any(a.shape[1:] != b.shape[1:] or a.dtype != b.dtype for (_, a), (_, b) in zip(ours, theirs)):
        return None
    sizes = [len(ours[0][1]), len(theirs[0][1])]
    try:
        return _merged([first, second], sizes, torch.cat, lambda lists: lists[0] + lists[1])
    except Exception:  # what is beside the tensors differs, or a class of its own insists on its rows
        return None


class Collector:
    """Takes batches until it has `size` samples `count` times; a batch whose size cannot be told is taken whole."""

    def __init__(self, size: int, count: int = 1) -> None:
        self._size = size
        self._count = count
        self.batches: list[Any] = []

    @property
    def complete(self) -> bool:
        return len(self.batches) == self._count and self._is_full(self.batches[-1])

    def _is_full(self, batch: Any) -> bool:
        samples = samples_in(batch)
        return samples is None or samples >= self._size

    def add(self, batch: Any) -> None:
        if self.complete:
            return
        if self.batches and not self._is_full(self.batches[-1]):
            larger = joined(self.batches[-1], batch)
            if larger is not None:
                self.batches[-1] = owned(first_samples(larger, self._size))
                return
        if len(self.batches) < self._count:
            self.batches.append(owned(first_samples(batch, self._size)))


def fingerprint(batches: list[Any]) -> str:
    """The same for equal tensors in the same places, on any device."""
    digest = hashlib.sha256()
    for batch in batches:
        for path, tensor in named_tensors(batch):
            if tensor.layout is not torch.strided:
                digest.update(str(tensor.layout).encode())
            for part in _dense_parts(tensor.detach()):
                digest.update(f"{path} {part.dtype} {tuple(part.shape)}".encode())
                digest.update(_bytes(part))
    return digest.hexdigest()


def _dense_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """What a sparse or nested tensor is made of; a dense one as it is."""
    if tensor.is_nested:
        return tensor.unbind()
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
        return tensor.indices(), tensor.values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)


def _bytes(tensor: Tensor) -> bytes:
    flat = tensor.cpu().as_subclass(Tensor).resolve_conj().resolve_neg().contiguous().reshape(-1)
    # not by its storage, which is that of the whole batch for a part of it, and takes seconds for a megabyte
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def stored(batches: list[Any]) -> list[list[Tensor]] | None:
    """The tensors alone, on the CPU: what a checkpoint can hold whatever the containers are; None if too large.

    None also for tensors of a class of their own, sparse and nested ones: a checkpoint with them could not be loaded
    with `weights_only`, by anybody.
    """
    tensors = [[tensor for _, tensor in named_tensors(batch)] for batch in batches]
    if any(type(t) is not Tensor or t.layout is not torch.strided or t.is_nested for row in tensors for t in row):
        return None
    if sum(t.numel() * t.element_size() for row in tensors for t in row) > MOST_STORED:
        return None
    return [[t.detach().cpu().clone() for t in row] for row in tensors]


def restored(batches: list[Any], tensors: list[list[Tensor]]) -> list[Any] | None:
    """`batches` with earlier tensors in them; None where these are of another kind."""
    if len(batches) != len(tensors):
        return None
    result = []
    for batch, row in zip(batches, tensors):
        present = [tensor for _, tensor in named_tensors(batch)]
        if any(type(t) is not Tensor or t.is_nested for t in present):
            return None
        if len(present) != len(row) or any(
            a.dtype != b.dtype or a.shape[1:] != b.shape[1:] for a, b in zip(present, row)
        ):
            return None
        following = iter(row)
        result.append(map_tensors(batch, lambda tensor: next(following).to(tensor.device)))  # noqa: B023
    return result

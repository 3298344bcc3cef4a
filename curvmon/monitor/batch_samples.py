"""Batches of any structure as lists of samples: capture, slice, concatenate, recognize, store.

Batches are captured during training. `iter()` of a user's DataLoader would consume random numbers and start workers.
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

MAX_STORED_BYTES = 2**26
"""largest probe batch in a checkpoint; of a larger one only the fingerprint is stored"""


def detached_copy(batch: Any) -> Any:
    """A copy that shares no memory with the batch, also of tensors of inference mode (Trainer.validate)."""
    with torch.inference_mode(False):
        return map_all_tensors(batch, lambda tensor: tensor.detach().clone())


def sample_count(batch: Any) -> int | None:
    """The first dimension, if it is the same for all tensors; None otherwise."""
    sizes = {tensor.shape[0] if _has_rows(tensor) else None for _, tensor in named_tensors(batch)}
    return sizes.pop() if len(sizes) == 1 else None


def _has_rows(tensor: Tensor) -> bool:
    """Neither sparse nor nested: these cannot be sliced, and a nested tensor may have no shape."""
    return tensor.layout is torch.strided and not tensor.is_nested and tensor.ndim > 0


def first_samples(batch: Any, count: int) -> Any:
    """The first `count` samples; the whole batch if it is not larger, or cannot be sliced."""
    size = sample_count(batch)
    if size is not None and size > count:
        with suppress(Exception):  # a custom class may insist on its number of rows
            return _sliced(batch, size, slice(None, count))
    return batch


def _sliced(tree: Any, size: int, rows: slice) -> Any:
    return _combined([tree], [size], lambda tensors: tensors[0][rows], lambda lists: lists[0][rows])


def _combined(trees: list[Any], sizes: list[int], tensor: Callable[[Any], Any], entries: Callable[[Any], Any]) -> Any:
    """A tree with the structure of the first.

    `tensor` makes its tensors from those of all trees; `entries` its lists without tensors (names, paths) that have one
    entry per sample. Everything else is that of the first tree.
    """
    tree = trees[0]
    if isinstance(tree, Tensor):
        return tensor(trees)

    def part(of: Callable[[Any], Any]) -> Any:
        return _combined([of(other) for other in trees], sizes, tensor, entries)

    if isinstance(tree, Mapping):
        # `keys()`: iterating over a TensorDict gives its rows
        entries_by_key = {key: part(lambda other: other[key]) for key in tree.keys()}  # noqa: B023, SIM118
        if isinstance(tree, MutableMapping) and type(tree) is not dict:
            return refilled(tree, entries_by_key)
        return entries_by_key
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
    """The first half of the samples and the rest; None for fewer than two samples or a batch that cannot be sliced."""
    size = sample_count(batch)
    if size is not None and size > 1:
        with suppress(Exception):  # as in `first_samples`
            return _sliced(batch, size, slice(None, size // 2)), _sliced(batch, size, slice(size // 2, None))
    return None


def concatenated(first: Any, second: Any) -> Any | None:
    """The samples of both batches; None if their shapes or structures differ (padded to other lengths, for example)."""
    ours, theirs = list(named_tensors(first)), list(named_tensors(second))
    if sample_count(first) is None or sample_count(second) is None or [p for p, _ in ours] != [p for p, _ in theirs]:
        return None
    if any(a.shape[1:] != b.shape[1:] or a.dtype != b.dtype for (_, a), (_, b) in zip(ours, theirs)):
        return None
    sizes = [len(ours[0][1]), len(theirs[0][1])]
    try:
        return _combined([first, second], sizes, torch.cat, lambda lists: lists[0] + lists[1])
    except Exception:  # entries without tensors differ, or a custom class insists on its number of rows
        return None


class Collector:
    """Collects `count` batches of `size` samples; a batch without a sample count is taken as a whole."""

    def __init__(self, size: int, count: int = 1) -> None:
        self._size = size
        self._count = count
        self.batches: list[Any] = []

    @property
    def complete(self) -> bool:
        return len(self.batches) == self._count and self._is_full(self.batches[-1])

    def _is_full(self, batch: Any) -> bool:
        samples = sample_count(batch)
        return samples is None or samples >= self._size

    def add(self, batch: Any) -> None:
        if self.complete:
            return
        if self.batches and not self._is_full(self.batches[-1]):
            larger = concatenated(self.batches[-1], batch)
            if larger is not None:
                self.batches[-1] = detached_copy(first_samples(larger, self._size))
                return
        if len(self.batches) < self._count:
            self.batches.append(detached_copy(first_samples(batch, self._size)))


def fingerprint(batches: list[Any]) -> str:
    """A hash of all tensors and their paths; the same on every device."""
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
    """The components of a sparse or nested tensor; a dense one as it is."""
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
    # not from its storage: for a slice that is the whole batch's, and takes seconds per megabyte
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def storable_tensors(batches: list[Any]) -> list[list[Tensor]] | None:
    """The tensors of all batches, on the CPU, without their containers; None if too large for a checkpoint.

    None also for tensor subclasses, sparse and nested tensors: a checkpoint that contains them cannot be loaded with
    `weights_only`.
    """
    tensors = [[tensor for _, tensor in named_tensors(batch)] for batch in batches]
    if any(type(t) is not Tensor or t.layout is not torch.strided or t.is_nested for row in tensors for t in row):
        return None
    if sum(t.numel() * t.element_size() for row in tensors for t in row) > MAX_STORED_BYTES:
        return None
    return [[t.detach().cpu().clone() for t in row] for row in tensors]


def with_tensors(batches: list[Any], tensors: list[list[Tensor]]) -> list[Any] | None:
    """`batches` with these tensors instead of their own; None if dtypes or shapes differ in more than the samples."""
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

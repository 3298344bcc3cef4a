"""How many samples a batch has, and the share of every batch in all samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from curvmon.errors import InputError
from curvmon.graph.arguments import batch_size
from curvmon.graph.pytree import named_tensors


def samples_of(batch: Any) -> int:
    """One where the batch does not say: it holds no tensor, or scalars only."""
    counts = any(tensor.is_nested or tensor.ndim for _, tensor in named_tensors(batch))
    return (batch_size(batch, 0) or 1) if counts else 1


def shares_of(batches: Sequence[Any]) -> list[float]:
    """The share of every batch in all samples. The sum of the batch losses with these weights is the mean over all.

    The number of samples is the size that most tensors have along their first dimension, over all batches together:
    class weights that come with every batch do not count samples.
    """
    if len(batches) == 1:
        return [1.0]
    tensors = [[t for _, t in named_tensors(batch, objects=True) if not t.is_nested] for batch in batches]
    sizes = [[len(tensor) if tensor.ndim else 1 for tensor in batch] for batch in tensors]
    if len({len(batch) for batch in sizes}) > 1:
        counts = [tuple(samples_of(batch) for batch in batches)]
    else:
        votes = Counter(zip(*sizes)) or Counter([(1,) * len(batches)])
        counts = [sample for sample, count in votes.items() if count == max(votes.values())]
    shares = {tuple(count / sum(each) for count in each) for each in counts if all(each)}
    if len(shares) != 1:
        raise InputError(
            f"more_batches: how many samples each batch has is not clear (sizes {', '.join(map(str, counts))}), and "
            f"their losses are weighted by that; pass batches of the same size"
        )
    return list(shares.pop())

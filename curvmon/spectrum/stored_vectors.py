"""Long vectors, stored in few matrices and perhaps in half precision, and their inner products.

    q̃ = q + δ,  ‖δ‖ < 5e-4 ‖q‖        half precision: half of the memory, and the error has no preferred direction

Products are computed with the rounded vectors, so that only H Q = Q T + F C is not exact, by as much as they are. They
are orthogonal to about 5e-4 / √n, n their length, and to 5e-4 where a few large entries make up a vector.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from curvmon.numerics import precise_dtype

ROWS = 4
"""most vectors that are allocated at a time"""
BLOCK = 2**26
"""entries of the vectors that are allocated at a time, unless a single one has more"""
CHUNK = 2**16
"""Entries of the vectors that are combined at a time on a CPU: they stay in its cache. Inner products of chunks are
summed in double precision; over millions of entries single precision loses three digits."""
MOST_COMBINED = 2**22
"""entries of the vectors that are combined at a time on an accelerator, for the memory of all of them"""


class StoredVectors:
    """Vectors of one length as the rows of a few matrices, so that adding some does not copy the others."""

    def __init__(self, like: Tensor, storage: torch.dtype | None = None) -> None:
        """`like`: vectors of this length, dtype and device, as rows. `storage`: dtype in which they are stored."""
        self._size, self._dtype = like.shape[1], like.dtype
        self._storage = storage or like.dtype
        self._rows = max(1, min(ROWS, BLOCK // max(self._size, 1)))
        self._blocks: list[Tensor] = []
        self.count = 0

    def __len__(self) -> int:
        return self.count

    def round(self, rows: Tensor) -> None:
        """Overwrite rows with what will be stored of them."""
        if self._storage != rows.dtype:
            for row in rows:
                row.copy_(row.to(self._storage))

    def append(self, rows: Tensor) -> None:
        for row in rows:
            if self.count % self._rows == 0:
                self._blocks.append(row.new_empty((self._rows, self._size), dtype=self._storage))
            self._blocks[-1][self.count % self._rows] = row
            self.count += 1

    def filled(self) -> list[Tensor]:
        """The matrices without their unused rows, in the dtype of the storage."""
        return [block[: self.count - i * self._rows] for i, block in enumerate(self._blocks)]

    def block_of(self, index: int) -> int:
        return index // self._rows

    def rows(self) -> list[Tensor]:
        """In the dtype of the storage."""
        return [row for block in self.filled() for row in block]

    def replace(self, coefficients: Tensor) -> None:
        """Overwrite the vectors with linear combinations of them (count x fewer), in their memory."""
        blocks, fewer = self.filled(), coefficients.shape[1]
        weights = coefficients.T.to(device=blocks[0].device, dtype=self._dtype)
        for chunk in chunks(blocks[0], MOST_COMBINED):
            rows = weights @ torch.cat([block[:, chunk] for block in blocks]).to(self._dtype)
            for block, part in zip(blocks, torch.split(rows, self._rows)):
                block[: len(part), chunk] = part
        self.count = fewer
        del self._blocks[-(-fewer // self._rows) :]


def chunks(rows: Tensor, most: int = 2**62) -> Iterator[slice]:
    """Parts of the columns; on an accelerator `most` columns each, because every operation takes a launch."""
    size = rows.shape[1]
    step = CHUNK if rows.device.type == "cpu" else max(1, min(size, most))
    return (slice(start, start + step) for start in range(0, size, step))


def inner_products(matrices: Sequence[Tensor], rows: Tensor) -> Tensor:
    """Inner products of the rows of all matrices with the given ones."""
    parts = [torch.cat([matrix[:, chunk].to(rows) @ rows[:, chunk].T for matrix in matrices]) for chunk in chunks(rows)]
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0, dtype=precise_dtype(rows))


def take_projections(rows: Tensor, matrices: Sequence[Tensor]) -> Tensor:
    """Subtract the projections on the rows of all matrices, in place; returns the inner products."""
    inner = inner_products(matrices, rows)
    weights = torch.split(inner.T.to(rows), [len(matrix) for matrix in matrices], dim=1)
    for chunk in chunks(rows):
        part = rows[:, chunk]
        for weight, matrix in zip(weights, matrices):
            part.addmm_(weight, matrix[:, chunk].to(rows), alpha=-1)
    return inner

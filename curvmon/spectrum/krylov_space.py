"""Krylov spaces that grow from a block of starting vectors, one product or several at a time, in bounded memory.

    H Q = Q T + F C        Q: orthonormal basis, T = Q^T H Q, F: orthonormal, orthogonal to Q; its columns are the front

All images H Q lie in the span of the basis and of the front, which has no more columns than there were starting
vectors: a product with a direction F c moves this direction into the basis and adds at most one new column to the
front. A Ritz pair (θ, Q u) has the residual

    H Q u - θ Q u = F C u,    ‖F C u‖ = ‖C u‖

and an eigenvalue of H lies within that distance of θ. So the residuals of all Ritz pairs are known from small matrices
on the host, and the direction of the worst one is the best direction to expand. With one starting vector and one
product at a time this is Lanczos' method (1950) with full reorthogonalisation, which it needs: in finite precision the
basis loses orthogonality as soon as a Ritz pair converges (Paige 1971). A restart keeps some Ritz vectors and the front
(thick restart: Wu & Simon 2000).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from curvmon.errors import NonFiniteError
from curvmon.numerics import NOT_FINITE, precise_dtype

Products = Callable[[Tensor], Tensor]
"""images of the columns of a matrix"""
ROWS = 8
"""vectors that are allocated at a time"""
CHUNK = 2**20
"""entries of the vectors that are combined at a time"""
CANCELLATION = 0.1
"""what remains of a vector after a projection is projected again if it is shorter than this share of the vector"""


class RitzPairs(NamedTuple):
    """Approximate eigenvalues in ascending order.

    Attributes:
        values: float64, on the CPU.
        residuals: residual of every value; an eigenvalue of the operator lies within that distance.
        coefficients: of the Ritz vectors w.r.t. the basis, one column per value.
        directions: C u, one column per value: residual vectors w.r.t. the front.
    """

    values: Tensor
    residuals: Tensor
    coefficients: Tensor
    directions: Tensor


class Vectors:
    """Vectors of one length as the rows of a few matrices, so that adding some does not copy the others."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._blocks: list[Tensor] = []
        self.count = 0

    def __len__(self) -> int:
        return self.count

    def append(self, rows: Tensor) -> None:
        for row in rows:
            if self.count % ROWS == 0:
                self._blocks.append(row.new_empty((ROWS, self._size)))
            self._blocks[-1][self.count % ROWS] = row
            self.count += 1

    def filled(self) -> list[Tensor]:
        """The matrices without their unused rows."""
        return [block[: self.count - i * ROWS] for i, block in enumerate(self._blocks)]

    def rows(self) -> list[Tensor]:
        return [row for block in self.filled() for row in block]

    def dot(self, rows: Tensor) -> Tensor:
        """Inner products of all vectors with the given ones, count x given."""
        return torch.cat([block @ rows.T for block in self.filled()]) if self.count else rows.new_zeros((0, len(rows)))

    def combined(self, coefficients: Tensor) -> Tensor:
        """Linear combinations as rows, one for each column of the coefficients (count x combinations)."""
        blocks = self.filled()
        parts = torch.split(coefficients, [len(block) for block in blocks])
        total = parts[0].T @ blocks[0]
        for part, block in zip(parts[1:], blocks[1:]):
            total.addmm_(part.T, block)
        return total

    def replace(self, coefficients: Tensor) -> None:
        """Overwrite the vectors with linear combinations of them (count x fewer), in their memory."""
        blocks, fewer = self.filled(), coefficients.shape[1]
        weights = coefficients.T.to(blocks[0])
        for start in range(0, self._size, CHUNK):
            rows = weights @ torch.cat([block[:, start : start + CHUNK] for block in blocks])
            for block, part in zip(blocks, torch.split(rows, ROWS)):
                block[: len(part), start : start + CHUNK] = part
        self.count = fewer
        del self._blocks[-(-fewer // ROWS) :]


class KrylovSpace:
    """A Krylov space whose Ritz pairs are known after every product.

    It belongs to the operator restricted to the complement of the `locked` vectors.

    Attributes:
        basis: Q.
        front: F, its columns as rows; at first the starting vectors.
        projected: T, float64 on the CPU.
        products: so far.
    """

    def __init__(self, products: Products, starts: Tensor, *, locked: Sequence[Tensor] = ()) -> None:
        """`starts`: the starting vectors as rows, of any length; what depends on the others is dropped."""
        self._products = products
        self._locked = Vectors(starts.shape[1])
        for vector in locked:
            self._locked.append(vector.unsqueeze(0))
        self.basis = Vectors(starts.shape[1])
        self._dimension = starts.shape[1] - len(locked)
        self.projected = torch.zeros((0, 0), dtype=torch.float64, device="cpu")
        self._scale = self._asymmetry = 0.0
        self.products = 0
        lengths = torch.linalg.vector_norm(starts, dim=1, keepdim=True, dtype=precise_dtype(starts))
        rest = self.orthogonalised(starts / lengths.clamp_min(torch.finfo(starts.dtype).tiny).to(starts))
        self.front = _orthonormal(rest, _on_host(rest @ rest.T))[0][: self._dimension]
        self._coupling = torch.zeros((len(self.front), 0), dtype=torch.float64, device="cpu")
        """C"""

    @property
    def exhausted(self) -> bool:
        """The space is invariant: further products add nothing."""
        return len(self.front) == 0

    @property
    def asymmetry(self) -> float:
        """Largest |<p, Hq> - <q, Hp>| so far, relative to ‖H‖: rounding, or wrong products."""
        return self._asymmetry / self._scale if self._scale else 0.0

    def ritz_pairs(self) -> RitzPairs:
        values, vectors = torch.linalg.eigh(self.projected)
        directions = self._coupling @ vectors
        return RitzPairs(values, torch.linalg.vector_norm(directions, dim=0), vectors, directions)

    def restart(self, coefficients: Tensor) -> None:
        """Keep these Ritz vectors, in the memory of the basis, and the front."""
        self.basis.replace(coefficients)
        self.projected = coefficients.T @ self.projected @ coefficients
        self._coupling = self._coupling @ coefficients

    def expand(self, directions: Tensor | None = None) -> None:
        """Products with the span of some directions of the front (front x few); by default with all of the front.

        Raises:
            NonFiniteError: an image is not finite.
        """
        few = len(self.front) if directions is None else directions.shape[1]
        if directions is not None and len(self.front) > 1:
            rotation = torch.linalg.qr(directions, mode="complete").Q.T
            self.front = rotation.to(self.front) @ self.front
            self._coupling = rotation @ self._coupling
        fresh, kept = self.front[:few], self.front[few:]
        expected, coupling = self._coupling[:few], self._coupling[few:]
        images = self._products(fresh.T).T
        self.products += few
        inner, lengths, rest, gram = self._projected_out(images)
        old = len(self.basis)
        above, own, aside = torch.split(inner, [old, few, len(kept)])
        self._scale = max(self._scale, lengths.max().item())
        skew = torch.cat([(above - expected.T).flatten(), (own - own.T).flatten()])
        self._asymmetry = max(self._asymmetry, skew.abs().max().item())
        own = (own + own.T) / 2
        self.projected = torch.cat([torch.cat([self.projected, above], dim=1), torch.cat([above.T, own], dim=1)])
        self.basis.append(fresh)
        if len(self.basis) >= self._dimension:
            self.front, self._coupling = fresh[:0], self.projected[:0]
            return
        added, shares = _orthonormal(rest, gram)
        self.front = torch.cat([kept, added])
        self._coupling = torch.cat(
            [
                torch.cat([coupling, aside], dim=1),
                torch.cat([shares.new_zeros((len(added), old)), (lengths.unsqueeze(1) * shares).T], dim=1),
            ]
        )

    def orthogonalised(self, rows: Tensor) -> Tensor:
        """Rows without their projections on the locked vectors and the basis."""
        for _ in range(2):  # cancellation in the first projection leaves components behind
            for vectors in (self._locked, self.basis):
                if len(vectors):
                    rows = rows - vectors.combined(vectors.dot(rows))
        return rows

    def _projected_out(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Inner products with basis and front, lengths, what remains of the images of unit length, its Gram matrix."""
        before = torch.linalg.vector_norm(images, dim=1, dtype=precise_dtype(images)).to(images)
        # if the loss is scaled by 1e-20, squares would underflow in single precision
        rest = images / before.clamp_min(torch.finfo(images.dtype).tiny).unsqueeze(1)
        few, old = len(images), len(self.basis)
        total = torch.zeros((old + len(self.front), few), dtype=torch.float64, device="cpu")
        for is_last in (False, True):
            inner = torch.cat([self.basis.dot(rest), self.front @ rest.T])
            rest = rest - inner[old:].T @ self.front
            for vectors, weights in ((self.basis, inner[:old]), (self._locked, self._locked.dot(rest))):
                if len(vectors):
                    rest -= vectors.combined(weights)
            # one copy to the host
            numbers = _on_host(torch.cat([inner.flatten(), (rest @ rest.T).flatten(), before]))
            if not torch.isfinite(numbers).all():
                raise NonFiniteError(NOT_FINITE)
            flat, gram, lengths = torch.split(numbers, [inner.numel(), few**2, few])
            total += flat.reshape(total.shape)
            gram = gram.reshape(few, few)
            if is_last or gram.diagonal().min() >= CANCELLATION**2:
                break
        return total * lengths, lengths, rest, gram


def _orthonormal(rows: Tensor, gram: Tensor) -> tuple[Tensor, Tensor]:
    """Orthonormal rows B with the same span, and X such that rows = X B; `gram` is rows rows^T, on the host.

    Rows of rounding size (for rows that were of unit length once) and what depends on other rows are dropped.
    """
    shares = torch.eye(len(rows), dtype=torch.float64, device="cpu")
    eps = torch.finfo(rows.dtype).eps
    for _ in range(2):  # the first time, rounding is that of rows that depend on each other
        sizes = gram.diagonal().clamp_min(0).sqrt()
        significant = sizes > 10 * eps
        scale = torch.where(significant, 1 / sizes, 0.0)
        values, vectors = torch.linalg.eigh(scale.unsqueeze(1) * gram * scale)
        kept = values > 10 * eps * len(values)
        values, vectors = values[kept], vectors[:, kept]
        shares = shares @ (sizes.unsqueeze(1) * vectors * values.sqrt())
        rows = (vectors / values.sqrt()).T.mul(scale).to(rows) @ rows
        if len(rows) <= 1 or values[0] > 0.1:
            break
        gram = _on_host(rows @ rows.T)
    return rows, shares


def _on_host(x: Tensor) -> Tensor:
    return x.cpu().double()

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
from curvmon.numerics import NOT_FINITE, SAFE, precise_dtype, row_norms_squared
from curvmon.spectrum.stored_vectors import StoredVectors, chunks, inner_products, take_projections

Products = Callable[[Tensor], Tensor]
"""images of the columns of a matrix"""
MOST_ROUNDS = 3
"""of projecting a product on all of the basis; one does, unless it takes more than it leaves"""


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


class KrylovSpace:
    """A Krylov space whose Ritz pairs are known after every product.

    It belongs to the operator restricted to the complement of the `locked` vectors.

    Attributes:
        basis: Q.
        front: F, its columns as rows; at first the starting vectors.
        projected: T, float64 on the CPU.
        products: so far.
    """

    def __init__(
        self,
        products: Products,
        starts: Tensor,
        *,
        locked: Sequence[Tensor] = (),
        storage: torch.dtype | None = None,
    ) -> None:
        """`starts`: the starting vectors as rows, of any length; what depends on the others is dropped.

        `storage`: dtype in which the basis is stored; None: that of the starting vectors.
        """
        self._products = products
        self._locked = StoredVectors(starts)
        for vector in locked:
            self._locked.append(vector.unsqueeze(0))
        self.basis = StoredVectors(starts, storage)
        self._dimension = starts.shape[1] - len(locked)
        self.projected = torch.zeros((0, 0), dtype=torch.float64, device="cpu")
        self._scale = self._asymmetry = 0.0
        self.products = 0
        starts = starts.clone()
        _normalize(starts, _lengths(starts))
        rest = self.orthogonalised(starts)
        self.front = _orthonormal(rest, _on_host(inner_products([rest], rest)))[0][: self._dimension]
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
        self.basis.round(fresh)
        expected, coupling = self._coupling[:few], self._coupling[few:]
        inner, lengths, rest, gram = self._projected_out(self._images(fresh), expected)
        self.products += few
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
        self.front = torch.cat([kept, added]) if len(kept) else added
        self._coupling = torch.cat(
            [
                torch.cat([coupling, aside], dim=1),
                torch.cat([shares.new_zeros((len(added), old)), (lengths.unsqueeze(1) * shares).T], dim=1),
            ]
        )

    def orthogonalised(self, rows: Tensor, rounds: int = 2) -> Tensor:
        """Rows without their projections on the locked vectors and the basis; they are overwritten.

        One round is enough for random rows: in others, cancellation leaves components behind.
        """
        for _ in range(rounds):
            for vectors in (self._locked, self.basis):
                if len(vectors):
                    take_projections(rows, vectors.filled())
        return rows

    def _images(self, rows: Tensor) -> Tensor:
        """In memory of their own: they are overwritten."""
        images = self._products(rows.T).T
        shared = images.untyped_storage().data_ptr() == rows.untyped_storage().data_ptr()
        return images.clone() if shared else images

    def _projected_out(self, rest: Tensor, expected: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Inner products with basis and front, lengths, what remains of the images of unit length, its Gram matrix.

        Overwrites the images. `expected`: their inner products with the basis, as H is symmetric.
        """
        before = _lengths(rest)
        _normalize(rest, before)
        few, old = len(rest), len(self.basis)
        own, locked = [*self.basis.filled(), self.front], self._locked.filled()
        # first what Lanczos' recurrence has, then all: what cancels only once grows from product to product
        # (Giraud et al. 2005)
        recent = self.basis.block_of(int(expected.any(0).int().argmax())) if expected.any() else len(own) - 1
        near = take_projections(rest, own[recent:])
        total = torch.cat([near.new_zeros((old + len(self.front) - len(near), few)), near])
        for _ in range(MOST_ROUNDS):
            late = take_projections(rest, own)
            total = total + late
            if locked:
                take_projections(rest, locked)
            # one copy to the host
            parts = [total, late.square().sum(0), inner_products([rest], rest).to(total), before.to(total)]
            numbers = _on_host(torch.cat([part.flatten() for part in parts]))
            if not torch.isfinite(numbers).all():
                raise NonFiniteError(NOT_FINITE)
            inner, taken, gram, lengths = torch.split(numbers, [total.numel(), few, few**2, few])
            gram = gram.reshape(few, few)
            if (taken <= gram.diagonal()).all():
                break
        return inner.reshape(-1, few) * lengths, lengths, rest, gram


def _orthonormal(rows: Tensor, gram: Tensor) -> tuple[Tensor, Tensor]:
    """Orthonormal rows B with the same span, and X such that rows = X B; `gram` is rows rows^T, on the host.

    A single row is overwritten. Rows of rounding size (for rows that were of unit length once) and what depends on
    other rows are dropped.
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
        factors = (vectors / values.sqrt()).T.mul(scale).to(rows)
        rows = rows.mul_(factors) if factors.shape == (1, 1) else factors @ rows
        if len(rows) <= 1 or values[0] > 0.1:
            break
        gram = _on_host(inner_products([rows], rows))
    return rows, shares


def _lengths(rows: Tensor) -> Tensor:
    """In double precision; on a CPU only where single precision may not do."""
    if rows.device.type == "cpu":
        lengths = row_norms_squared(rows).sqrt()
        if bool(((lengths > SAFE) & (lengths < 1 / SAFE)).all()):
            return lengths
    dtype = precise_dtype(rows)
    parts: list[Tensor] = [torch.linalg.vector_norm(rows[:, chunk], dim=1, dtype=dtype) for chunk in chunks(rows)]
    return parts[0] if len(parts) == 1 else torch.stack(parts).norm(dim=0)


def _normalize(rows: Tensor, lengths: Tensor) -> None:
    """In place: rows of unit length."""
    rows.div_(lengths.to(rows).clamp_min(torch.finfo(rows.dtype).tiny).unsqueeze(1))


def _on_host(x: Tensor) -> Tensor:
    return x.cpu().double()

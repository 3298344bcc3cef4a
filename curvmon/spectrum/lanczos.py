"""Lanczos' method (1950) with full reorthogonalisation and thick restarts (Wu & Simon 2000), in bounded memory.

    H Q = Q T + β q e^T        Q: orthonormal basis, T = Q^T H Q, q: next basis vector, e: last unit vector

One product per step. In finite precision the basis loses orthogonality as soon as a Ritz pair converges (Paige 1971),
and copies of the same eigenvalue appear; so every new vector is orthogonalised against the whole basis, twice. T is
stored in full, so that the same code serves before and after a restart. A Ritz pair (θ, Q s) has the residual

    ‖H Q s - θ Q s‖ = β |s_last|

and an eigenvalue of H lies within that distance of θ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from curvmon.numerics import norm

Product = Callable[[Tensor], Tensor]
CHUNK = 2**20
"""entries of the basis vectors that are combined at a time"""


class RitzPairs(NamedTuple):
    """Approximate eigenvalues, the largest in descending order, then the smallest in descending order.

    Attributes:
        values: float64, on the CPU.
        residuals: residual of every value; an eigenvalue of the operator lies within that distance.
        coefficients: coefficients of the Ritz vectors w.r.t. the basis, one column per value.
    """

    values: Tensor
    residuals: Tensor
    coefficients: Tensor


class Lanczos:
    """A Krylov space whose Ritz pairs are available after every step.

    It stores at most `capacity` + 1 vectors, all orthogonal to the `locked` ones: it belongs to the operator restricted
    to their complement.

    Attributes:
        basis: the columns of Q.
        projected: T = Q^T H Q, float64 on the CPU.
        products: so far.
        exhausted: the space is invariant; further steps from this start add nothing.
    """

    def __init__(self, product: Product, start: Tensor, *, capacity: int, locked: Sequence[Tensor] = ()) -> None:
        self._product = product
        self._locked = list(locked)
        self._dimension = len(start) - len(self._locked)
        self._capacity = max(2, capacity)
        self.basis: list[Tensor] = []
        self.projected = torch.zeros((0, 0), dtype=torch.float64, device="cpu")
        self._beta = 0.0
        self._expected = torch.zeros(0, dtype=torch.float64, device="cpu")
        """Q^T H q for the next q, if H is symmetric"""
        self._scale = 0.0
        self._asymmetry = 0.0
        self.products = 0
        rest, _ = self.orthogonalised(start)
        length = norm(rest)
        self.exhausted = self._dimension == 0 or length == 0
        self._next = rest / (length or 1.0)

    def step(self, top: int, bottom: int) -> None:
        """One product. At full capacity, restart first with the `top` largest and `bottom` smallest Ritz vectors."""
        if len(self.basis) == self._capacity:
            self._restart(top, bottom)
        self.basis.append(self._next)
        image = self._product(self._next)
        self.products += 1
        scale = norm(image)
        image, column = self.orthogonalised(image)
        self._scale = max(self._scale, scale)
        if len(self._expected):
            self._asymmetry = max(self._asymmetry, (column[:-1] - self._expected).abs().max().item())
        projected = torch.zeros((len(column), len(column)), dtype=torch.float64, device="cpu")
        projected[:-1, :-1] = self.projected
        projected[-1], projected[:, -1] = column, column
        self.projected = projected
        self._beta = norm(image)
        # in an invariant space, only rounding remains of the image
        if len(self.basis) >= self._dimension or self._beta <= 10 * torch.finfo(image.dtype).eps * scale:
            self._beta, self.exhausted = 0.0, True
        else:
            self._next = image.div_(self._beta)
        self._expected = torch.zeros_like(column)
        self._expected[-1] = self._beta

    @property
    def asymmetry(self) -> float:
        """Largest |<p, Hq> - <q, Hp>| so far, relative to ‖H‖: rounding, or wrong products."""
        return self._asymmetry / self._scale if self._scale else 0.0

    def ritz_pairs(self, top: int, bottom: int) -> RitzPairs:
        """The `top` largest and the `bottom` smallest ones."""
        values, vectors = torch.linalg.eigh(self.projected)
        order = _extremal(len(values), top, bottom)
        chosen = vectors[:, order]
        return RitzPairs(values[order], self._beta * chosen[-1].abs(), chosen)

    def replace_basis(self, top: int, bottom: int) -> list[Tensor]:
        """Overwrite the basis with the Ritz vectors of `ritz_pairs`, in its memory, and return it."""
        coefficients = self.ritz_pairs(top, bottom).coefficients
        weights = coefficients.T.to(self.basis[0])
        for start in range(0, len(self.basis[0]), CHUNK):
            rows = torch.stack([vector[start : start + CHUNK] for vector in self.basis])
            for vector, combined in zip(self.basis, weights @ rows):
                vector[start : start + CHUNK] = combined
        del self.basis[len(weights) :]
        return self.basis

    def orthogonalised(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x minus its projections on the locked and the basis vectors, and the coefficients of the latter."""
        total = torch.zeros(len(self.basis), dtype=torch.float64, device="cpu")
        vectors = [*self._locked, *self.basis]
        x = x.clone()
        for _ in range(2 if vectors else 0):  # cancellation in the first pass leaves components behind
            coefficients = torch.stack([vector.dot(x) for vector in vectors])
            for vector, coefficient in zip(vectors, coefficients.unbind()):
                x.addcmul_(vector, coefficient, value=-1)
            total += coefficients[len(self._locked) :].cpu().double()
        return x, total

    def _restart(self, top: int, bottom: int) -> None:
        """Thick restart: the extremal Ritz vectors become the basis, and the next vector stays the same."""
        bottom = min(bottom, self._capacity - 2)
        top = min(top, self._capacity - 1 - bottom)
        ritz = self.ritz_pairs(top, bottom)
        self.replace_basis(top, bottom)
        self.projected = torch.diag(ritz.values)
        self._expected = self._beta * ritz.coefficients[-1]


def _extremal(size: int, top: int, bottom: int) -> list[int]:
    """Indices into ascending values: the `top` largest, largest first, then the `bottom` smallest of the others."""
    top = min(top, size)
    bottom = max(0, min(bottom, size - top))
    return [*range(size - 1, size - 1 - top, -1), *range(bottom - 1, -1, -1)]

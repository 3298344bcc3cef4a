"""Lanczos' method with full reorthogonalisation and thick restarts: both ends of a spectrum, in bounded memory.

Every step multiplies one vector. The projected matrix T = Q^T H Q is kept as a whole, so that the same code serves
before and after a restart: H Q = Q T + β q e^T, e the last unit vector. A Ritz pair (θ, Q s) has the residual
‖H Q s - θ Q s‖ = β |s_last|, and an eigenvalue of H lies within that distance of θ. Nothing else counts as converged.
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


class Ritz(NamedTuple):
    """Approximate eigenvalues, largest first, and how far an eigenvalue may be from each; float64, on the CPU."""

    values: Tensor
    residuals: Tensor
    coefficients: Tensor
    """of the vectors in the basis, as columns"""


class Lanczos:
    """A Krylov space that can be asked for the ends of the spectrum at any time.

    It holds at most `capacity` + 1 vectors, all of them orthogonal to `locked`: what is looked at is the operator on
    the complement of those.
    """

    def __init__(self, product: Product, start: Tensor, *, capacity: int, locked: Sequence[Tensor] = ()) -> None:
        self._product = product
        self._locked = list(locked)
        self._room = len(start) - len(self._locked)
        self._capacity = max(2, capacity)
        self.basis: list[Tensor] = []
        self.projected = torch.zeros((0, 0), dtype=torch.float64, device="cpu")
        """Q^T H Q"""
        self._beta = 0.0
        self._coupled = torch.zeros(0, dtype=torch.float64, device="cpu")
        """Q^T H q for the next q, as far as H is symmetric"""
        self._scale = 0.0
        self._asymmetry = 0.0
        self.products = 0
        rest, _ = self.outside(start)
        length = norm(rest)
        self.exhausted = self._room == 0 or length == 0
        """the space is invariant: nothing more is to be found from this start"""
        self._following = rest / (length or 1.0)

    def step(self, top: int, bottom: int) -> None:
        """One product more; at full capacity, first a restart that keeps so many Ritz vectors of either end."""
        if len(self.basis) == self._capacity:
            self._restart(top, bottom)
        self.basis.append(self._following)
        image = self._product(self._following)
        self.products += 1
        scale = norm(image)
        image, column = self.outside(image)
        self._scale = max(self._scale, scale)
        if len(self._coupled):
            self._asymmetry = max(self._asymmetry, (column[:-1] - self._coupled).abs().max().item())
        grown = torch.zeros((len(column), len(column)), dtype=torch.float64, device="cpu")
        grown[:-1, :-1] = self.projected
        grown[-1], grown[:, -1] = column, column
        self.projected = grown
        self._beta = norm(image)
        # what is left of an image in an invariant space is rounding
        if len(self.basis) >= self._room or self._beta <= 10 * torch.finfo(image.dtype).eps * scale:
            self._beta, self.exhausted = 0.0, True
        else:
            self._following = image.div_(self._beta)
        self._coupled = torch.zeros_like(column)
        self._coupled[-1] = self._beta

    @property
    def asymmetry(self) -> float:
        """Largest |<p, Hq> - <q, Hp>| that was seen, relative to ‖H‖: rounding, or products that are wrong."""
        return self._asymmetry / self._scale if self._scale else 0.0

    def ends(self, top: int, bottom: int) -> Ritz:
        values, vectors = torch.linalg.eigh(self.projected)
        order = _outermost(len(values), top, bottom)
        chosen = vectors[:, order]
        return Ritz(values[order], self._beta * chosen[-1].abs(), chosen)

    def reduce(self, top: int, bottom: int) -> list[Tensor]:
        """The Ritz vectors of `ends`, in place of the basis."""
        coefficients = self.ends(top, bottom).coefficients
        weights = coefficients.T.to(self.basis[0])
        for start in range(0, len(self.basis[0]), CHUNK):
            rows = torch.stack([vector[start : start + CHUNK] for vector in self.basis])
            for vector, combined in zip(self.basis, weights @ rows):
                vector[start : start + CHUNK] = combined
        del self.basis[len(weights) :]
        return self.basis

    def outside(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x without its parts in the locked and the basis vectors, and the coefficients of the latter."""
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
        """Thick: the outermost Ritz vectors stay, and the direction that was to be next."""
        bottom = min(bottom, self._capacity - 2)
        top = min(top, self._capacity - 1 - bottom)
        ritz = self.ends(top, bottom)
        self.reduce(top, bottom)
        self.projected = torch.diag(ritz.values)
        self._coupled = self._beta * ritz.coefficients[-1]


def _outermost(size: int, top: int, bottom: int) -> list[int]:
    """Indices into ascending values: the `top` largest, largest first, then the `bottom` smallest of the others."""
    top = min(top, size)
    bottom = max(0, min(bottom, size - top))
    return [*range(size - 1, size - 1 - top, -1), *range(bottom - 1, -1, -1)]

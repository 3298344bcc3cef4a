"""Looks for the ends of a spectrum, its trace and its density, with one Krylov space after the other."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from curvmon.numerics import gaussian, norm, small_sample_factor
from curvmon.operators.protocol import SymmetricOperator
from curvmon.records import Density
from curvmon.spectrum.lanczos import Lanczos, Product

EXTRA_VECTORS = 20
"""basis vectors beyond k: what bounds the memory"""
TRACE_PROBES = 10
FEW_DIMENSIONS = 2**16
DENSITY_RUNS, DENSITY_STEPS = 4, 20
FLOOR = 1e-4
"""of the largest magnitude: a residual this small always counts as converged, however small the eigenvalue"""
FRESH_STEPS = 8
"""products at least before a second start may say that it finds nothing"""


class Found(NamedTuple):
    """Eigenvalues from the top, largest first, and the smallest as the last one; with vectors and residuals."""

    values: Tensor
    residuals: Tensor
    vectors: list[Tensor]

    def settled(self, rtol: float, k: int) -> Tensor:
        return self.residuals <= tolerances(self.values, rtol, k)


def tolerances(values: Tensor, rtol: float, k: int) -> Tensor:
    """How large a residual may be: `rtol` of the eigenvalue itself for the first k, of the largest for the smallest.

    An eigenvalue among the bulk around zero need not be known to a share of itself. The smallest one is often part of
    the bulk; what matters is whether it is large beside λ_1.
    """
    largest = values.abs().max()
    allowed = torch.maximum(rtol * values.abs(), min(rtol, FLOOR) * largest)
    allowed[k:] = rtol * largest
    return allowed


class Search:
    """Looks for the ends of the spectrum with several Krylov spaces, one after the other.

    In memory at any time: k + 1 eigenvectors, and the vectors of one space.
    """

    def __init__(
        self,
        operator: SymmetricOperator,
        k: int,
        rtol: float,
        limit: int,
        generator: torch.Generator,
        smallest: bool = True,
    ) -> None:
        self._operator = operator
        self._k = min(k, operator.size)
        self._rtol = rtol
        self._limit = limit
        self._generator = generator
        self._waited_for = self._k + 1 if smallest else self._k
        self.capacity = self._k + EXTRA_VECTORS - 3
        """vectors of one space"""

    def _is_done(self, values: Tensor, residuals: Tensor) -> bool:
        enough = residuals <= tolerances(values, self._rtol, self._k)
        return bool(enough[: self._waited_for].all())

    def random(self) -> Tensor:
        return gaussian(self._operator.template.expand(self._operator.size), 1, self._generator).squeeze(1)

    def _first(self, start: Tensor | None) -> Tensor:
        random = self.random()
        if start is None:
            return random
        # a new direction may have come up since: keep some chance for it
        mixed: Tensor = start / norm(start) + 0.1 * random / norm(random)
        return mixed

    def ends(self, start: Tensor | None) -> Lanczos:
        """A Krylov space that holds the k largest eigenvalues and the smallest one, as far as the limit allows."""
        space = Lanczos(self._operator.matvec, self._first(start), capacity=self.capacity)
        while not space.exhausted and space.products < self._limit:
            space.step(self._k + 3, 2)
            ritz = space.ends(self._k, 1)
            enough = len(space.basis) > self._k
            if enough and self._is_done(ritz.values, ritz.residuals):
                break
        return space

    def found(self, start: Tensor | None, verify: bool) -> tuple[Found, bool]:
        """The ends, and whether another start found nothing else."""
        return self.verified(self.extract(self.ends(start)), verify)

    def verified(self, found: Found, wanted: bool) -> tuple[Found, bool]:
        """`verify`, if wanted or needed, and if there is something settled to start from."""
        missing = len(found.values) < self._k  # an invariant space that is too small
        if (wanted or missing) and self._is_done(found.values, found.residuals):
            return self.verify(found)
        return found, False

    def extract(self, space: Lanczos) -> Found:
        ritz = space.ends(self._k, 1)
        return Found(ritz.values, ritz.residuals, space.reduce(self._k, 1))

    def verify(self, found: Found) -> tuple[Found, bool]:
        """Look for what the first Krylov space does not hold, and add what belongs to the ends.

        That is a further copy of an eigenvalue, always, and an eigenvalue to which the start was nearly orthogonal, by
        bad luck. A second start, orthogonal to what was found, goes on until its own ends have settled. Returns whether
        the last start found nothing.
        """
        while len(found.values) < self._operator.size:
            few = len(found.values) <= self._k
            scale = tolerances(found.values, self._rtol, self._k).min().item()
            space = Lanczos(self._operator.matvec, self.random(), capacity=EXTRA_VECTORS - 4, locked=found.vectors)
            settled = space.exhausted
            while not (space.exhausted or settled) and self._operator.products < self._limit:
                space.step(3, 2)
                enough = space.products >= FRESH_STEPS
                # the smallest one is part of it only where it is waited for
                settled = enough and bool((space.ends(1, self._waited_for - self._k).residuals <= scale).all())
            if not space.basis:
                return found, False
            ritz = space.ends(1, 1)
            found, changed = self._merged(found, Found(ritz.values, ritz.residuals, space.reduce(1, 1)), few, scale)
            if not changed:
                return found, settled or space.exhausted
        return found, True

    def _merged(self, found: Found, fresh: Found, few: bool, scale: float) -> tuple[Found, bool]:
        """The ends of both together, and whether the second one changed anything."""
        values = torch.cat([found.values, fresh.values])
        residuals = torch.cat([found.residuals, fresh.residuals])
        vectors = [*found.vectors, *fresh.vectors]
        order = values.argsort(descending=True, stable=True).tolist()
        kept = [*order[: self._k], *order[self._k :][-1:]]
        merged = Found(values[kept], residuals[kept], [vectors[i] for i in kept])
        moved = (merged.values - found.values).abs()[: self._waited_for] if not few else None
        changed = len(kept) > len(found.values) if moved is None else bool((moved > scale).any())
        return (merged, True) if changed else (found, False)

    def top(self, product: Product, start: Tensor) -> tuple[float, bool]:
        """The largest eigenvalue of another operator, from a vector close to its own; and whether it has converged."""
        # as much chance as guess: a start that is an eigenvector already would end the search there
        random = self.random()
        start = start + random / torch.linalg.vector_norm(random)
        space = Lanczos(product, start, capacity=EXTRA_VECTORS - 4)
        while not space.exhausted and space.products < self._limit:
            space.step(3, 0)
            ritz = space.ends(1, 0)
            if ritz.residuals[0] <= self._rtol * ritz.values.abs().max():
                return ritz.values[0].item(), True
        return (space.ends(1, 0).values[0].item() if space.basis else 0.0), space.exhausted

    def density(self) -> Density:
        """Gauss quadrature of the spectral measure of random vectors: Ritz values with squared first components."""
        values, weights = [], []
        for _ in range(DENSITY_RUNS):
            space = Lanczos(self._operator.matvec, self.random(), capacity=DENSITY_STEPS)
            while not space.exhausted and space.products < DENSITY_STEPS:
                space.step(1, 1)
            nodes, vectors = torch.linalg.eigh(space.projected)
            values.append(nodes)
            weights.append(vectors[0].square() / DENSITY_RUNS)
        return Density(torch.cat(values), torch.cat(weights))

    def trace(self, space: Lanczos) -> tuple[float, float]:
        """tr T + d E u^T H u, u a random unit vector outside the basis, where there are d dimensions."""
        known, size = space.projected.trace().item(), space.projected.diagonal().abs().sum().item()
        eps = torch.finfo(self._operator.template.dtype).eps
        dimensions = self._operator.size - len(space.basis)
        if dimensions == 0:
            return known, 10 * eps * size
        probes: list[Tensor] = []
        samples = []
        for _ in range(min(TRACE_PROBES, dimensions)):
            probe, _ = space.outside(self.random())
            # orthogonal to each other, sampling without replacement; among many dimensions they are anyway
            for earlier in [*probes, *probes]:
                probe = probe - earlier.dot(probe) * earlier
            probe = probe / torch.linalg.vector_norm(probe)
            samples.append(probe.dot(self._operator.matvec(probe)).item())
            if dimensions <= FEW_DIMENSIONS:
                probes.append(probe)
        values = torch.tensor(samples, dtype=torch.float64, device="cpu")
        total = known + dimensions * values.mean().item()
        rounding = 10 * eps * (size + dimensions * values.abs().mean().item())
        if len(values) == dimensions:
            return total, rounding
        spread = values.std().item() * math.sqrt((1 - len(values) / dimensions) / len(values))
        return total, math.hypot(dimensions * spread * small_sample_factor(len(values) - 1), rounding)

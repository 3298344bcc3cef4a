"""Extremal eigenvalues, trace and spectral density of a symmetric operator, from Krylov spaces."""

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
"""basis vectors beyond k; they bound the memory"""
TRACE_PROBES = 10
FEW_DIMENSIONS = 2**16
DENSITY_RUNS, DENSITY_STEPS = 4, 20
FLOOR = 1e-4
"""share of the largest magnitude: a residual this small always counts as converged, however small the eigenvalue"""
MIN_VERIFICATION_STEPS = 8
"""products of another start before it may count as having no further eigenvalue"""


class Eigenpairs(NamedTuple):
    """The k largest eigenvalues in descending order, then the smallest one, with residuals and unit eigenvectors."""

    values: Tensor
    residuals: Tensor
    vectors: list[Tensor]

    def converged(self, rtol: float, k: int) -> Tensor:
        return self.residuals <= tolerances(self.values, rtol, k)


def tolerances(values: Tensor, rtol: float, k: int) -> Tensor:
    """Largest residual that counts as converged: rtol |λ_i| for the first k, rtol max|λ| for the smallest eigenvalue.

    The smallest eigenvalue is often part of the bulk around zero. What matters is its size compared with λ_1.
    """
    largest = values.abs().max()
    allowed = torch.maximum(rtol * values.abs(), min(rtol, FLOOR) * largest)
    allowed[k:] = rtol * largest
    return allowed


class EigenvalueSearch:
    """Extremal eigenpairs from several Krylov spaces, one after the other.

    Memory: k + 1 eigenvectors and the vectors of one Krylov space.
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
        """`limit`: of all products of the operator. `smallest`: the smallest eigenvalue has to converge, too."""
        self._operator = operator
        self._k = min(k, operator.size)
        self._rtol = rtol
        self._limit = limit
        self._generator = generator
        self._required = self._k + 1 if smallest else self._k
        self.capacity = self._k + EXTRA_VECTORS - 3
        """vectors of one Krylov space"""

    def eigenpairs(self, start: Tensor | None, verify: bool) -> tuple[Eigenpairs, bool]:
        """Extremal eigenpairs, and whether another start found nothing else."""
        return self.verified(self.extract(self.krylov_space(start)), verify)

    def krylov_space(self, start: Tensor | None) -> Lanczos:
        """Lanczos steps until the k largest eigenvalues and the smallest one have converged, or to the limit."""
        space = Lanczos(self._operator.matvec, self._perturbed(start), capacity=self.capacity)
        while not space.exhausted and space.products < self._limit:
            space.step(self._k + 3, 2)
            ritz = space.ritz_pairs(self._k, 1)
            if len(space.basis) > self._k and self._have_converged(ritz.values, ritz.residuals):
                break
        return space

    def extract(self, space: Lanczos) -> Eigenpairs:
        """The Ritz pairs of a Krylov space, which cannot be used afterwards."""
        ritz = space.ritz_pairs(self._k, 1)
        return Eigenpairs(ritz.values, ritz.residuals, space.replace_basis(self._k, 1))

    def verified(self, pairs: Eigenpairs, verify: bool) -> tuple[Eigenpairs, bool]:
        """Run `verify` on converged eigenpairs, if asked for or if some are missing."""
        missing = len(pairs.values) < self._k  # an invariant space that is too small
        if (verify or missing) and self._have_converged(pairs.values, pairs.residuals):
            return self.verify(pairs)
        return pairs, False

    def verify(self, pairs: Eigenpairs) -> tuple[Eigenpairs, bool]:
        """Search the orthogonal complement of the eigenvectors for eigenpairs that the first Krylov space missed.

        In exact arithmetic a Krylov space contains one copy of a multiple eigenvalue, and no eigenvector orthogonal to
        its start. Repeat from random starts until one finds nothing. Returns the merged eigenpairs, and whether the
        last start found nothing.
        """
        while len(pairs.values) < self._operator.size:
            scale = tolerances(pairs.values, self._rtol, self._k).min().item()
            space = Lanczos(self._operator.matvec, self._random(), capacity=EXTRA_VECTORS - 4, locked=pairs.vectors)
            converged = space.exhausted
            while not (space.exhausted or converged) and self._operator.products < self._limit:
                space.step(3, 2)
                if space.products >= MIN_VERIFICATION_STEPS:
                    # the smallest eigenvalue counts only if it is required
                    residuals = space.ritz_pairs(1, self._required - self._k).residuals
                    converged = bool((residuals <= scale).all())
            if not space.basis:
                return pairs, False
            ritz = space.ritz_pairs(1, 1)
            others = Eigenpairs(ritz.values, ritz.residuals, space.replace_basis(1, 1))
            merged = self._merged(pairs, others)
            if not self._differ(pairs, merged, scale):
                return pairs, converged or space.exhausted
            pairs = merged
        return pairs, True

    def largest(self, product: Product, start: Tensor) -> tuple[float, bool]:
        """The largest eigenvalue of another operator and whether it has converged; `start` approximates its vector."""
        # an exact eigenvector, but of another eigenvalue, would end the search: add a random vector of the same size
        random = self._random()
        start = start + random / torch.linalg.vector_norm(random)
        space = Lanczos(product, start, capacity=EXTRA_VECTORS - 4)
        while not space.exhausted and space.products < self._limit:
            space.step(3, 0)
            ritz = space.ritz_pairs(1, 0)
            if ritz.residuals[0] <= self._rtol * ritz.values.abs().max():
                return ritz.values[0].item(), True
        return (space.ritz_pairs(1, 0).values[0].item() if space.basis else 0.0), space.exhausted

    def density(self) -> Density:
        """Stochastic Lanczos quadrature (Ubaru, Chen & Saad 2017; Ghorbani et al. 2019 for neural networks).

        The density is that of Σ_i τ_i² δ(θ_i), averaged over random starts: θ the Ritz values, τ the first components
        of the eigenvectors of the projected matrix. Costs DENSITY_RUNS * DENSITY_STEPS products.
        """
        values, weights = [], []
        for _ in range(DENSITY_RUNS):
            space = Lanczos(self._operator.matvec, self._random(), capacity=DENSITY_STEPS)
            while not space.exhausted and space.products < DENSITY_STEPS:
                space.step(1, 1)
            nodes, vectors = torch.linalg.eigh(space.projected)
            values.append(nodes)
            weights.append(vectors[0].square() / DENSITY_RUNS)
        return Density(torch.cat(values), torch.cat(weights))

    def deflated_trace(self, space: Lanczos) -> tuple[float, float]:
        """tr H = tr Q^T H Q + d E u^T H u and its standard error; one product per probe.

        Q is the basis of the Krylov space, u a random unit vector in its complement of dimension d: Girard's (1989)
        estimator for what the basis does not contain. Exact if the probes span the complement.
        """
        projected, size = space.projected.trace().item(), space.projected.diagonal().abs().sum().item()
        eps = torch.finfo(self._operator.template.dtype).eps
        dimensions = self._operator.size - len(space.basis)
        if dimensions == 0:
            return projected, 10 * eps * size
        probes: list[Tensor] = []
        samples = []
        for _ in range(min(TRACE_PROBES, dimensions)):
            probe, _ = space.orthogonalised(self._random())
            # orthogonal to each other: sampling without replacement. In many dimensions they are almost so anyway
            for earlier in [*probes, *probes]:
                probe = probe - earlier.dot(probe) * earlier
            probe = probe / torch.linalg.vector_norm(probe)
            samples.append(probe.dot(self._operator.matvec(probe)).item())
            if dimensions <= FEW_DIMENSIONS:
                probes.append(probe)
        values = torch.tensor(samples, dtype=torch.float64, device="cpu")
        total = projected + dimensions * values.mean().item()
        rounding = 10 * eps * (size + dimensions * values.abs().mean().item())
        if len(values) == dimensions:
            return total, rounding
        spread = values.std().item() * math.sqrt((1 - len(values) / dimensions) / len(values))
        return total, math.hypot(dimensions * spread * small_sample_factor(len(values) - 1), rounding)

    def _random(self) -> Tensor:
        return gaussian(self._operator.template.expand(self._operator.size), 1, self._generator).squeeze(1)

    def _perturbed(self, start: Tensor | None) -> Tensor:
        """The start with a random component: it may be orthogonal to a new leading eigenvector."""
        random = self._random()
        if start is None:
            return random
        mixed: Tensor = start / norm(start) + 0.1 * random / norm(random)
        return mixed

    def _have_converged(self, values: Tensor, residuals: Tensor) -> bool:
        converged = residuals <= tolerances(values, self._rtol, self._k)
        return bool(converged[: self._required].all())

    def _merged(self, pairs: Eigenpairs, others: Eigenpairs) -> Eigenpairs:
        """The extremal eigenpairs of both."""
        values = torch.cat([pairs.values, others.values])
        residuals = torch.cat([pairs.residuals, others.residuals])
        vectors = [*pairs.vectors, *others.vectors]
        order = values.argsort(descending=True, stable=True).tolist()
        kept = [*order[: self._k], *order[self._k :][-1:]]
        return Eigenpairs(values[kept], residuals[kept], [vectors[i] for i in kept])

    def _differ(self, pairs: Eigenpairs, merged: Eigenpairs, scale: float) -> bool:
        """Whether there are more eigenvalues, or required ones that differ by more than `scale`."""
        if len(pairs.values) <= self._k:
            return len(merged.values) > len(pairs.values)
        return bool(((merged.values - pairs.values).abs()[: self._required] > scale).any())

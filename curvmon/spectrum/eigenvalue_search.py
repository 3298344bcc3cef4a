"""Extremal eigenvalues, trace and spectral density of a symmetric operator, from Krylov spaces."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from curvmon.numerics import gaussian, normalized, rademacher, small_sample_factor
from curvmon.operators.protocol import SymmetricOperator
from curvmon.records import Density
from curvmon.spectrum.krylov_space import KrylovSpace, Products, RitzPairs

EXTRA_VECTORS = 20
"""vectors beyond k; they bound the memory"""
TRACE_PROBES = 10
FEW_DIMENSIONS = 2**16
DENSITY_RUNS, DENSITY_STEPS = 4, 20
FLOOR = 1e-4
"""share of the largest magnitude: a residual this small always counts as converged, however small the eigenvalue"""
FEW_PRODUCTS = 4
"""for the largest eigenvalue of another operator, when the limit is reached already"""
OTHER_VECTORS = 5
"""how much larger the error of a product may be for another vector than for the first"""
SHARE_OF_LARGEST = 0.1
"""error of a small eigenvalue, in errors of the largest"""
MIN_VERIFICATION_STEPS = 8
"""products of another start before it may count as having no further eigenvalue"""


class Eigenpairs(NamedTuple):
    """The k largest eigenvalues in descending order, then the smallest one, with error bars and unit eigenvectors.

    `vectors`: in the dtype in which the search stores them. `converged`: whether each is as exact as the search wants.
    """

    values: Tensor
    residuals: Tensor
    vectors: list[Tensor]
    converged: Tensor


class Accuracy(NamedTuple):
    """An eigenvalue counts as converged if its residual, a bound of its error, is below a share of its own magnitude.

    Attributes:
        first: share for the largest eigenvalue.
        others: share for the others of the k largest.
        smallest: share for the smallest eigenvalue; `smallest_floor` replaces its magnitude where that is smaller.
        smallest_floor: as a share of the largest magnitude. The smallest eigenvalue is often part of the bulk around
            zero: what matters is its size compared with λ_1.
    """

    first: float
    others: float
    smallest: float
    smallest_floor: float = 1.0

    @classmethod
    def uniform(cls, rtol: float) -> Accuracy:
        return cls(rtol, rtol, rtol)

    def tolerances(self, values: Tensor, k: int) -> Tensor:
        """For the k largest values and the smallest one."""
        sizes = values.abs()
        largest = sizes.max()
        shares = torch.full_like(values, self.others)
        shares[:1], shares[k:] = self.first, self.smallest
        sizes[k:] = sizes[k:].clamp_min(self.smallest_floor * largest)
        return torch.maximum(shares * sizes, min(self.first, FLOOR) * largest)


class EigenvalueSearch:
    """Extremal eigenpairs from several Krylov spaces, one after the other.

    Memory: k + 1 eigenvectors and the vectors of one Krylov space.
    """

    def __init__(
        self,
        operator: SymmetricOperator,
        k: int,
        accuracy: Accuracy,
        limit: int,
        generator: torch.Generator,
        smallest: bool = True,
        width: int = 1,
        storage: torch.dtype | None = None,
    ) -> None:
        """
        Args:
            operator: whose eigenvalues are searched.
            k: number of the largest ones.
            accuracy: when they count as converged.
            limit: of all products of the operator.
            generator: draws random vectors.
            smallest: the smallest eigenvalue has to converge, too.
            width: products that run in one launch.
            storage: dtype in which the basis of `krylov_space` is stored; None: that of the vectors.
        """
        self._storage = storage
        self._operator = operator
        self._k = min(k, operator.size)
        self._accuracy = accuracy
        self._limit = limit
        self._generator = generator
        self._required = self._k + 1 if smallest else self._k
        self._width = width
        self.capacity = self._k + EXTRA_VECTORS - 3
        """vectors of one Krylov space"""

    def eigenpairs(self, starts: Tensor | None, verify: bool) -> tuple[Eigenpairs, bool]:
        """Extremal eigenpairs, and whether another start found nothing else."""
        return self.verified(self.extract(self.krylov_space(starts)), verify)

    def krylov_space(self, starts: Tensor | None) -> KrylovSpace:
        """Products until the k largest eigenvalues and the smallest one have converged, or to the limit.

        First with all of the starting vectors (rows; None: a random one), then with the worst residual, or with as many
        residuals as run in one launch.
        """
        starts = self._random() if starts is None else starts
        space = KrylovSpace(self._operator.unchecked, starts, storage=self._storage)
        del starts  # their memory
        space.expand()
        while not space.exhausted and self._operator.products < self._limit:
            self._restart_if_full(space, self.capacity, self._k + 3, 2)
            ritz = space.ritz_pairs()
            chosen = _extremal(len(ritz.values), self._k, 1)
            excess = self._residuals_per_tolerance(ritz, chosen)[: self._required]
            if len(chosen) > self._k and excess.max() <= 1:
                break
            few = min(self._width, len(space.front), self._limit - self._operator.products)
            worst = [chosen[i] for i in excess.argsort(descending=True).tolist()]
            space.expand(ritz.directions[:, worst[:few]])
        return space

    def _residuals_per_tolerance(self, ritz: RitzPairs, chosen: list[int]) -> Tensor:
        return self._error_bars(ritz)[chosen] / self._accuracy.tolerances(ritz.values[chosen], self._k)

    def _error_bars(self, ritz: RitzPairs) -> Tensor:
        """Residuals, and what errors of products and of vectors add: most along sharp directions, some along all."""
        stored = 0.0 if self._storage is None else torch.finfo(self._storage).eps / 2
        error = OTHER_VECTORS * self._operator.relative_error + stored
        sizes = ritz.values.abs()
        return ritz.residuals + error * (sizes + SHARE_OF_LARGEST * sizes.max())

    def extract(self, space: KrylovSpace) -> Eigenpairs:
        """The Ritz pairs of a Krylov space, which is left with them alone."""
        ritz = space.ritz_pairs()
        chosen = _extremal(len(ritz.values), self._k, 1)
        converged = self._residuals_per_tolerance(ritz, chosen) <= 1
        space.restart(ritz.coefficients[:, chosen])
        return Eigenpairs(ritz.values[chosen], self._error_bars(ritz)[chosen], space.basis.rows(), converged)

    def verified(self, pairs: Eigenpairs, verify: bool) -> tuple[Eigenpairs, bool]:
        """Run `verify` on converged eigenpairs, if asked for or if some are missing."""
        missing = len(pairs.values) < self._k  # an invariant space that is too small
        if (verify or missing) and pairs.converged[: self._required].all():
            return self.verify(pairs)
        return pairs, False

    def verify(self, pairs: Eigenpairs) -> tuple[Eigenpairs, bool]:
        """Search the orthogonal complement of the eigenvectors for eigenpairs that the first Krylov space missed.

        In exact arithmetic a Krylov space contains one copy of a multiple eigenvalue, and no eigenvector orthogonal to
        its start. Repeat from random starts until one finds nothing. Returns the merged eigenpairs, and whether the
        last start found nothing.
        """
        while len(pairs.values) < self._operator.size:
            scale = self._accuracy.tolerances(pairs.values, self._k).min().item()
            space = KrylovSpace(self._operator.unchecked, self._random(), locked=pairs.vectors)
            converged = space.exhausted
            # the smallest eigenvalue counts only if it is required
            bottom = self._required - self._k
            while not (space.exhausted or converged) and self._operator.products < self._limit:
                self._restart_if_full(space, EXTRA_VECTORS - 4, 3, 2)
                space.expand()
                if space.products >= MIN_VERIFICATION_STEPS:
                    ritz = space.ritz_pairs()
                    converged = bool((ritz.residuals[_extremal(len(ritz.values), 1, bottom)] <= scale).all())
            if not len(space.basis):
                return pairs, False
            merged = self._merged(pairs, space)
            if not self._differ(pairs, merged, scale):
                return pairs, converged or space.exhausted
            pairs = merged
        return pairs, True

    def largest(self, products: Products, start: Tensor) -> tuple[float, bool]:
        """The largest eigenvalue of another operator and whether it has converged; `start` approximates its vector."""
        # an exact eigenvector, but of another eigenvalue, would end the search
        space = KrylovSpace(products, self.perturbed(start.to(self._operator.template)))
        limit = max(FEW_PRODUCTS, self._limit - self._operator.products)
        while not space.exhausted and space.products < limit:
            self._restart_if_full(space, EXTRA_VECTORS - 4, 3, 0)
            space.expand()
            ritz = space.ritz_pairs()
            if self._error_bars(ritz)[-1] <= self._accuracy.others * ritz.values.abs().max():
                return ritz.values[-1].item(), True
        return (space.ritz_pairs().values[-1].item() if space.products else 0.0), space.exhausted

    def density(self) -> Density:
        """Stochastic Lanczos quadrature (Ubaru, Chen & Saad 2017; Ghorbani et al. 2019 for neural networks).

        The density is that of Σ_i τ_i² δ(θ_i), averaged over random starts: θ the Ritz values, τ the first components
        of the eigenvectors of the projected matrix. Costs DENSITY_RUNS * DENSITY_STEPS products.
        """
        values, weights = [], []
        for _ in range(DENSITY_RUNS):
            space = KrylovSpace(self._operator.unchecked, self._random())
            while not space.exhausted and space.products < DENSITY_STEPS:
                space.expand()
            ritz = space.ritz_pairs()
            values.append(ritz.values)
            weights.append(ritz.coefficients[0].square() / DENSITY_RUNS)
        return Density(torch.cat(values), torch.cat(weights))

    def deflated_trace(self, space: KrylovSpace, probes: int = TRACE_PROBES) -> tuple[float, float]:
        """tr H = tr Q^T H Q + d E u^T H u and its standard error; one product per probe.

        Q is the basis of the Krylov space, u a random unit vector in its complement of dimension d: Girard's (1989)
        estimator for what the basis does not contain. Exact if the probes span the complement.
        """
        projected, size = space.projected.trace().item(), space.projected.diagonal().abs().sum().item()
        eps = torch.finfo(self._operator.template.dtype).eps + self._operator.relative_error / 10
        dimensions = self._operator.size - len(space.basis)
        if dimensions == 0:
            return projected, 10 * eps * size
        count = min(probes, dimensions)
        if dimensions <= FEW_DIMENSIONS:
            vectors = space.orthogonalised(torch.cat([self._random() for _ in range(count)]))
            # orthogonal to each other: sampling without replacement. In many dimensions they are almost so anyway
            vectors = torch.linalg.qr(vectors.T).Q
            samples = (vectors * self._operator.matmat_of_random(vectors)).sum(0)
        else:  # one at a time, for their memory
            samples = torch.cat([self._outside(space) for _ in range(count)]) / dimensions
        values = samples.cpu().double()
        total = projected + dimensions * values.mean().item()
        rounding = 10 * eps * (size + dimensions * values.abs().mean().item())
        if len(values) == dimensions:
            return total, rounding
        spread = values.std().item() * math.sqrt((1 - len(values) / dimensions) / len(values))
        return total, math.hypot(dimensions * spread * small_sample_factor(len(values) - 1), rounding)

    def _outside(self, space: KrylovSpace) -> Tensor:
        """z^T H z for random signs without their part in the space: tr H outside of it, on average."""
        signs = rademacher(self._operator.template.expand(1, self._operator.size), self._generator)
        column = space.orthogonalised(signs, rounds=1).T
        return (column * self._operator.matmat_of_random(column)).sum(0)

    def perturbed(self, start: Tensor) -> Tensor:
        """The start with a random component, as a row: it may be orthogonal to a new leading eigenvector."""
        random = self._random()
        mixed: Tensor = normalized(start) + 0.1 * normalized(random)
        return mixed

    def around(self, start: Tensor) -> Tensor:
        """Starting vectors for a search, as rows: `perturbed`, and random ones where several run in one launch."""
        if self._width == 1:
            return self.perturbed(start)
        # a generator of their own: what follows draws the same numbers on every device
        own = torch.Generator("cpu").manual_seed(1)
        others = gaussian(self._operator.template.expand(self._operator.size), self._k, own).T
        return torch.cat([self.perturbed(start), others])

    def _random(self) -> Tensor:
        """One row."""
        return gaussian(self._operator.template.expand(self._operator.size), 1, self._generator).T

    def _restart_if_full(self, space: KrylovSpace, capacity: int, top: int, bottom: int) -> None:
        """Keep the `top` largest and the `bottom` smallest Ritz vectors."""
        if len(space.basis) >= capacity:
            bottom = min(bottom, capacity - 2)
            top = min(top, capacity - 1 - bottom)
            coefficients = space.ritz_pairs().coefficients
            space.restart(coefficients[:, _extremal(len(coefficients), top, bottom)])

    def _merged(self, pairs: Eigenpairs, space: KrylovSpace) -> Eigenpairs:
        """The extremal eigenpairs of both."""
        ritz = space.ritz_pairs()
        others = _extremal(len(ritz.values), 1, 1)
        space.restart(ritz.coefficients[:, others])
        values = torch.cat([pairs.values, ritz.values[others]])
        residuals = torch.cat([pairs.residuals, self._error_bars(ritz)[others]])
        vectors = [*pairs.vectors, *space.basis.rows()]
        order = values.argsort(descending=True, stable=True).tolist()
        kept = [*order[: self._k], *order[self._k :][-1:]]
        converged = residuals[kept] <= self._accuracy.tolerances(values[kept], self._k)
        return Eigenpairs(values[kept], residuals[kept], [vectors[i] for i in kept], converged)

    def _differ(self, pairs: Eigenpairs, merged: Eigenpairs, scale: float) -> bool:
        """Whether there are more eigenvalues, or required ones that differ by more than `scale`."""
        if len(pairs.values) <= self._k:
            return len(merged.values) > len(pairs.values)
        return bool(((merged.values - pairs.values).abs()[: self._required] > scale).any())


def _extremal(size: int, top: int, bottom: int) -> list[int]:
    """Indices into ascending values: the `top` largest, largest first, then the `bottom` smallest of the others."""
    top = min(top, size)
    bottom = max(0, min(bottom, size - top))
    return [*range(size - 1, size - 1 - top, -1), *range(bottom - 1, -1, -1)]

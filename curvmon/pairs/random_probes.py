"""Random probes for the part of a block outside the shared bases, and their standard errors.

    ‖P_v A P_w‖_F² = d E‖P_v A u‖²,   u a random unit vector in the range of P_w, which has d dimensions

(Hutchinson 1989). The probes at a node are orthogonal to each other: sampling without replacement, exact after d of
them. A probe at w is a sample for the pairs of w with all nodes; by symmetry, a probe at v is one for the pair (v, w)
as well. Functions of several norms (a ratio, a root) get their error by the delta method: every probe contributes the
linearised change of the function, which accounts for the correlation between blocks that share probes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from curvmon.numerics import gaussian, precise, small_sample_factor
from curvmon.operators.node_blocks import BlockOperator, Part, Products
from curvmon.pairs.shared_basis import SharedBasis

PARTS: tuple[Part, ...] = ("hessian", "gauss_newton", "remainder")
Term = tuple[float, Part, int, int]
"""(slope, part, v, w): slope times ‖P_v A P_w‖_F² for A = part"""

KEPT_IMAGES = 16
"""The images of this many probes at a node are kept, rounded up to a whole batch."""


class RestSamples:
    """Inner products <A z_i, A z_j> of the images of probes z_i = sqrt(d) u_i at w, for every row v and A = H, GN, T.

    A is short for P_v A P_w. The diagonal holds the samples ‖A z_i‖², the other entries give their variance: with
    G = A^T A and orthonormal u_i, uniformly distributed,

        Var (1/m) Σ_i ‖A z_i‖² = (2/m) (1 - m/d) E (z_i^T G z_j)²,   i != j

    m probes have m (m-1) / 2 such products, a better estimate than the sample variance of m values. The basis must not
    change once there are samples.
    """

    def __init__(self, operator: BlockOperator, basis: SharedBasis, rows: Sequence[int]) -> None:
        self._operator = operator
        self._basis = basis
        self._rows = rows
        self._probes = [precise(t.new_zeros((t.numel(), 0))) for t in operator.templates]
        self._images: dict[int, list[Products]] = defaultdict(list)
        # per node and (part, row), a matrix for every batch of probes
        self._products: list[dict[tuple[Part, int], list[Tensor]]] = [defaultdict(list) for _ in operator.templates]

    def count(self, w: int) -> int:
        return self._probes[w].shape[1]

    def directions(self) -> dict[int, tuple[Tensor, list[Products]]]:
        """The probes as unit vectors, with their images: they improve the spectral norms as well."""
        return {w: (self._probes[w][:, : _width(images)], images) for w, images in self._images.items()}

    def remaining(self, w: int) -> int:
        """Number of probes at w until they span the whole complement of the basis."""
        return self._dimension(w) - self.count(w)

    def _dimension(self, w: int) -> int:
        return self._basis.dimension(w) - self._basis.size(w)

    def add(self, counts: Mapping[int, int], generator: torch.Generator) -> int:
        """Add `counts[w]` probes at every node w, at most `remaining`; returns the number of HVPs."""
        spent = 0
        for w, count in counts.items():
            directions = self._new_directions(w, min(count, self.remaining(w)), generator)
            if directions.shape[1]:
                images = self._operator.columns(w, directions)
                self._keep(w, directions, images)
                spent += images.spent
        return spent

    def _keep(self, w: int, directions: Tensor, images: Products) -> None:
        if self.count(w) < KEPT_IMAGES:
            self._images[w].append(images)
        for v in self._rows:
            self._put(w, v, "hessian", images.hessian(v))
            if images.gauss_newton is not None:
                self._put(w, v, "gauss_newton", precise(images.gauss_newton[v]))
                self._put(w, v, "remainder", precise(images.remainder[v]))
        self._probes[w] = torch.cat([self._probes[w], directions], dim=1)

    def _new_directions(self, w: int, count: int, generator: torch.Generator) -> Tensor:
        """Orthonormal, uniformly distributed in the complement of the basis and of earlier probes."""
        directions = precise(gaussian(self._operator.templates[w], count, generator))
        for _ in range(2):  # cancellation in the first projection leaves components behind
            directions = self._basis.outside(w, directions)
            directions = torch.linalg.qr(directions - self._probes[w] @ (self._probes[w].T @ directions)).Q
        return directions

    def _put(self, w: int, v: int, part: Part, image: Tensor) -> None:
        """Adds the inner products of the images of z = sqrt(d) u, from those of the unit vectors u."""
        outside = self._basis.outside(v, image)
        self._products[w][part, v].append((outside.T @ outside * self._dimension(w)).cpu())

    def mean(self, part: Part, v: int, w: int) -> float:
        """Estimate of ‖P_v A P_w‖_F², pooled over the probes at both nodes; zero where a basis is complete."""
        if self._basis.is_complete(v) or self._basis.is_complete(w):
            return 0.0
        sides = self._sides(v, w)
        total = sum(m.trace().item() for row, at in sides for m in self._products[at][part, row])
        count = sum(self.count(at) for _, at in sides)
        return total / count if count else math.nan

    def _sides(self, v: int, w: int) -> list[tuple[int, int]]:
        """(row, node of the probes): both nodes of a pair, or the one at which the probes span the complement."""
        sides = [(v, w), (w, v)] if v != w else [(v, w)]
        return [(row, at) for row, at in sides if self.remaining(at) == 0][:1] or sides

    def spectral_norms(self, v: int, w: int) -> tuple[float, float]:
        """Estimated range of σ_max, the spectral norm of P_v H[v, w] P_w: Σσ⁴ / Σσ² <= σ_max² <= sqrt(Σσ⁴), from

        E (z_i^T G z_j)² = d² / ((d + 2)(d - 1)) (Σσ⁴ - (Σσ²)² / d)
        """
        second = self.mean("hessian", v, w)
        if not second > 0:
            return 0.0, 0.0
        estimates = []
        for row, at in self._sides(v, w):
            d = self._dimension(at)
            mixed = _mean_square_off_diagonal(self._products[at]["hessian", row])
            estimates.append(mixed * (d + 2) * (d - 1) / d**2 + second**2 / d)
        fourth = sum(estimates) / len(estimates)
        return math.sqrt(fourth / second), fourth**0.25

    def standard_error(self, terms: Iterable[Term]) -> float:
        """Standard error of Σ slope · ‖P_v A P_w‖_F² over `terms` (slope, part, v, w).

        The slopes are the derivatives of the function of interest (delta method). The sum is regrouped by the node of
        the probes: within a node the terms are combined probe by probe, because they are correlated; between nodes they
        are independent.
        """
        combined: dict[int, list[Tensor]] = {}
        size: dict[int, float] = defaultdict(float)
        for slope, part, v, w in terms:
            if slope == 0 or self._basis.is_complete(v) or self._basis.is_complete(w):
                continue
            sides = self._sides(v, w)
            total = sum(self.count(at) for _, at in sides)
            for row, at in sides:
                added = [slope * self.count(at) / total * m for m in self._products[at][part, row]]
                before = combined.get(at)
                combined[at] = added if before is None else [a + b for a, b in zip(before, added)]
                size[at] += sum(abs(m.trace().item()) for m in added) / self.count(at)
        if not combined:
            return 0.0
        variances = {at: self._variance(at, matrices, size[at]) for at, matrices in combined.items()}
        overall: float = sum(variances.values())
        if overall == 0 or math.isinf(overall):
            return overall
        # degrees of freedom of a sum of variances that are estimated from few probes each (Welch-Satterthwaite)
        degrees_of_freedom = 1 / sum((s / overall) ** 2 / (self.count(at) - 1) for at, s in variances.items() if s)
        return math.sqrt(overall) * small_sample_factor(int(degrees_of_freedom))

    def _variance(self, at: int, matrices: Sequence[Tensor], size: float) -> float:
        """Variance of the mean of the diagonals of `matrices`; `size` is that mean (of the terms' absolute values).

        The standard deviation of ‖A z‖² is proportional to its mean, with a factor r. A mean that is low by chance
        would come with too small an error. The error is therefore scaled to mean / (1 - r), the true value of which the
        observed mean is one standard error below.
        """
        if self.remaining(at) == 0:
            return 0.0
        if self.count(at) < 2:
            return math.inf
        population = 1 - self.count(at) / self._dimension(at)
        deviation = math.sqrt(2 * population / self.count(at) * _mean_square_off_diagonal(matrices))
        return (deviation / (1 - min(deviation / size, 0.8))) ** 2 if size else 0.0


def _width(images: Sequence[Products]) -> int:
    return sum(image.remainder[0].shape[1] for image in images)


def _mean_square_off_diagonal(matrices: Sequence[Tensor]) -> float:
    pairs = sum(len(m) * (len(m) - 1) for m in matrices)
    squares = sum((m.square().sum() - m.diagonal().square().sum()).item() for m in matrices)
    return squares / pairs if pairs else 0.0

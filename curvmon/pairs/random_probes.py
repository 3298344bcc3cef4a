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
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from curvmon.numerics import gaussian, precise, small_sample_factor
from curvmon.operators.node_blocks import Part
from curvmon.pairs.images import Images
from curvmon.pairs.shared_basis import PARTS, SharedBasis, select

Term = tuple[float, Part, int, int]
"""(slope, part, v, w): slope times ‖P_v A P_w‖_F² for A = part"""

KEPT_IMAGES = 16
"""The images of this many probes at a node are kept, rounded up to a whole batch: they improve the spectral norms."""


class RestSamples:
    """Inner products <A z_i, A z_j> of the images of probes z_i = sqrt(d) u_i at w, for every row v and A = H, GN, T.

    A is short for P_v A P_w. The diagonal holds the samples ‖A z_i‖², the other entries give their variance: with
    G = A^T A and orthonormal u_i, uniformly distributed,

        Var (1/m) Σ_i ‖A z_i‖² = (2/m) (1 - m/d) E (z_i^T G z_j)²,   i != j

    m probes have m (m-1) / 2 such products, a better estimate than the sample variance of m values. The basis must not
    change once there are samples.
    """

    def __init__(self, images: Images, basis: SharedBasis) -> None:
        self._images = images
        self._basis = basis
        self._rows = {v: i for i, v in enumerate(images.nodes)}
        # per node, with an entry for every part and row: Σ ‖A z_i‖², and the matrix of Σ <A z_i, A z_j> <B z_i, B z_j>
        # over i != j in the same batch for two of them
        entries = len(PARTS) * len(self._rows)
        self._totals = torch.zeros((len(self._rows), entries), dtype=torch.float64, device="cpu")
        self._mixed = torch.zeros((len(self._rows), entries, entries), dtype=torch.float64, device="cpu")
        self._combinations = dict.fromkeys(images.nodes, 0)
        """number of i != j"""
        self._total_list: list[list[float]] = self._totals.tolist()
        self._mixed_list: list[list[list[float]]] = self._mixed.tolist()

    def count(self, w: int) -> int:
        return self._images.size(w) - self._basis.size(w)

    def kept(self) -> dict[int, int]:
        """Number of directions per node, bases and probes, with images: they improve the spectral norms as well."""
        return {w: len(self._images.positions(w, None, w)) for w in self._rows}

    def remaining(self, w: int) -> int:
        """Number of probes at w until they span the whole complement of the basis."""
        return self._dimension(w) - self.count(w)

    def _dimension(self, w: int) -> int:
        return self._basis.dimension(w) - self._basis.size(w)

    def add(self, counts: Mapping[int, int], generator: torch.Generator) -> int:
        """Add `counts[w]` probes at every node w, at most `remaining`; returns the number of HVPs."""
        counts = {w: min(count, self.remaining(w)) for w, count in counts.items() if self.remaining(w) > 0}
        directions = {w: self._new_directions(w, count, generator) for w, count in counts.items()}
        images = self._images
        if counts and all(self.count(w) >= KEPT_IMAGES for w in counts):
            images = images.without_images(self._basis.sizes)
        first = {w: len(images.positions(self._images.nodes[0], "remainder", w)) for w in self._rows}
        before = images.products
        images.add(directions)
        images.read()
        if directions:
            self._put(images, {w: slice(start, None) for w, start in first.items()}, counts)
        return images.products - before

    def _new_directions(self, w: int, count: int, generator: torch.Generator) -> Tensor:
        """Orthonormal, uniformly distributed in the complement of the basis and of earlier probes."""
        earlier = precise(self._images.vectors[w])
        directions = gaussian(earlier.new_empty(len(earlier)), count, generator)
        for _ in range(2):  # cancellation in the first projection leaves components behind
            directions = torch.linalg.qr(directions - earlier @ (earlier.T @ directions)).Q
        return directions.to(self._images.vectors[w])

    def _put(self, images: Images, new: Mapping[int, slice], counts: Mapping[int, int]) -> None:
        """Adds the inner products of the images of z = sqrt(d) u, from those of the unit vectors u."""
        rows = {v: slice(0, self._basis.size(v)) for v in self._rows}
        selection = select(images, rows, new)
        scale = torch.tensor([float(self._dimension(w)) for w in self._rows], device="cpu").double().reshape(-1, 1, 1)
        matrices = [self._basis.outside(selection, part) * scale for part in PARTS if part in selection.inner]
        matrices += [torch.zeros_like(matrices[0])] * (len(PARTS) - len(matrices))
        batch = torch.stack(matrices).permute(2, 0, 1, 3, 4).flatten(1, 2)  # node of the probes, part and row, i, j
        diagonal = batch.diagonal(dim1=2, dim2=3)
        apart = (batch - torch.diag_embed(diagonal)).flatten(2)
        self._totals += diagonal.sum(2)
        self._mixed += apart @ apart.mT
        for w, count in counts.items():
            self._combinations[w] += count * (count - 1)
        self._total_list, self._mixed_list = self._totals.tolist(), self._mixed.tolist()

    def _entry(self, part: Part, row: int) -> int:
        return PARTS.index(part) * len(self._rows) + self._rows[row]

    def _total(self, at: int, part: Part, row: int) -> float:
        """Σ ‖A z_i‖² over the probes at a node"""
        return self._total_list[self._rows[at]][self._entry(part, row)]

    def mean(self, part: Part, v: int, w: int) -> float:
        """Estimate of ‖P_v A P_w‖_F², pooled over the probes at both nodes; zero where a basis is complete."""
        if self._basis.is_complete(v) or self._basis.is_complete(w):
            return 0.0
        sides = self._sides(v, w)
        total = sum(self._total(at, part, row) for row, at in sides)
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
            mixed = self._mean_mixed(at, {self._entry("hessian", row): 1.0})
            estimates.append(mixed * (d + 2) * (d - 1) / d**2 + second**2 / d)
        fourth = sum(estimates) / len(estimates)
        return math.sqrt(fourth / second), fourth**0.25

    def standard_error(self, terms: Iterable[Term]) -> float:
        """Standard error of Σ slope · ‖P_v A P_w‖_F² over `terms` (slope, part, v, w).

        The slopes are the derivatives of the function of interest (delta method). The sum is regrouped by the node of
        the probes: within a node the terms are combined probe by probe, because they are correlated; between nodes they
        are independent.
        """
        combined: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
        size: dict[int, float] = defaultdict(float)
        for slope, part, v, w in terms:
            if slope == 0 or self._basis.is_complete(v) or self._basis.is_complete(w):
                continue
            sides = self._sides(v, w)
            total = sum(self.count(at) for _, at in sides)
            for row, at in sides:
                share = slope * self.count(at) / total
                combined[at][self._entry(part, row)] += share
                size[at] += abs(share * self._total(at, part, row)) / self.count(at)
        if not combined:
            return 0.0
        variances = {at: self._variance(at, weights, size[at]) for at, weights in combined.items()}
        overall: float = sum(variances.values())
        if overall == 0 or math.isinf(overall):
            return overall
        # degrees of freedom of a sum of variances that are estimated from few probes each (Welch-Satterthwaite)
        degrees_of_freedom = 1 / sum((s / overall) ** 2 / (self.count(at) - 1) for at, s in variances.items() if s)
        return math.sqrt(overall) * small_sample_factor(int(degrees_of_freedom))

    def _variance(self, at: int, weights: Mapping[int, float], size: float) -> float:
        """Variance of the mean of Σ weight ‖A z‖² over entries A; `size` is that mean (of the terms' absolute values).

        The standard deviation of ‖A z‖² is proportional to its mean, with a factor r. A mean that is low by chance
        would come with too small an error. The error is therefore scaled to mean / (1 - r), the true value of which the
        observed mean is one standard error below.
        """
        if self.remaining(at) == 0:
            return 0.0
        if self.count(at) < 2:
            return math.inf
        population = 1 - self.count(at) / self._dimension(at)
        deviation = math.sqrt(2 * population / self.count(at) * self._mean_mixed(at, weights))
        return (deviation / (1 - min(deviation / size, 0.8))) ** 2 if size else 0.0

    def _mean_mixed(self, at: int, weights: Mapping[int, float]) -> float:
        """Mean of <A z_i, A z_j>² over i != j, for Σ weight <A z_i, A z_j> over entries."""
        if not self._combinations[at]:
            return 0.0
        mixed = self._mixed_list[self._rows[at]]
        total = sum(one * other * mixed[i][j] for i, one in weights.items() for j, other in weights.items())
        return max(0.0, total) / self._combinations[at]

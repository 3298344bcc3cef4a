"""Random probes for what the shared basis does not hold, and the standard errors that come with them.

    ‖P_v A P_w‖_F² = E‖P_v A P_w z‖²,   z with independent entries ±1

One probe at w is a sample for the pairs of w with all nodes, and by symmetry a probe at v is one for the same pair.
Functions of several norms (a ratio, a root) get their error by the delta method: every probe contributes the linearised
change it makes to the function, so that the correlation between the blocks that one probe touches is accounted for.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor

from curvmon.curvature.operators import BlockOperator
from curvmon.curvature.subspace import SharedBasis, precise, products

Part = Literal["hessian", "gauss_newton", "remainder"]
PARTS: tuple[Part, ...] = ("hessian", "gauss_newton", "remainder")
Term = tuple[float, Part, int, int]
"""(slope, part, v, w): slope times ‖P_v A P_w‖_F² for A = part"""
BOUND_WEIGHT = 8
"""How many samples the bound on the variance counts for beside the sample variance (see `RestSamples`)."""
# Student's t at 97.5 % over 1.96, for one to four degrees of freedom; a series takes over from five.
_STUDENT = (6.4829, 2.1953, 1.6237, 1.4166)


def rademacher(like: Tensor, generator: torch.Generator) -> Tensor:
    """Independent ±1 entries, flat. Drawn on the CPU: the same seed means the same probe on every device."""
    bits = torch.randint(0, 2, (like.numel(),), generator=generator)
    return (2 * bits - 1).to(dtype=like.dtype, device=like.device)


def small_sample_factor(freedom: int) -> float:
    """What to multiply a standard error with so that ± 1.96 of it covers 95 % although it comes from few probes."""
    if freedom < 1:
        return math.inf
    if freedom <= len(_STUDENT):
        return _STUDENT[freedom - 1]
    z, n = 1.959964, float(freedom)
    # Cornish-Fisher expansion of the quantile in 1/n
    terms = (
        (z**2 + 1) / (4 * n),
        (5 * z**4 + 16 * z**2 + 3) / (96 * n**2),
        (3 * z**6 + 19 * z**4 + 17 * z**2 - 15) / (384 * n**3),
    )
    return 1 + sum(terms)


class RestSamples:
    """Inner products <P_v A P_w z_i, P_v A P_w z_j> of the images of probes z_i at w, for every row v and A = H, GN, T.

    Their diagonal are the samples ‖P_v A P_w z_i‖². The others tell how much these vary, far better than a handful of
    samples does: with G = (P_v A P_w)^T (P_v A P_w),

        Var‖P_v A P_w z‖² = 2 (‖G‖_F² - Σ_i G_ii²) <= 2 ‖G‖_F² = 2 E (z_i^T G z_j)²,   i != j

    m probes have m (m-1) / 2 such products, so the bound is known well where the sample variance is not.
    """

    def __init__(self, operator: BlockOperator, basis: SharedBasis) -> None:
        self._operator = operator
        self._basis = basis
        self._count = [0] * len(operator.templates)
        # per node and (part, row), a matrix for every batch of probes
        self._products: list[dict[tuple[Part, int], list[Tensor]]] = [defaultdict(list) for _ in operator.templates]

    def count(self, w: int) -> int:
        return self._count[w]

    def add(self, w: int, count: int, generator: torch.Generator) -> int:
        """`count` more probes at w; returns the products spent."""
        template = self._operator.templates[w]
        z = torch.stack([rademacher(template, generator) for _ in range(count)], dim=1)
        images = products(self._operator, w, self._basis.outside(w, precise(z)))
        for v, image in enumerate(images.hessian):
            hessian = self._basis.outside(v, precise(image))
            self._put(w, v, "hessian", hessian)
            if images.gauss_newton is not None:
                gauss_newton = self._basis.outside(v, precise(images.gauss_newton[v]))
                self._put(w, v, "gauss_newton", gauss_newton)
                self._put(w, v, "remainder", hessian - gauss_newton)
        self._count[w] += count
        return count * (1 if images.gauss_newton is None else 2)

    def _put(self, w: int, v: int, part: Part, image: Tensor) -> None:
        self._products[w][part, v].append((image.T @ image).cpu())

    def mean(self, part: Part, v: int, w: int) -> float:
        """Estimate of ‖P_v A P_w‖_F², pooled over the probes at both nodes; zero where a basis is complete."""
        if self._basis.is_complete(v) or self._basis.is_complete(w):
            return 0.0
        sides = {(v, w), (w, v)}
        total = sum(m.trace().item() for row, at in sides for m in self._products[at][part, row])
        count = sum(self.count(at) for _, at in sides)
        return total / count if count else math.nan

    def fourth_moment(self, v: int, w: int) -> float:
        """Estimate of ‖G‖_F² = Σ σ_i⁴ over the singular values of P_v H[v, w] P_w, hence of its spectral norm's range:

        Σσ⁴ / Σσ² <= σ_max² <= sqrt(Σσ⁴)
        """
        matrices = [m for row, at in {(v, w), (w, v)} for m in self._products[at]["hessian", row]]
        pairs = sum(len(m) * (len(m) - 1) for m in matrices)
        return sum(_off_diagonal_squares(m) for m in matrices) / pairs if pairs else 0.0

    def standard_error(self, terms: Iterable[Term]) -> float:
        """Standard error of Σ slope · ‖P_v A P_w‖_F² over `terms` (slope, part, v, w).

        The slopes are the derivatives of whatever function is wanted. The sum is regrouped by the node where a probe
        was drawn: within a node the terms are combined probe by probe, so that their correlation counts; between nodes
        they are independent.
        """
        combined: dict[int, list[Tensor]] = {}
        size: dict[int, float] = defaultdict(float)
        for slope, part, v, w in terms:
            if slope == 0 or self._basis.is_complete(v) or self._basis.is_complete(w):
                continue
            sides = {(v, w), (w, v)}
            total = sum(self.count(at) for _, at in sides)
            for row, at in sides:
                added = [slope * self.count(at) / total * m for m in self._products[at][part, row]]
                before = combined.get(at)
                combined[at] = added if before is None else [a + b for a, b in zip(before, added)]
                size[at] += sum(abs(m.trace().item()) for m in added) / self.count(at)
        if not combined:
            return 0.0
        variance = sum(_variance_of_mean(matrices, size[at]) for at, matrices in combined.items())
        freedom = sum(self.count(at) - 1 + BOUND_WEIGHT for at in combined)
        return math.sqrt(variance) * small_sample_factor(freedom)


def _variance_of_mean(batches: Sequence[Tensor], size: float) -> float:
    """Variance of the mean of the samples on the diagonals, from them and from the products of different probes.

    The spread of ‖A z‖² is a share r of its mean, so a mean that is low by chance brings an error that is too small. It
    is therefore taken for the truth that this mean would be one standard error below: mean / (1 - r). `size` is the
    mean (of the terms' absolute values).
    """
    samples = torch.cat([m.diagonal() for m in batches])
    count = len(samples)
    pairs = sum(len(m) * (len(m) - 1) for m in batches)
    if pairs == 0:
        return math.inf
    bound = 2 * sum(_off_diagonal_squares(m) for m in batches) / pairs
    variance = (BOUND_WEIGHT * bound + (count - 1) * samples.var().item()) / (BOUND_WEIGHT + count - 1)
    deviation = math.sqrt(variance / count)
    return (deviation / (1 - min(deviation / size, 0.8))) ** 2 if size else 0.0


def _off_diagonal_squares(matrix: Tensor) -> float:
    return (matrix.square().sum() - matrix.diagonal().square().sum()).item()

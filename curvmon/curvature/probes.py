"""Random probes for what the shared basis does not hold, and the standard errors that come with them.

    ‖P_v A P_w‖_F² = E‖P_v A P_w z‖²,   z with independent entries ±1

One probe at w is a sample for the pairs of w with all nodes, and by symmetry a probe at v is one for the same pair.
Functions of several norms (a ratio, a root) get their error by the delta method: every probe contributes the linearised
change it makes to the function, so that the correlation between the blocks that one probe touches is accounted for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor

from curvmon.curvature.operators import BlockOperator
from curvmon.curvature.subspace import SharedBasis, norm_squared, precise, products

Part = Literal["hessian", "gauss_newton", "remainder"]
PARTS: tuple[Part, ...] = ("hessian", "gauss_newton", "remainder")
Term = tuple[float, Part, int, int]
"""(slope, part, v, w): slope times ‖P_v A P_w‖_F² for A = part"""
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
    return 1 + (z**2 + 1) / (4 * n) + (5 * z**4 + 16 * z**2 + 3) / (96 * n**2)


class RestSamples:
    """‖P_v A P_w z‖² for every probe z at w, every row v and A = H, GN, T."""

    def __init__(self, operator: BlockOperator, basis: SharedBasis) -> None:
        self._operator = operator
        self._basis = basis
        n = len(operator.templates)
        self._samples: list[dict[Part, list[list[float]]]] = [{part: [] for part in PARTS} for _ in range(n)]

    def count(self, w: int) -> int:
        return len(self._samples[w]["hessian"])

    def add(self, w: int, generator: torch.Generator) -> int:
        """One more probe at w; returns the products spent."""
        z = self._basis.outside(w, precise(rademacher(self._operator.templates[w], generator)))
        images = products(self._operator, w, z.unsqueeze(1))
        norms = self._samples[w]
        columns: dict[Part, list[Tensor]] = {"hessian": [precise(x) for x in images.hessian]}
        if images.gauss_newton is not None:
            columns["gauss_newton"] = [precise(x) for x in images.gauss_newton]
            columns["remainder"] = [h - g for h, g in zip(columns["hessian"], columns["gauss_newton"])]
        for part, rows in columns.items():
            norms[part].append([norm_squared(self._basis.outside(v, x)) for v, x in enumerate(rows)])
        return 1 if images.gauss_newton is None else 2

    def mean(self, part: Part, v: int, w: int) -> float:
        """Estimate of ‖P_v A P_w‖_F², pooled over the probes at both nodes; zero where a basis is complete."""
        if self._basis.is_complete(v) or self._basis.is_complete(w):
            return 0.0
        values = [*self._values(part, v, w), *(self._values(part, w, v) if v != w else ())]
        return sum(values) / len(values) if values else math.nan

    def _values(self, part: Part, v: int, w: int) -> list[float]:
        """Samples for the block (v, w) from the probes at w."""
        return [row[v] for row in self._samples[w][part]]

    def standard_error(self, terms: Iterable[Term]) -> float:
        """Standard error of Σ slope · ‖P_v A P_w‖_F² over `terms` (slope, part, v, w).

        The slopes are the derivatives of whatever function is wanted. The sum is regrouped by the node where a probe
        was drawn: within a node the contributions of one probe are correlated and are added probe by probe, between
        nodes they are independent.
        """
        influence: dict[int, list[float]] = {}
        for slope, part, v, w in terms:
            if slope == 0 or self._basis.is_complete(v) or self._basis.is_complete(w):
                continue
            total = self.count(w) + (self.count(v) if v != w else 0)
            for row, at in {(v, w), (w, v)}:
                values = self._values(part, row, at)
                weight = slope * len(values) / total if total else math.nan
                sums = influence.setdefault(at, [0.0] * len(values))
                for i, value in enumerate(values):
                    sums[i] += weight * value
        variance = sum(_variance_of_mean(values) for values in influence.values())
        freedom = sum(max(0, len(values) - 1) for values in influence.values())
        return math.sqrt(variance) * small_sample_factor(freedom) if influence else 0.0


def _variance_of_mean(values: Sequence[float]) -> float:
    n = len(values)
    if n < 2:
        return math.inf
    mean = sum(values) / n
    return sum((value - mean) ** 2 for value in values) / (n - 1) / n

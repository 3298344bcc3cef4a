"""R, C, D and GN-Gap of all pairs, with standard errors, from products alone.

Pairs with H = GN are computed from the Gauss-Newton factors, without further products. The other pairs take three
phases, and every HVP is counted:

    1. a few Lanczos steps (Lanczos 1950) at every node build its shared basis
    2. Krylov steps refine the bases until the spectral norms of all pairs have converged
    3. random probes estimate the rest until every standard error is below `rtol`
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import NamedTuple

import torch
from torch import Tensor

from curvmon.errors import InputError
from curvmon.numerics import gaussian, precise
from curvmon.operators.node_blocks import BlockOperator
from curvmon.pairs.gauss_newton import NO_FACTORS, GaussNewtonPart
from curvmon.pairs.metric_estimates import Assembler
from curvmon.pairs.pair_metrics import Matrices
from curvmon.pairs.random_probes import RestSamples
from curvmon.pairs.shared_basis import SharedBasis

SMALL_NODE = 12
"""A node with at most this many entries is measured exactly: that costs no more than a basis and probes."""
MIN_PROBES, FIRST_PROBES = 3, 5
LANCZOS_STEPS = 6
BASIS_SIZE = {1: 11, 2: 8}
"""Directions per node without `max_hvps`, for one HVP or two per column; more for a tolerance below 5 %."""
PRODUCTS_PER_NODE = 400
"""Limit without `max_hvps`. A tolerance of 5 % needs it only if very few directions dominate the rest of a block."""


class Estimate(NamedTuple):
    matrices: Matrices
    hvps: int
    notes: list[str]


class PairEstimator:
    """Estimates the four metrics of all pairs from products with a `BlockOperator`."""

    def __init__(
        self,
        operator: BlockOperator,
        names: tuple[str, ...],
        *,
        rtol: float,
        max_hvps: int | None,
        generator: torch.Generator,
        part: GaussNewtonPart = NO_FACTORS,
        raise_max_hvps: bool = False,
    ) -> None:
        self._operator = operator
        self._names = names
        self._rtol = rtol
        self._generator = generator
        self._part = part
        self._nodes = [v for v in range(len(names)) if not part.gives_hessian(v, v)]
        """nodes with a pair that needs products"""
        self._n = len(self._nodes)
        self._hvps_per_column = operator.hvps_per_column
        least = part.hvps + (2 + MIN_PROBES) * self._n * self._hvps_per_column
        if raise_max_hvps and max_hvps is not None:
            max_hvps = max(max_hvps, least)
        if max_hvps is not None and max_hvps < least:
            both = ", for the Hessian and its Gauss-Newton part" if self._hvps_per_column == 2 else ""
            earlier = f", and {part.hvps} for the Gauss-Newton factors" if part.hvps else ""
            raise InputError(
                f"max_hvps={max_hvps} is too few: at least {least} HVPs are needed, two directions and three "
                f"probes at {self._n} nodes{both}{earlier}; raise it or choose fewer nodes"
            )
        self._limit = PRODUCTS_PER_NODE * self._n if max_hvps is None else max_hvps
        # columns per node
        self._columns = (self._limit - part.hvps) // max(1, self._n * self._hvps_per_column)
        self._limited_by_user = max_hvps is not None
        self._spent = part.hvps
        self._eps = max(torch.finfo(template.dtype).eps for template in operator.templates)
        self._basis = SharedBasis(operator)
        self._rest = RestSamples(operator, self._basis, self._nodes)

    def run(self) -> Estimate:
        self._build_basis()
        self._refine_basis()
        return self._probe_until_converged(Assembler(self._basis, self._rest, self._part, self._names, self._eps))

    def _pairs(self) -> list[tuple[int, int]]:
        return [(v, w) for v in self._nodes for w in self._nodes if v <= w]

    def _build_basis(self) -> None:
        """A few Lanczos steps at every node with its diagonal block: its leading directions matter for all pairs."""
        steps = max(1, min(LANCZOS_STEPS, self._columns // 3))
        directions: dict[int, Tensor] = {}
        for v in self._nodes:
            if self._operator.templates[v].numel() <= min(SMALL_NODE, self._columns):
                self._spent += self._basis.complete(v)
            else:
                directions[v] = self._start_vector(v)
        for _ in range(steps):
            units = {v: direction / torch.linalg.vector_norm(direction) for v, direction in directions.items()}
            spent = self._basis.extend_all(units, 1)
            self._spent += sum(spent.values())
            images = {v: self._basis.last_image(v, v) for v, products in spent.items() if products}
            directions = {v: image for v, image in images.items() if image.any()}

    def _start_vector(self, v: int) -> Tensor:
        """Random; with exact factors, the sum of a random direction (for T) and the leading one of GN.

        A sketch must not be used twice: the rest outside a basis from the same sketch would be too low.
        """
        random = gaussian(self._operator.templates[v], 1, self._generator)
        factors = self._part.factors
        if factors is None or factors.rows is None or not factors.is_exact:
            return random
        both = torch.cat([precise(random) / torch.linalg.vector_norm(random), precise(factors.leading(v, v))], dim=1)
        return both.sum(dim=1, keepdim=True)

    def _refine_basis(self) -> None:
        """Add one direction per node and round until all spectral norms have converged: a Krylov method.

        It is the leading direction of the residuals of all pairs of the node, weighted by the bias of their norms.
        """
        while True:
            norms = {pair: self._basis.spectral_norm(*pair) for pair in self._pairs()}
            wanted: dict[int, list[Tensor]] = defaultdict(list)
            for (v, w), norm in norms.items():
                # there is no estimate of the rest yet: assume that it is as large as the norm
                bias = norm.largest_bias()
                if bias <= self._rtol / 2:
                    continue
                ritz = norm.least_converged()
                for node, residual in {v: ritz.row_residual, w: ritz.col_residual}.items():
                    length = torch.linalg.vector_norm(residual).item()
                    # otherwise this side is in the basis already, up to rounding
                    if length**2 > 1e-3 * ritz.outside:
                        wanted[node].append(residual * (bias / length))
            largest = max((norm.largest_bias() for norm in norms.values()), default=1.0)
            affordable = max(0, (self._basis_budget() - self._spent) // self._hvps_per_column)
            chosen = list(wanted.items())[:affordable]
            spent = self._basis.extend_all({v: torch.stack(parts, dim=1) / largest for v, parts in chosen}, 1)
            self._spent += sum(spent.values())
            if not any(spent.values()):
                return

    def _basis_budget(self) -> int:
        """HVPs for the bases: all but those of the first probes, at least half; without a limit, by `BASIS_SIZE`."""
        if not self._limited_by_user:
            size = math.ceil(BASIS_SIZE[self._hvps_per_column] * max(1.0, math.sqrt(0.05 / self._rtol)))
            return self._part.hvps + size * self._n * self._hvps_per_column
        per_probe = len(self._open_nodes()) * self._hvps_per_column
        ceiling = max(self._limit // 2, self._limit - FIRST_PROBES * per_probe)
        return min(ceiling, self._limit - MIN_PROBES * per_probe)

    def _open_nodes(self) -> list[int]:
        return [v for v in self._nodes if not self._basis.is_complete(v)]

    def _probe_until_converged(self, assembler: Assembler) -> Estimate:
        open_nodes = self._open_nodes()
        first = max(
            MIN_PROBES,
            min(FIRST_PROBES, (self._limit - self._spent) // max(1, self._hvps_per_column * len(open_nodes))),
        )
        wanted = {v: first for v in open_nodes}
        while True:
            self._spent += self._rest.add(wanted, self._generator)
            matrices = assembler.matrices()
            unconverged = self._unconverged(matrices)
            wanted = {
                v: min(-(-self._rest.count(v) // 2), self._rest.remaining(v)) for v in open_nodes if v in unconverged
            }
            wanted = {v: count for v, count in wanted.items() if count > 0}
            if not wanted:
                return Estimate(matrices, self._spent, assembler.notes(matrices, self._rtol))
            each = (self._limit - self._spent) // (self._hvps_per_column * len(wanted))
            wanted = {v: min(count, each) for v, count in wanted.items()}
            if each <= 0:
                why = "max_hvps" if self._limited_by_user else f"{PRODUCTS_PER_NODE} HVPs per node"
                note = f"stopped at {why} before every standard error was below rtol={self._rtol:g}"
                return Estimate(matrices, self._spent, [note, *assembler.notes(matrices, self._rtol)])

    def _unconverged(self, matrices: Matrices) -> set[int]:
        """Nodes with pairs whose standard errors are above the tolerance."""
        unconverged: set[int] = set()
        for v, w in self._pairs():
            for metric in ("resonance", "coupling", "gn_gap"):
                value, error = matrices.get(metric, v, w), matrices.get(f"stderr/{metric}", v, w)
                # a gap far below one needs no relative error of 5 %
                scale = max(value, self._rtol) if metric == "gn_gap" else value
                if error > self._rtol * scale and math.isfinite(scale):
                    unconverged.update((v, w))
        return unconverged

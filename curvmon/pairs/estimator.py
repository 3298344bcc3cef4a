"""R, C, D and GN-Gap of all pairs, with standard errors, from products alone.

Pairs with H = GN are computed from the Gauss-Newton factors, without further products. The other pairs take three
phases, and every HVP is counted:

    1. a few Lanczos steps (Lanczos 1950) at every node build its shared basis
    2. Krylov steps refine the bases until the spectral norms of all pairs have converged
    3. random probes estimate the rest until every standard error is below `rtol`

For R, C and the gap alone, three probes without a basis may be enough: the flatter the spectra of the blocks, the less
their norms vary. Only if they are not, there are phases 1 to 3, with these probes for a start.
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
from curvmon.pairs.images import Images
from curvmon.pairs.metric_estimates import Assembler, RelativeError, exact_products
from curvmon.pairs.pair_metrics import Matrices
from curvmon.pairs.random_probes import RestSamples
from curvmon.pairs.shared_basis import SharedBasis

SMALL_NODE = 12
"""A node with at most this many entries is measured exactly: that costs no more than a basis and probes."""
MIN_PROBES = 3
FEW_MORE = 2.0
"""A standard error up to so many times too large takes a few more probes; above, bases take fewer products."""


class Effort(NamedTuple):
    """How many directions a node gets before its standard errors ask for more."""

    lanczos_steps: int
    basis_size: dict[int, int]
    """for one HVP or two per column; more for a tolerance below 5 %"""
    probes: int
    probes_first: bool
    """without a basis"""
    limit: int
    """most HVPs without `max_hvps`, for a tolerance of 5 %"""


FOR_ALL_METRICS = Effort(6, {1: 11, 2: 8}, 5, False, 150)
FOR_NORMS = Effort(2, {1: 2, 2: 2}, 3, True, 115)
"""For R, C and the gap: their standard errors are below the tolerance, that of D is what it is."""


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
        effort: Effort = FOR_ALL_METRICS,
        raise_max_hvps: bool = False,
        relative_error: RelativeError = exact_products,
    ) -> None:
        """`relative_error`: of the products; see `GraphOperator`."""
        self._relative_error = relative_error
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
        self._effort = effort
        self._refinement = max(1.0, 0.05 / rtol)
        """how many times more precise than usual"""
        self._limit = max(least, int(effort.limit * self._refinement**2)) if max_hvps is None else max_hvps
        # columns per node
        self._columns = (self._limit - part.hvps) // max(1, self._n * self._hvps_per_column)
        self._limited_by_user = max_hvps is not None
        self._eps = max(torch.finfo(template.dtype).eps for template in operator.templates)
        self._images = Images(operator, self._nodes)
        self._probe_products = 0
        self._starts: dict[int, Tensor] = {}

    @property
    def _spent(self) -> int:
        return self._part.hvps + self._probe_products + self._images.products

    def run(self) -> Estimate:
        if not self._nodes:
            return self._finished(SharedBasis(self._images, {}))
        if self._probes_first():
            estimate = self._probed(SharedBasis(self._images, dict.fromkeys(self._nodes, 0)), FEW_MORE)
            if estimate is not None:
                return estimate
        self._build_basis()
        return self._finished(self._refined_basis())

    def _probes_first(self) -> bool:
        """Where GN has no exact factors, with leading directions for a basis, and the budget allows for one later."""
        columns = 2 * MIN_PROBES + 1
        large = all(self._operator.templates[v].numel() > SMALL_NODE for v in self._nodes)
        return self._effort.probes_first and self._hvps_per_column == 2 and large and self._columns >= columns

    def _pairs(self) -> list[tuple[int, int]]:
        return [(v, w) for v in self._nodes for w in self._nodes if v <= w]

    def _build_basis(self) -> None:
        """A few Lanczos steps at every node with its diagonal block: its leading directions matter for all pairs."""
        if any(self._images.size(v) for v in self._nodes):  # probes that were not enough
            self._starts = {v: self._start_vector(v) for v in self._nodes}
            self._images.add({v: self._next(v, self._images.last_image(v)) for v in self._starts})
            self._images.read()
            return
        steps = max(1, min(self._effort.lanczos_steps, self._columns // 3))
        first: dict[int, Tensor] = {}
        for v in self._nodes:
            template = self._operator.templates[v]
            if template.numel() <= min(SMALL_NODE, self._columns):
                first[v] = torch.eye(template.numel(), dtype=template.dtype, device=template.device)
            else:
                self._starts[v] = self._start_vector(v)
                first[v] = self._images.orthonormal(v, self._starts[v], self._starts[v])
        self._images.add(first)
        for _ in range(steps - 1):
            self._images.add({v: self._next(v, self._images.last_image(v)) for v in self._starts})
        self._images.read()

    def _next(self, v: int, candidate: Tensor) -> Tensor:
        return self._images.orthonormal(v, candidate, self._starts[v].roll(self._images.size(v), 0))

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

    def _refined_basis(self) -> SharedBasis:
        """Add one direction per node and round until all spectral norms have converged: a Krylov method.

        It is the leading direction of the residuals of all pairs of the node, weighted by the bias of their norms.
        """
        pairs = self._pairs()
        while True:
            basis = SharedBasis(self._images, {v: self._images.size(v) for v in self._nodes})
            ritz_values = basis.spectral_norms(pairs)
            wanted: dict[int, list[tuple[int, Tensor]]] = defaultdict(list)
            # there is no estimate of the rest yet: assume that it is as large as the norm
            biases = [norm.largest_bias() for norm in ritz_values.norms]
            for i, ((v, w), norm, bias) in enumerate(zip(pairs, ritz_values.norms, biases)):
                if bias <= self._rtol / 2:
                    continue
                at = norm.least_converged()
                ritz = norm.ritz[at]
                # otherwise this side is in the basis already, up to rounding
                if ritz.row > 1e-3 * ritz.outside:
                    wanted[v].append((w, ritz_values.rows[i, at] * (bias / math.sqrt(ritz.row))))
                if v != w and ritz.col > 1e-3 * ritz.outside:
                    wanted[w].append((v, ritz_values.cols[i, at] * (bias / math.sqrt(ritz.col))))
            affordable = max(0, (self._basis_budget() - self._spent) // self._hvps_per_column)
            leading = {v: basis.leading_residual(v, parts) for v, parts in list(wanted.items())[:affordable]}
            chosen = {v: combination for v, (combination, size) in leading.items() if size > 1e-3 * max(biases)}
            if not chosen:
                return basis
            self._images.add({v: self._next(v, self._images.combination(v, c)) for v, c in chosen.items()})
            self._images.read()

    def _basis_budget(self) -> int:
        """HVPs for the bases: all but those of the first probes, at least half; without `max_hvps` a fixed size."""
        per_probe = len(self._open_nodes()) * self._hvps_per_column
        ceiling = max(self._limit // 2, self._limit - self._effort.probes * per_probe)
        affordable = min(ceiling, self._limit - MIN_PROBES * per_probe)
        if self._limited_by_user:
            return affordable
        size = math.ceil(self._effort.basis_size[self._hvps_per_column] * math.sqrt(self._refinement))
        return min(affordable, self._part.hvps + size * self._n * self._hvps_per_column)

    def _open_nodes(self) -> list[int]:
        return [v for v in self._nodes if self._images.size(v) < self._images.dimension(v)]

    def _finished(self, basis: SharedBasis) -> Estimate:
        estimate = self._probed(basis)
        assert estimate is not None
        return estimate

    def _probed(self, basis: SharedBasis, most: float = math.inf) -> Estimate | None:
        """With probes until all standard errors are small enough; None once one is `most` times too large."""
        rest = RestSamples(self._images, basis)
        dimensions = [template.numel() for template in self._operator.templates]
        assembler = Assembler(
            self._images, basis, rest, self._part, self._names, dimensions, self._eps, self._relative_error
        )
        open_nodes = self._open_nodes()
        affordable = (self._limit - self._spent) // max(1, self._hvps_per_column * len(open_nodes))
        wanted = dict.fromkeys(open_nodes, max(MIN_PROBES, min(self._effort.probes, affordable)))
        while True:
            before = self._images.products
            spent = rest.add(wanted, self._generator)
            # images of many probes are not kept with the others
            self._probe_products += spent - (self._images.products - before)
            matrices = assembler.matrices()
            unconverged = self._unconverged(matrices)
            if max(unconverged.values(), default=0.0) > most:
                return None
            wanted = {v: min(-(-rest.count(v) // 2), rest.remaining(v)) for v in open_nodes if v in unconverged}
            wanted = {v: count for v, count in wanted.items() if count > 0}
            if not wanted:
                return Estimate(matrices, self._spent, assembler.notes(matrices, self._rtol))
            each = (self._limit - self._spent) // (self._hvps_per_column * len(wanted))
            wanted = {v: min(count, each) for v, count in wanted.items()}
            if each <= 0:
                why = "max_hvps" if self._limited_by_user else f"{self._limit} HVPs"
                note = f"stopped at {why} before every standard error was below rtol={self._rtol:g}"
                return Estimate(matrices, self._spent, [note, *assembler.notes(matrices, self._rtol)])

    def _unconverged(self, matrices: Matrices) -> dict[int, float]:
        """Nodes with pairs whose standard errors are above the tolerance, and how many times."""
        unconverged: dict[int, float] = defaultdict(float)
        for v, w in self._pairs():
            for metric in ("resonance", "coupling", "gn_gap"):
                value, error = matrices.get(metric, v, w), matrices.get(f"stderr/{metric}", v, w)
                # a gap far below one needs no relative error of 5 %
                scale = max(value, self._rtol) if metric == "gn_gap" else value
                if error > self._rtol * scale and math.isfinite(scale):
                    excess = error / (self._rtol * scale) if scale else math.inf
                    unconverged.update({node: max(unconverged[node], excess) for node in (v, w)})
        return unconverged

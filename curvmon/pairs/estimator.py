"""R, C, D and GN-Gap of all pairs, with standard errors, from products alone.

What factors and certificate know costs nothing more. For the other pairs there are three phases, all of them counted:
a few steps of Lanczos' method at every node begin its shared basis; the bases are refined until the spectral norms of
all pairs have settled; random probes estimate the rest until every error is below `rtol`.
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
from curvmon.pairs.gauss_newton import NOTHING, Knowledge
from curvmon.pairs.metric_assembly import Assembler
from curvmon.pairs.pair_metrics import Matrices
from curvmon.pairs.random_probes import RestSamples
from curvmon.pairs.shared_basis import SharedBasis

# A node this small is measured exactly: its whole space costs no more than a basis and the probes would.
SMALL_NODE = 12
FEWEST_PROBES, FIRST_PROBES = 3, 5
LANCZOS_STEPS = 6
BASIS_SIZE = {1: 11, 2: 8}
"""directions per node without `max_hvps` if each costs one product or two; more for a tolerance below 5 %"""
PRODUCTS_PER_NODE = 400
"""Limit without `max_hvps`; 5 % needs it only for blocks whose rest is dominated by very few directions."""


class Estimate(NamedTuple):
    matrices: Matrices
    hvps: int
    notes: list[str]


class PairEstimator:
    """Spends products of a `BlockOperator` on the four metrics of all pairs."""

    def __init__(
        self,
        operator: BlockOperator,
        names: tuple[str, ...],
        *,
        rtol: float,
        max_hvps: int | None,
        generator: torch.Generator,
        known: Knowledge = NOTHING,
        clamp: bool = False,
    ) -> None:
        self._operator = operator
        self._names = names
        self._rtol = rtol
        self._generator = generator
        self._known = known
        self._nodes = [v for v in range(len(names)) if not (known.is_exact and v in known.flat)]
        """those with pairs of which not everything is known"""
        self._n = len(self._nodes)
        self._price = operator.hvps_per_column
        least = known.spent + (2 + FEWEST_PROBES) * self._n * self._price
        if clamp and max_hvps is not None:
            max_hvps = max(max_hvps, least)
        if max_hvps is not None and max_hvps < least:
            raise InputError(
                f"max_hvps={max_hvps} is too few: at least {least} products are needed, two directions and three "
                f"probes at {self._n} nodes{', for the Hessian and its Gauss-Newton part' if self._price == 2 else ''}"
                f"{f', and {known.spent} before' if known.spent else ''}; raise it or choose fewer nodes"
            )
        self._limit = PRODUCTS_PER_NODE * self._n if max_hvps is None else max_hvps
        # columns per node, each a product with H and one with GN
        self._columns = (self._limit - known.spent) // max(1, self._n * self._price)
        self._limited_by_user = max_hvps is not None
        self._spent = known.spent
        self._eps = max(torch.finfo(template.dtype).eps for template in operator.templates)
        self._basis = SharedBasis(operator)
        self._rest = RestSamples(operator, self._basis, self._nodes)

    def run(self) -> Estimate:
        self._build_basis()
        self._refine_basis()
        return self._probe_until_sure(Assembler(self._basis, self._rest, self._known, self._names, self._eps))

    def _pairs(self) -> list[tuple[int, int]]:
        return [(v, w) for v in self._nodes for w in self._nodes if v <= w]

    def _build_basis(self) -> None:
        """At every node a few steps of Lanczos' method for its own block, whose leading directions matter for all."""
        steps = max(1, min(LANCZOS_STEPS, self._columns // 3))
        directions: dict[int, Tensor] = {}
        for v in self._nodes:
            if self._operator.templates[v].numel() <= min(SMALL_NODE, self._columns):
                self._spent += self._basis.complete(v)
            else:
                directions[v] = self._first(v)
        for _ in range(steps):
            units = {v: direction / torch.linalg.vector_norm(direction) for v, direction in directions.items()}
            spent = self._basis.extend_all(units, 1)
            self._spent += sum(spent.values())
            images = {v: self._basis.last_image(v, v) for v, products in spent.items() if products}
            directions = {v: image for v, image in images.items() if image.any()}

    def _first(self, v: int) -> Tensor:
        """Where GN is known, its leading direction and a random one in equal parts: T may be elsewhere.

        Not that of a sketch: what the same sketch then says of the rest would be too low.
        """
        random = gaussian(self._operator.templates[v], 1, self._generator)
        factors = self._known.factors
        if factors is None or factors.rows is None or not factors.is_exact:
            return random
        both = torch.cat([precise(random) / torch.linalg.vector_norm(random), precise(factors.leading(v, v))], dim=1)
        return both.sum(dim=1, keepdim=True)

    def _refine_basis(self) -> None:
        """Until all spectral norms have settled, one direction more per node and round: a Krylov method.

        It is the one that its pairs miss most, each pair missing a part of its leading singular vectors.
        """
        while True:
            leading = {pair: self._basis.leading(*pair) for pair in self._pairs()}
            wanted: dict[int, list[Tensor]] = defaultdict(list)
            for v, w in self._pairs():
                # the rest is not known yet; that it is no stronger than what was found is the cautious guess
                lacking = leading[v, w].may_lack()
                if lacking <= self._rtol / 2:
                    continue
                ritz = leading[v, w].least_settled()
                for node, missing in {v: ritz.at_row, w: ritz.at_col}.items():
                    length = torch.linalg.vector_norm(missing).item()
                    # a side that adds nothing to the tilt is in the basis already, up to rounding
                    if length**2 > 1e-3 * ritz.tilt:
                        wanted[node].append(missing * (lacking / length))
            most = max((ritz.may_lack() for ritz in leading.values()), default=1.0)
            affordable = max(0, (self._basis_budget() - self._spent) // self._price)
            chosen = list(wanted.items())[:affordable]
            spent = self._basis.extend_all({v: torch.stack(some, dim=1) / most for v, some in chosen}, 1)
            self._spent += sum(spent.values())
            if not any(spent.values()):
                return

    def _basis_budget(self) -> int:
        """Products for the bases: what the first probes leave, at least half; without a limit, `BASIS_SIZE` each."""
        if not self._limited_by_user:
            size = math.ceil(BASIS_SIZE[self._price] * max(1.0, math.sqrt(0.05 / self._rtol)))
            return self._known.spent + size * self._n * self._price
        per_probe = len(self._open_nodes()) * self._price
        ceiling = max(self._limit // 2, self._limit - FIRST_PROBES * per_probe)
        return min(ceiling, self._limit - FEWEST_PROBES * per_probe)

    def _open_nodes(self) -> list[int]:
        return [v for v in self._nodes if not self._basis.is_complete(v)]

    def _probe_until_sure(self, assembler: Assembler) -> Estimate:
        open_nodes = self._open_nodes()
        first = max(
            FEWEST_PROBES, min(FIRST_PROBES, (self._limit - self._spent) // max(1, self._price * len(open_nodes)))
        )
        wanted = {v: first for v in open_nodes}
        while True:
            self._spent += self._rest.add(wanted, self._generator)
            matrices = assembler.matrices()
            unsure = self._unsure(matrices)
            wanted = {v: min(-(-self._rest.count(v) // 2), self._rest.room(v)) for v in open_nodes if v in unsure}
            wanted = {v: count for v, count in wanted.items() if count > 0}
            if not wanted:
                return Estimate(matrices, self._spent, assembler.notes(matrices, self._rtol))
            each = (self._limit - self._spent) // (self._price * len(wanted))
            wanted = {v: min(count, each) for v, count in wanted.items()}
            if each <= 0:
                why = "max_hvps" if self._limited_by_user else f"{PRODUCTS_PER_NODE} products per node"
                note = f"stopped at {why} before every standard error was below rtol={self._rtol:g}"
                return Estimate(matrices, self._spent, [note, *assembler.notes(matrices, self._rtol)])

    def _unsure(self, matrices: Matrices) -> set[int]:
        """Nodes at which more probes would help: their pairs have errors above the tolerance."""
        unsure: set[int] = set()
        for v, w in self._pairs():
            for metric in ("resonance", "coupling", "gn_gap"):
                value, error = matrices.get(metric, v, w), matrices.get(f"stderr/{metric}", v, w)
                # a gap far below one need not be known to 5 % of itself
                scale = max(value, self._rtol) if metric == "gn_gap" else value
                if error > self._rtol * scale and math.isfinite(scale):
                    unsure.update((v, w))
        return unsure

"""R, C, D and GN-Gap of all pairs, with standard errors, from products alone.

Three phases, all of them counted: a random sketch finds the leading directions of every node; the shared basis is
refined until the spectral norms have settled; random probes estimate the rest until every error is below `rtol`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import NamedTuple

import torch
from torch import Tensor

from curvmon.curvature.assembly import Assembler
from curvmon.curvature.metrics import Matrices
from curvmon.curvature.operators import BlockOperator, precise
from curvmon.curvature.probes import RestSamples, gaussian
from curvmon.curvature.subspace import SharedBasis
from curvmon.errors import InputError

# A node this small is measured exactly: its whole space costs no more than a basis and the probes would.
SMALL_NODE = 12
FEWEST_PROBES, FIRST_PROBES = 3, 16
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
    ) -> None:
        self._operator = operator
        self._names = names
        self._rtol = rtol
        self._generator = generator
        self._n = len(operator.templates)
        self._price = 2 if operator.has_gauss_newton else 1
        least = (2 + FEWEST_PROBES) * self._n * self._price
        if max_hvps is not None and max_hvps < least:
            raise InputError(
                f"max_hvps={max_hvps} is too few for {self._n} nodes: at least {least} products are needed "
                f"(two directions and three probes per node, for the Hessian and its Gauss-Newton part); "
                f"raise it or choose fewer nodes"
            )
        self._limit = PRODUCTS_PER_NODE * self._n if max_hvps is None else max_hvps
        # columns per node, each a product with H and one with GN
        self._columns = self._limit // (self._n * self._price)
        self._limited_by_user = max_hvps is not None
        self._spent = 0
        self._eps = max(torch.finfo(template.dtype).eps for template in operator.templates)
        self._basis = SharedBasis(operator)
        self._rest = RestSamples(operator, self._basis)

    def run(self) -> Estimate:
        self._build_basis()
        self._refine_basis()
        return self._probe_until_sure(Assembler(self._basis, self._rest, self._names, self._eps))

    def _pairs(self) -> list[tuple[int, int]]:
        return [(v, w) for v in range(self._n) for w in range(v, self._n)]

    def _build_basis(self) -> None:
        """Sketch every node with random probes, keep the leading directions of what arrives at each node."""
        sketches = max(1, min(max(2, -(-4 // self._n)), self._columns // 8))
        columns = max(1, min(max(6, 2 * self._n), 3 * self._columns // 8))
        # a node of which fewer entries than probes would be left is measured completely
        enough = min(max(SMALL_NODE, columns + FEWEST_PROBES), self._columns - sketches)
        small = [template.numel() <= enough for template in self._operator.templates]
        arrived: dict[int, list[Tensor]] = defaultdict(list)
        for w, template in enumerate(self._operator.templates):
            if all(small):
                break
            count = min(sketches, template.numel())
            images = self._operator.columns(w, gaussian(template, count, self._generator))
            self._spent += images.spent
            for v, image in enumerate(images.hessian):
                # every pair counts the same; T, where it is small, less
                hessian = precise(image)
                scale = torch.linalg.vector_norm(hessian, dim=0).clamp_min(torch.finfo(hessian.dtype).tiny)
                arrived[v].append(hessian / scale)
                if images.gauss_newton is not None:
                    remainder = hessian - precise(images.gauss_newton[v])
                    arrived[v].append(remainder / torch.linalg.vector_norm(remainder, dim=0).maximum(scale))
        for v in range(self._n):
            if small[v]:
                self._spent += self._basis.complete(v)
            else:
                self._spent += self._extended(v, torch.cat(arrived[v], dim=1), columns)

    def _extended(self, v: int, candidates: Tensor, most: int) -> int:
        """Extend the basis; a node on which nothing arrives gets one random direction, so that zero is seen as zero."""
        if not candidates.any():
            candidates = gaussian(self._operator.templates[v], 1, self._generator)
        return self._basis.extend(v, candidates, most)

    def _refine_basis(self) -> None:
        """Add the missing part of the leading singular vectors, worst pair first, until all spectral norms settle."""
        while True:
            leading = {pair: self._basis.leading(*pair) for pair in self._pairs()}
            # the rest is not known yet; that it is no stronger than what was found is the cautious guess
            unsettled = [pair for pair in self._pairs() if leading[pair].error(rest=1.0) > self._rtol / 2]
            affordable = (self._basis_budget() - self._spent) // self._price
            wanted: dict[int, list[Tensor]] = defaultdict(list)
            for v, w in sorted(unsettled, key=lambda pair: -leading[pair].error(rest=1.0)):
                ritz = leading[v, w].least_settled()
                for node, missing in {v: ritz.at_row, w: ritz.at_col}.items():
                    length = torch.linalg.vector_norm(missing).item()
                    # a side that adds nothing to the tilt is in the basis already, up to rounding
                    if affordable > 0 and length**2 > 1e-3 * ritz.tilt:
                        wanted[node].append(missing / length)
                        affordable -= 1
            before = self._spent
            for v, candidates in wanted.items():
                self._spent += self._basis.extend(v, torch.stack(candidates, dim=1), len(candidates))
            if self._spent == before:
                return

    def _basis_budget(self) -> int:
        """Products for sketch and bases: what the first probes leave, at least half; without a limit, a quarter."""
        if not self._limited_by_user:
            return self._limit // 4
        per_probe = len(self._open_nodes()) * self._price
        ceiling = max(self._limit // 2, self._limit - FIRST_PROBES * per_probe)
        return min(ceiling, self._limit - FEWEST_PROBES * per_probe)

    def _open_nodes(self) -> list[int]:
        return [v for v in range(self._n) if not self._basis.is_complete(v)]

    def _probe_until_sure(self, assembler: Assembler) -> Estimate:
        open_nodes = self._open_nodes()
        first = max(
            FEWEST_PROBES, min(FIRST_PROBES, (self._limit - self._spent) // max(1, self._price * len(open_nodes)))
        )
        wanted = {v: first for v in open_nodes}
        while True:
            for v, count in wanted.items():
                self._spent += self._rest.add(v, count, self._generator)
            matrices = assembler.matrices()
            unsure = self._unsure(matrices)
            wanted = {v: min(-(-self._rest.count(v) // 2), self._rest.room(v)) for v in open_nodes if v in unsure}
            wanted = {v: count for v, count in wanted.items() if count > 0}
            if not wanted:
                return Estimate(matrices, self._spent, assembler.notes(matrices, self._rtol))
            if self._spent + self._price * sum(wanted.values()) > self._limit:
                why = "max_hvps" if self._limited_by_user else f"{PRODUCTS_PER_NODE} products per node"
                note = f"stopped at {why} before every standard error was below rtol={self._rtol:g}"
                return Estimate(matrices, self._spent, [note, *assembler.notes(matrices, self._rtol)])

    def _unsure(self, matrices: Matrices) -> set[int]:
        """Nodes at which more probes would help: their pairs have errors above the tolerance."""
        unsure: set[int] = set()
        for v, w in self._pairs():
            for metric in ("resonance", "coupling", "gn_gap"):
                value, error = matrices.get(metric, v, w), matrices.get(f"stderr/{metric}", v, w)
                # D has twice the relative error of R; a gap far below one need not be known to 5 % of itself
                scale = {"resonance": value / 2, "gn_gap": max(value, self._rtol)}.get(metric, value)
                if error > self._rtol * scale and math.isfinite(scale):
                    unsure.update((v, w))
        return unsure

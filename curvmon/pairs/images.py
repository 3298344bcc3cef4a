"""Directions at every node, their images under H and GN, and the inner products of all of them.

Vectors stay on the device. The estimator needs their inner products alone: norms, projections and small singular value
problems follow from them, on the host, after one copy per round.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from curvmon.errors import NonFiniteError
from curvmon.numerics import NOT_FINITE, precise
from curvmon.operators.node_blocks import BlockOperator, Part
from curvmon.pairs.host_copy import to_host

CHUNK = 2**22
"""entries that are converted to double precision at a time"""
SMALLEST = 1e-3
"""share of a vector that is left outside the directions of its node, below which it is rounding"""


class Images:
    """For every node v the columns [Q_v, T[v, w] Q_w, GN[v, w] Q_w for all w] and their Gram matrix.

    `add` computes products and reads nothing back; `read` brings the new inner products to the host.
    """

    def __init__(self, operator: BlockOperator, nodes: Sequence[int]) -> None:
        self._operator = operator
        self.nodes = list(nodes)
        self.vectors = {v: self._empty(v) for v in nodes}
        """Q_v: orthonormal directions (up to rounding), or zero where there was none"""
        self.products = 0
        self._columns = {v: [self._empty(v)] for v in nodes}
        self._last: dict[int, Tensor] = {}
        self._positions: dict[int, dict[tuple[Part | None, int], list[int]]] = {v: defaultdict(list) for v in nodes}
        """at every node, the columns that are directions (None), or images of those at a node"""
        self._grams = {v: torch.zeros((0, 0), dtype=torch.float64, device="cpu") for v in nodes}

    def _empty(self, v: int) -> Tensor:
        template = self._operator.templates[v]
        return template.new_zeros((template.numel(), 0))

    def size(self, v: int) -> int:
        return self.vectors[v].shape[1]

    def dimension(self, v: int) -> int:
        return self.vectors[v].shape[0]

    @property
    def has_gauss_newton(self) -> bool:
        return any(("gauss_newton", w) in self._positions[self.nodes[0]] for w in self.nodes)

    def without_images(self, sizes: Mapping[int, int]) -> Images:
        """The same directions, but inner products with the first `sizes[v]` of them, and no earlier images."""
        copy = Images(self._operator, self.nodes)
        for v, size in sizes.items():
            copy._put(v, None, v, self.vectors[v][:, :size])
        copy.vectors = self.vectors
        return copy

    def add(self, directions: Mapping[int, Tensor]) -> None:
        """Add orthonormal directions and their images: one launch for all nodes, where the operator has one."""
        if not directions:
            return
        for w, products in self._operator.columns_of(directions).items():
            self.products += products.spent
            self.vectors[w] = torch.cat([self.vectors[w], directions[w].to(self.vectors[w])], dim=1)
            self._put(w, None, w, directions[w])
            for v in self.nodes:
                self._put(v, "remainder", w, products.remainder[v])
                if products.gauss_newton is not None:
                    self._put(v, "gauss_newton", w, products.gauss_newton[v])
            self._last[w] = products.hessian(w)[:, -1:]

    def _put(self, v: int, part: Part | None, source: int, columns: Tensor) -> None:
        first = sum(piece.shape[1] for piece in self._columns[v])
        self._positions[v][part, source] += range(first, first + columns.shape[1])
        self._columns[v].append(columns.to(self._columns[v][0]))

    def _matrix(self, v: int) -> Tensor:
        self._columns[v] = [torch.cat(self._columns[v], dim=1)]
        return self._columns[v][0]

    def read(self) -> None:
        """Bring the inner products of all columns that are new to the host: one copy.

        Raises:
            NonFiniteError: a product is not finite.
        """
        blocks = to_host([self._new_products(v) for v in self.nodes])
        if not all(block.isfinite().all().tolist() for block in blocks):
            raise NonFiniteError(NOT_FINITE)
        for v, block in zip(self.nodes, blocks):
            above = torch.cat([self._grams[v], block[:, : len(self._grams[v])].T], dim=1)
            self._grams[v] = torch.cat([above, block])

    def _new_products(self, v: int) -> Tensor:
        """Inner products of the columns that have not been read with all columns."""
        columns, old = self._matrix(v), len(self._grams[v])
        total = precise(columns.new_zeros((columns.shape[1] - old, columns.shape[1])))
        for rows in torch.split(columns, max(1, CHUNK // max(1, columns.shape[1]))):
            piece = precise(rows)
            total.addmm_(piece[:, old:].T, piece)
        return total

    def last_image(self, v: int) -> Tensor:
        """H[v, v] q in double precision for the direction that was added last at v."""
        return self._last[v]

    def orthonormal(self, v: int, candidate: Tensor, fallback: Tensor) -> Tensor:
        """P_v x of unit length for a vector x, or for `fallback` where x is in the span of Q_v. Nothing is read."""
        basis = precise(self.vectors[v])

        def outside(x: Tensor) -> Tensor:
            rest: Tensor = x - basis @ (basis.T @ x)
            return rest

        candidate = precise(candidate)
        rest = outside(candidate)
        length = torch.linalg.vector_norm(rest)
        is_new = length > SMALLEST * torch.linalg.vector_norm(candidate)
        rest = torch.where(is_new, rest / length, outside(precise(fallback)))
        rest = outside(rest)  # cancellation in the first projection leaves components behind
        unit: Tensor = (rest / torch.linalg.vector_norm(rest)).to(self.vectors[v])
        return unit

    def combination(self, v: int, coefficients: Tensor) -> Tensor:
        """A linear combination of all columns at v."""
        matrix = self._matrix(v)
        return matrix @ coefficients.to(matrix).unsqueeze(1)

    def gram(self, v: int) -> Tensor:
        """Inner products of all columns at v, on the host."""
        return self._grams[v]

    def positions(self, v: int, part: Part | None, source: int) -> list[int]:
        return self._positions[v].get((part, source), [])

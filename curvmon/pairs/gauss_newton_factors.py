"""GN for all pairs from a few backward passes: factors, Gram matrices, and what they know.

Derivatives by taps with a row per sample give, for a cotangent with one column of A_b in every sample b, one column of
F_v = J_v^T A for every node and sample at once (S_b = A_b A_b^T, see `losses`). Then, for all pairs,

    GN[v, w] = F_v D F_w^T        ‖GN[v, w]‖_F² = Σ_ij D_i D_j G_v[i, j] G_w[i, j],   G_v = F_v^T F_v

with D the signs, all 1 for a convex loss. This holds where samples do not interact. With random combinations of columns
(a sketch) GN is unbiased but its square is not; the sum without the terms in which a random vector meets itself is.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from curvmon.graph.autograd import product
from curvmon.graph.taps import TappedGraph
from curvmon.numerics import precise, small_sample_factor
from curvmon.operators.node_blocks import Columns, Products
from curvmon.pairs.singular_values import Rights, leading_pairs

MOST_BYTES = 2**30
"""Factors of all nodes together take no more than this; if they do not fit, nodes are taken in turns, and not kept."""
CHUNK = 2**13
"""entries of a node that enter a Gram matrix at a time"""
SMALL_PIECE = 2**16
"""numbers in a column of a factor up to which the columns are put together: copying a large one costs time"""


class Cotangents(NamedTuple):
    """Where the columns of A come from: `column(k)` is one of every sample, shaped as the outputs.

    Without `signs` the columns are random, and their mean is what counts.
    """

    columns: int
    signs: Tensor | None
    """columns x samples"""
    text: str
    column: Callable[[int], list[Tensor]]

    def scaled(self, k: int) -> list[Tensor]:
        """`column(k)`, such that GN is a sum over columns and not a mean."""
        return self.column(k) if self.signs is not None else [c * self.columns**-0.5 for c in self.column(k)]

    @property
    def note(self) -> str:
        return self.text.format(columns=self.columns)


class Rows:
    """F_v^T, units x d_v with unit k B + b for column k of sample b: as the backward passes left it, in pieces."""

    def __init__(self, pieces: list[Tensor]) -> None:
        self._pieces = [torch.cat(pieces)] if pieces[0].numel() <= SMALL_PIECE else pieces
        self.units, self.width = sum(len(piece) for piece in pieces), pieces[0].shape[1]

    def __matmul__(self, z: Tensor) -> Tensor:
        """F_v^T z for the columns of z."""
        return torch.cat([piece @ z.to(piece) for piece in self._pieces])

    def transposed(self, coefficients: Tensor) -> Tensor:
        """F_v c for the columns of c."""
        parts = torch.split(coefficients, [len(piece) for piece in self._pieces])
        total = self._pieces[0].T @ parts[0].to(self._pieces[0])
        for piece, part in zip(self._pieces[1:], parts[1:]):
            total.addmm_(piece.T, part.to(piece))
        return total

    def column(self, k: int, samples: int) -> Tensor:
        """What the k-th backward pass gave, samples x d_v."""
        if len(self._pieces) > 1:
            return self._pieces[k]
        return self._pieces[0][k * samples : (k + 1) * samples]

    def whole(self) -> Tensor:
        return torch.cat(self._pieces)

    def gram(self, precisely: bool = False) -> Tensor:
        """F_v^T F_v, in chunks, because sums of many terms belong in double precision; and one half of it only."""
        total = precise(self._pieces[0].new_zeros((self.units, self.units)))
        step = max(48, -(-self.units // 6))
        room = self._pieces[0].new_empty((self.units, min(CHUNK, self.width)))
        for start in range(0, self.width, CHUNK):
            stop = min(start + CHUNK, self.width)
            chunk = room[:, : stop - start]
            for piece, at in zip(self._pieces, torch.split(chunk, [len(piece) for piece in self._pieces])):
                at.copy_(piece[:, start:stop])
            chunk = precise(chunk) if precisely else chunk
            for top in range(0, self.units, step):
                end = min(top + step, self.units)
                total[top:end, :end] += chunk[top:end] @ chunk[:end].T
        lower = total.cpu().double()
        return lower.tril() + lower.tril(-1).T


class Factors:
    """F_v for every node, and its Gram matrix.

    `rows` is None where they would not fit into memory: then only norms of whole blocks are known.
    """

    def __init__(self, rows: list[Rows] | None, grams: list[Tensor], signs: Tensor | None, columns: int) -> None:
        self.rows = rows
        self._grams = grams
        self._sizes = [torch.linalg.vector_norm(gram).item() for gram in grams]
        self._pairs = list(itertools.combinations_with_replacement(range(len(grams)), 2))
        self._columns = columns
        self.is_exact = signs is not None
        units = len(grams[0])
        if signs is not None:
            self._signs = signs.reshape(-1).cpu().double()
            self._weights = self._signs.outer(self._signs)
        else:
            self._signs = torch.ones(units, dtype=torch.float64, device="cpu")
            sample = torch.arange(units, device="cpu") % (units // columns)
            same = sample.unsqueeze(0) == sample.unsqueeze(1)
            self._weights = torch.where(same, columns / (columns - 1), 1.0).double().fill_diagonal_(0)
        self._outside: dict[int, tuple[int, Tensor]] = {}
        self._roots: dict[int, Tensor] = {}
        self._rights: Rights | None = None
        self._norms: dict[tuple[int, int], float] = {}
        self._spectral: dict[tuple[int, int], float] = {}

    def norm_squared(self, v: int, w: int) -> float:
        """‖GN[v, w]‖_F²; zero where rounding, or a sketch, makes it negative."""
        if (v, w) not in self._norms:
            self._norms[v, w] = max(0.0, (self._weights * self._grams[v] * self._grams[w]).sum().item())
        return self._norms[v, w]

    def orthogonality(self, v: int, w: int) -> float:
        """‖G_v‖ ‖G_w‖ / ‖GN[v, w]‖², one at least: how much larger the factors are than what they give."""
        norm = self.norm_squared(v, w)
        return max(1.0, self._sizes[v] * self._sizes[w] / norm) if norm else math.inf

    def sharpen(self) -> None:
        """Gram matrices in double precision throughout, where single precision leaves too little of some norm."""
        if self.rows is None or all(self.orthogonality(v, w) < 1e3 for v, w in self._pairs):
            return
        self._grams = [rows.gram(precisely=True) for rows in self.rows]
        self._norms.clear()

    def cancels(self) -> bool:
        """Signs let a norm come out as the small difference of large numbers: it would be mostly rounding."""
        if not self.is_exact or (self._signs >= 0).all():
            return False
        return any(
            self.norm_squared(v, w) < 1e-4 * (self._grams[v] * self._grams[w]).sum().item() for v, w in self._pairs
        )

    def rest(self, v: int, w: int, bases: Sequence[Tensor]) -> float:
        """‖P_v GN[v, w] P_w‖_F² with P_v = I - Q_v Q_v^T, Q_v = bases[v]."""
        return self._influence(v, w, bases).sum().item()

    def _influence(self, v: int, w: int, bases: Sequence[Tensor]) -> Tensor:
        return (self._weights * self._gram_outside(v, bases[v]) * self._gram_outside(w, bases[w])).sum(1)

    def _gram_outside(self, v: int, basis: Tensor) -> Tensor:
        """Gram matrix of P_v F_v."""
        if basis.shape[1] == 0:
            return self._grams[v]
        assert self.rows is not None
        cached = self._outside.get(v)
        if cached is None or cached[0] != basis.shape[1]:
            inside = precise(self.rows[v] @ basis).cpu()
            cached = self._outside[v] = basis.shape[1], self._grams[v] - inside @ inside.T
        return cached[1]

    def standard_error(self, terms: Iterable[tuple[float, int, int]], bases: Sequence[Tensor]) -> float:
        """Of Σ slope · rest(v, w), for a sketch: how the contribution of a sample varies between its random vectors.

        The variance of such a sum is that of its linear part (Hoeffding), which is independent between the vectors,
        4 Σ_b r Var_r(h_br). Estimated from the sum itself it errs on the high side (Efron and Stein).
        """
        if self.is_exact:
            return 0.0
        linear = sum(slope * self._influence(v, w, bases) for slope, v, w in terms)
        if not isinstance(linear, Tensor):
            return 0.0
        spread = linear.reshape(self._columns, -1).var(dim=0, unbiased=True)
        total = spread.sum().item()
        if total == 0:
            return 0.0
        freedom = (self._columns - 1) * total**2 / spread.square().sum().item()
        return 2 * math.sqrt(self._columns * total) * small_sample_factor(int(freedom))

    def relative_error(self) -> float:
        """Largest standard error of any ‖GN[v, w]‖_F, relative to it."""
        if self.is_exact:
            return 0.0
        whole = [gram.new_zeros((0, 0)) for gram in self._grams]
        errors = [
            self.standard_error([(0.5 / self.norm_squared(v, w), v, w)], whole)
            for v, w in self._pairs
            if self.norm_squared(v, w) > 0
        ]
        return max(errors, default=0.0)

    def form(self, one: Tensor, other: Tensor) -> float:
        """z_v^T GN[v, w] z_w for F_v^T z_v and F_w^T z_w."""
        return (one * self._signs * other).sum().item()

    def product(self, w: int, z: Tensor) -> Columns:
        """GN[:, w] z for the columns of z, from an exact factor."""
        assert self.rows is not None
        coefficients = (self.rows[w] @ z) * self._signs.to(z).unsqueeze(1)
        return [rows.transposed(coefficients) for rows in self.rows]

    def spectral_norm(self, v: int, w: int) -> float:
        """‖GN[v, w]‖_2, from an exact factor: that of L_v^T D L_w, with G_v = L_v L_v^T; a row of pairs at a time."""
        v, w = min(v, w), max(v, w)
        if (v, w) not in self._spectral:
            if self._rights is None:
                self._rights = Rights([self._signed_root(other) for other in range(len(self._grams))])
            norms = leading_pairs(self._root(v), self._rights.since(v), self._grams[v])[1].tolist()
            self._spectral.update({(v, v + i): norm for i, norm in enumerate(norms)})
        return self._spectral[v, w]

    def leading(self, v: int, w: int) -> Tensor:
        """The leading left singular vector of GN[v, w], as a column; that of an estimate of GN if this is a sketch."""
        assert self.rows is not None
        root = self._root(v)
        u = leading_pairs(root, Rights([self._signed_root(w)]), self._grams[v])[0][0]
        weights = root / root.square().sum(0).clamp_min(torch.finfo(root.dtype).tiny)
        return self.rows[v].transposed((weights @ u).unsqueeze(1))

    def _signed_root(self, v: int) -> Tensor:
        return self._signs.unsqueeze(1) * self._root(v)

    def _root(self, v: int) -> Tensor:
        """L_v with G_v = L_v L_v^T, strongest columns first: F_v itself if it is narrow, else from eigenvectors."""
        if v not in self._roots:
            if self.rows is not None and self.rows[v].width <= self.rows[v].units:
                rows = self.rows[v].whole()
                strongest = torch.linalg.vector_norm(rows, dim=0).argsort(descending=True)
                self._roots[v] = rows[:, strongest].cpu().double()
            else:
                values, vectors = torch.linalg.eigh(self._grams[v])
                kept = values > 1e-7 * values[-1]
                self._roots[v] = (vectors * values.clamp_min(0).sqrt())[:, kept].flip(1)
        return self._roots[v]


def build(
    graph: TappedGraph, source: Cotangents, batch_dim: int, probes: Sequence[Tensor]
) -> tuple[Factors, list[Tensor]]:
    """Factors of all nodes by one backward pass per column, and F_v^T z_v for a probe z_v at every node.

    Where all factors do not fit into `MOST_BYTES`, nodes are taken in turns, the last ones first: a turn differentiates
    no further back than it must.
    """
    nodes = range(len(graph.taps))
    turns = _turns([tap.numel() * source.columns * tap.element_size() for tap in graph.sample_taps])
    kept: dict[int, Rows] = {}
    grams: dict[int, Tensor] = {}
    coefficients: dict[int, Tensor] = {}
    for turn in turns:
        for v, rows in _rows(graph, turn, source, batch_dim).items():
            grams[v] = rows.gram()
            coefficients[v] = precise(rows @ probes[v].reshape(-1)).cpu()
            if len(turns) == 1:
                kept[v] = rows
    factors = Factors(
        [kept[v] for v in nodes] if kept else None, [grams[v] for v in nodes], source.signs, source.columns
    )
    factors.sharpen()
    return factors, [coefficients[v] for v in nodes]


def _turns(sizes: list[int]) -> list[list[int]]:
    turns: list[list[int]] = [[]]
    room = MOST_BYTES
    for v in reversed(range(len(sizes))):
        if turns[-1] and sizes[v] > room:
            turns.append([])
            room = MOST_BYTES
        turns[-1].insert(0, v)
        room -= sizes[v]
    return turns


def _rows(graph: TappedGraph, nodes: list[int], source: Cotangents, batch_dim: int) -> dict[int, Rows]:
    taps = [graph.sample_taps[v] for v in nodes]
    pieces: dict[int, list[Tensor]] = {v: [] for v in nodes}
    for k in range(source.columns):
        for v, gradient in zip(nodes, product(graph.outputs, taps, source.scaled(k))):
            pieces[v].append(gradient.movedim(batch_dim, 0).flatten(1))
    return {v: Rows(pieces.pop(v)) for v in nodes}


Remainders = Callable[[Sequence[tuple[int, Tensor]]], list[Products]]
"""T[:, w] Z for several (w, Z)"""


class FactoredOperator:
    """The `BlockOperator` of a network whose GN has an exact factor: a column costs one product, that with T."""

    hvps_per_column = 1

    def __init__(self, templates: Sequence[Tensor], remainders: Remainders, factors: Factors) -> None:
        self.templates = templates
        self._remainders = remainders
        self._factors = factors

    def columns(self, w: int, z: Tensor) -> Products:
        return self.many([(w, z)])[0]

    def many(self, requests: Sequence[tuple[int, Tensor]]) -> list[Products]:
        found = zip(requests, self._remainders(requests))
        return [part._replace(gauss_newton=self._factors.product(w, z)) for (w, z), part in found]

"""GN for all pairs from a few backward passes: factors F_v and their Gram matrices.

    GN[v, w] = F_v D F_w^T        ‖GN[v, w]‖_F² = Σ_ij D_i D_j G_v[i, j] G_w[i, j],   G_v = F_v^T F_v

with F_v = J_v^T A, S_b = A_b D_b A_b^T the loss curvature of sample b (see `loss_curvature`) and D the signs, all 1 for
a convex loss. One backward pass with a column of every A_b as cotangent gives, w.r.t. taps with a row per sample, one
column of F_v for every node and sample. This holds where samples do not interact.

With random combinations of the columns (a sketch), GN is unbiased, but the sum for its squared norm is not. Without the
terms in which a random vector is multiplied by itself, it is an unbiased U-statistic.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from curvmon.graph.autograd import product
from curvmon.graph.taps import TappedGraph
from curvmon.numerics import precise, small_sample_factor
from curvmon.operators.node_blocks import Columns, GraphOperator, Products, checked
from curvmon.pairs.host_copy import to_host
from curvmon.pairs.singular_values import RightFactors, leading_pairs

MAX_BYTES = 2**30
"""Largest size of the factors of all nodes. If it is exceeded, nodes are taken in groups, and only norms are kept."""
CHUNK = 2**13
"""entries of a node that enter a Gram matrix at a time"""
SMALL_PIECE = 2**16
"""Columns of a factor are concatenated up to this many entries each: copying large ones costs time."""


class Cotangents(NamedTuple):
    """The columns of A: `column(k)` holds one of every sample, shaped as the outputs.

    Without `signs` the columns are random, new tensors in every call, and S_b is the mean of their outer products.
    """

    columns: int
    signs: Tensor | None
    """columns x samples"""
    text: str
    column: Callable[[int], list[Tensor]]

    def scaled(self, k: int) -> list[Tensor]:
        """`column(k)`, scaled such that GN is a sum over columns and not a mean."""
        return self.column(k) if self.signs is not None else [c.mul_(self.columns**-0.5) for c in self.column(k)]

    @property
    def note(self) -> str:
        return self.text.format(columns=self.columns)


class FactorRows:
    """F_v^T, units x d_v; unit k B + b is column k of sample b of B. In one piece per backward pass."""

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
        """The result of backward pass k, samples x d_v."""
        if len(self._pieces) > 1:
            return self._pieces[k]
        return self._pieces[0][k * samples : (k + 1) * samples]

    def dense(self) -> Tensor:
        """F_v^T"""
        return torch.cat(self._pieces)

    def gram(self, precisely: bool = False) -> Tensor:
        """G_v = F_v^T F_v without its upper half. Chunks are summed in double precision."""
        rows = self.dense()
        padded = torch.nn.functional.pad(rows, (0, -self.width % min(CHUNK, self.width)))
        chunks = padded.view(self.units, -1, min(CHUNK, self.width)).transpose(0, 1)
        chunks = precise(chunks) if precisely else chunks
        total = precise(rows.new_zeros((self.units, self.units)))
        step = max(48, -(-self.units // 6))
        for top in range(0, self.units, step):
            end = min(top + step, self.units)
            total[top:end, :end] = precise(chunks[:, top:end] @ chunks[:, :end].mT).sum(0)
        return total


def whole_grams(lower: Sequence[Tensor]) -> list[Tensor]:
    """Symmetric matrices on the host, from their lower halves."""
    return [matrix.tril() + matrix.tril(-1).T for matrix in lower]


class Factors:
    """F_v for every node, and its Gram matrix.

    `rows` is None where they would not fit into memory: then there are norms of whole blocks only.
    """

    def __init__(self, rows: list[FactorRows] | None, grams: list[Tensor], signs: Tensor | None, columns: int) -> None:
        self.rows = rows
        self._grams = grams
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
        self._roots: dict[int, Tensor] = {}
        self._right_factors: RightFactors | None = None
        self._spectral: dict[tuple[int, int], float] = {}
        self._summarise()

    def _summarise(self) -> None:
        """Norms of all blocks."""
        weighted = [self._weights * gram for gram in self._grams]
        norms = [(weighted[v] * self._grams[w]).sum() for v, w in self._pairs]
        bounds = [(self._grams[v] * self._grams[w]).sum() for v, w in self._pairs]
        sizes = [torch.linalg.vector_norm(gram) for gram in self._grams]
        self._sizes: list[float] = torch.stack(sizes).tolist()
        self._norms: dict[tuple[int, int], float] = dict(zip(self._pairs, torch.stack(norms).tolist()))
        self._bounds: dict[tuple[int, int], float] = dict(zip(self._pairs, torch.stack(bounds).tolist()))

    def norm_squared(self, v: int, w: int) -> float:
        """‖GN[v, w]‖_F²; zero where rounding or the error of a sketch makes it negative."""
        return max(0.0, self._norms[min(v, w), max(v, w)])

    def orthogonality(self, v: int, w: int) -> float:
        """max(1, ‖G_v‖ ‖G_w‖ / ‖GN[v, w]‖²): the cancellation in F_v D F_w^T, which amplifies rounding errors."""
        norm = self.norm_squared(v, w)
        return max(1.0, self._sizes[v] * self._sizes[w] / norm) if norm else math.inf

    def refine_precision(self) -> None:
        """Recompute the Gram matrices in double precision throughout, if a norm suffers from cancellation."""
        if self.rows is None or all(self.orthogonality(v, w) < 1e3 for v, w in self._pairs):
            return
        self._grams = whole_grams(to_host([rows.gram(precisely=True) for rows in self.rows]))
        self._summarise()

    def cancels(self) -> bool:
        """Positive and negative parts cancel in some norm: it is mostly rounding."""
        if not self.is_exact or (self._signs >= 0).all():
            return False
        return any(self.norm_squared(*pair) < 1e-4 * self._bounds[pair] for pair in self._pairs)

    def outside(self, bases: Mapping[int, Tensor]) -> OutsideFactors:
        """P_v GN[v, w] P_w with P_v = I - Q_v Q_v^T, Q_v = bases[v]."""
        assert self.rows is not None
        inside = to_host([self.rows[v] @ basis for v, basis in bases.items()])
        grams = {v: self._grams[v] - matrix @ matrix.T for v, matrix in zip(bases, inside)}
        return OutsideFactors(grams, self._weights, 0 if self.is_exact else self._columns)

    def relative_error(self) -> float:
        """Largest standard error of any ‖GN[v, w]‖_F, relative to it."""
        if self.is_exact:
            return 0.0
        whole = OutsideFactors(dict(enumerate(self._grams)), self._weights, self._columns)
        errors = [
            whole.standard_error([(0.5 / self.norm_squared(v, w), v, w)])
            for v, w in self._pairs
            if self.norm_squared(v, w) > 0
        ]
        return max(errors, default=0.0)

    def bilinear_form(self, one: Tensor, other: Tensor) -> float:
        """z_v^T GN[v, w] z_w for F_v^T z_v and F_w^T z_w."""
        (form,) = (one * self._signs * other).sum().reshape(1).tolist()
        return float(form)

    def product(self, w: int, z: Tensor) -> Columns:
        """GN[:, w] z for the columns of z, from an exact factor."""
        assert self.rows is not None
        coefficients = (self.rows[w] @ z) * self._signs.to(z).unsqueeze(1)
        return [rows.transposed(coefficients) for rows in self.rows]

    def spectral_norm(self, v: int, w: int) -> float:
        """‖GN[v, w]‖_2 = ‖L_v^T D L_w‖_2 with G_v = L_v L_v^T, from an exact factor; all w >= v at once."""
        v, w = min(v, w), max(v, w)
        if (v, w) not in self._spectral:
            if self._right_factors is None:
                self._right_factors = RightFactors([self._signed_root(other) for other in range(len(self._grams))])
            norms = leading_pairs(self._root(v), self._right_factors.from_index(v), self._grams[v])[1].tolist()
            self._spectral.update({(v, v + i): norm for i, norm in enumerate(norms)})
        return self._spectral[v, w]

    def leading(self, v: int, w: int) -> Tensor:
        """The leading left singular vector of GN[v, w], or of its sketch, as a column."""
        assert self.rows is not None
        root = self._root(v)
        u = leading_pairs(root, RightFactors([self._signed_root(w)]), self._grams[v])[0][0]
        weights = root / root.square().sum(0).clamp_min(torch.finfo(root.dtype).tiny)
        return self.rows[v].transposed((weights @ u).unsqueeze(1))

    def _signed_root(self, v: int) -> Tensor:
        return self._signs.unsqueeze(1) * self._root(v)

    def _root(self, v: int) -> Tensor:
        """L_v with G_v = L_v L_v^T, largest columns first: F_v^T itself if it is narrow, else from eigenvectors."""
        if v not in self._roots:
            if self.rows is not None and self.rows[v].width <= self.rows[v].units:
                rows = self.rows[v].dense()
                order = torch.linalg.vector_norm(rows, dim=0).argsort(descending=True)
                self._roots[v] = rows[:, order].cpu().double()
            else:
                values, vectors = torch.linalg.eigh(self._grams[v])
                kept = values > 1e-7 * values[-1]
                self._roots[v] = (vectors * values.clamp_min(0).sqrt())[:, kept].flip(1)
        return self._roots[v]


class OutsideFactors:
    """‖P_v GN[v, w] P_w‖_F² from the Gram matrices of P_v F_v, with errors for a sketch."""

    def __init__(self, grams: Mapping[int, Tensor], weights: Tensor, columns: int) -> None:
        """`columns`: vectors per sample of the sketch; 0 if there is none, and so no error."""
        self._columns = columns
        nodes = sorted(grams)
        self._pairs = {pair: i for i, pair in enumerate(itertools.combinations_with_replacement(nodes, 2))}
        # the contribution of every unit
        self._influences = torch.stack([(weights * grams[v] * grams[w]).sum(1) for v, w in self._pairs])
        self._norms: list[float] = self._influences.sum(1).tolist()

    def norm_squared(self, v: int, w: int) -> float:
        return self._norms[self._pairs[min(v, w), max(v, w)]]

    def standard_error(self, terms: Iterable[tuple[float, int, int]]) -> float:
        """Standard error of Σ slope · norm_squared(v, w) for a sketch of r random vectors per sample.

        To first order, the variance of a U-statistic is that of its linear part (Hoeffding 1948), 4 Σ_b r Var_r(h_br),
        which is independent between the vectors. Estimated from the statistic itself it is conservative (Efron & Stein
        1981). Degrees of freedom after Welch and Satterthwaite.
        """
        if not self._columns:
            return 0.0
        slopes = self._influences.new_zeros(len(self._pairs))
        for slope, v, w in terms:
            slopes[self._pairs[min(v, w), max(v, w)]] += slope
        spread = (slopes @ self._influences).reshape(self._columns, -1).var(dim=0, unbiased=True)
        total, squares = torch.stack([spread.sum(), spread.square().sum()]).tolist()
        if total == 0:
            return 0.0
        degrees_of_freedom = (self._columns - 1) * total**2 / squares
        return 2 * math.sqrt(self._columns * total) * small_sample_factor(int(degrees_of_freedom))


def build(
    graph: TappedGraph, source: Cotangents, batch_dim: int, probes: Sequence[Tensor]
) -> tuple[Factors, list[Tensor]]:
    """Factors of all nodes by one backward pass per column, and F_v^T z_v for a probe z_v at every node.

    Where all factors do not fit into `MAX_BYTES`, nodes are taken in groups, the last ones first: a backward pass goes
    no further back than the first node of its group.
    """
    nodes = range(len(graph.taps))
    groups = _groups([tap.numel() * source.columns * tap.element_size() for tap in graph.sample_taps])
    kept: dict[int, FactorRows] = {}
    grams: dict[int, Tensor] = {}
    coefficients: dict[int, Tensor] = {}
    for group in groups:
        factor_rows = _factor_rows(graph, group, source, batch_dim)
        read = to_host([x for v, rows in factor_rows.items() for x in (rows.gram(), rows @ probes[v].reshape(-1))])
        grams.update(zip(factor_rows, whole_grams(read[::2])))
        coefficients.update(zip(factor_rows, read[1::2]))
        if len(groups) == 1:
            kept = factor_rows
    factors = Factors(
        [kept[v] for v in nodes] if kept else None, [grams[v] for v in nodes], source.signs, source.columns
    )
    factors.refine_precision()
    return factors, [coefficients[v] for v in nodes]


def _groups(sizes: list[int]) -> list[list[int]]:
    """Consecutive indices whose sizes add up to at most `MAX_BYTES`, the last ones first."""
    groups: list[list[int]] = [[]]
    free = MAX_BYTES
    for v in reversed(range(len(sizes))):
        if groups[-1] and sizes[v] > free:
            groups.append([])
            free = MAX_BYTES
        groups[-1].insert(0, v)
        free -= sizes[v]
    return groups


def _factor_rows(graph: TappedGraph, nodes: list[int], source: Cotangents, batch_dim: int) -> dict[int, FactorRows]:
    taps = [graph.sample_taps[v] for v in nodes]
    pieces: dict[int, list[Tensor]] = {v: [] for v in nodes}
    for k in range(source.columns):
        for v, gradient in zip(nodes, product(graph.outputs, taps, source.scaled(k))):
            pieces[v].append(gradient.movedim(batch_dim, 0).flatten(1))
    return {v: FactorRows(pieces.pop(v)) for v in nodes}


class FactoredOperator:
    """The `BlockOperator` of a network whose GN has an exact factor: a column takes one HVP, that with T."""

    hvps_per_column = 1

    def __init__(self, operator: GraphOperator, factors: Factors) -> None:
        self.templates = operator.templates
        self._operator = operator
        self._factors = factors

    def columns(self, w: int, z: Tensor) -> Products:
        return checked(self.columns_of({w: z})[w])

    def columns_of(self, requests: Mapping[int, Tensor]) -> dict[int, Products]:
        remainders = self._operator.remainders_of(requests)
        return {w: remainders[w]._replace(gauss_newton=self._factors.product(w, z)) for w, z in requests.items()}

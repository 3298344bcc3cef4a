"""One orthonormal basis per node, shared by all pairs.

    ‖A‖_F² = ‖A^T Q_v‖_F² + ‖P_v A Q_w‖_F² + ‖P_v A P_w‖_F²             captured, captured, rest

for a block A = H[v, w], a basis Q_v at node v and P_v = I - Q_v Q_v^T. The products A Q_w and A^T Q_v give the captured
terms exactly, and the spectral norm of A without its rest. The rest is estimated by random probes: the idea of Hutch++
(Meyer et al. 2021), for Frobenius norms. It is projected on both sides, and therefore small where the bases hold the
leading directions.

Cost: k HVPs at node w for a basis of k vectors. They serve the pairs of w with all nodes. Everything here is computed
on the host, from inner products, for all pairs at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from curvmon.operators.node_blocks import Part
from curvmon.pairs.images import Images
from curvmon.pairs.spectral_norm import RitzValue, SpectralNorm

RITZ_VALUES = 4
PARTS: tuple[Part, ...] = ("hessian", "gauss_newton", "remainder")
_TINY = 1e-150


class PartNorms(NamedTuple):
    """One number each for H, GN and T = H - GN."""

    hessian: float
    gauss_newton: float
    remainder: float


class Selection(NamedTuple):
    """Blocks of inner products for some directions at every node, padded with zeros to k of them.

    All are stacked over the nodes: entry [v, w] belongs to A = H[v, w], GN[v, w] or T[v, w].
    """

    directions: Tensor
    """Q_v^T Q_v, n x k x k"""
    cross: dict[Part, Tensor]
    """Q_v^T A Q_w, n x n x k x k"""
    inner: dict[Part, Tensor]
    """(A Q_w)^T A Q_w"""


def select(images: Images, rows: Mapping[int, slice], columns: Mapping[int, slice]) -> Selection:
    """Inner products of the directions `rows[v]` of every node with the images of `columns[w]`."""
    nodes = images.nodes
    chosen_rows = _padded([images.positions(v, None, v)[rows[v]] for v in nodes])
    directions, cross, inner = [], [], []
    kinds: tuple[Part, ...] = ("remainder", "gauss_newton") if images.has_gauss_newton else ("remainder",)
    for v, row in zip(nodes, chosen_rows):
        gram = torch.nn.functional.pad(images.gram(v), (0, 1, 0, 1))  # index -1: zeros
        directions.append(gram[row[:, None], row])
        at = [_padded([images.positions(v, kind, w)[columns[w]] for w in nodes]) for kind in kinds]
        cross.append(torch.stack([gram[row[:, None], i.unsqueeze(1)] for i in at]))
        inner.append(torch.stack([torch.stack([gram[i[:, :, None], j[:, None, :]] for j in at]) for i in at]))
    by_kind, products = torch.stack(cross, dim=1), torch.stack(inner, dim=2)
    if len(kinds) == 1:
        return Selection(torch.stack(directions), {"hessian": by_kind[0]}, {"hessian": products[0, 0]})
    return Selection(
        torch.stack(directions),
        {"hessian": by_kind.sum(0), "gauss_newton": by_kind[1], "remainder": by_kind[0]},
        {"hessian": products.sum((0, 1)), "gauss_newton": products[1, 1], "remainder": products[0, 0]},
    )


def _padded(positions: Sequence[list[int]]) -> Tensor:
    most = max(map(len, positions))
    rows = [[*row, *[-1] * (most - len(row))] for row in positions]
    return torch.tensor(rows, dtype=torch.long, device="cpu").reshape(len(rows), most)


def inverse_root(gram: Tensor) -> Tensor:
    """G^(-1/2) for nearly orthonormal directions, without those that are zero."""
    values, vectors = torch.linalg.eigh(gram)
    scale = torch.where(values > 0.5, values.clamp_min(0.5).rsqrt(), 0)
    root: Tensor = (vectors * scale.unsqueeze(-2)) @ vectors.mT
    return root


class SharedBasis:
    """What the first directions of every node give for all its pairs; `sizes[v]` of them form the basis."""

    def __init__(self, images: Images, sizes: Mapping[int, int]) -> None:
        self._images = images
        self.sizes = dict(sizes)
        self._at = {v: i for i, v in enumerate(images.nodes)}
        if not sizes:
            return  # all pairs have exact factors
        every = {v: slice(0, size) for v, size in sizes.items()}
        selection = select(images, every, every)
        self._root = inverse_root(selection.directions)
        left, right = self._root.unsqueeze(1), self._root.unsqueeze(0)
        self._cross = {part: left @ block @ right for part, block in selection.cross.items()}
        inner = {part: right @ block @ right for part, block in selection.inner.items()}
        self._outside = {part: inner[part] - block.mT @ block for part, block in self._cross.items()}
        """(P_v A Q_w)^T P_v A Q_w"""
        traces = {part: _traces(block) for part, block in inner.items()}
        captured = {part: (traces[part].T + _traces(self._outside[part])).clamp_min(0) for part in traces}
        self._captured = {part: block.tolist() for part, block in captured.items()}
        self._norms = traces["hessian"].clamp_min(0).sqrt()
        """‖H[v, w] Q_w‖"""
        cross = self._cross["hessian"]
        difference = torch.linalg.vector_norm(cross - cross.transpose(0, 1).mT, dim=(2, 3))
        self._asymmetry = torch.where(self._norms > 0, difference / self._norms.clamp_min(_TINY), 0).tolist()

    def size(self, v: int) -> int:
        return self.sizes[v]

    def dimension(self, v: int) -> int:
        return self._images.dimension(v)

    def is_complete(self, v: int) -> bool:
        """Q_v spans the whole space: all blocks of v are exact."""
        return self.size(v) == self.dimension(v)

    def vectors(self, v: int) -> Tensor:
        return self._images.vectors[v][:, : self.size(v)]

    def captured(self, v: int, w: int) -> PartNorms:
        """‖A^T Q_v‖_F² + ‖P_v A Q_w‖_F² for A = H, GN and T."""
        if not self.sizes[v] and not self.sizes[w]:
            return PartNorms(0.0, 0.0, 0.0)
        i, j = self._at[v], self._at[w]
        return PartNorms(*(self._captured[part][i][j] if part in self._captured else math.nan for part in PARTS))

    def asymmetry(self, v: int, w: int) -> float:
        """‖Q_v^T (A Q_w) - (A^T Q_v)^T Q_w‖_F / ‖A Q_w‖_F: rounding, if all second derivatives are correct."""
        value: float = self._asymmetry[self._at[v]][self._at[w]]
        return value

    def outside(self, selection: Selection, part: Part) -> Tensor:
        """(P_v A Z_w)^T P_v A Z_w for all v and w, from the inner products of Q_v with images of Z_w."""
        inside = self._root.unsqueeze(1) @ selection.cross[part]
        return selection.inner[part] - inside.mT @ inside

    def spectral_norms(self, pairs: Sequence[tuple[int, int]]) -> RitzValues:
        """‖A - P_v A P_w‖_2 from matrices with 2 k rows and columns:

        A - P_v A P_w = [Q_v  Q_B] [ Q_v^T A Q_w   R_C^T ] [Q_w  Q_C]^T,   P_v A Q_w = Q_B R_B,  P_w A^T Q_v = Q_C R_C
                                   [ R_B             0   ]
        """
        rows, cols = (torch.tensor([self._at[pair[side]] for pair in pairs], device="cpu") for side in (0, 1))
        cross, outside = self._cross["hessian"], self._outside["hessian"]
        scale = torch.maximum(self._norms[rows, cols], self._norms[cols, rows]).clamp_min(_TINY).reshape(-1, 1, 1)
        k = cross.shape[2]
        small = cross.new_zeros((len(pairs), 2 * k, 2 * k))
        small[:, :k, :k] = cross[rows, cols] / scale
        small[:, k:, :k] = _square_root(outside[rows, cols] / scale**2)
        small[:, :k, k:] = _square_root(outside[cols, rows] / scale**2).mT
        u, s, vh = torch.linalg.svd(small)
        s, left, right = s[:, :RITZ_VALUES], u[:, :, :RITZ_VALUES].mT, vh[:, :RITZ_VALUES]
        row, col = left[:, :, k:].square().sum(2), right[:, :, k:].square().sum(2)
        top = s[:, :1].clamp_min(_TINY)
        norms = []
        for (v, w), size, *values in zip(
            pairs, (s[:, :1] * scale[:, 0]).flatten().tolist(), (s / top).tolist(), row.tolist(), col.tolist()
        ):
            ritz = [RitzValue(value, 0.5 * (one + other), one, other) for value, one, other in zip(*values)]
            is_exact = size == 0 or self.is_complete(v) or self.is_complete(w)
            norms.append(SpectralNorm(size, [] if is_exact else ritz))
        # P_v x = P_v A Q_w y / s for the part y of the right singular vector that is in Q_w, and likewise P_w y
        divisor = (s.unsqueeze(2) * scale).clamp_min(_TINY)
        row_residuals = right[:, :, :k] @ self._root[cols] / divisor
        col_residuals = left[:, :, :k] @ self._root[rows] / divisor
        return RitzValues(norms, row_residuals, col_residuals)

    def leading_residual(self, v: int, residuals: Sequence[tuple[int, Tensor]]) -> tuple[Tensor, float]:
        """The leading left singular vector of residuals P_v A Q_w c, as coefficients of all columns at v, and its size.

        Every residual is given as (w, c).
        """
        gram, images = self._images.gram(v), self._images
        coefficients = gram.new_zeros((len(gram), len(residuals)))
        for i, (w, own) in enumerate(residuals):
            for part in PARTS[1:]:
                at = images.positions(v, part, w)
                coefficients[at, i] = own[: len(at)]
        products = gram @ coefficients
        size = self.size(v)
        inside = self._root[self._at[v], :size, :size] @ products[images.positions(v, None, v)[:size]]
        values, vectors = torch.linalg.eigh(coefficients.T @ products - inside.T @ inside)
        return coefficients @ vectors[:, -1], max(0.0, values[-1:].tolist()[0]) ** 0.5


class RitzValues(NamedTuple):
    """Ritz values of some pairs, and the residuals of their singular vectors as coefficients of images."""

    norms: list[SpectralNorm]
    rows: Tensor
    """P_v x = P_v A Q_w c: c for every pair and Ritz value"""
    cols: Tensor
    """P_w y = P_w A^T Q_v c"""


def _traces(blocks: Tensor) -> Tensor:
    return blocks.diagonal(dim1=2, dim2=3).sum(2)


def _square_root(gram: Tensor) -> Tensor:
    """R with R^T R = G."""
    values, vectors = torch.linalg.eigh(gram)
    root: Tensor = values.clamp_min(0).sqrt().unsqueeze(2) * vectors.mT
    return root

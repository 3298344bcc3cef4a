"""One orthonormal basis per node, shared by all pairs: exact on what it spans, honest about the rest.

With Q_v at node v and P_v = I - Q_v Q_v^T, the products A Q_w and A^T Q_v of a block A = H[v, w] give

    ‖A‖_F² = ‖A^T Q_v‖_F² + ‖P_v A Q_w‖_F² + ‖P_v A P_w‖_F²             captured, captured, rest

and the spectral norm of A without its rest. The rest is what random probes have to estimate; it is small where the
bases hold the leading directions, because it is cut on both sides. k products at node w serve its pairs with all nodes.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from curvmon.curvature.operators import BlockOperator, Columns, Products, norm_squared, precise

RITZ_VALUES = 4


class Ritz(NamedTuple):
    """A singular value of what the bases hold of a block, relative to the largest, and how far to trust it.

    `tilt` is ½(ε_v² + ε_w²), ε the length of the part of its singular vectors outside the bases. `at_row`, `at_col` are
    those parts: adding them to the bases is one step of a Krylov method.
    """

    value: float
    tilt: float
    at_row: Tensor
    at_col: Tensor


class Leading(NamedTuple):
    """Spectral norm of a block, as far as the bases know it: the first of a few Ritz values."""

    norm: float
    ritz: list[Ritz]
    """empty where a basis is complete: then the norm is exact"""

    def error(self, rest: float) -> float:
        """By how much, relatively, the norm may be too low if P_v A P_w has `rest` times its size."""
        return max(0.0, *self._bounds(rest)) if self.ritz else 0.0

    def least_settled(self) -> Ritz:
        """The Ritz value that may turn out largest, should the rest be as strong as what was found."""
        bounds = self._bounds(1.0)
        return self.ritz[bounds.index(max(bounds))]

    def _bounds(self, rest: float) -> list[float]:
        """How far above the first Ritz value each of them may be in truth.

        To first order u^T (P_v A P_w) y <= ε_v ε_w rest is missing, u and y the singular vectors. To second order the
        residual, of length sqrt(2 tilt) rest at most, mixes them with others: for the first by its square over the gap
        to the second, for those behind it, which may be the true leaders half seen, by its length.
        """
        bounds = []
        for i, (value, tilt, _, _) in enumerate(self.ritz):
            mixed = residual = math.sqrt(2 * tilt) * rest
            if i == 0 and len(self.ritz) > 1 and self.ritz[1].value < 1:
                mixed = min(residual, residual**2 / (2 * (1 - self.ritz[1].value)))
            bounds.append(value - 1 + tilt * rest + mixed)
        return bounds


class PerPart(NamedTuple):
    """One number each for H, GN and T = H - GN."""

    hessian: float
    gauss_newton: float
    remainder: float


class SharedBasis:
    """Q_v for every node, and the images of all basis vectors."""

    def __init__(self, operator: BlockOperator) -> None:
        self._operator = operator
        self.vectors = [t.new_zeros((t.numel(), 0)) for t in operator.templates]
        self._images: list[Products | None] = [None] * len(self.vectors)

    def size(self, v: int) -> int:
        return self.vectors[v].shape[1]

    def dimension(self, v: int) -> int:
        return self.vectors[v].shape[0]

    def is_complete(self, v: int) -> bool:
        """Q_v spans the whole space: every block of v is known exactly."""
        return self.size(v) == self.dimension(v)

    def extend(self, w: int, candidates: Tensor, most: int) -> int:
        """Add up to `most` directions from the columns of `candidates`, strongest first; returns the products spent.

        The columns should have length one, or less where they matter less.
        """
        fresh = self._orthonormal(w, candidates, most)
        if fresh.shape[1] == 0:
            return 0
        images, before = self._operator.columns(w, fresh), self._images[w]
        if before is None:
            self._images[w] = images
        else:
            joined = [_joined(old, new) for old, new in zip(before, images)]
            self._images[w] = Products(joined[0] or [], joined[1])
        self.vectors[w] = torch.cat([self.vectors[w], fresh], dim=1)
        return images.spent

    def complete(self, w: int) -> int:
        """Span the whole space with the unit vectors; returns the products spent."""
        like, size = self.vectors[w], self.dimension(w)
        return self.extend(w, torch.eye(size, dtype=like.dtype, device=like.device), most=size)

    def _orthonormal(self, w: int, candidates: Tensor, most: int) -> Tensor:
        basis = self.vectors[w]
        fresh = self.outside(w, precise(candidates))
        u, s, _ = torch.linalg.svd(fresh, full_matrices=False)
        keep = min(int((s > 1e-3).sum().item()), most, basis.shape[0] - basis.shape[1])
        # a second projection: cancellation in the first left components along the basis
        fresh = torch.linalg.qr(self.outside(w, u[:, :keep])).Q
        directions: Tensor = fresh.to(basis.dtype)
        return directions

    def outside(self, v: int, x: Tensor) -> Tensor:
        """P_v x = x - Q_v Q_v^T x, for columns or one vector."""
        if self.size(v) == 0:
            return x
        basis = precise(self.vectors[v])
        return x - basis @ (basis.T @ x)

    def captured(self, v: int, w: int) -> PerPart:
        """‖A^T Q_v‖_F² + ‖P_v A Q_w‖_F², the part of ‖A‖_F² that the bases know."""
        values = []
        for toward_w, toward_v in zip(self._parts(w, v), self._parts(v, w)):
            values.append(norm_squared(toward_v) + norm_squared(self.outside(v, toward_w)))
        return _per_part(values)

    def _images_of(self, source: int) -> Products:
        images = self._images[source]
        assert images is not None, "a block is known only where both nodes have a basis"
        return images

    def _image(self, source: int, target: int) -> Tensor:
        """H Q_source at `target`."""
        return precise(self._images_of(source).hessian[target])

    def _parts(self, source: int, target: int) -> list[Tensor]:
        """A Q_source at `target`, for A = H, and where known GN and T."""
        hessian, known = self._image(source, target), self._images_of(source).gauss_newton
        if known is None:
            return [hessian]
        gauss_newton = precise(known[target])
        return [hessian, gauss_newton, hessian - gauss_newton]

    def asymmetry(self, v: int, w: int) -> float:
        """‖Q_v^T (A Q_w) - (A^T Q_v)^T Q_w‖_F / ‖A Q_w‖_F: rounding, if every second derivative is right."""
        forward, backward = self._image(w, v), self._image(v, w)
        scale = float(torch.linalg.vector_norm(forward).item())
        if scale == 0:
            return 0.0
        difference = precise(self.vectors[v]).T @ forward - (backward.T @ precise(self.vectors[w])).to(forward.device)
        return float(torch.linalg.vector_norm(difference).item()) / scale

    def leading(self, v: int, w: int) -> Leading:
        """Top singular value of A - P_v A P_w, from the (k_v + k_w)² matrix it is in the basis [Q_v, rest]x[Q_w, rest].

        A - P_v A P_w = [Q_v  Q_B] [ Q_v^T A Q_w   R_C^T ] [Q_w  Q_C]^T,   P_v A Q_w = Q_B R_B,  P_w A^T Q_v = Q_C R_C
                                   [ R_B             0   ]
        """
        forward, backward = self._image(w, v), self._image(v, w)
        scale = max(torch.linalg.vector_norm(forward).item(), torch.linalg.vector_norm(backward).item())
        if scale == 0:
            return Leading(0.0, [])
        q_b, r_b = torch.linalg.qr(self.outside(v, forward / scale))
        q_c, r_c = torch.linalg.qr(self.outside(w, backward / scale))
        core = (precise(self.vectors[v]).T @ forward / scale).cpu()
        k_v, k_w = core.shape
        small = core.new_zeros((k_v + r_b.shape[0], k_w + r_c.shape[0]))
        small[:k_v, :k_w] = core
        small[k_v:, :k_w] = r_b.cpu()
        small[:k_v, k_w:] = r_c.T.cpu()
        u, s, vh = torch.linalg.svd(small)
        norm = s[0].item() * scale
        if self.is_complete(v) or self.is_complete(w):
            return Leading(norm, [])
        ritz = []
        for i in range(min(RITZ_VALUES, len(s))):
            left, right = u[k_v:, i], vh[i, k_w:]
            tilt = 0.5 * (left.square().sum() + right.square().sum()).item()
            ritz.append(Ritz((s[i] / s[0]).item(), tilt, q_b @ left.to(q_b), q_c @ right.to(q_c)))
        return Leading(norm, ritz)


def _per_part(values: list[float]) -> PerPart:
    return PerPart(*values) if len(values) == 3 else PerPart(values[0], float("nan"), float("nan"))


def _joined(old: Columns | None, new: Columns | None) -> Columns | None:
    if old is None or new is None:
        return None
    return [torch.cat([a, b], dim=1) for a, b in zip(old, new)]

"""One orthonormal basis per node, shared by all pairs: exact on what it spans, honest about the rest.

With Q_v at node v and P_v = I - Q_v Q_v^T, the products A Q_w and A^T Q_v of a block A = H[v, w] give

    ‖A‖_F² = ‖A^T Q_v‖_F² + ‖P_v A Q_w‖_F² + ‖P_v A P_w‖_F²             captured, captured, rest

and the spectral norm of A without its rest. The rest is what random probes have to estimate; it is small where the
bases hold the leading directions, because it is cut on both sides. k products at node w serve its pairs with all nodes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from curvmon.numerics import norm_squared, precise
from curvmon.operators.node_blocks import BlockOperator, Products

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

    def corrected(self, weakest: float, strongest: float) -> tuple[float, float]:
        """The norm with what it lacks by expectation, and a standard error, if ‖P_v A P_w‖_2 is in a range.

        A Ritz value knows nothing of the rest and is too low: to first order by the rest between the parts of its
        vectors that lie outside the bases, to second order because its residual mixes it with others. Neither is known;
        the form is fitted to dense blocks with all kinds of spectra and to networks (docs/accuracy.md).
        """
        if not self.ritz or not self.norm:
            return self.norm, 0.0
        low, high = weakest / self.norm, strongest / self.norm
        rest = math.sqrt(low * min(high, 1.0))
        doubts = [_at_most(ritz, rest) for ritz in self.ritz]
        values = [ritz.value * (1 + doubt * (1 - ritz.tilt) ** 2) for ritz, doubt in zip(self.ritz, doubts)]
        best, errors = max(values), []
        # another one may lead in truth: its uncertainty counts as far as it reaches beyond the best
        for i, (ritz, doubt, value) in enumerate(zip(self.ritz, doubts, values)):
            mixed = residual = math.sqrt(2 * ritz.tilt) * high
            gap = 1 - self.ritz[1].value if i == 0 and len(self.ritz) > 1 else 0.0
            if gap > 0:
                mixed = min(residual, residual**2 / (2 * gap))
            errors.append(value + math.hypot(doubt, 0.05 * mixed) - best)
        return self.norm * best, self.norm * max(0.0, *errors)

    def may_lack(self) -> float:
        """By how much, relatively, the norm may be too low should the rest be as strong as what was found."""
        return max((ritz.value * (1 + _at_most(ritz, 1.0)) for ritz in self.ritz), default=1.0) - 1

    def least_settled(self) -> Ritz:
        """The Ritz value that may turn out largest, should the rest be as strong as what was found."""
        return max(self.ritz, key=lambda ritz: ritz.value * (1 + _at_most(ritz, 1.0)))


def _at_most(ritz: Ritz, rest: float) -> float:
    """By how much a Ritz value may be too low, relatively, if the rest has `rest` times the norm."""
    return rest * (0.4 + rest) * ritz.tilt


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
        # in pieces as they came, never copied: together they are the largest thing here
        self._images: list[list[Products]] = [[] for _ in self.vectors]

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
        return self.extend_all({w: candidates}, most)[w]

    def extend_all(self, candidates: Mapping[int, Tensor], most: int) -> dict[int, int]:
        """`extend` at several nodes; what each of them spent."""
        fresh = {w: self._orthonormal(w, columns, most) for w, columns in candidates.items()}
        requests = [(w, directions) for w, directions in fresh.items() if directions.shape[1]]
        spent = dict.fromkeys(candidates, 0)
        for w, directions in requests:
            images = self._operator.columns(w, directions)
            self._add(w, directions, [images])
            spent[w] = images.spent
        return spent

    def _add(self, w: int, fresh: Tensor, images: Iterable[Products]) -> None:
        self._images[w] = [*self._images[w], *images]
        self.vectors[w] = torch.cat([self.vectors[w], fresh], dim=1)

    def with_more(self, more: Mapping[int, tuple[Tensor, list[Products]]]) -> SharedBasis:
        """A copy that also holds directions (orthonormal, outside the basis) whose images are known already."""
        copy = SharedBasis(self._operator)
        copy.vectors, copy._images = list(self.vectors), list(self._images)
        for w, (directions, images) in more.items():
            copy._add(w, directions.to(copy.vectors[w].dtype), images)
        return copy

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

    def last_image(self, source: int, target: int) -> Tensor:
        """H q at `target` for the direction that was added last at `source`."""
        return self._images[source][-1].hessian(target)[:, -1:]

    def _image(self, source: int, target: int) -> Tensor:
        """H Q_source at `target`."""
        return torch.cat([images.hessian(target) for images in self._images[source]], dim=1)

    def _parts(self, source: int, target: int) -> list[Tensor]:
        """A Q_source at `target`, for A = H, and where known GN and T."""
        parts = [self._image(source, target)]
        known = [images.gauss_newton[target] for images in self._images[source] if images.gauss_newton is not None]
        if known:
            parts.append(precise(torch.cat(known, dim=1)))
            parts.append(precise(torch.cat([images.remainder[target] for images in self._images[source]], dim=1)))
        return parts

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

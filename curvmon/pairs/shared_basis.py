"""One orthonormal basis per node, shared by all pairs.

    ‖A‖_F² = ‖A^T Q_v‖_F² + ‖P_v A Q_w‖_F² + ‖P_v A P_w‖_F²             captured, captured, rest

for a block A = H[v, w], a basis Q_v at node v and P_v = I - Q_v Q_v^T. The products A Q_w and A^T Q_v give the captured
terms exactly, and the spectral norm of A without its rest. The rest is estimated by random probes: the idea of Hutch++
(Meyer et al. 2021), for Frobenius norms. It is projected on both sides, and therefore small where the bases hold the
leading directions.

Cost: k HVPs at node w for a basis of k vectors. They serve the pairs of w with all nodes.
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


class RitzValue(NamedTuple):
    """A singular value of A - P_v A P_w, as an approximation to one of A.

    ε_v and ε_w are the lengths of P_v x and P_w y, the parts of its singular vectors x, y outside the bases. Adding
    these parts to the bases is one step of a Krylov method (Golub & Van Loan, Matrix Computations, 4th ed., ch. 10.4).
    """

    value: float
    """the singular value, relative to the largest one"""
    outside: float
    """½(ε_v² + ε_w²)"""
    row_residual: Tensor
    """P_v x"""
    col_residual: Tensor
    """P_w y"""


class SpectralNorm(NamedTuple):
    """Estimate of ‖A‖_2 from the bases: the largest of a few Ritz values."""

    norm: float
    ritz: list[RitzValue]
    """empty where a basis is complete: then the norm is exact"""

    def corrected(self, lower: float, upper: float) -> tuple[float, float]:
        """The norm, corrected for its bias, and a standard error, for lower <= ‖P_v A P_w‖_2 <= upper.

        A Ritz value does not contain the rest and is too low: to first order by x^T P_v A P_w y, to second order
        because its residual mixes it with other singular values. Neither can be computed from the bases; the formula
        was fitted to dense blocks with many kinds of spectra and to networks (docs/accuracy.md).
        """
        if not self.ritz or not self.norm:
            return self.norm, 0.0
        low, high = lower / self.norm, upper / self.norm
        rest = math.sqrt(low * min(high, 1.0))
        biases = [_bias(ritz, rest) for ritz in self.ritz]
        values = [ritz.value * (1 + bias * (1 - ritz.outside) ** 2) for ritz, bias in zip(self.ritz, biases)]
        best, errors = max(values), []
        # another Ritz value may actually be the largest: its error counts as far as it exceeds the best
        for i, (ritz, bias, value) in enumerate(zip(self.ritz, biases, values)):
            mixed = residual = math.sqrt(2 * ritz.outside) * high
            gap = 1 - self.ritz[1].value if i == 0 and len(self.ritz) > 1 else 0.0
            if gap > 0:
                mixed = min(residual, residual**2 / (2 * gap))
            errors.append(value + math.hypot(bias, 0.05 * mixed) - best)
        return self.norm * best, self.norm * max(0.0, *errors)

    def largest_bias(self) -> float:
        """Relative bias of the norm if ‖P_v A P_w‖_2 is as large as the norm itself."""
        return max((ritz.value * (1 + _bias(ritz, 1.0)) for ritz in self.ritz), default=1.0) - 1

    def least_converged(self) -> RitzValue:
        """The Ritz value that attains `largest_bias`."""
        return max(self.ritz, key=lambda ritz: ritz.value * (1 + _bias(ritz, 1.0)))


def _bias(ritz: RitzValue, rest: float) -> float:
    """Relative bias of a Ritz value if ‖P_v A P_w‖_2 is `rest` times the norm."""
    return rest * (0.4 + rest) * ritz.outside


class PartNorms(NamedTuple):
    """One number each for H, GN and T = H - GN."""

    hessian: float
    gauss_newton: float
    remainder: float


class SharedBasis:
    """Q_v for every node, and the images of all basis vectors."""

    def __init__(self, operator: BlockOperator) -> None:
        self._operator = operator
        self.vectors = [t.new_zeros((t.numel(), 0)) for t in operator.templates]
        # one entry per call of `columns`, never concatenated: together they take the most memory here
        self._images: list[list[Products]] = [[] for _ in self.vectors]

    def size(self, v: int) -> int:
        return self.vectors[v].shape[1]

    def dimension(self, v: int) -> int:
        return self.vectors[v].shape[0]

    def is_complete(self, v: int) -> bool:
        """Q_v spans the whole space: all blocks of v are exact."""
        return self.size(v) == self.dimension(v)

    def extend(self, w: int, candidates: Tensor, most: int) -> int:
        """Add up to `most` leading left singular vectors of `candidates` to Q_w; returns the number of HVPs.

        The lengths of the columns are their weights.
        """
        return self.extend_all({w: candidates}, most)[w]

    def extend_all(self, candidates: Mapping[int, Tensor], most: int) -> dict[int, int]:
        """`extend` at several nodes; returns the number of HVPs at each of them."""
        spent = dict.fromkeys(candidates, 0)
        for w, columns in candidates.items():
            directions = self._orthonormal(w, columns, most)
            if directions.shape[1]:
                images = self._operator.columns(w, directions)
                self._add(w, directions, [images])
                spent[w] = images.spent
        return spent

    def _add(self, w: int, fresh: Tensor, images: Iterable[Products]) -> None:
        self._images[w] = [*self._images[w], *images]
        self.vectors[w] = torch.cat([self.vectors[w], fresh], dim=1)

    def extended_by(self, more: Mapping[int, tuple[Tensor, list[Products]]]) -> SharedBasis:
        """A copy with further directions (orthonormal, outside the basis) and their images; takes no HVP."""
        copy = SharedBasis(self._operator)
        copy.vectors, copy._images = list(self.vectors), list(self._images)
        for w, (directions, images) in more.items():
            copy._add(w, directions.to(copy.vectors[w].dtype), images)
        return copy

    def complete(self, w: int) -> int:
        """Extend Q_w to the whole space; returns the number of HVPs."""
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

    def captured(self, v: int, w: int) -> PartNorms:
        """‖A^T Q_v‖_F² + ‖P_v A Q_w‖_F² for A = H, GN and T."""
        values = []
        for toward_w, toward_v in zip(self._parts(w, v), self._parts(v, w)):
            values.append(norm_squared(toward_v) + norm_squared(self.outside(v, toward_w)))
        return PartNorms(*values) if len(values) == 3 else PartNorms(values[0], math.nan, math.nan)

    def last_image(self, source: int, target: int) -> Tensor:
        """H q at `target` for the direction that was added last at `source`."""
        return self._images[source][-1].hessian(target)[:, -1:]

    def _image(self, source: int, target: int) -> Tensor:
        """H Q_source at `target`."""
        return torch.cat([images.hessian(target) for images in self._images[source]], dim=1)

    def _parts(self, source: int, target: int) -> list[Tensor]:
        """A Q_source at `target`, for A = H, and if there is a Gauss-Newton part, for GN and T."""
        parts = [self._image(source, target)]
        gauss_newton = [i.gauss_newton[target] for i in self._images[source] if i.gauss_newton is not None]
        if gauss_newton:
            parts.append(precise(torch.cat(gauss_newton, dim=1)))
            parts.append(precise(torch.cat([images.remainder[target] for images in self._images[source]], dim=1)))
        return parts

    def asymmetry(self, v: int, w: int) -> float:
        """‖Q_v^T (A Q_w) - (A^T Q_v)^T Q_w‖_F / ‖A Q_w‖_F: rounding, if all second derivatives are correct."""
        forward, backward = self._image(w, v), self._image(v, w)
        scale = float(torch.linalg.vector_norm(forward).item())
        if scale == 0:
            return 0.0
        difference = precise(self.vectors[v]).T @ forward - (backward.T @ precise(self.vectors[w])).to(forward.device)
        return float(torch.linalg.vector_norm(difference).item()) / scale

    def spectral_norm(self, v: int, w: int) -> SpectralNorm:
        """‖A - P_v A P_w‖_2 from a matrix with k_v + k_w rows and columns:

        A - P_v A P_w = [Q_v  Q_B] [ Q_v^T A Q_w   R_C^T ] [Q_w  Q_C]^T,   P_v A Q_w = Q_B R_B,  P_w A^T Q_v = Q_C R_C
                                   [ R_B             0   ]
        """
        forward, backward = self._image(w, v), self._image(v, w)
        scale = max(torch.linalg.vector_norm(forward).item(), torch.linalg.vector_norm(backward).item())
        if scale == 0:
            return SpectralNorm(0.0, [])
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
            return SpectralNorm(norm, [])
        ritz = []
        for i in range(min(RITZ_VALUES, len(s))):
            left, right = u[k_v:, i], vh[i, k_w:]
            outside = 0.5 * (left.square().sum() + right.square().sum()).item()
            ritz.append(RitzValue((s[i] / s[0]).item(), outside, q_b @ left.to(q_b), q_c @ right.to(q_c)))
        return SpectralNorm(norm, ritz)

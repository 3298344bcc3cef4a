"""The largest singular value of each of many products L^T R_i, by subspace iteration.

Golub & Van Loan, Matrix Computations, 4th ed., section 8.2 (orthogonal iteration with Rayleigh-Ritz).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from curvmon.numerics import gaussian

TOLERANCE = 1e-4
"""Relative residual of a converged vector. The error of its singular value is the square of that."""
MAX_STEPS = 12
SMALL = 64
"""Up to this size, a full decomposition is as fast."""


class RightFactors:
    """R_i, count x rows x columns: in double precision, and normalised in single precision."""

    def __init__(self, matrices: list[Tensor]) -> None:
        columns = max(matrix.shape[1] for matrix in matrices)
        self.double = torch.stack([torch.nn.functional.pad(m, (0, columns - m.shape[1])) for m in matrices])
        size = torch.linalg.vector_norm(self.double, dim=(1, 2), keepdim=True).clamp_min(1e-300)
        self.unit = (self.double / size).float()

    def from_index(self, first: int) -> RightFactors:
        """Without the matrices before `first`; nothing is copied."""
        rest = RightFactors.__new__(RightFactors)
        rest.double, rest.unit = self.double[first:], self.unit[first:]
        return rest


def leading_pairs(left: Tensor, rights: RightFactors, gram: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Leading left singular vectors (rows) and singular values of left^T R_i for all R_i in `rights`.

    The iteration starts from the first columns, which should be the largest. Where it does not converge soon, a full
    decomposition takes over. `gram` is left left^T, if it was computed before.
    """
    count, _, columns = rights.double.shape
    vectors, values = left.new_zeros((count, left.shape[1])), left.new_zeros(count)
    converged = torch.zeros(count, dtype=torch.bool, device=left.device)
    if min(left.shape[1], columns) > SMALL:
        best, converged = _iterate(left @ left.T if gram is None else gram, rights.unit)
        images = left.T @ (rights.double @ best.to(rights.double))
        values = torch.linalg.vector_norm(images, dim=1).squeeze(1)
        vectors = images.squeeze(2) / values.unsqueeze(1)
    for i in [i for i, done in enumerate(converged.tolist()) if not done]:
        u, s, _ = torch.linalg.svd(left.T @ rights.double[i], full_matrices=False)
        vectors[i], values[i] = (u[:, 0], s[0]) if s[:1].tolist() > [0.0] else (0.0, 0.0)
    return vectors, values


def _iterate(gram: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """Leading right singular vectors (unit columns), and which of them have converged.

    Vectors to 1e-4 need single precision only; their singular values are computed in double precision by the caller.
    """
    columns = others.shape[2]
    gram = (gram / gram.trace().clamp_min(1e-300)).float()
    # the largest columns, and random ones in case the matrix maps those to zero
    random = gaussian(others.new_zeros(columns), 4, torch.Generator("cpu").manual_seed(0)) / math.sqrt(columns)
    blocks = torch.cat([torch.eye(columns, 8, dtype=others.dtype, device=others.device), random], dim=1)
    blocks = torch.linalg.qr(blocks).Q
    for step in range(MAX_STEPS + 1):
        images = others @ blocks
        curved = gram @ images
        back = others.mT @ curved
        values, vectors = torch.linalg.eigh(images.mT @ curved)
        top, vector = values[:, -1], vectors[:, :, -1:]
        best = blocks @ vector
        residual = back @ vector - top.reshape(-1, 1, 1) * best
        converged = (top > 0) & (torch.linalg.vector_norm(residual, dim=(1, 2)) <= TOLERANCE * top)
        if step >= 4 and all(converged.tolist()):
            break
        blocks = torch.linalg.qr(back).Q
    return best / torch.linalg.vector_norm(best.double(), dim=1, keepdim=True), converged

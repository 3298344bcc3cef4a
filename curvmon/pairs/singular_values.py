"""The largest singular values of many products of two matrices at once."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from curvmon.numerics import gaussian

TOLERANCE = 1e-4
"""A residual of this size leaves an error of its square."""
MOST_STEPS = 12
SMALL = 64
"""up to this size a full decomposition is as fast"""


class Rights:
    """Right factors, many x rows x columns: in double precision, and scaled to length one in single."""

    def __init__(self, matrices: list[Tensor]) -> None:
        columns = max(matrix.shape[1] for matrix in matrices)
        self.whole = torch.stack([torch.nn.functional.pad(m, (0, columns - m.shape[1])) for m in matrices])
        size = torch.linalg.vector_norm(self.whole, dim=(1, 2), keepdim=True).clamp_min(1e-300)
        self.unit = (self.whole / size).float()

    def since(self, first: int) -> Rights:
        """Without the matrices before `first`; nothing is copied."""
        rest = Rights.__new__(Rights)
        rest.whole, rest.unit = self.whole[first:], self.unit[first:]
        return rest


def leading_pairs(left: Tensor, rights: Rights, gram: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """For every right in `rights` the left singular vector (a row) and value of left^T right, the largest.

    By subspace iteration that begins with the first columns: they should be the strongest. Where it does not settle
    soon, a full decomposition takes over. `gram` is left left^T where that is known.
    """
    many, _, columns = rights.whole.shape
    vectors, values = left.new_zeros((many, left.shape[1])), left.new_zeros(many)
    settled = torch.zeros(many, dtype=torch.bool, device=left.device)
    if min(left.shape[1], columns) > SMALL:
        best, settled = _iterate(left @ left.T if gram is None else gram, rights.unit)
        images = left.T @ (rights.whole @ best.to(rights.whole))
        values = torch.linalg.vector_norm(images, dim=1).squeeze(1)
        vectors = images.squeeze(2) / values.unsqueeze(1)
    for i in (~settled).nonzero().flatten().tolist():
        u, s, _ = torch.linalg.svd(left.T @ rights.whole[i], full_matrices=False)
        vectors[i], values[i] = (u[:, 0], s[0]) if len(s) and s[0] > 0 else (0.0, 0.0)
    return vectors, values


def _iterate(gram: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """Leading right vectors (unit columns), and which of them have settled.

    A vector that is right to 1e-4 can be found in single precision; only its value wants double.
    """
    columns = others.shape[2]
    gram = (gram / gram.trace().clamp_min(1e-300)).float()
    # the strongest columns, and in case the matrix is blind to them, random ones
    random = gaussian(others.new_zeros(columns), 4, torch.Generator("cpu").manual_seed(0)) / math.sqrt(columns)
    blocks = torch.cat([torch.eye(columns, 8, dtype=others.dtype, device=others.device), random], dim=1)
    blocks = torch.linalg.qr(blocks).Q
    for step in range(MOST_STEPS + 1):
        images = others @ blocks
        curved = gram @ images
        back = others.mT @ curved
        values, vectors = torch.linalg.eigh(images.mT @ curved)
        top, vector = values[:, -1], vectors[:, :, -1:]
        best = blocks @ vector
        residual = back @ vector - top.reshape(-1, 1, 1) * best
        settled = (top > 0) & (torch.linalg.vector_norm(residual, dim=(1, 2)) <= TOLERANCE * top)
        if step >= 4 and settled.all():
            break
        blocks = torch.linalg.qr(back).Q
    return best / torch.linalg.vector_norm(best.double(), dim=1, keepdim=True), settled

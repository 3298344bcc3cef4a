"""The largest singular values of many products of two matrices at once."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from curvmon.curvature.randomness import gaussian

TOLERANCE = 1e-4
"""A residual of this size leaves an error of its square."""
MOST_STEPS = 12
SMALL = 64
"""up to this size a full decomposition is as fast"""


def leading_pairs(left: Tensor, rights: Tensor) -> tuple[Tensor, Tensor]:
    """For every right in `rights` the left singular vector (a row) and value of left^T right, the largest.

    By subspace iteration that begins with the first columns: they should be the strongest. Where it does not settle
    soon, a full decomposition takes over.
    """
    many, _, columns = rights.shape
    vectors, values = left.new_zeros((many, left.shape[1])), left.new_zeros(many)
    settled = torch.zeros(many, dtype=torch.bool, device=left.device)
    if min(left.shape[1], columns) > SMALL:
        best, settled = _iterate(left, rights)
        images = left.T @ (rights @ best.to(rights))
        values = torch.linalg.vector_norm(images, dim=1).squeeze(1)
        vectors = images.squeeze(2) / values.unsqueeze(1)
    for i in (~settled).nonzero().flatten().tolist():
        u, s, _ = torch.linalg.svd(left.T @ rights[i], full_matrices=False)
        vectors[i], values[i] = (u[:, 0], s[0]) if len(s) and s[0] > 0 else (0.0, 0.0)
    return vectors, values


def _iterate(left: Tensor, rights: Tensor) -> tuple[Tensor, Tensor]:
    """Leading right vectors (unit columns), and which of them have settled.

    A vector that is right to 1e-4 can be found in single precision; only its value wants double.
    """
    columns = rights.shape[2]
    size = torch.linalg.vector_norm(rights, dim=(1, 2), keepdim=True).clamp_min(1e-300)
    others = (rights / size).float()
    gram = (left @ left.T / left.square().sum().clamp_min(1e-300)).float()
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

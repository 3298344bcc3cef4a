"""Dense float64 truth that shares no code with curvmon.

A case writes its network once more, by hand, as a function of explicit perturbations; torch's own `jacobian` and
`hessian` differentiate it. No hooks, no output detection, no products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.functional import hessian, jacobian

Forward = Callable[[Sequence[Tensor]], list[Tensor]]
"""perturbations, one per node -> outputs that enter the loss"""
Criterion = Callable[[Sequence[Tensor]], Tensor]
"""outputs -> loss"""


class Truth(NamedTuple):
    hessian: dict[tuple[int, int], Tensor]
    gauss_newton: dict[tuple[int, int], Tensor]

    def metrics(self, v: int, w: int) -> dict[str, float]:
        """The definitions of the four metrics, word by word."""
        block, gn = self.hessian[v, w], self.gauss_newton[v, w]
        norm = torch.linalg.norm
        return {
            "resonance": norm(block).item(),
            "coupling": (norm(block) / (norm(self.hessian[v, v]) * norm(self.hessian[w, w])).sqrt()).item(),
            "stable_rank": (norm(block) ** 2 / norm(block, ord=2) ** 2).item(),
            "gn_gap": (norm(block - gn) / norm(gn)).item(),
        }


def truth(forward: Forward, criterion: Criterion, shapes: Sequence[tuple[int, ...]]) -> Truth:
    """H = d²L/de², GN = J^T S J with J = d out/de and S = d²L/d out², cut into blocks."""
    sizes = [torch.Size(shape).numel() for shape in shapes]

    def perturbed(flat: Tensor) -> list[Tensor]:
        return forward([part.reshape(shape) for part, shape in zip(flat.split(sizes), shapes)])

    zero = torch.zeros(sum(sizes), dtype=torch.float64)
    outputs = [out.detach() for out in perturbed(zero)]
    assert all(out.dtype == torch.float64 for out in outputs)

    def loss_of_outputs(flat: Tensor) -> Tensor:
        parts = flat.split([out.numel() for out in outputs])
        return criterion([part.reshape(out.shape) for part, out in zip(parts, outputs)])

    H = hessian(lambda flat: criterion(perturbed(flat)), zero)
    J = jacobian(lambda flat: torch.cat([out.reshape(-1) for out in perturbed(flat)]), zero)
    S = hessian(loss_of_outputs, torch.cat([out.reshape(-1) for out in outputs]))
    return Truth(_blocks(H, sizes), _blocks(J.T @ S @ J, sizes))


def _blocks(matrix: Tensor, sizes: list[int]) -> dict[tuple[int, int], Tensor]:
    rows = matrix.split(sizes, dim=0)
    return {(v, w): block for v, row in enumerate(rows) for w, block in enumerate(row.split(sizes, dim=1))}

"""What the first paper derives from the blocks: pooled gaps, straight lines, Jacobians of the blocks."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import torch
from torch import Tensor, nn

import curvmon


def mean_by_distance(found: Sequence[curvmon.Measurement], metric: curvmon.records.measurement.Metric) -> Tensor:
    """`metric` over pairs d apart, seeds x distances."""
    return torch.stack([m.by_distance(metric) for m in found])


def pooled_gap(found: curvmon.Measurement, distance: int | None = None) -> float:
    """Σ‖T‖_F / Σ‖GN‖_F over the pairs that are `distance` apart, or over all of them: the paper's tables.

    Not the mean of the pairs' gaps, which `by_distance` returns: here a pair counts by its share of the curvature.
    """
    tensors = found.gn_gap * found.gn_norm
    if distance is None:
        return (tensors.triu().sum() / found.gn_norm.triu().sum()).item()
    return (tensors.diagonal(distance).sum() / found.gn_norm.diagonal(distance).sum()).item()


def straight_line(values: Sequence[float]) -> tuple[float, float]:
    """log R = a - b d by least squares: b and R²."""
    logs = [math.log(value) for value in values]
    slope, _ = statistics.linear_regression(range(len(logs)), logs)
    return -slope, statistics.correlation(range(len(logs)), logs) ** 2


def block_jacobians(blocks: nn.Sequential, x: Tensor) -> list[Tensor]:
    """d block(h) / dh of every block for every sample, batch x outputs x inputs; x is the first block's input."""
    found = []
    with torch.no_grad():
        for block in blocks:
            found.append(torch.func.vmap(torch.func.jacrev(block))(x))
            x = block(x)
    return found


def largest_norm(jacobians: Sequence[Tensor]) -> float:
    """ρ: the largest of the blocks' spectral norms, each the mean over samples."""
    return max(torch.linalg.matrix_norm(jacobian, 2).mean().item() for jacobian in jacobians)


def lyapunov_exponent(jacobians: Sequence[Tensor]) -> float:
    """λ_1 = (1/L) log‖J_L ··· J_1‖_2, mean over samples: the paper's definition."""
    product = jacobians[0].double()
    for jacobian in jacobians[1:]:
        product = jacobian.double() @ product
    return (torch.linalg.matrix_norm(product, 2).log() / len(jacobians)).mean().item()


def lyapunov_exponent_by_qr(jacobians: Sequence[Tensor]) -> float:
    """What the paper's tables hold: Σ log|r_kk| / L over QR factors, largest of the means over samples.

    Equal to the definition for long products only: it follows the image of the first unit vector, not the most
    stretched direction.
    """
    frame = torch.eye(jacobians[0].shape[2]).expand(len(jacobians[0]), -1, -1)
    total = torch.zeros(frame.shape[:2])
    for jacobian in jacobians:
        frame, triangle = torch.linalg.qr(jacobian @ frame)
        total += triangle.diagonal(dim1=1, dim2=2).abs().clamp_min(1e-30).log()
    return (total / len(jacobians)).mean(0).max().item()

"""A long run to compare with where the blocks are too large for dense truth: plain estimators, many products.

R and the gap from random probes at both ends of a pair; the spectral norm from Golub-Kahan bidiagonalisation with full
reorthogonalisation, pair by pair. Shares nothing with the estimator but the products themselves.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from curvmon.operators.node_blocks import GraphOperator
from curvmon.operators.session import open_session
from curvmon.pairs.gauss_newton import gauss_newton_part


def reference(
    model: nn.Module,
    batch: Any,
    *,
    loss: Callable[[Any, Any], Tensor],
    nodes: Sequence[str],
    at: Sequence[int],
    probes: int = 50,
    steps: int = 16,
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, Tensor]:
    """The four metrics as (n, n) matrices for the pairs of the nodes numbered `at`; NaN for the others.

    `change` is how much each spectral norm still grew over the last fifth of its steps.
    """
    generator = torch.Generator().manual_seed(12345)
    with open_session(model, batch, loss=loss, nodes=nodes, output=None, batch_dim=0, dtype=None) as session:
        operator = session.operator
        n = len(operator.templates)
        squares = torch.full((3, n, n), math.nan, dtype=torch.float64)
        for w in at:
            template = operator.templates[w]
            squares[:, list(at), w] = 0
            for _ in range(probes):
                z = torch.randn(template.numel(), 1, generator=generator).to(template)
                products = operator.columns(w, z)
                assert products.gauss_newton is not None
                for v in at:
                    parts = products.hessian(v), products.gauss_newton[v].double(), products.remainder[v].double()
                    squares[:, v, w] += torch.stack([x.square().sum() for x in parts]) / probes
            report(f"reference: {probes} probes at {session.names[w]}")
        squares = (squares + squares.transpose(1, 2)) / 2
        # a gap needs ‖GN‖ better than 50 probes know it: exactly, from factors (tests compare them with dense truth)
        factors = gauss_newton_part(operator, batch_dim=0, rtol=0.05, generator=generator).factors
        assert factors is not None and factors.is_exact
        for v, w in itertools.product(at, at):
            squares[1, v, w] = factors.norm_squared(v, w)
        spectral, change = torch.full((2, n, n), math.nan, dtype=torch.float64)
        for v, w in itertools.combinations_with_replacement(at, 2):
            spectral[v, w], change[v, w] = _golub_kahan(operator, v, w, steps, generator)
            spectral[w, v], change[w, v] = spectral[v, w], change[v, w]
            report(f"reference: ‖H[{session.names[v]}, {session.names[w]}]‖_2 to {change[v, w]:.1e}")
    resonance = squares[0].sqrt()
    own = resonance.diagonal()
    return {
        "resonance": resonance,
        "coupling": resonance / (own.unsqueeze(0) * own.unsqueeze(1)).sqrt(),
        "stable_rank": squares[0] / spectral.square(),
        "gn_gap": (squares[2] / squares[1]).sqrt(),
        "change": change,
    }


def _golub_kahan(
    operator: GraphOperator, v: int, w: int, steps: int, generator: torch.Generator
) -> tuple[float, float]:
    """Largest singular value of H[v, w], and its relative change over the last fifth of the steps."""

    def times(source: int, target: int, x: Tensor) -> Tensor:
        return operator.columns(source, x.unsqueeze(1)).hessian(target).squeeze(1)

    def orthogonal(x: Tensor, basis: list[Tensor]) -> Tensor:
        q = torch.stack(basis, dim=1) if basis else x.new_zeros((len(x), 0))
        for _ in range(2):
            x = x - q @ (q.T @ x)
        return x

    right = [torch.randn(operator.templates[w].numel(), generator=generator).double()]
    right[0] /= right[0].norm()
    left: list[Tensor] = []
    images: list[Tensor] = []
    values: list[float] = []
    for _ in range(steps):
        images.append(times(w, v, right[-1]))
        fresh = orthogonal(images[-1], left)
        if fresh.norm() <= 1e-6 * images[0].norm():
            break
        left.append(fresh / fresh.norm())
        values.append(torch.linalg.matrix_norm(torch.stack(images, dim=1), 2).item())
        fresh = orthogonal(times(v, w, left[-1]), right)
        if fresh.norm() <= 1e-6 * images[0].norm():
            break
        right.append(fresh / fresh.norm())
    if not values:
        return 0.0, 0.0
    earlier = values[max(0, math.ceil(0.8 * len(values)) - 1)]
    return values[-1], 1 - earlier / values[-1]

"""`curvmon.exact`: all blocks as dense matrices in float64, for small networks."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from curvmon.errors import InputError
from curvmon.numerics import norm_squared
from curvmon.operators.finite_difference_check import check_custom_functions
from curvmon.operators.session import Loss, open_session
from curvmon.pairs.pair_metrics import Matrices, Norms, metrics_of_norms
from curvmon.records import METRICS, ExactMeasurement

MAX_BYTES = 2 * 2**30
"""Largest total size of all blocks."""


def exact(
    model: nn.Module,
    batch: Any,
    *,
    loss: Loss,
    nodes: Sequence[str] | None = None,
    output: str | None = None,
    batch_dim: int = 0,
) -> ExactMeasurement:
    """All blocks H[v, w] and GN[v, w], dense and in float64, and the metrics they give.

    Cost: one product with H and one with GN per entry of every node, and 16 (Σ d_v)² bytes (8 (Σ d_v)² where GN is not
    known). The model is computed in float64 and is exactly as before afterwards. Arguments as in `measure`.

    Raises:
        InputError: an argument makes no sense, or the blocks take more than 2 GiB.
        NodeError: a name matches no module, or a module returns no activations.
        LossError: the loss does not depend on the nodes, or is not a scalar tensor.
        DivergedError: the loss is not finite.
        NonFiniteError: an HVP is not finite although the loss is.
        DoubleBackwardError: an operation between the nodes and the loss cannot be differentiated twice.

    Example:
        >>> import torch, curvmon
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2))
        >>> batch = torch.randn(16, 4), torch.randn(16, 2)
        >>> m = curvmon.exact(net, batch, loss=lambda net, b: torch.nn.functional.mse_loss(net(b[0]), b[1]))
        >>> m.blocks["0", "2"].shape
        torch.Size([6, 2])
    """
    start = time.perf_counter()
    with open_session(
        model, batch, loss=loss, nodes=nodes, output=output, batch_dim=batch_dim, dtype=torch.float64
    ) as session:
        operator, names = session.operator, session.names
        checked = check_custom_functions(session)
        sizes = [template.numel() for template in operator.templates]
        needed = 8 * sum(sizes) ** 2 * (1 + operator.has_gauss_newton)
        if needed > MAX_BYTES:
            raise InputError(
                f"the dense blocks of {', '.join(f'{n} ({d})' for n, d in zip(names, sizes))} take "
                f"{needed / 2**30:.1f} GiB; choose smaller nodes, or use curvmon.measure"
            )
        blocks: dict[tuple[str, str], Tensor] = {}
        gauss_newton: dict[tuple[str, str], Tensor] = {}
        for w, template in enumerate(operator.templates):
            columns = operator.columns(w, torch.eye(sizes[w], dtype=template.dtype, device=template.device))
            for v, name in enumerate(names):
                blocks[name, names[w]] = columns.hessian(v).cpu()
                if columns.gauss_newton is not None:
                    gauss_newton[name, names[w]] = columns.gauss_newton[v].double().cpu()
    matrices = _matrices(names, blocks, gauss_newton)
    return ExactMeasurement(
        nodes=names,
        **matrices.values(),
        stderr=matrices.errors(),
        loss=session.loss,
        hvps=sum(sizes) * (2 if gauss_newton else 1),
        seconds=time.perf_counter() - start,
        notes=(*session.notes, *checked, *matrices.notes(), *_symmetry_notes(blocks)),
        operations={},
        blocks=blocks,
        gauss_newton=gauss_newton,
    )


def _matrices(
    names: tuple[str, ...], blocks: dict[tuple[str, str], Tensor], gauss_newton: dict[tuple[str, str], Tensor]
) -> Matrices:
    matrices = Matrices(names)
    eps = torch.finfo(torch.float64).eps
    own = [norm_squared(blocks[name, name]) for name in names]
    for v, row in enumerate(names):
        for w in range(v, len(names)):
            norms = _norms(blocks[row, names[w]], gauss_newton.get((row, names[w])))
            matrices.put_metrics(v, w, metrics_of_norms(norms, own[v], own[w], eps, diagonal=v == w), norms)
            for metric in METRICS:
                matrices.put_error(metric, v, w, 0.0)
    return matrices


def _symmetry_notes(blocks: dict[tuple[str, str], Tensor]) -> list[str]:
    """H[v, w] = H[w, v]^T to the last digits, unless the model drops to float32 inside or a derivative is wrong."""
    worst = 0.0
    for row, col in blocks:
        size = norm_squared(blocks[row, col])
        if size:
            worst = max(worst, norm_squared(blocks[row, col] - blocks[col, row].T) / size)
    if worst < 1e-20:
        return []
    return [
        f"the blocks are symmetric to {math.sqrt(worst):.0e} only: the model computes in lower precision inside, or "
        f"a custom autograd function has a wrong second derivative"
    ]


def _norms(block: Tensor, gauss_newton: Tensor | None) -> Norms:
    spectral = torch.linalg.matrix_norm(block, 2).item()
    if gauss_newton is None:
        return Norms(norm_squared(block), float("nan"), float("nan"), spectral)
    return Norms(norm_squared(block), norm_squared(gauss_newton), norm_squared(block - gauss_newton), spectral)

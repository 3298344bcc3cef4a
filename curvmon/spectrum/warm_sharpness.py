"""The largest eigenvalue of the Hessian from a few HVPs, where its eigenvector was known a while ago."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from curvmon.errors import DifferencesError
from curvmon.numerics import normalized
from curvmon.operators.gradient_differences import DifferenceOperator
from curvmon.operators.parameter_hessian import ParameterOperator, open_parameters
from curvmon.spectrum.eigenvalue_search import Accuracy, EigenvalueSearch
from curvmon.spectrum.findings import Findings

HVPS = 6
"""after which no further one is computed; up to five choose the step of differences"""
ACCURACY = Accuracy.uniform(0.05)
SHARE_OF_GRADIENT = 0.3
"""in the starting vector: what has become sharp since lies along the gradient"""


class WarmSharpness(NamedTuple):
    """λ_1, its residual, its eigenvector on the CPU, and what it took."""

    value: float
    error: float
    vector: Tensor
    loss: float
    hvps: int


def warm_sharpness(
    model: nn.Module,
    batches: Sequence[Any],
    *,
    loss: Callable[[Any, Any], Tensor],
    start: Tensor,
    findings: Findings,
) -> WarmSharpness:
    """λ_1 of the mean loss over all samples, from a Krylov space of an earlier eigenvector and the gradient.

    A Ritz value: never above λ_1 but for the error of the HVPs, and below it by the residual at most, unless another
    eigenvalue has become the largest.

    Raises:
        CurvmonError: as `curvmon.spectrum`.
    """
    if findings.no_differences is None:
        with (
            suppress(DifferencesError),
            open_parameters(model, batches, loss=loss, kind=DifferenceOperator) as operator,
        ):
            findings.prepare(operator)
            return _near(start, operator)
    with open_parameters(model, batches, loss=loss) as operator:
        return _near(start, operator)


def _near(start: Tensor, operator: ParameterOperator) -> WarmSharpness:
    generator = torch.Generator("cpu").manual_seed(0)
    search = EigenvalueSearch(operator, 1, ACCURACY, HVPS, generator, smallest=False)
    direction = normalized(start.to(operator.template)) + SHARE_OF_GRADIENT * normalized(operator.gradient)
    pairs = search.extract(search.krylov_space(direction.unsqueeze(0)))
    value, error = pairs.values[0].item(), pairs.residuals[0].item()
    return WarmSharpness(value, error, pairs.vectors[0].cpu(), operator.loss, operator.products)

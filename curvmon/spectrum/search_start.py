"""Where an eigenvalue search starts: at earlier eigenvectors, at an estimate of the trace, or at the gradient."""

from __future__ import annotations

import math

from torch import Tensor

from curvmon.errors import InputError
from curvmon.numerics import norm, normalized
from curvmon.operators.parameter_hessian import ParameterOperator
from curvmon.records import Spectrum
from curvmon.spectrum.eigenvalue_search import EigenvalueSearch

SAME_WEIGHTS = 1e-5
"""relative difference of losses and of gradients up to which two searches are at the same weights"""


def starting_vectors(
    operator: ParameterOperator,
    gradient_norm: float,
    search: EigenvalueSearch,
    start: Spectrum | Tensor | None,
    estimate: Tensor | None,
) -> Tensor | None:
    """The starting vectors of the search, as rows."""
    if start is None:
        # the gradient of a trained network lies mostly in the span of the leading eigenvectors, and costs nothing
        single = operator.gradient if estimate is None else estimate
        return search.around(single) if single.any() else None
    if isinstance(start, Tensor):
        if start.shape[:1] != (operator.size,) or not 1 <= start.ndim <= 2:
            raise InputError(f"start= has shape {tuple(start.shape)}, the parameters are {operator.size} numbers")
        if not 0 < norm(start) < math.inf:
            raise InputError("start= has no direction: it is zero or not finite; omit it")
        vectors = start.to(operator.template).reshape(operator.size, -1)
        return search.perturbed(_with_gradient(vectors[:, 0], operator)) if vectors.shape[1] == 1 else vectors.T
    if not isinstance(start, Spectrum):
        raise InputError(f"start= takes an earlier Spectrum or a tensor, not {type(start).__name__}")
    if start.parameters == operator.names and not start.eigenvectors.numel():
        raise InputError("start= has no eigenvectors (dropped by without_vectors or to_dict); omit it")
    if start.parameters != operator.names or len(start.eigenvectors) != operator.size:
        raise InputError("start= is the spectrum of another model, or of other parameters; omit it")
    same = all(
        math.isclose(before, now, rel_tol=SAME_WEIGHTS)
        for before, now in ((start.loss, operator.loss), (start.gradient_norm, gradient_norm))
    )
    # elsewhere, the Krylov space of the sum takes fewer products than a block: docs/spectrum-cost.md
    if same:
        return start.start_vectors().to(operator.template).T
    return search.perturbed(_with_gradient(start.start_vector().to(operator.template), operator))


def _with_gradient(start: Tensor, operator: ParameterOperator) -> Tensor:
    """Between an earlier result and the gradient, which lies mostly along what has become sharp since."""
    return normalized(start) + normalized(operator.gradient)

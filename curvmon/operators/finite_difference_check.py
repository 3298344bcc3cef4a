"""Check Hessian-vector products of graphs with custom autograd functions against finite differences.

    H z  =?  (g(e + h z) - g(e - h z)) / 2h

A custom function whose backward hides part of its dependence (a tensor kept on `ctx` instead of saved, or a detached
one) gives wrong second derivatives without an error. One HVP on all nodes is compared with a central difference of
gradients. In double precision: in single precision, rounding needs steps that cross the kinks of ReLU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from curvmon.graph.autograd import differentiate
from curvmon.numerics import norm_squared
from curvmon.operators.session import Session

STEPS = 1e-7, 1e-5
"""step sizes relative to the activations; the better one counts: the other may cross a kink or suffer from rounding"""
TOLERANCE = 1e-3
WRONG = "suspect: a Hessian-vector product is off by"


def check_in_double_precision(
    open_again: Callable[..., AbstractContextManager[Session]], functions: Sequence[str]
) -> list[str]:
    """`check_custom_functions` in a new session, in double precision; returns a note."""
    try:
        with open_again(dtype=torch.float64) as session:
            return check_custom_functions(session)
    except Exception as error:  # a custom function may accept single precision only; the measurement is still valid
        return [
            f"custom autograd functions between nodes and loss ({', '.join(functions)}): not checked in double "
            f"precision ({type(error).__name__}); the numbers are right only if their backward can be differentiated"
        ]


def check_custom_functions(session: Session) -> list[str]:
    """Compare one HVP with a finite difference, if the graph has custom functions. Needs double precision."""
    operator = session.operator
    if not operator.custom_functions:
        return []
    names = ", ".join(operator.custom_functions)
    generator = torch.Generator("cpu").manual_seed(0)
    directions = []
    for tap, tapped in zip(operator.graph.taps, operator.graph.tapped):
        size = tapped.detach().square().mean().sqrt().clamp_min(torch.finfo(tap.dtype).tiny)
        directions.append(torch.randn(tap.shape, generator=generator, dtype=torch.float64, device="cpu").to(tap) * size)
    remainder, gauss_newton = operator.joint(dict(enumerate(directions)))
    hvp = remainder if gauss_newton is None else [t + gn for t, gn in zip(remainder, gauss_newton)]
    off = min(_largest_error(hvp, _central_difference(session, directions, step)) for step in STEPS)
    if off <= TOLERANCE:
        return [f"custom autograd functions between nodes and loss ({names}): agree with finite differences"]
    return [
        f"{WRONG} {off:.1g} of its size against finite differences; a custom "
        f"autograd function ({names}) does not have the second derivative of what it computes (a "
        f"straight-through estimator never has); save tensors with save_for_backward, and use differentiable "
        f"operations in its backward"
    ]


def _central_difference(session: Session, directions: list[Tensor], step: float) -> list[Tensor]:
    """(g(e + h z) - g(e - h z)) / 2h."""
    ends = []
    for h in (step, -step):
        graph = session.shifted({name: h * z for name, z in zip(session.names, directions)})
        gradients = differentiate([graph.loss], graph.taps)
        ends.append([torch.zeros_like(t) if g is None else g for g, t in zip(gradients, graph.taps)])
    return [(after - before) / (2 * step) for after, before in zip(*ends)]


def _largest_error(hvp: list[Tensor], difference: list[Tensor]) -> float:
    """max_v ‖x_v - y_v‖ / ‖y_v‖ over the nodes v; a y_v that is close to zero counts as 1e-4 of the largest."""
    sizes = [norm_squared(y) for y in difference]
    floor = 1e-8 * max(sizes)
    errors = [norm_squared(x.reshape(y.shape) - y) for x, y in zip(hvp, difference)]
    return max(
        float((error / max(size, floor)) ** 0.5) if size or floor else float(error > 0)
        for error, size in zip(errors, sizes)
    )

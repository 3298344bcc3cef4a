"""Is a second derivative what it claims to be? Where custom autograd functions are involved, only a comparison tells.

A function whose backward hides part of its dependence (a tensor kept on `ctx` instead of saved, a detached one) gives
products that are wrong and raise nothing. One product on all nodes is compared with a difference of gradients, in
double precision: in single precision, the kinks of ReLU between the two points would drown it.
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
"""relative to the activations; the better of two, one may meet a kink or rounding"""
TOLERANCE = 1e-3


def recheck(reopen: Callable[..., AbstractContextManager[Session]], functions: Sequence[str]) -> list[str]:
    """`check` in a session of its own, in double precision."""
    try:
        with reopen(dtype=torch.float64) as session:
            return check(session)
    except Exception as error:  # a custom function may take single precision only; the measurement itself stands
        return [
            f"custom autograd functions between nodes and loss ({', '.join(functions)}): not checked in double "
            f"precision ({type(error).__name__}); the numbers are right only if their backward can be differentiated"
        ]


def check(session: Session) -> list[str]:
    """Compare one product with a finite difference, if the graph has custom functions. Needs double precision."""
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
    claimed = remainder if gauss_newton is None else [t + gn for t, gn in zip(remainder, gauss_newton)]
    off = min(_worst_distance(claimed, _difference(session, directions, step)) for step in STEPS)
    if off <= TOLERANCE:
        return [f"custom autograd functions between nodes and loss ({names}): agree with finite differences"]
    return [
        f"suspect: a Hessian-vector product is off by {off:.1g} of its size against finite differences; a custom "
        f"autograd function ({names}) does not have the second derivative of what it computes (a "
        f"straight-through estimator never has); save tensors with save_for_backward, and use differentiable "
        f"operations in its backward"
    ]


def _difference(session: Session, directions: list[Tensor], step: float) -> list[Tensor]:
    """(g(e + h z) - g(e - h z)) / 2h."""
    ends = []
    for h in (step, -step):
        graph = session.shifted({name: h * z for name, z in zip(session.names, directions)})
        gradients = differentiate([graph.loss], graph.taps)
        ends.append([torch.zeros_like(t) if g is None else g for g, t in zip(gradients, graph.taps)])
    return [(after - before) / (2 * step) for after, before in zip(*ends)]


def _worst_distance(claimed: list[Tensor], true: list[Tensor]) -> float:
    """Of all nodes, relative to the node; a node with next to nothing compared with the largest."""
    sizes = [norm_squared(y) for y in true]
    floor = 1e-8 * max(sizes)
    missing = [norm_squared(x.reshape(y.shape) - y) for x, y in zip(claimed, true)]
    return max(
        float((m / max(size, floor)) ** 0.5) if size or floor else float(m > 0) for m, size in zip(missing, sizes)
    )

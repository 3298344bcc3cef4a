"""What can be known before any probing: GN from factors, and where T = 0.

One product with a random vector on all nodes at once serves twice. Its GN part must be what the factors say; if it is
not, samples interact, and the factors are dropped. Its T part is zero, up to rounding, at a node whose row of T is
zero: there H = GN, and a piecewise-linear network is known completely.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from curvmon.curvature.autograd import product
from curvmon.curvature.factors import FactoredOperator, Factors, build
from curvmon.curvature.losses import Layout, Sketch, dense_factor, sketch
from curvmon.curvature.operators import BlockOperator, Columns, GraphOperator, precise
from curvmon.curvature.probes import gaussian

MOST_COLUMNS = 24
"""outputs per sample up to which factors are exact: one backward pass each"""
FIRST_SKETCHES, MOST_SKETCHES = 4, 64
AGREEMENT = 1e-3
"""of factors and a true product, relative; rounding is 1e-5, interacting samples are off by one"""


class Knowledge(NamedTuple):
    """`factors` is None where GN has none; `flat` are the nodes with a row of T that is zero."""

    factors: Factors | None
    flat: frozenset[int]
    spent: int
    notes: list[str]

    @property
    def is_exact(self) -> bool:
        return self.factors is not None and self.factors.is_exact


NOTHING = Knowledge(None, frozenset(), 0, [])


def examine(operator: GraphOperator, *, batch_dim: int, rtol: float, generator: torch.Generator) -> Knowledge:
    """Factors and certificate of a network, as far as it has them."""
    graph = operator.graph
    counts = {tapped.shape[batch_dim] for tapped in graph.tapped}
    layout = Layout(graph.outputs, counts.pop(), batch_dim)
    if not operator.splits or counts or not layout.fits:
        return NOTHING
    probes = [gaussian(template, 1, generator) for template in operator.templates]
    if layout.width <= MOST_COLUMNS:
        found = _exact(operator, layout, probes, batch_dim)
    else:
        found = _sketched(operator, layout, probes, batch_dim, rtol, generator)
    if found is None:
        return NOTHING
    factors, coefficients, note = found
    # every node with the same weight, whatever its scale
    scales = [1 / (torch.linalg.vector_norm(c).item() or 1.0) for c in coefficients]
    remainder, gauss_newton = operator.joint({v: scale * z for v, (z, scale) in enumerate(zip(probes, scales))})
    assert gauss_newton is not None
    if factors.is_exact:
        total = sum(scale * c for scale, c in zip(scales, coefficients))
        assert isinstance(total, Tensor)
        for v, (z, image) in enumerate(zip(probes, gauss_newton)):
            true = (precise(z.reshape(-1)) @ precise(image.reshape(-1))).item()
            if abs(factors.form(coefficients[v], total) - true) > AGREEMENT / scales[v]:
                return Knowledge(None, frozenset(), 2, ["samples interact: Gauss-Newton by products, without factors"])
    return Knowledge(factors, _flat(remainder, gauss_newton), 2, [note])


def _exact(
    operator: GraphOperator, layout: Layout, probes: list[Tensor], batch_dim: int
) -> tuple[Factors, list[Tensor], str] | None:
    factor = dense_factor(layout, operator.curved, operator.graph.outputs[0].detach())
    if factor is None:
        return None
    columns = len(factor.columns)

    def cotangents() -> Iterator[list[Tensor]]:
        return (layout.tensors(column) for column in factor.columns)

    factors, coefficients = build(operator.graph, cotangents, columns, factor.signs.T, batch_dim, probes)
    return factors, coefficients, f"Gauss-Newton exactly, from {columns} backward passes"


def _sketched(
    operator: GraphOperator,
    layout: Layout,
    probes: list[Tensor],
    batch_dim: int,
    rtol: float,
    generator: torch.Generator,
) -> tuple[Factors, list[Tensor], str] | None:
    graph = operator.graph
    found = sketch(graph.outputs, operator.curved)
    if found is None or not _samples_are_independent(operator, found, layout, batch_dim):
        return None
    seed = int(torch.randint(2**62, (), generator=generator))

    def drawn(columns: int) -> tuple[Factors, list[Tensor]]:
        def cotangents() -> Iterator[list[Tensor]]:
            own = torch.Generator("cpu").manual_seed(seed)
            return ([x / math.sqrt(columns) for x in found.draw(own)] for _ in range(columns))

        return build(graph, cotangents, columns, None, batch_dim, probes)

    columns = FIRST_SKETCHES
    factors, coefficients = drawn(columns)
    error = factors.relative_error()
    wanted = min(MOST_SKETCHES, math.ceil(columns * (error / (rtol / 2)) ** 2))
    if wanted > columns:
        columns = wanted
        factors, coefficients = drawn(columns)
    return factors, coefficients, f"Gauss-Newton from {columns} random backward passes ({found.form})"


def _samples_are_independent(operator: GraphOperator, found: Sketch, layout: Layout, batch_dim: int) -> bool:
    """A cotangent in every other sample must leave nothing at the others."""
    rows = layout.rows(found.draw(torch.Generator("cpu").manual_seed(0)))
    rows[::2] = 0
    graph = operator.graph
    for gradient in product(graph.outputs, graph.sample_taps, layout.tensors(rows)):
        by_sample = gradient.movedim(batch_dim, 0)
        leaked, whole = (torch.linalg.vector_norm(x).item() for x in (by_sample[::2], by_sample))
        if leaked > AGREEMENT * whole:
            return False
    return True


def _flat(remainder: Columns, gauss_newton: Columns) -> frozenset[int]:
    eps = max(torch.finfo(x.dtype).eps for x in remainder)
    norm = torch.linalg.vector_norm
    return frozenset(
        v for v, (t, gn) in enumerate(zip(remainder, gauss_newton)) if norm(t).item() <= 10 * eps * norm(gn).item()
    )


def with_factors(operator: GraphOperator, known: Knowledge) -> BlockOperator:
    """The cheapest way to the products."""
    if known.factors is not None and known.is_exact and known.factors.rows is not None:
        return FactoredOperator(operator, known.factors)
    return operator

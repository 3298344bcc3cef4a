"""What can be known before any probing: GN from factors, and where T = 0.

One product with a random vector on all nodes at once serves twice. Its GN part must be what the factors say; if it is
not, samples interact, and the factors are dropped. Its T part is zero, up to rounding, at a node whose row of T is
zero: there H = GN, and a piecewise-linear network is known completely.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from curvmon.graph.autograd import product
from curvmon.graph.loss_curvature import Layout, dense_factor, sketch
from curvmon.numerics import gaussian, norm_squared, precise, precise_dtype
from curvmon.operators.node_blocks import BlockOperator, Columns, GraphOperator
from curvmon.pairs.gauss_newton_factors import Cotangents, FactoredOperator, Factors, build

MOST_COLUMNS = 24
"""outputs per sample up to which factors are exact: one backward pass each"""
FIRST_SKETCHES, MOST_SKETCHES = 4, 64
MOST_UNITS = 2048
"""columns times samples: Gram matrices are units x units"""
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
    few = layout.width <= MOST_COLUMNS and layout.width * layout.samples <= MOST_UNITS
    source = _exact(operator, layout) if few else _sketched(operator, layout, generator)
    if source is None:
        what = "the loss has no factor that its precision resolves, or samples interact in it"
        return Knowledge(None, frozenset(), 0, [f"Gauss-Newton by products: {what}"])
    factors, coefficients = build(graph, source, batch_dim, probes)
    if not _samples_are_independent(operator, layout, source, factors):
        return Knowledge(None, frozenset(), 0, ["Gauss-Newton by products: samples interact"])
    # every node with the same weight, whatever its scale
    scales = [1 / (torch.linalg.vector_norm(c).item() or 1.0) for c in coefficients]
    remainder, gauss_newton = operator.joint({v: scale * z for v, (z, scale) in enumerate(zip(probes, scales))})
    assert gauss_newton is not None
    if factors.is_exact:
        total = torch.stack([scale * c for scale, c in zip(scales, coefficients)]).sum(0)
        for z, image, c in zip(probes, gauss_newton, coefficients):
            true = (precise(z.reshape(-1)) @ precise(image.reshape(-1))).item()
            if abs(factors.form(c, total) - true) > AGREEMENT * torch.linalg.vector_norm(c).item():
                what = "its factors do not agree with a true product (samples interact, or rounding)"
                return Knowledge(None, frozenset(), 2, [f"Gauss-Newton by products: {what}"])
    if factors.cancels():
        return Knowledge(None, frozenset(), 2, ["Gauss-Newton by products: parts of an indefinite loss cancel"])
    flat = _flat(remainder, gauss_newton)
    if not factors.is_exact and len(flat) == len(graph.nodes):
        # H = GN everywhere: its error is the error of everything
        wanted = min(
            MOST_SKETCHES,
            MOST_UNITS // layout.samples,
            math.ceil(source.columns * (factors.relative_error() / (rtol / 2)) ** 2),
        )
        if wanted > source.columns:
            source = source._replace(columns=wanted)
            factors, _ = build(graph, source, batch_dim, probes)
    return Knowledge(factors, flat, 2, [source.note])


def _exact(operator: GraphOperator, layout: Layout) -> Cotangents | None:
    factor = dense_factor(layout, operator.curved, operator.graph.outputs[0].detach())
    if factor is None:
        return None
    columns = len(factor.columns)
    note = f"Gauss-Newton exactly, from {columns} backward passes"
    return Cotangents(columns, factor.signs.T, note, lambda k: layout.tensors(factor.columns[k]))


def _sketched(operator: GraphOperator, layout: Layout, generator: torch.Generator) -> Cotangents | None:
    if layout.samples * FIRST_SKETCHES > MOST_UNITS:
        return None
    found = sketch(layout, operator.graph.outputs, operator.curved)
    if found is None:
        return None
    note = f"Gauss-Newton from {{columns}} random backward passes ({found.form})"
    seed = int(torch.randint(2**62, (), generator=generator, device="cpu"))

    def draw(k: int) -> list[Tensor]:
        return found.draw(torch.Generator("cpu").manual_seed(seed + k))

    return Cotangents(FIRST_SKETCHES, None, note, draw)


def _samples_are_independent(operator: GraphOperator, layout: Layout, source: Cotangents, factors: Factors) -> bool:
    """J^T (ω c) = ω J^T c for weights ω of the samples. Powers of two: without interaction the same to the last bit."""
    graph = operator.graph
    generator = torch.Generator("cpu").manual_seed(0)
    powers = torch.randperm(layout.samples, generator=generator, device="cpu") % 9 - 4
    weights = 2.0**powers

    def pulled_back(rows: Tensor) -> list[Tensor]:
        found = product(graph.outputs, graph.sample_taps, layout.tensors(rows))
        return [x.movedim(layout.batch_dim, 0).flatten(1) for x in found]

    column = layout.rows(source.scaled(0))
    kept = factors.rows
    plain = pulled_back(column) if kept is None else [rows.column(0, layout.samples) for rows in kept]
    for expected, found in zip(plain, pulled_back(column * weights.to(column).unsqueeze(1))):
        leaked = torch.addcmul(found, expected, weights.to(expected).unsqueeze(1), value=-1)
        size, whole = (torch.linalg.vector_norm(x, dtype=precise_dtype(x)).item() for x in (leaked, found))
        if size > 10 * torch.finfo(found.dtype).eps * whole:
            return False
    return True


def _flat(remainder: Columns, gauss_newton: Columns) -> frozenset[int]:
    eps = max(torch.finfo(x.dtype).eps for x in remainder)
    sizes = [(norm_squared(t), norm_squared(gn)) for t, gn in zip(remainder, gauss_newton)]
    return frozenset(v for v, (t, gn) in enumerate(sizes) if t <= (10 * eps) ** 2 * gn)


def with_factors(operator: GraphOperator, known: Knowledge) -> BlockOperator:
    """The cheapest way to the products."""
    if known.factors is not None and known.is_exact and known.factors.rows is not None:
        return FactoredOperator(
            operator.templates,
            lambda requests: [operator.remainders(w, z) for w, z in requests],
            known.factors,
        )
    return operator

"""What needs no probes: GN from factors, and the nodes at which T = 0.

    GN[v, w] = F_v D F_w^T          T[v, :] = 0 at a node v behind which the network is (piecewise) linear

One HVP with a random vector at all nodes checks both. Its GN part must agree with the factors; if it does not, samples
interact, and the factors are dropped. Its T part is zero, up to rounding, at the nodes with T[v, :] = 0 (almost
surely: the vector is random). There H = GN, so that a piecewise-linear network needs no probes at all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from curvmon.graph.autograd import product
from curvmon.graph.loss_curvature import MAX_COLUMNS, Layout, dense_factor, sample_weights, sketch
from curvmon.numerics import gaussian, precise, precise_norm
from curvmon.operators.node_blocks import BlockOperator, GraphOperator, Products, checked
from curvmon.pairs.gauss_newton_factors import Cotangents, FactoredOperator, Factors, build
from curvmon.pairs.host_copy import to_host

FIRST_SKETCHES, MAX_SKETCHES = 4, 64
MAX_UNITS = 2048
"""Largest number of columns times samples: the size of the Gram matrices."""
AGREEMENT = 1e-3
"""Relative tolerance for factors against an HVP; rounding is about 1e-5, interacting samples give errors of order 1."""


RESOLVED = 0.1
"""Relative error up to which the curvature of the loss at the output is a number and not its rounding."""


class GaussNewtonPart(NamedTuple):
    """The factors of GN, and where H = GN."""

    factors: Factors | None
    """None where GN has none that can be trusted"""
    linear_nodes: frozenset[int]
    """nodes v with T[v, :] = 0"""
    hvps: int
    notes: list[str]
    rounding: Literal["gauss_newton", "hessian"] | None = None
    """what is below the rounding errors of the loss"""

    @property
    def is_exact(self) -> bool:
        """The factors are no sketch."""
        return self.factors is not None and self.factors.is_exact

    def gives_hessian(self, v: int, w: int) -> bool:
        """H[v, w] = GN[v, w], and GN has exact factors."""
        return self.is_exact and bool({v, w} & self.linear_nodes)


NO_FACTORS = GaussNewtonPart(None, frozenset(), 0, [])


def gauss_newton_part(
    operator: GraphOperator, *, batch_dim: int, rtol: float, generator: torch.Generator
) -> GaussNewtonPart:
    """Factors of GN and the nodes with T[v, :] = 0, for 2 products: one with H and one with GN."""
    graph = operator.graph
    if operator.splits and not _is_resolved(operator):
        return _without_curvature_of_the_loss(operator, generator)
    counts = {tapped.shape[batch_dim] for tapped in graph.tapped}
    layout = Layout(graph.outputs, counts.pop(), batch_dim)
    if not operator.splits or counts or not layout.fits:
        return NO_FACTORS
    probes = [gaussian(template, 1, generator) for template in operator.templates]
    few = layout.width <= MAX_COLUMNS and layout.width * layout.samples <= MAX_UNITS
    image = None
    if not few:
        lengths = [1.0 if g is None else torch.linalg.vector_norm(g).clamp_min(1e-30) for g in operator.gradients]
        image = _joint_image(operator, [z / length for z, length in zip(probes, lengths)])
        if all(t >= gn for t, gn in zip(image.remainder, image.gauss_newton)):
            why = "T is larger than GN, which is of little use as a control variate"
            return NO_FACTORS._replace(hvps=2, notes=[f"no Gauss-Newton factors, HVPs instead: {why}"])
    source = _exact(operator, layout) if few else _sketched(operator, layout, generator)
    if source is None:
        what = "the loss has no factor that its precision resolves, or samples interact in it"
        return NO_FACTORS._replace(notes=[f"no Gauss-Newton factors, HVPs instead: {what}"])
    factors, coefficients = build(graph, source, batch_dim, probes)
    if not _samples_are_independent(operator, layout, source, factors):
        return NO_FACTORS._replace(notes=["no Gauss-Newton factors, HVPs instead: samples interact"])
    sizes: list[float] = torch.stack([torch.linalg.vector_norm(c) for c in coefficients]).tolist()
    scales = [1 / (size or 1.0) for size in sizes]
    if image is None:
        image = _joint_image(operator, [scale * z for z, scale in zip(probes, scales)])
    if factors.is_exact:
        total = torch.stack([scale * c for scale, c in zip(scales, coefficients)]).sum(0)
        for c, scale, true, size in zip(coefficients, scales, image.form, sizes):
            if abs(factors.bilinear_form(c, total) - true / scale) > AGREEMENT * size:
                what = "its factors do not agree with an HVP (samples interact, or rounding)"
                return NO_FACTORS._replace(hvps=2, notes=[f"no Gauss-Newton factors, HVPs instead: {what}"])
    if factors.cancels():
        return NO_FACTORS._replace(
            hvps=2, notes=["no Gauss-Newton factors, HVPs instead: parts of an indefinite loss cancel"]
        )
    eps = max(torch.finfo(x.dtype).eps for x in probes)
    sizes_of_parts = enumerate(zip(image.remainder, image.gauss_newton))
    linear_nodes = frozenset(v for v, (t, gn) in sizes_of_parts if t <= 10 * eps * gn)
    if not factors.is_exact and len(linear_nodes) == len(graph.nodes):
        # H = GN everywhere: the error of the sketch is that of all metrics
        wanted = min(
            MAX_SKETCHES,
            MAX_UNITS // layout.samples,
            math.ceil(source.columns * (factors.relative_error() / (rtol / 2)) ** 2),
        )
        if wanted > source.columns:
            source = source._replace(columns=wanted)
            factors, _ = build(graph, source, batch_dim, probes)
    return GaussNewtonPart(factors, linear_nodes, 2, [source.note])


class _JointImage(NamedTuple):
    """Of vectors z_v at all nodes at once."""

    form: list[float]
    """<z_v, Σ_w GN[v, w] z_w>"""
    remainder: list[float]
    """‖Σ_w T[v, w] z_w‖"""
    gauss_newton: list[float]
    """‖Σ_w GN[v, w] z_w‖"""


def _joint_image(operator: GraphOperator, vectors: list[Tensor]) -> _JointImage:
    """For vectors that give all nodes about the same weight, whatever their scale."""
    remainder, gauss_newton = operator.joint(dict(enumerate(vectors)))
    assert gauss_newton is not None
    forms = [precise(z.reshape(-1)) @ precise(image.reshape(-1)) for z, image in zip(vectors, gauss_newton)]
    read = to_host([*forms, *map(precise_norm, remainder), *map(precise_norm, gauss_newton)])
    return _JointImage(*torch.stack(read).reshape(3, -1).tolist())


def _exact(operator: GraphOperator, layout: Layout) -> Cotangents | None:
    factor = dense_factor(layout, operator.output_curvature, operator.graph.outputs[0].detach())
    if factor is None:
        return None
    columns = len(factor.columns)
    note = f"Gauss-Newton exactly, from {columns} backward passes"
    return Cotangents(columns, factor.signs.T, note, lambda k: layout.tensors(factor.columns[k]))


def _sketched(operator: GraphOperator, layout: Layout, generator: torch.Generator) -> Cotangents | None:
    if layout.samples * FIRST_SKETCHES > MAX_UNITS:
        return None
    random_factor = sketch(layout, operator.graph.outputs, operator.output_curvature)
    if random_factor is None:
        return None
    note = f"Gauss-Newton from {{columns}} random backward passes ({random_factor.form})"
    seed = int(torch.randint(2**62, (), generator=generator, device="cpu"))

    def draw(k: int) -> list[Tensor]:
        return random_factor.draw(torch.Generator("cpu").manual_seed(seed + k))

    return Cotangents(FIRST_SKETCHES, None, note, draw)


def _samples_are_independent(operator: GraphOperator, layout: Layout, source: Cotangents, factors: Factors) -> bool:
    """Whether J^T (ω c) = ω J^T c for weights ω of the samples."""
    graph, weights = operator.graph, sample_weights(layout.samples)

    def pulled_back(rows: Tensor) -> list[Tensor]:
        gradients = product(graph.outputs, graph.sample_taps, layout.tensors(rows))
        return [x.movedim(layout.batch_dim, 0).flatten(1) for x in gradients]

    column = layout.rows(source.scaled(0))
    kept = factors.rows
    plain = pulled_back(column) if kept is None else [rows.column(0, layout.samples) for rows in kept]
    norms, limits = [], []
    for unweighted, weighted in zip(plain, pulled_back(column * weights.to(column).unsqueeze(1))):
        difference = torch.addcmul(weighted, unweighted, weights.to(unweighted).unsqueeze(1), value=-1)
        norms += [precise_norm(difference), precise_norm(weighted)]
        limits.append(10 * torch.finfo(weighted.dtype).eps)
    sizes = torch.stack(to_host(norms)).reshape(-1, 2).tolist()
    return not any(size > limit * whole for (size, whole), limit in zip(sizes, limits))


def _is_resolved(operator: GraphOperator) -> bool:
    """Whether products with S are linear up to a few per cent: S (u + v) = S u + S v. Rounding is not."""
    generator = torch.Generator("cpu").manual_seed(0)

    def drawn() -> list[Tensor]:
        return [gaussian(x, 1, generator).reshape(x.shape) for x in operator.graph.outputs]

    # the outputs may be the largest tensors of the network: few at a time
    one, other = drawn(), drawn()
    image = operator.output_curvature(one)
    both = [u.add_(v) for u, v in zip(one, other)]
    image_of_other = operator.output_curvature(other)
    del one, other
    expected = [u + v for u, v in zip(image, image_of_other)]
    del image_of_other
    image = operator.output_curvature(both)
    norms = [norm for u, v in zip(image, expected) for norm in (precise_norm(u - v), precise_norm(u))]
    error, whole = torch.stack(to_host(norms)).reshape(-1, 2).square().sum(0).tolist()
    # a curvature of zero may be exact: that of a loss that is linear in the output
    return not error > RESOLVED**2 * whole


def _without_curvature_of_the_loss(operator: GraphOperator, generator: torch.Generator) -> GaussNewtonPart:
    """H = T, unless T vanishes as well."""
    probes = {v: gaussian(template, 1, generator) for v, template in enumerate(operator.templates)}
    images = operator.joint(probes)
    norms = (to_host([precise_norm(x) for x in part or []]) for part in images)
    remainder, gauss_newton = (torch.stack(each).norm().tolist() for each in norms)
    what = "the curvature of the loss at the output is below its rounding error (a saturated softmax?)"
    if remainder <= 10 * gauss_newton:
        return NO_FACTORS._replace(hvps=2, notes=[f"{what}: no metric is defined"], rounding="hessian")
    note = f"{what}: gn_gap is not defined; R, C and D are those of H without its Gauss-Newton part"
    return NO_FACTORS._replace(hvps=2, notes=[note], rounding="gauss_newton")


class RemainderOperator:
    """The `BlockOperator` where H = T."""

    hvps_per_column = 1

    def __init__(self, operator: GraphOperator) -> None:
        self.templates = operator.templates
        self._operator = operator

    def columns(self, w: int, z: Tensor) -> Products:
        return checked(self.columns_of({w: z})[w])

    def columns_of(self, requests: Mapping[int, Tensor]) -> dict[int, Products]:
        return self._operator.remainders_of(requests)


def with_factors(operator: GraphOperator, part: GaussNewtonPart) -> BlockOperator:
    """The cheapest operator for the blocks: GN from exact factors if there are any."""
    if part.rounding == "gauss_newton":
        return RemainderOperator(operator)
    if part.factors is not None and part.is_exact and part.factors.rows is not None:
        return FactoredOperator(operator, part.factors)
    return operator

"""The trace of the Hessian from its Gauss-Newton and its tensor part, tr H = tr GGN + tr T.

    tr GGN = Σ_ik ‖J_i^T a_ik‖²       a_ik: column k of the root of the loss curvature at sample i. One backward pass
                                      per column for all samples; the norm of every sample's own gradient
    tr T   = E <c, D² out [z, z]>     c = dL/d out, E z z^T = 1: Girard (1989), Hutchinson (1989)

The first is exact where the outputs are few and the samples do not interact. For the second only diagonal blocks
count. Most of T couples a layer's parameters with the layer's own input and does not contribute to the trace: with
f = A(x) θ, derivatives are taken w.r.t. f at constant x (`linear_layers`). What remains comes from the curvature of the
activations. A piecewise linear network has none, and a single probe shows it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from curvmon.graph.autograd import differentiate, product
from curvmon.graph.linear_layers import LayeredGraph
from curvmon.graph.loss_curvature import MAX_COLUMNS, Factor, Layout, dense_factor, sketch
from curvmon.graph.proxy import without_values
from curvmon.numerics import gaussian, precise, row_norms_squared, small_sample_factor
from curvmon.operators.parameter_hessian import ParameterOperator
from curvmon.spectrum.layer_check import LayerCheck, combined, separable_layers
from curvmon.spectrum.starting_vector import GradientSketches, joined, sketcher_for, start_cotangents


class Effort(NamedTuple):
    """How many backward passes and products an estimate of the trace takes.

    Attributes:
        columns: most columns of the root of the loss curvature that are taken one by one; the others are combined with
            random signs, `draws` times. None: all, exactly.
        draws: random combinations of columns, where not all are taken one by one.
        probes: random products for the trace of T.
        by_samples: only where T = 0 and every sample has its own gradient in every layer. Elsewhere, random probes of
            the whole Hessian have a smaller error at the same cost.
    """

    columns: int | None
    draws: int
    probes: int
    by_samples: bool


FULL = Effort(None, 10, 10, by_samples=False)
COARSE = Effort(1, 2, 4, by_samples=True)
"""for curves in a dashboard: a standard error of a few percent by samples, of four probes elsewhere"""
MIN_SKETCHES = 4
"""draws where no column can be taken by itself"""
CHECKS = 4
"""backward passes: two test whether samples interact, two whether the layers make up the network (`LayerCheck`)"""
PASSES_PER_PRODUCT = 3
"""A Hessian-vector product differentiates a forward and a backward pass and costs twice as much as both: six forward
passes. A backward pass costs two. Measured, it is less (docs/spectrum-table.md)."""


class TraceEstimate(NamedTuple):
    """An estimate of a trace.

    Attributes:
        value: the estimate.
        stderr: its standard error.
        products: its cost in Hessian-vector products.
        sketches: sketches of the per-sample gradients, if requested and if every sample has its own gradient.
    """

    value: float
    stderr: float
    products: int
    sketches: GradientSketches | None = None


class TraceAndStart(NamedTuple):
    """tr H with its standard error, and a starting vector for the eigenvalue search, or None."""

    value: float
    stderr: float
    start: Tensor | None


class LayerwiseError(Exception):
    """The layers of this network cannot be differentiated one by one; the message says why."""


def layerwise_trace(
    operator: ParameterOperator, generator: torch.Generator, k: int, effort: Effort = FULL, checked: bool = False
) -> TraceAndStart | None:
    """tr H, and the sum of the k leading eigenvectors of Gauss-Newton as a starting vector (`k` 0: none).

    The operator counts the products. None if the curvature of the loss has no known factor. `checked`: an earlier call
    found that samples do not interact in any layer of this network and that the layers make it up.

    Raises:
        LayerwiseError: if the layers cannot be run one by one, or do not make up the network.
    """
    check = LayerCheck(operator)
    graphs = operator.layered() if checked else check.graphs()
    try:
        estimate = trace_of_parts(graphs, generator, k > 0, effort, checked)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError) as error:
        # layers run outside the model: a loss that differentiates w.r.t. the parameters does not find them in the
        # graph, and a module that relies on its parent may not run
        reason = (str(error).strip().splitlines() or [""])[0]
        raise LayerwiseError(f"the layers cannot be run one by one ({type(error).__name__}: {reason})") from error
    if estimate is None:
        return None
    operator.spend(estimate.products)
    if not (checked or check.passed()):
        raise LayerwiseError(
            "the layers do not make up the network (a parameter is used outside its layer, or the model computes "
            "something else in every forward pass)"
        )
    cotangents = None if estimate.sketches is None else start_cotangents(estimate.sketches, k)
    if cotangents is None:
        return TraceAndStart(estimate.value, estimate.stderr, None)
    operator.spend(1)  # one backward pass and the sketches: less than a product
    return TraceAndStart(estimate.value, estimate.stderr, operator.pullback(cotangents))


def trace_of_parts(
    graphs: Iterable[tuple[float, LayeredGraph]],
    generator: torch.Generator,
    sketched: bool = False,
    effort: Effort = FULL,
    checked: bool = False,
) -> TraceEstimate | None:
    """tr H of a weighted sum of losses. `sketched`: also sketches of the gradients, if all losses have them."""
    seed = int(torch.randint(2**62, (), generator=generator, device="cpu").item()) if sketched else None
    total = variance = 0.0
    products = 0
    sketches: GradientSketches | None = None
    for number, (weight, layered) in enumerate(graphs):
        remainder = remainder_trace(layered, generator, 1) if effort.by_samples else None
        if remainder is not None and remainder.stderr:
            return None
        ggn = gauss_newton_trace(layered, generator, weight, seed, effort, checked)
        if ggn is None:
            return None
        if remainder is None:
            remainder = remainder_trace(layered, generator, effort.probes)
        total += weight * (ggn.value + remainder.value)
        variance += weight**2 * (ggn.stderr**2 + remainder.stderr**2)
        # a product passes through all losses, and counts once
        products = max(products, remainder.products + ggn.products)
        sketches = joined(sketches, ggn.sketches) if number else ggn.sketches
    return TraceEstimate(total, math.sqrt(variance), products, sketches)


def gauss_newton_trace(
    layered: LayeredGraph,
    generator: torch.Generator,
    weight: float = 1.0,
    sketch_seed: int | None = None,
    effort: Effort = FULL,
    checked: bool = False,
) -> TraceEstimate | None:
    """tr GGN of one loss; `weight` scales the sketches alone.

    None if the curvature of the loss has no known factor, or is indefinite where samples interact. `checked`: samples
    do not interact.
    """
    graph = layered.graph
    layout = Layout(graph.outputs, layered.samples, 0)
    if not layout.fits or (effort.by_samples and (layered.rest or layout.width > MAX_COLUMNS)):
        return None
    slopes = differentiate([graph.loss], graph.output_taps, create_graph=True)

    def loss_curvature(tangents: Sequence[Tensor]) -> list[Tensor]:
        return product(slopes, graph.output_taps, tangents)

    factor = dense_factor(layout, loss_curvature, graph.outputs[0].detach()) if layout.width <= MAX_COLUMNS else None
    if factor is not None:
        if not checked:
            separable = separable_layers(layered, layout, layout.tensors(combined(factor.columns)))
        if checked or (len(separable) == len(layered.layers) and not layered.rest):
            return _by_columns(layered, layout, factor, generator, weight, sketch_seed, effort)
        if effort.by_samples or (factor.signs < 0).any():
            return None

        def draw() -> list[Tensor]:
            return layout.tensors(_with_random_signs(factor.columns, generator))

    else:
        root = None if effort.by_samples else sketch(layout, graph.outputs, loss_curvature)
        if root is None:
            return None
        separable = separable_layers(layered, layout, root.draw(generator))

        def draw() -> list[Tensor]:
            return root.draw(generator)

    count = max(MIN_SKETCHES, effort.draws)
    norms = [_squared_norm(layered, separable, draw()) for _ in range(count)]
    samples = torch.stack(norms).cpu().double()
    return TraceEstimate(samples.mean().item(), _standard_error(samples), _as_products(count))


def _by_columns(
    layered: LayeredGraph,
    layout: Layout,
    factor: Factor,
    generator: torch.Generator,
    weight: float,
    sketch_seed: int | None,
    effort: Effort,
) -> TraceEstimate:
    """Columns of the root one by one, the largest first; from a number on, all others with random signs."""
    size = factor.columns.abs().max().item()
    columns, signs = factor.columns / (size or 1.0), factor.signs.T
    sketcher = sketcher_for(layered.layers, factor.columns, weight, size, sketch_seed)
    rank = single = len(columns)
    if effort.columns is not None and effort.columns + effort.draws < rank and not (signs < 0).any():
        single = effort.columns
    exact, drawn = [], []
    for number in range(single):
        for sign in (1, -1):
            if (mask := (signs[number] == sign).to(columns)).any():
                gradients = layered.gradients(layout.tensors(columns[number] * mask.unsqueeze(1)))
                exact.append(sign * _norms_by_sample(layered, gradients).sum())
                if sketcher is not None and sign > 0:  # negative curvature has no large eigenvalues
                    sketcher.add(number, gradients)
    for _ in range(effort.draws if single < rank else 0):
        gradients = layered.gradients(layout.tensors(_with_random_signs(columns[single:], generator)))
        drawn.append(_norms_by_sample(layered, gradients))
    sketches = None if sketcher is None else sketcher.sketches()
    numbers = torch.cat([torch.stack(exact), *drawn]).cpu().double() * size**2
    total, variance = numbers[:single].sum().item(), 0.0
    if drawn:
        by_sample = numbers[single:].reshape(len(drawn), -1)
        total += by_sample.mean(0).sum().item()
        # samples have independent signs; degrees of freedom after Welch and Satterthwaite
        spread = by_sample.var(0)
        variance = spread.sum().item() / len(drawn)
        if variance:
            freedom = (len(drawn) - 1) * spread.sum().square() / spread.square().sum()
            variance *= small_sample_factor(max(1, int(freedom))) ** 2
    rounding = 10 * torch.finfo(columns.dtype).eps * abs(total)
    return TraceEstimate(total, math.hypot(math.sqrt(variance), rounding), _as_products(single + len(drawn)), sketches)


def _with_random_signs(columns: Tensor, generator: torch.Generator) -> Tensor:
    """Σ_k s_k a_k with signs of its own for every sample."""
    signs = gaussian(columns[:, :, 0], 1, generator).sign().reshape(columns.shape[:2])
    return (columns * signs.unsqueeze(2)).sum(0)


def remainder_trace(layered: LayeredGraph, generator: torch.Generator, probes: int = FULL.probes) -> TraceEstimate:
    """tr T by random probes; exactly zero if the network is piecewise linear in every layer's parameters."""
    graph = layered.graph
    variables = [*(layer.tap for layer in layered.layers), *layered.rest]
    gradients = differentiate([graph.loss], graph.output_taps)
    cotangents = [torch.zeros_like(o) if g is None else g.detach() for o, g in zip(graph.outputs, gradients)]
    slopes = differentiate(graph.outputs, variables, cotangents, create_graph=True)
    slopes = [None if slope is None else without_values(slope) for slope in slopes]

    def entries(like: Tensor) -> Tensor:
        # signs have the least variance, but cancel exactly (T = [[1, -1], [-1, 1]]): squares between 1/2 and 3/2
        normal = gaussian(like.new_empty(like.shape, device="cpu"), 1, generator).reshape(like.shape)
        return (normal.sign() * (0.5 + torch.erf(normal.abs() / math.sqrt(2))).sqrt()).to(like.device)

    def sample() -> tuple[Tensor, Tensor]:
        """<z, T z> for a random z, and the largest entry of T z. The tensors of one probe are gone before the next."""
        with torch.no_grad():
            vectors = [*(layer.tangent(entries) for layer in layered.layers), *(entries(p) for p in layered.rest)]
        images = product(slopes, variables, vectors)
        inner = [precise(torch.dot(z.flatten(), image.flatten())) for z, image in zip(vectors, images)]
        return torch.stack(inner).sum(), torch.stack([image.abs().max() for image in images]).max()

    samples: list[Tensor] = []
    for _ in range(probes):
        value, largest = sample()
        if not samples and not largest:
            return TraceEstimate(0.0, 0.0, products=1)  # T z = 0 for a random z: T = 0
        samples.append(value)
    values = torch.stack(samples).cpu().double()
    return TraceEstimate(values.mean().item(), _standard_error(values), products=probes)


def _norms_by_sample(layered: LayeredGraph, gradients: list[Tensor]) -> Tensor:
    """‖J_i^T c_i‖² of every sample i, where all layers are separable."""
    norms = [layer.squared_norms(g, layered.samples) for layer, g in zip(layered.layers, gradients)]
    return torch.stack(norms).sum(0)


def _squared_norm(layered: LayeredGraph, separable: list[int], cotangents: list[Tensor]) -> Tensor:
    """Σ_i ‖J_i^T c_i‖² over the samples in separable layers, ‖J^T c‖² over all samples together in the others."""
    # of size one: the squares of the gradients would underflow if the loss is scaled by 1e-20
    scale = torch.stack([c.abs().max() for c in cotangents]).max()
    gradients = layered.gradients([c / torch.where(scale > 0, scale, 1.0) for c in cotangents])
    parts = [row_norms_squared(g.reshape(1, -1)) for g in gradients[len(layered.layers) :]]
    for i, (layer, gradient) in enumerate(zip(layered.layers, gradients)):
        parts.append(layer.squared_norms(gradient, layered.samples if i in separable else 1))
    return torch.cat(parts).sum() * precise(scale).square()


def _as_products(backward_passes: int) -> int:
    return math.ceil((backward_passes + CHECKS) / PASSES_PER_PRODUCT)


def _standard_error(samples: Tensor) -> float:
    if len(samples) == 1:
        return math.inf
    return samples.std().item() / math.sqrt(len(samples)) * small_sample_factor(len(samples) - 1)

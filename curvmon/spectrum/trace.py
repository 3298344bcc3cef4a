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
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from curvmon.graph.autograd import differentiate, product
from curvmon.graph.linear_layers import LayeredGraph
from curvmon.graph.loss_curvature import MAX_COLUMNS, Layout, dense_factor, sample_weights, sketch
from curvmon.numerics import gaussian, norm, norm_squared, precise, small_sample_factor
from curvmon.operators.parameter_hessian import ParameterOperator
from curvmon.spectrum.starting_vector import GradientSketches, joined, sketcher_for, start_cotangents

TOLERANCE = 1e-4
"""relative tolerance; rounding is 1e-6, and a missing path contributes as much as any other"""


class LayerCheck:
    """Checks that the layers of a network, differentiated one by one, give the gradient of the whole network.

        J^T c = Σ_layers A(x)^T (d<c, out>/df)        c: one random cotangent; f = A(x) θ: the output of a layer

    The left side is computed w.r.t. the parameters, the right side w.r.t. taps on the layers. They differ if a
    parameter is used outside its layer (a gradient penalty uses the weights again, in the backward pass of the
    network), or if the model computes something else in every forward pass. Cost: one backward pass for each side.

    The right side is accumulated while the layered graphs are in use, then compared with the left side.
    """

    def __init__(self, operator: ParameterOperator) -> None:
        self._operator = operator
        self._cotangents: list[Tensor] = []
        self._by_layers = operator.template.new_zeros(operator.size)

    def graphs(self) -> Iterator[tuple[float, LayeredGraph]]:
        """The layered graph of every batch with its weight in the loss."""
        generator = torch.Generator("cpu").manual_seed(0)
        for weight, layered in self._operator.layered():
            outputs = layered.graph.outputs
            layout = Layout(outputs, layered.samples, 0)
            if layout.fits:
                rows = gaussian(outputs[0].detach().new_zeros(layout.width), layered.samples, generator).T
                self._cotangents.append(rows)
                self._by_layers += self._pulled_back(layered, layout.tensors(rows))
            yield weight, layered

    def passed(self) -> bool:
        """Whether both sides agree, once all of `graphs` were used."""
        if len(self._cotangents) != self._operator.batches:
            return False
        expected = self._operator.pullback(self._cotangents)
        return norm(expected - self._by_layers) <= TOLERANCE * norm(expected)

    def _pulled_back(self, layered: LayeredGraph, cotangents: list[Tensor]) -> Tensor:
        gradients = layered.gradients(cotangents)
        pairs = list(zip(layered.rest, gradients[len(layered.layers) :]))
        for layer, gradient in zip(layered.layers, gradients):
            pairs += layer.pulled_back(gradient)
        return self._operator.gathered(pairs)


SKETCHES = 10
PROBES = 10
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


def layerwise_trace(operator: ParameterOperator, generator: torch.Generator, k: int) -> TraceAndStart | None:
    """tr H, and the sum of the k leading eigenvectors of Gauss-Newton as a starting vector (`k` 0: none).

    The operator counts the products. None if the curvature of the loss has no known factor.

    Raises:
        LayerwiseError: if the layers cannot be run one by one, or do not make up the network.
    """
    check = LayerCheck(operator)
    try:
        estimate = trace_of_parts(check.graphs(), generator, sketched=k > 0)
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
    if not check.passed():
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
    graphs: Iterable[tuple[float, LayeredGraph]], generator: torch.Generator, sketched: bool = False
) -> TraceEstimate | None:
    """tr H of a weighted sum of losses. `sketched`: also sketches of the gradients, if all losses have them."""
    seed = int(torch.randint(2**62, (), generator=generator, device="cpu").item()) if sketched else None
    total = variance = 0.0
    products = 0
    sketches: GradientSketches | None = None
    for number, (weight, layered) in enumerate(graphs):
        ggn = gauss_newton_trace(layered, generator, weight, seed)
        if ggn is None:
            return None
        remainder = remainder_trace(layered, generator)
        total += weight * (ggn.value + remainder.value)
        variance += weight**2 * (ggn.stderr**2 + remainder.stderr**2)
        # a product passes through all losses, and counts once
        products = max(products, remainder.products + ggn.products)
        sketches = joined(sketches, ggn.sketches) if number else ggn.sketches
    return TraceEstimate(total, math.sqrt(variance), products, sketches)


def gauss_newton_trace(
    layered: LayeredGraph, generator: torch.Generator, weight: float = 1.0, sketch_seed: int | None = None
) -> TraceEstimate | None:
    """tr GGN of one loss; `weight` scales the sketches alone.

    None if the curvature of the loss has no known factor, or is indefinite where samples interact.
    """
    graph = layered.graph
    layout = Layout(graph.outputs, layered.samples, 0)
    if not layout.fits:
        return None
    slopes = differentiate([graph.loss], graph.output_taps, create_graph=True)

    def loss_curvature(tangents: Sequence[Tensor]) -> list[Tensor]:
        return product(slopes, graph.output_taps, tangents)

    factor = dense_factor(layout, loss_curvature, graph.outputs[0].detach()) if layout.width <= MAX_COLUMNS else None
    if factor is not None:
        separable = _separable_layers(layered, layout, layout.tensors(_combined(factor.columns)))
        if len(separable) == len(layered.layers) and not layered.rest:
            total = 0.0
            sketcher = sketcher_for(layered.layers, factor.columns, weight, sketch_seed)
            for number, (column, signs) in enumerate(zip(factor.columns, factor.signs.T)):
                for sign in (1, -1):
                    if (mask := (signs == sign).to(column)).any():
                        gradients = layered.gradients(layout.tensors(column * mask.unsqueeze(1)))
                        total += sign * _squared_norm(layered, separable, gradients)
                        if sketcher is not None and sign > 0:  # negative curvature has no large eigenvalues
                            sketcher.add(number, gradients)
            eps = torch.finfo(factor.columns.dtype).eps
            sketches = None if sketcher is None else sketcher.sketches()
            return TraceEstimate(total, 10 * eps * abs(total), _as_products(len(factor.columns)), sketches)
        if (factor.signs < 0).any():
            return None

        def draw() -> list[Tensor]:
            signs = gaussian(factor.columns[:, :, 0], 1, generator).sign().reshape(factor.columns.shape[:2])
            return layout.tensors((factor.columns * signs.unsqueeze(2)).sum(0))

    else:
        root = sketch(layout, graph.outputs, loss_curvature)
        if root is None:
            return None
        separable = _separable_layers(layered, layout, root.draw(generator))

        def draw() -> list[Tensor]:
            return root.draw(generator)

    samples = torch.tensor(
        [_squared_norm(layered, separable, layered.gradients(draw())) for _ in range(SKETCHES)], dtype=torch.float64
    )
    return TraceEstimate(samples.mean().item(), _standard_error(samples), _as_products(SKETCHES))


def remainder_trace(layered: LayeredGraph, generator: torch.Generator) -> TraceEstimate:
    """tr T by random probes; exactly zero if the network is piecewise linear in every layer's parameters."""
    graph = layered.graph
    variables = [*(layer.tap for layer in layered.layers), *layered.rest]
    gradients = differentiate([graph.loss], graph.output_taps)
    cotangents = [torch.zeros_like(o) if g is None else g.detach() for o, g in zip(graph.outputs, gradients)]
    slopes = differentiate(graph.outputs, variables, cotangents, create_graph=True)

    def entries(like: Tensor) -> Tensor:
        # signs have the least variance, but cancel exactly (T = [[1, -1], [-1, 1]]): squares between 1/2 and 3/2
        normal = gaussian(like, 1, generator).reshape(like.shape)
        return normal.sign() * (0.5 + torch.erf(normal.abs() / math.sqrt(2))).sqrt()

    samples: list[float] = []
    for _ in range(PROBES):
        with torch.no_grad():
            vectors = [*(layer.tangent(entries) for layer in layered.layers), *(entries(p) for p in layered.rest)]
        images = product(slopes, variables, vectors)
        if not samples and not any(image.any() for image in images):
            return TraceEstimate(0.0, 0.0, products=1)  # T z = 0 for a random z: T = 0
        samples.append(sum((precise(z) * precise(image)).sum().item() for z, image in zip(vectors, images)))
    values = torch.tensor(samples, dtype=torch.float64)
    return TraceEstimate(values.mean().item(), _standard_error(values), products=PROBES)


def _combined(columns: Tensor) -> Tensor:
    """A random combination of all columns: samples may interact in a single one."""
    weights = gaussian(columns[:, 0, 0], 1, torch.Generator("cpu").manual_seed(0))
    return (columns * weights.unsqueeze(2)).sum(0)


def _separable_layers(layered: LayeredGraph, layout: Layout, column: list[Tensor]) -> list[int]:
    """The layers in which samples do not interact: weights on the samples become weights on the gradient's rows."""
    weights = sample_weights(layout.samples)
    rows = layout.rows(column)
    taps = [layer.tap for layer in layered.layers]
    plain = product(layered.graph.outputs, taps, column)
    weighted = product(layered.graph.outputs, taps, layout.tensors(rows * weights.to(rows).unsqueeze(1)))
    separable = []
    for i, (layer, one, other) in enumerate(zip(layered.layers, plain, weighted)):
        if not layer.has_sample_rows(layout.samples):
            continue
        each = weights.to(one).repeat_interleave(len(one) // layout.samples).reshape(-1, *[1] * (one.ndim - 1))
        if norm_squared(other - each * one) <= (10 * torch.finfo(one.dtype).eps) ** 2 * norm_squared(other):
            separable.append(i)
    return separable


def _squared_norm(layered: LayeredGraph, separable: list[int], gradients: list[Tensor]) -> float:
    """Σ_i ‖J_i^T c_i‖² over the samples in separable layers, ‖J^T c‖² over all samples together in the others."""
    total = sum(norm_squared(g) for g in gradients[len(layered.layers) :])
    for i, (layer, gradient) in enumerate(zip(layered.layers, gradients)):
        total += layer.squared_norm(gradient, layered.samples if i in separable else 1)
    return total


def _as_products(backward_passes: int) -> int:
    return math.ceil((backward_passes + CHECKS) / PASSES_PER_PRODUCT)


def _standard_error(samples: Tensor) -> float:
    return samples.std().item() / math.sqrt(len(samples)) * small_sample_factor(len(samples) - 1)

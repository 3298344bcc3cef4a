"""The trace of the Hessian as that of its two parts, tr H = tr GGN + tr T.

    tr GGN = Σ_ik ‖J_i^T a_ik‖²        a_ik the columns of the root of the loss's curvature at sample i: a backward pass
                                       for column k of all samples, and the size of each sample's own gradient
    tr T   = E <c, D² out [z, z]>      z random with E z z^T = 1, c = dL/d out

The first is exact where the outputs are few and samples do not interact. Of the second only blocks on the diagonal
count. Between a layer's parameters and its own input lies most of T, and none of its trace: with f = A(x) θ, the
derivatives are taken by f at a constant x (see `layers`). What is left is what the activations bend; in a network of
ReLUs, nothing, and one probe proves it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from curvmon.graph.autograd import differentiate, product
from curvmon.graph.linear_layers import LayeredGraph
from curvmon.graph.loss_curvature import Layout, dense_factor, sketch
from curvmon.numerics import gaussian, norm_squared, precise, small_sample_factor
from curvmon.spectrum.initial_block import Beginning

MOST_COLUMNS = 24
"""outputs per sample up to which tr GGN is exact: one backward pass each"""
SKETCHES = 10
PROBES = 10
CHECKS = 4
"""backward passes: two whether samples interact, two whether the layers make up the network (`agreement`)"""
PASSES_PER_PRODUCT = 3
"""A product with H differentiates a forward and a backward pass, twice the work of both, six forward passes; a backward
pass is two. Measured, it is less (docs/spectrum-table.md)."""


class Part(NamedTuple):
    """An estimate, its standard error, and what it took."""

    value: float
    stderr: float
    backward_passes: int = 0
    products: int = 0


def trace_of_parts(
    graphs: Iterable[tuple[float, LayeredGraph]], generator: torch.Generator, beginning: Beginning | None = None
) -> tuple[float, float, int] | None:
    """tr H of the weighted sum of some losses, its standard error, and how many products with H it was worth.

    `beginning` is shown the gradients on the way, where every sample has its own.
    """
    total = variance = spent = 0.0
    for weight, layered in graphs:
        curved = gauss_newton_trace(layered, generator, beginning, weight)
        if curved is None:
            return None
        bent = remainder_trace(layered, generator)
        total += weight * (curved.value + bent.value)
        variance += weight**2 * (curved.stderr**2 + bent.stderr**2)
        # a product passes through all losses, and counts once
        spent = max(spent, bent.products + math.ceil(curved.backward_passes / PASSES_PER_PRODUCT))
    return total, math.sqrt(variance), int(spent)


def gauss_newton_trace(
    layered: LayeredGraph, generator: torch.Generator, beginning: Beginning | None = None, share: float = 1.0
) -> Part | None:
    """None where the loss has no root that is known, or a negative curvature that cannot be taken apart."""
    graph = layered.graph
    layout = Layout(graph.outputs, layered.samples, 0)
    if not layout.fits:
        return None
    slopes = differentiate([graph.loss], graph.output_taps, create_graph=True)

    def curved(tangents: Sequence[Tensor]) -> list[Tensor]:
        return product(slopes, graph.output_taps, tangents)

    factor = dense_factor(layout, curved, graph.outputs[0].detach()) if layout.width <= MOST_COLUMNS else None
    if factor is not None:
        columns = [layout.tensors(column) for column in factor.columns]
        apart = _separable(layered, layout, layout.tensors(_mixed(factor.columns)))
        if len(apart) == len(layered.layers) and not layered.rest:
            total = 0.0
            shown = beginning if beginning and beginning.open_batch(layered.layers, factor.columns, share) else None
            for number, (column, signs) in enumerate(zip(factor.columns, factor.signs.T)):
                for sign in (1, -1):
                    if (weight := (signs == sign).to(column)).any():
                        gradients = layered.gradients(layout.tensors(column * weight.unsqueeze(1)))
                        total += sign * _sizes(layered, apart, gradients)
                        if shown is not None and sign > 0:  # where S is negative there are no large eigenvalues
                            shown.add(number, gradients)
            eps = torch.finfo(factor.columns.dtype).eps
            return Part(total, 10 * eps * abs(total), len(columns) + CHECKS)
        if (factor.signs < 0).any():
            return None

        def draw() -> list[Tensor]:
            signs = gaussian(factor.columns[:, :, 0], 1, generator).sign().reshape(factor.columns.shape[:2])
            return layout.tensors((factor.columns * signs.unsqueeze(2)).sum(0))

    else:
        root = sketch(layout, graph.outputs, curved)
        if root is None:
            return None
        apart = _separable(layered, layout, root.draw(generator))

        def draw() -> list[Tensor]:
            return root.draw(generator)

    samples = torch.tensor(
        [_sizes(layered, apart, layered.gradients(draw())) for _ in range(SKETCHES)], dtype=torch.float64
    )
    return Part(samples.mean().item(), _standard_error(samples), SKETCHES + CHECKS)


def remainder_trace(layered: LayeredGraph, generator: torch.Generator) -> Part:
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
            return Part(0.0, 0.0, products=1)  # T z = 0 for a random z: T = 0
        samples.append(sum((precise(z) * precise(image)).sum().item() for z, image in zip(vectors, images)))
    values = torch.tensor(samples, dtype=torch.float64)
    return Part(values.mean().item(), _standard_error(values), products=PROBES)


def _mixed(columns: Tensor) -> Tensor:
    """A random combination of all columns: samples may interact in one of them alone."""
    weights = gaussian(columns[:, 0, 0], 1, torch.Generator("cpu").manual_seed(0))
    return (columns * weights.unsqueeze(2)).sum(0)


def _separable(layered: LayeredGraph, layout: Layout, column: list[Tensor]) -> list[int]:
    """The layers whose gradients have a row for every sample: weights of the samples become weights of the rows."""
    generator = torch.Generator("cpu").manual_seed(0)
    weights = 2.0 ** (torch.randperm(layout.samples, generator=generator, device="cpu") % 9 - 4)
    rows = layout.rows(column)
    taps = [layer.tap for layer in layered.layers]
    plain = product(layered.graph.outputs, taps, column)
    scaled = product(layered.graph.outputs, taps, layout.tensors(rows * weights.to(rows).unsqueeze(1)))
    found = []
    for i, (layer, one, other) in enumerate(zip(layered.layers, plain, scaled)):
        if not layer.has_sample_rows(layout.samples):
            continue
        each = weights.to(one).repeat_interleave(len(one) // layout.samples).reshape(-1, *[1] * (one.ndim - 1))
        if norm_squared(other - each * one) <= (10 * torch.finfo(one.dtype).eps) ** 2 * norm_squared(other):
            found.append(i)
    return found


def _sizes(layered: LayeredGraph, apart: list[int], gradients: list[Tensor]) -> float:
    """‖J^T c‖², the samples apart in those layers where they can be told apart."""
    total = sum(norm_squared(g) for g in gradients[len(layered.layers) :])
    for i, (layer, gradient) in enumerate(zip(layered.layers, gradients)):
        total += layer.squared_norm(gradient, layered.samples if i in apart else 1)
    return total


def _standard_error(samples: Tensor) -> float:
    return samples.std().item() / math.sqrt(len(samples)) * small_sample_factor(len(samples) - 1)

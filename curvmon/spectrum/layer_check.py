"""Whether the trace of Gauss-Newton may be computed layer by layer and sample by sample.

Two questions, each answered by two backward passes: do the layers make up the network, and do samples interact.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from curvmon.graph.autograd import product
from curvmon.graph.linear_layers import LayeredGraph
from curvmon.graph.loss_curvature import Layout, sample_weights
from curvmon.numerics import gaussian, norms
from curvmon.operators.parameter_hessian import ParameterOperator

TOLERANCE = 1e-4
"""relative tolerance; rounding is 1e-6, and a missing path contributes as much as any other"""


class LayerCheck:
    """Checks that the layers of a network, differentiated one by one, give the gradient of the whole network.

        J^T c = Σ_layers A(x)^T (d<c, out>/df)        c: one random cotangent; f = A(x) θ: the output of a layer

    The left side is computed w.r.t. the parameters, the right side w.r.t. taps on the layers. They differ if a
    parameter is used outside its layer and the graph does not show it, or if the model computes something else in every
    forward pass. Cost: one backward pass for each side.

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
        difference, size = norms([expected - self._by_layers, expected])
        return difference <= TOLERANCE * size

    def _pulled_back(self, layered: LayeredGraph, cotangents: list[Tensor]) -> Tensor:
        gradients = layered.gradients(cotangents)
        pairs = list(zip(layered.rest, gradients[len(layered.layers) :]))
        for layer, gradient in zip(layered.layers, gradients):
            pairs += layer.pulled_back(gradient)
        return self._operator.gathered(pairs)


def combined(columns: Tensor) -> Tensor:
    """A random combination of all columns: samples may interact in a single one."""
    weights = gaussian(columns[:, 0, 0], 1, torch.Generator("cpu").manual_seed(0))
    return (columns * weights.unsqueeze(2)).sum(0)


def separable_layers(layered: LayeredGraph, layout: Layout, column: list[Tensor]) -> list[int]:
    """The layers in which samples do not interact: weights on the samples become weights on the gradient's rows."""
    weights = sample_weights(layout.samples)
    rows = layout.rows(column)
    taps = [layer.tap for layer in layered.layers]
    plain = product(layered.graph.outputs, taps, column)
    weighted = product(layered.graph.outputs, taps, layout.tensors(rows * weights.to(rows).unsqueeze(1)))
    candidates, errors = [], []
    for i, (layer, one, other) in enumerate(zip(layered.layers, plain, weighted)):
        if layer.has_sample_rows(layout.samples):
            each = weights.to(one).repeat_interleave(len(one) // layout.samples).reshape(-1, *[1] * (one.ndim - 1))
            # the largest entries first: squares of tiny gradients would underflow
            largest = other.abs().max()
            scaled = [x / torch.where(largest > 0, largest, 1.0) for x in (other - each * one, other)]
            errors.append(torch.stack([torch.linalg.vector_norm(x) for x in scaled]))
            candidates.append(i)
    if not candidates:
        return []
    limit = 10 * torch.finfo(plain[candidates[0]].dtype).eps
    sizes = torch.stack(errors).cpu()
    return [i for i, (size, whole) in zip(candidates, sizes.tolist()) if size <= limit * whole]

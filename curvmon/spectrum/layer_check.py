"""Check that the layers of a network, differentiated one by one, give the gradient of the whole network.

    J^T c = Σ_layers A(x)^T (d<c, out>/df)        c: one random cotangent; f = A(x) θ: the output of a layer

The left side is computed w.r.t. the parameters, the right side w.r.t. taps on the layers. They differ if a parameter
is used outside its layer (a gradient penalty uses the weights again, in the backward pass of the network) or if the
model computes something else in every forward pass. Cost: one backward pass of each kind.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from curvmon.graph.linear_layers import LayeredGraph
from curvmon.graph.loss_curvature import Layout
from curvmon.numerics import gaussian, norm
from curvmon.operators.parameter_hessian import ParameterOperator

TOLERANCE = 1e-4
"""relative; rounding is 1e-6, and a missing path contributes as much as any other"""


class LayerCheck:
    """Accumulates the right side while the layered graphs are in use, then compares it with the left side."""

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

"""Do the layers of a network, looked at apart, make up the network? One random vector tells.

    J^T c = Σ_layers A(x)^T (d<c, out>/df)        by taps on the layers on the right, by the parameters on the left

The sides differ where a parameter acts elsewhere than in its layer (a penalty on gradients of the network uses weights
again, in its backward pass), and where the model computes something else in another forward pass.
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
"""relative; rounding is 1e-6, a path that is missing is as large as any other"""


class Agreement:
    """Looks at the graphs by layers as they pass; then compares with the operator's own, for one backward pass."""

    def __init__(self, operator: ParameterOperator) -> None:
        self._operator = operator
        self._cotangents: list[Tensor] = []
        self._by_layers = operator.template.new_zeros(operator.size)

    def watched(self) -> Iterator[tuple[float, LayeredGraph]]:
        generator = torch.Generator("cpu").manual_seed(0)
        for weight, layered in self._operator.layered():
            outputs = layered.graph.outputs
            layout = Layout(outputs, layered.samples, 0)
            if layout.fits:
                rows = gaussian(outputs[0].detach().new_zeros(layout.width), layered.samples, generator).T
                self._cotangents.append(rows)
                self._by_layers += self._pulled_back(layered, layout.tensors(rows))
            yield weight, layered

    def holds(self) -> bool:
        if len(self._cotangents) != self._operator.batches:
            return False
        true = self._operator.pullback(self._cotangents)
        return norm(true - self._by_layers) <= TOLERANCE * norm(true)

    def _pulled_back(self, layered: LayeredGraph, cotangents: list[Tensor]) -> Tensor:
        gradients = layered.gradients(cotangents)
        found = list(zip(layered.rest, gradients[len(layered.layers) :]))
        for layer, gradient in zip(layered.layers, gradients):
            found += layer.pulled_back(gradient)
        return self._operator.gathered(found)

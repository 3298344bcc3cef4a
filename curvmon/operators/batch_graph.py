"""Products w.r.t. the parameters for one batch: a graph with a tap on the output and none on the layers.

    q = J^T c,  c = dL/d out                the gradient; with a graph to θ and to c
    H z = d/dθ <q, z>                       through c as well
    J z = d/dc <q, z>                       double backward
    GGN z = J^T S J z,  S = dc/d out

Vectors are lists of tensors in the shapes of the parameters, with one more dimension in front if `batched`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from curvmon.errors import DoubleBackwardError, InputError
from curvmon.graph.autograd import bypassed, custom_functions, differentiate, product
from curvmon.graph.linear_layers import used_once
from curvmon.graph.loss_curvature import Layout
from curvmon.graph.proxy import without_values
from curvmon.graph.taps import TappedGraph


class BatchGraph:
    """The loss of one batch and its gradient, with their graphs.

    Attributes:
        loss: its value.
        entries: of the activations, about.
        has_ggn: the outputs that enter the loss were recognised, and nothing bypasses them.
    """

    def __init__(self, graph: TappedGraph, parameters: list[Tensor], differentiable: bool = True) -> None:
        """`differentiable`: the gradient has a graph, for products with the Hessian."""
        self._graph = graph
        self._parameters = parameters
        self.loss = graph.loss.item()
        self.entries = graph.operations.entries
        self.has_ggn = bool(graph.outputs) and not bypassed(graph.loss, parameters, graph.output_taps)
        self._cotangents: list[Tensor] = []
        self._differentiable = differentiable
        if self.has_ggn:
            slopes = differentiate([graph.loss], graph.output_taps, create_graph=True)
            # views: two outputs may have the same slope, and each is a variable of its own
            self._cotangents = [
                torch.zeros_like(out) if slope is None else slope.view_as(slope)
                for out, slope in zip(graph.outputs, slopes)
            ]
        self._gradients: list[Tensor | None] = [None] * len(parameters)
        if differentiable:
            outer = (graph.outputs, self._cotangents) if self.has_ggn else ([graph.loss], None)
            self._gradients = differentiate(outer[0], parameters, outer[1], create_graph=True)
            graph.operations.free_second()

    def take_gradient(self) -> list[Tensor | None]:
        """The values of the gradient, which are not kept: products need its graph alone."""
        if not self._differentiable:
            return _dense(differentiate([self._graph.loss], self._parameters))
        _dense(self._gradients)
        values = [None if g is None else g.detach() for g in self._gradients]
        self.drop_gradient()
        return values

    def drop_gradient(self) -> None:
        """Free the values of the gradient."""
        self._gradients = [None if g is None else without_values(g) for g in self._gradients]

    def custom_functions(self) -> list[str]:
        """Those of the user, whose backward has to be differentiable for products by second derivatives."""
        return custom_functions([self._graph.loss, *(g for g in self._gradients if g is not None)])

    def used_once(self) -> set[int]:
        return used_once(self._graph.loss, self._parameters)

    def hessian(
        self, rows: Sequence[int], columns: Sequence[int], z: Sequence[Tensor], batched: bool = False
    ) -> list[Tensor]:
        """H[rows, columns] z. Only what that block needs is differentiated."""
        return product([self._gradients[i] for i in columns], [self._parameters[i] for i in rows], z, batched)

    def ggn(self, z: Sequence[Tensor], batched: bool = False) -> list[Tensor]:
        curved = [c for c in self._cotangents if c.requires_grad]
        with self._graph.operations.cotangents_only():
            tangents = product(self._gradients, curved, z, batched)
        return self._pulled_back(z, curved, tangents, batched)

    @cached_property
    def loss_differentiates_twice(self) -> bool:
        """S has products: the loss itself, apart from the network, can be differentiated twice."""
        try:
            custom_functions(self._cotangents)  # raises for one that hides that it has no second derivative
            product(self._cotangents, self._graph.output_taps, [c.detach() for c in self._cotangents])
        except DoubleBackwardError:
            return False
        return True

    def pullback_of_slopes(self, shifted: Sequence[Tensor | None], scale: Tensor) -> list[Tensor]:
        """J^T (c' - c) scale: J^T S u for the cotangents c' = c + S u / scale of other outputs."""
        cotangents = [
            torch.zeros_like(before) if after is None else (after - before.detach()).mul_(scale)
            for after, before in zip(shifted, self._cotangents)
        ]
        return product(self._graph.outputs, self._parameters, cotangents)

    def outputs(self) -> list[Tensor]:
        return [output.detach() for output in self._graph.outputs]

    def curved_pullback(self, tangents: Sequence[Tensor]) -> list[Tensor]:
        """J^T S u for tangents u of all outputs."""
        curved = [(c, u) for c, u in zip(self._cotangents, tangents) if c.requires_grad]
        return self._pulled_back(self._parameters, [c for c, _ in curved], [u for _, u in curved], False)

    def hessian_and_ggn(self, z: Sequence[Tensor], batched: bool = False) -> tuple[list[Tensor], list[Tensor]]:
        """H z and GGN z; the backward pass that gives H z gives J z too."""
        curved = [c for c in self._cotangents if c.requires_grad]
        images = product(self._gradients, [*self._parameters, *curved], z, batched)
        number = len(self._parameters)
        return images[:number], self._pulled_back(z, curved, images[number:], batched)

    def _pulled_back(
        self, z: Sequence[Tensor], curved: list[Tensor], tangents: list[Tensor], batched: bool
    ) -> list[Tensor]:
        """J^T S J z from J z for the outputs in which the loss is not linear."""
        if not curved:
            return [torch.zeros_like(part) for part in z]
        curvature = product(curved, self._graph.output_taps, tangents, batched)
        return product(self._graph.outputs, self._parameters, curvature, batched)

    def pullback(self, rows: Tensor) -> list[Tensor]:
        """J^T c for a cotangent, samples x outputs."""
        layout = Layout(self._graph.outputs, len(rows), 0)
        return product(self._graph.outputs, self._parameters, layout.tensors(rows))


def _dense(gradients: list[Tensor | None]) -> list[Tensor | None]:
    if any(g is not None and g.layout is not torch.strided for g in gradients):
        raise InputError("a gradient is sparse (nn.Embedding(sparse=True)); set sparse=False for the measurement")
    return gradients

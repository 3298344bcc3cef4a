"""Products with the blocks of H and of its Gauss-Newton part from central differences, without second derivatives.

    T[:, w] z ≈ D(h),  D(h) = (q(e + h z) - q(e - h z)) / 2h       q = J^T c at fixed c: one backward pass
    J_w z     ≈ (out(e + h z) - out(e - h z)) / 2h                 from the same forward passes
    GN[:, w] z = J^T S J_w z                                       one pullback

For networks with an operation that cannot be differentiated twice: a fused kernel, a custom function. S is the loss's
own curvature; where the loss is such an operation (CTC), it comes from differences as well. Operations stay on the
piece that they are on (`fixed_pieces`), so that ReLU and max-pool are no obstacle.

Two steps h and 2h are made for every product: the value is (4 D(h) - D(2h)) / 3, without the error of order h², and
D(h) - D(2h) is taken for its error: too large for a smooth function, about right for rounding, and of the size of the
product itself if a kink is crossed. Four forward and four backward passes for a product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from curvmon.errors import DifferencesError
from curvmon.graph.autograd import custom_functions, differentiate, product
from curvmon.graph.fixed_pieces import ChangedCallsError
from curvmon.graph.taps import TappedGraph
from curvmon.numerics import precise_norm
from curvmon.operators.node_blocks import Columns, GraphOperator, Part

Shifted = Callable[..., TappedGraph]
"""the graph at values of the taps on nodes, by label, and of those on the outputs, which follow; none: zeros"""
STEPS = 1.0, 2.0
"""in units of the smaller one"""


class BlockDifferences(GraphOperator):
    """`GraphOperator` for a graph that is differentiated once."""

    differentiates_twice = False

    def __init__(self, graph: TappedGraph, shifted: Shifted) -> None:
        self._shifted = shifted
        super().__init__(graph, batched=False)
        self._labels = [node.label for node in graph.nodes]
        samples = [tapped.numel() / tap.numel() for tapped, tap in zip(graph.tapped, graph.taps)]
        self._sizes = [_length([tapped]) / math.sqrt(n) for tapped, n in zip(graph.tapped, samples)]
        self._step = max(torch.finfo(tap.dtype).eps for tap in graph.taps) ** 0.25
        """relative to the activations of one sample"""
        self._slope_errors = [_Errors() for _ in graph.taps]
        self._tangent_errors = [_Errors() for _ in graph.taps]
        self._curvature_errors = _Errors()
        self._loss_differentiates_twice = self._differentiate_loss()

    def _differentiate_loss(self) -> bool:
        """Whether S has exact products; then `output_curvature` of the base class computes them."""
        try:
            gradients = differentiate([self.graph.loss], self.graph.output_taps, create_graph=True)
            custom_functions([gradient for gradient in gradients if gradient is not None])
            product(gradients, self.graph.output_taps, self.cotangents)
        except RuntimeError:
            return False
        self._output_gradients = gradients
        return True

    def relative_error(self, v: int, w: int, hessian: float, remainder: float, gauss_newton: float) -> float:
        pairs = (v, w), (w, v)
        slope = max(self._slope_errors[col].relative(row) for row, col in pairs)
        if not self.has_gauss_newton:
            return slope
        gn = max(
            math.hypot(self._tangent_errors[col].relative(), self._curvature_errors.relative()) for _, col in pairs
        )
        own = slope * (remainder if self.splits else hessian)
        return math.hypot(own, gn * gauss_newton) / hessian if hessian else 0.0

    def joint(self, vectors: Mapping[int, Tensor], batched: bool = False) -> tuple[Columns, Columns | None]:
        slopes, tangents = self._differences(vectors)
        if not self.has_gauss_newton:
            return slopes, None
        gauss_newton = self._pull_curved(tangents, False)
        if self.splits:
            return slopes, gauss_newton
        return [h - gn for h, gn in zip(slopes, gauss_newton)], gauss_newton

    def _block(self, part: Part, v: int, w: int, vectors: Tensor, batched: bool) -> Tensor:
        remainder, gauss_newton = self.joint({w: vectors})
        if part == "remainder" or gauss_newton is None:
            return remainder[v]
        return gauss_newton[v] if part == "gauss_newton" else remainder[v] + gauss_newton[v]

    def _slope(self, vectors: Mapping[int, Tensor], variables: Sequence[Tensor], batched: bool) -> Columns:
        return self._differences(vectors)[0]

    def _differences(self, vectors: Mapping[int, Tensor]) -> tuple[Columns, Columns]:
        """T z (H z where part of the loss bypasses the outputs) at all rows, and J z."""
        shaped = dict(zip(vectors, self._shaped(vectors, False)))
        largest = torch.stack([_length([z]) / self._sizes[w].to(z.device) for w, z in shaped.items()]).max()
        step = self._step / largest.clamp_min(torch.finfo(largest.dtype).tiny)
        rows = len(self.graph.taps)

        def ends(h: Tensor) -> list[Tensor]:
            graph = self._at({self._labels[w]: h.to(z) * z for w, z in shaped.items()})
            if self.splits:
                slopes = differentiate(graph.outputs, graph.taps, self.cotangents)
            else:
                slopes = differentiate([graph.loss], graph.taps)
            filled = [torch.zeros_like(tap) if slope is None else slope for slope, tap in zip(slopes, graph.taps)]
            return [*filled, *(output.detach() for output in graph.outputs)]

        values, errors = _central(ends, step)
        for w in shaped:
            self._slope_errors[w].add(values[:rows], errors[:rows])
            self._tangent_errors[w].add_together(values[rows:], errors[rows:])
        return values[:rows], values[rows:]

    def output_curvature(self, tangents: Sequence[Tensor], batched: bool = False) -> list[Tensor]:
        """S u: exact where the loss is differentiable twice, else from differences of its gradient."""
        if self._loss_differentiates_twice:
            return super().output_curvature(tangents, batched)
        size = _length(tangents).clamp_min(torch.finfo(tangents[0].dtype).tiny)

        def ends(h: Tensor) -> list[Tensor]:
            graph = self._at({}, *(h.to(u) * u for u in tangents))
            slopes = differentiate([graph.loss], graph.output_taps)
            return [torch.zeros_like(u) if slope is None else slope for slope, u in zip(slopes, tangents)]

        values, errors = _central(ends, self._step * _length(self.graph.outputs) / size)
        self._curvature_errors.add_together(values, errors)
        return values

    def _at(self, at: Mapping[str, Tensor], *outputs: Tensor) -> TappedGraph:
        try:
            return self._shifted(at, *outputs)
        except ChangedCallsError as error:
            raise DifferencesError(f"a pass with shifted activations is another function: {error}") from error


class _Errors:
    """Sums over products: ‖D(h) - D(2h)‖² and ‖D‖², by row. Nothing is read until it is asked for."""

    def __init__(self) -> None:
        self._sums: Tensor | None = None

    def add(self, values: Sequence[Tensor], errors: Sequence[Tensor]) -> None:
        sizes = [precise_norm(x).to(values[0].device) for part in (errors, values) for x in part]
        squares = torch.stack(sizes).square().reshape(2, -1)
        self._sums = squares if self._sums is None else self._sums + squares

    def add_together(self, values: Sequence[Tensor], errors: Sequence[Tensor]) -> None:
        if values:
            self.add([_length(values)], [_length(errors)])

    def relative(self, row: int = 0) -> float:
        if self._sums is None:
            return 0.0
        error, size = self._sums[:, row].sqrt().tolist()
        return error / size if size else 0.0


def _central(ends: Callable[[Tensor], list[Tensor]], step: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """(4 D(h) - D(2h)) / 3 and D(h) - D(2h)."""
    small, large = (
        [(after - before) / (2 * h).to(after) for after, before in zip(ends(h), ends(-h))]
        for h in (factor * step for factor in STEPS)
    )
    return [(4 * a - b) / 3 for a, b in zip(small, large)], [a - b for a, b in zip(small, large)]


def _length(tensors: Sequence[Tensor]) -> Tensor:
    """‖x‖ of all of them together, in double precision."""
    lengths = torch.stack([precise_norm(x.detach()).to(tensors[0].device) for x in tensors])
    whole: Tensor = torch.linalg.vector_norm(lengths)
    return whole

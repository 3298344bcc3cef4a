"""Products with the Hessian w.r.t. the parameters from differences of gradients, without second derivatives.

    H z ≈ (g(θ + ε z) - g(θ)) / ε        ‖z‖ = 1;  error: ε/2 D³L[z, z] and rounding / ε
    J z ≈ (out(θ + ε z) - out(θ)) / ε,   GGN z = J^T S J z

One forward and one backward pass per product: half of what differentiating the gradient takes, and the memory of a
training step. Operations stay on the piece that they are on (`fixed_pieces`), so that ReLU and max-pool are no
obstacle. The step ε is chosen at the first product, where a second gradient, at θ - ε z, shows the error:

    (g(θ + ε z) + g(θ - ε z) - 2 g(θ)) / (g(θ + ε z) - g(θ - ε z)) = relative error of the one-sided difference
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from curvmon.errors import CurvmonError, DoubleBackwardError
from curvmon.graph.autograd import differentiate
from curvmon.graph.fixed_pieces import ChangedCallsError, FixedPieces
from curvmon.graph.taps import TappedGraph
from curvmon.isolation.patches import any_attention
from curvmon.numerics import norms, row_norms_squared
from curvmon.operators.batch_graph import BatchGraph
from curvmon.operators.parameter_hessian import Build, GraphImage, ParameterOperator

GOOD, TOLERATED = 2e-3, 1e-2
"""relative errors of a product: the first step that is as good as GOOD is taken, or else the best of a few"""
MOST_STEPS = 3
"""step sizes that are tried"""
FACTOR = 4.0
"""between the first two of them"""


class DifferencesError(CurvmonError):
    """Differences of gradients are not exact enough here; the message says why."""


class DifferenceOperator(ParameterOperator):
    """H and GGN w.r.t. the parameters from differences.

    Attributes:
        step: ε; None before the first product.
        error: relative error of the first product.
        checked: do not compare the first product with one from second derivatives.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._pieces: defaultdict[int, FixedPieces] = defaultdict(FixedPieces)
        self._efficient = False
        self.step: float | None = None
        self.error = math.nan
        self.checked = False
        super().__init__(*args, **kwargs)
        self._original = self._joined([parameter.detach() for parameter in self._parameters])
        self._in_batches.width = 1

    @property
    def first_step(self) -> float:
        """Large enough that θ + ε z differs from θ in single precision."""
        root = math.sqrt(torch.finfo(self.template.dtype).eps)
        return root * max(1.0, norms([self._original])[0] / 200)

    def pullback(self, cotangents: Sequence[Tensor]) -> Tensor:
        # by the operations of the layered graphs that it is compared with: with others, a ReLU may be on another piece
        self._kept, self._efficient = None, True
        try:
            return super().pullback(cotangents)
        finally:
            self._kept, self._efficient = None, False

    def of_random(self, z: Tensor) -> Tensor:
        """H Z for random vectors, of which rounding is a larger part, with larger steps."""
        if self.step is None:
            return self.matmat(z)
        step, self.step = self.step, self.step * min(30.0, max(1.0, self.size**0.5 / 100))
        try:
            return self.matmat(z)
        finally:
            self.step = step

    def _open(self, index: int, build: Build) -> BatchGraph:
        if self._efficient:
            return BatchGraph(build(), self._parameters, differentiable=False)
        with any_attention(), self._pieces[index]():
            return BatchGraph(build(efficient=False), self._parameters, differentiable=False)

    def _images(self, z: Tensor, columns: Sequence[int], image: GraphImage) -> Tensor:
        raise NotImplementedError("blocks of the Hessian need second derivatives")

    def _block(self, rows: Sequence[int], columns: Sequence[int], z: Tensor) -> Tensor:
        whole = range(len(self.sizes))
        if len(rows) != len(whole) or len(columns) != len(whole):
            raise NotImplementedError("blocks of the Hessian need second derivatives")
        return _by_columns(z, self._difference)

    def _ggn(self, z: Tensor) -> Tensor:
        return _by_columns(z, self._ggn_difference)

    def _difference(self, unit: Tensor) -> Tensor:
        """H u for a unit vector."""
        self._kept = None  # its memory is needed
        if self.step is None:
            return self._first_difference(unit)
        return (self._gradient_at(unit, self.step) - self.gradient).div_(self.step)

    def _first_difference(self, unit: Tensor) -> Tensor:
        """H u by a central difference; chooses the step."""
        tried: dict[float, float] = {}
        best, step = None, self.first_step
        while step is not None:
            after, before = self._gradient_at(unit, step), self._gradient_at(unit, -step)
            image = (after - before).div_(2 * step)
            curvature, straight = norms([after.add_(before).sub_(self.gradient, alpha=2), image])
            tried[step] = curvature / (2 * step * straight) if straight else math.inf
            if tried[step] == min(tried.values()):
                best, self.step, self.error = image, step, tried[step]
            step = _next_step(tried)
        if not self.error <= TOLERATED or best is None:
            raise DifferencesError(f"differences of gradients have an error of {self.error:.1g} or more")
        if not self.checked:
            self._compare_with_second_derivatives(unit, best)
        return best

    def _compare_with_second_derivatives(self, unit: Tensor, image: Tensor) -> None:
        """What a difference does not show: values that a model keeps from pass to pass, kinks at zero."""
        exact = torch.zeros_like(image)
        parts = self._shaped(unit, range(len(self.sizes)))
        every = range(len(self.sizes))
        try:
            for weight, build in self._losses:
                graph = BatchGraph(build(), self._parameters)
                exact += weight * self._joined(graph.hessian(every, every, parts))
        except DoubleBackwardError:
            return
        difference, size = norms([exact - image, exact])
        if not difference <= TOLERATED * size:
            raise DifferencesError(
                f"differences of gradients differ from second derivatives by {difference / (size or 1.0):.1g}"
            )

    def _ggn_difference(self, unit: Tensor) -> Tensor:
        step = self.first_step if self.step is None else self.step
        total = torch.zeros_like(unit)
        for index, (weight, graph) in enumerate(self._graphs()):
            with self._shifted(unit, step):
                outputs = [output.detach() for output in self._shifted_graph(index).outputs]
            tangents = [(after - before).div_(step) for after, before in zip(outputs, graph.outputs())]
            total.add_(self._joined(graph.curved_pullback(tangents)), alpha=weight)
        return total

    def _gradient_at(self, unit: Tensor, step: float) -> Tensor:
        """g(θ + ε u)."""
        total: Tensor | None = None
        with self._shifted(unit, step):
            for index, (weight, _) in enumerate(self._losses):
                graph = self._shifted_graph(index)
                flat = self._joined(differentiate([graph.loss], self._parameters, keep_graph=False))
                flat = flat if len(self._losses) == 1 else flat.mul_(weight)
                total = flat if total is None else total.add_(flat)
        assert total is not None
        return total

    def _shifted_graph(self, index: int) -> TappedGraph:
        _, build = self._losses[index]
        try:
            with any_attention(), self._pieces[index]():
                return build(efficient=False, finite=False)
        except ChangedCallsError as error:
            raise DifferencesError(f"a forward pass with shifted parameters is another function: {error}") from error

    @contextmanager
    def _shifted(self, unit: Tensor, step: float) -> Iterator[None]:
        """θ + ε u in place of θ; θ is restored bit by bit."""
        try:
            self._assign(torch.add(self._original, unit, alpha=step))
            yield
        finally:
            self._assign(self._original)

    def _assign(self, values: Tensor) -> None:
        for parameter, part in zip(self._parameters, self._shaped(values, range(len(self.sizes)))):
            parameter.data.copy_(part)  # the graph at θ, which holds the parameters, stays valid


def _by_columns(z: Tensor, image: Callable[[Tensor], Tensor]) -> Tensor:
    """The images of the columns of a matrix, from those of unit vectors."""
    sizes = row_norms_squared(z.T).sqrt().to(z)
    units = z / torch.where(sizes > 0, sizes, 1.0)
    return torch.stack([image(unit) for unit in units.T], dim=1).mul_(sizes)


def _next_step(tried: Mapping[float, float]) -> float | None:
    """None if the best is good enough, or no other promises to be better."""
    best = min(tried, key=lambda step: tried[step])
    if tried[best] <= GOOD or len(tried) >= MOST_STEPS:
        return None
    if len(tried) == 1:
        return best / FACTOR
    # the error is a ε + b / ε
    (small, error), (large, other) = sorted(tried.items())
    if not math.isfinite(error + other):
        return None
    a = (large * other - small * error) / (large**2 - small**2)
    b = (error - a * small) * small
    if a <= 0 or b <= 0:
        return large * FACTOR**2 if a <= 0 else small / FACTOR**2
    return math.sqrt(b / a)

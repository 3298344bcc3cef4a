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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from curvmon.errors import DifferencesError, DoubleBackwardError, LossError
from curvmon.graph.autograd import differentiate
from curvmon.graph.fixed_pieces import ChangedCallsError, FixedPieces
from curvmon.graph.linear_layers import LayeredGraph
from curvmon.graph.taps import TappedGraph
from curvmon.graph.unsaved import NotSavedError, nothing_saved
from curvmon.isolation.freed_memory import return_freed_memory
from curvmon.isolation.fused_attention import fused_attention
from curvmon.numerics import norms
from curvmon.operators.batch_graph import BatchGraph
from curvmon.operators.derivative import Way
from curvmon.operators.parameter_hessian import Build, GraphImage, ParameterOperator
from curvmon.operators.protocol import by_columns

GOOD, TOLERATED = 2e-3, 3.5e-3
"""relative errors of a product: the first step that is as good as GOOD is taken, or else the best of a few"""
SAME = 1e-2
"""relative difference from second derivatives"""
TOLERATED_ASYMMETRY = 0.02
"""relative to the norm of H"""
MOST_STEPS = 3
"""step sizes that are tried"""
FACTOR = 4.0
"""between the first two of them"""


class DifferenceOperator(ParameterOperator):
    """H and GGN w.r.t. the parameters from differences.

    Attributes:
        step: ε; None before the first product.
        usual_step: ε of earlier measurements, tried first.
        relative_error: of the first product; NaN before.
        verdict: what a comparison of the first product with one from second derivatives showed, in this measurement or
            in an earlier one; None: compare. "" if they agree.
    """

    def __init__(
        self, losses: Any, parameters: Mapping[str, Tensor], originals: Sequence[Tensor], *args: Any, **kwargs: Any
    ) -> None:
        self._pieces: defaultdict[int, FixedPieces] = defaultdict(FixedPieces)
        self._efficient = False
        self.step: float | None = None
        self.usual_step: float | None = None
        self.relative_error = math.nan
        self.verdict: str | None = None
        shared = {parameter.data_ptr() for parameter in originals} - {0}
        if any(parameter.data_ptr() in shared for parameter in parameters.values()):
            raise DifferencesError("the parameters of a scripted module cannot be copied", lasts=True)
        self._at, self._original = _in_one_tensor(list(parameters.values()))
        super().__init__(losses, parameters, originals, *args, **kwargs)
        self._in_batches.width = 1

    @cached_property
    def first_step(self) -> float:
        """Large enough that θ + ε z differs from θ in single precision."""
        root = math.sqrt(torch.finfo(self.template.dtype).eps)
        return root * max(1.0, norms([self._original])[0] / 200)

    @property
    def detaches(self) -> bool:
        """The loss takes something that depends on the parameters for a constant: a verdict holds at these only."""
        return any(pieces.detaches for pieces in self._pieces.values())

    def layered(self) -> Iterator[tuple[float, LayeredGraph]]:
        self._kept = None  # its memory is needed
        return super().layered()

    def pullback(self, cotangents: Sequence[Tensor]) -> Tensor:
        # by the operations of the layered graphs that it is compared with: with others, a ReLU may be on another piece
        self._kept, self._efficient = None, True
        try:
            return super().pullback(cotangents)
        finally:
            self._kept, self._efficient = None, False

    def matmat_of_random(self, z: Tensor) -> Tensor:
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
        with fused_attention(), self._pieces[index]():
            graph = build(efficient=False, finite=index not in self._losses_before)
        # not recorded: it reads the loss
        return BatchGraph(graph, self._parameters, differentiable=False)

    def _images(self, z: Tensor, columns: Sequence[int], image: GraphImage) -> Tensor:
        raise NotImplementedError("blocks of the Hessian need second derivatives")

    def _block(self, rows: Sequence[int], columns: Sequence[int], z: Tensor) -> Tensor:
        whole = range(len(self.sizes))
        if len(columns) != len(whole):
            given = dict(zip(columns, torch.split(z, [self.sizes[i] for i in columns])))
            z = torch.cat([given.get(i, z.new_zeros(self.sizes[i], z.shape[1])) for i in whole])
        image = by_columns(self._difference, z)
        if len(rows) == len(whole):
            return image
        parts = torch.split(image, self.sizes)
        return torch.cat([parts[i] for i in rows])

    def _ggn(self, z: Tensor) -> Tensor:
        return by_columns(self._ggn_difference, z)

    def _difference(self, z: Tensor) -> Tensor:
        """H z."""
        self._kept = None  # its memory is needed
        size = _length(z)
        if self.step is None:
            return self._first_difference(z / size).mul_(size)
        return self._gradient_at(z, self.step / size).sub_(self.gradient).mul_(size / self.step)

    def compare(self, z: Tensor) -> None:
        """Set `verdict`, or leave it where differences are too rough to tell.

        Raises:
            DifferencesError: differences are not derivatives.
        """
        unit = z / _length(z)
        image = self._central_difference(unit)
        if not math.isfinite(self.relative_error):
            return
        try:
            self.verdict = self._compared_with_second_derivatives(unit, image)
        except DifferencesError:
            if self.relative_error <= TOLERATED:
                raise

    def _first_difference(self, unit: Tensor) -> Tensor:
        image = self._central_difference(unit)
        if not self.relative_error <= TOLERATED:
            text = f"differences of gradients have an error of {self.relative_error:.1g} or more"
            raise DifferencesError(text, lasts=False)
        if self.verdict is None:
            self.verdict = self._compared_with_second_derivatives(unit, image)
        return image

    def _central_difference(self, unit: Tensor) -> Tensor:
        """H u; chooses the step of the differences after it."""
        tried: dict[float, float] = {}
        images: dict[float, Tensor] = {}
        step: float | None = self.usual_step or self.first_step
        while step is not None:
            after, before = (self._gradient_at(unit, unit.new_tensor(shift)) for shift in (step, -step))
            images = {step: (after - before).div_(2 * step)} | images
            curvature, straight = norms([after.add_(before).sub_(self.gradient, alpha=2), images[step]])
            tried[step] = curvature / (2 * step * straight) if straight else math.inf
            self.step = min(tried, key=lambda each: tried[each])
            images = {self.step: images[self.step]}
            step = None if tried[self.step] <= GOOD else _next_step(tried, self.first_step)
        assert self.step is not None
        self.relative_error = tried[self.step]
        self._spend(2 * len(tried) - 1)
        return images[self.step]

    def _compared_with_second_derivatives(self, unit: Tensor, image: Tensor) -> str:
        """What a difference does not show: values that a model keeps from pass to pass, kinks at zero."""
        exact = torch.zeros_like(image)
        parts = self._shaped(unit, range(len(self.sizes)))
        every = range(len(self.sizes))
        return_freed_memory(self.device)
        try:
            for weight, build in self._losses:
                graph = BatchGraph(build(), self._parameters)
                graph.custom_functions()  # raises for one that hides that it has no second derivative
                exact.add_(self._joined(graph.hessian(every, every, parts)), alpha=weight)
        except DoubleBackwardError as error:
            return f"HVPs are not compared with second derivatives: {error}"
        self._spend(1)
        del graph
        return_freed_memory(self.device)
        difference, size = norms([exact - image, exact])
        if difference <= SAME * size:
            return ""
        apart = f"differ by {difference / (size or 1.0):.1g}"
        if self.custom_functions:
            functions = ", ".join(self.custom_functions)
            return f"suspect: HVPs from differences and from the second derivatives of {functions} {apart}"
        raise DifferencesError(f"differences of gradients and second derivatives {apart}", lasts=True)

    def notes_on_symmetry(self, asymmetry: float) -> list[str]:
        if asymmetry > TOLERATED_ASYMMETRY:
            raise DifferencesError(f"differences of gradients are not symmetric (by {asymmetry:.1g})", lasts=False)
        text = f"HVPs from differences of gradients (step {self.step:.1g}, relative error {self.relative_error:.1g})"
        return [text, self.verdict] if self.verdict else [text]

    def _ggn_difference(self, z: Tensor) -> Tensor:
        """GGN z."""
        size, step = _length(z), self.first_step if self.step is None else self.step
        total = torch.zeros_like(z)
        for index, (weight, graph) in enumerate(self._graphs()):
            if graph.loss_differentiates_twice:
                with self._shifted(z, step / size):
                    outputs = self._outputs(index)
                tangents = [(after - before).mul_(size / step) for after, before in zip(outputs, graph.outputs())]
                image = graph.curved_pullback(tangents)
            else:
                with self._shifted(z, step / size):
                    shifted = self._shifted_graph(index)
                    slopes = differentiate([shifted.loss], shifted.output_taps)
                image = graph.pullback_of_slopes(slopes, size / step)
            total.add_(self._joined(image), alpha=weight)
        return total

    def _gradient_at(self, z: Tensor, step: Tensor) -> Tensor:
        """g(θ + step z)."""
        total: Tensor | None = None
        with self._shifted(z, step):
            for index, (weight, _) in enumerate(self._losses):
                graph = self._shifted_graph(index)
                flat = self._joined(differentiate([graph.loss], self._parameters, keep_graph=False))
                flat = flat if len(self._losses) == 1 else flat.mul_(weight)
                total = flat if total is None else total.add_(flat)
        assert total is not None
        return total

    def _shifted_graph(self, index: int) -> TappedGraph:
        _, build = self._losses[index]
        with fused_attention(), self._pieces[index]():
            return build(efficient=False, finite=False)

    def _outputs(self, index: int) -> list[Tensor]:
        """The outputs, from a forward pass that keeps nothing for a backward pass."""
        try:
            with nothing_saved():
                graph = self._shifted_graph(index)
        except NotSavedError:  # the loss takes gradients itself
            graph = self._shifted_graph(index)
        return [output.detach() for output in graph.outputs]

    @contextmanager
    def _shifted(self, z: Tensor, step: Tensor) -> Iterator[None]:
        """θ + step z in place of θ, which is restored bit by bit."""
        try:
            torch.addcmul(self._original, z, step, out=self._at)
            yield
        except (ChangedCallsError, LossError) as error:
            text = f"a pass with shifted parameters is another function: {error}"
            raise DifferencesError(text, lasts=True) from error
        finally:
            self._at.copy_(self._original)


KINDS: Mapping[Way, type[ParameterOperator]] = {"double": ParameterOperator, "differences": DifferenceOperator}


def _length(z: Tensor) -> Tensor:
    """‖z‖, about; above zero."""
    length: Tensor = torch.linalg.vector_norm(z)
    return length.clamp_min(torch.finfo(z.dtype).tiny)


def _in_one_tensor(parameters: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """A flat tensor that the parameters become parts of, and a copy of it.

    The values are exchanged below autograd: a graph at θ, which holds the parameters, stays valid once θ is restored.
    """
    first = parameters[0]
    if any(p.dtype != first.dtype or p.device != first.device or p.layout != torch.strided for p in parameters):
        raise DifferencesError("the parameters have several dtypes, devices or layouts", lasts=True)
    whole = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
    for parameter, part in zip(parameters, torch.split(whole, [p.numel() for p in parameters])):
        parameter.data = part.view(parameter.shape)
    return whole, whole.clone()


def _next_step(tried: Mapping[float, float], first: float) -> float | None:
    """From the errors of one or two steps, none of them good enough. None if no other promises to be better."""
    best = min(tried, key=lambda step: tried[step])
    if len(tried) >= MOST_STEPS:
        return None
    if len(tried) == 1:
        return best / FACTOR if 0.5 < best / first < 2 else first
    # the error is a ε + b / ε
    (small, error), (large, other) = sorted(tried.items())
    if not math.isfinite(error + other):
        return None
    a = (large * other - small * error) / (large**2 - small**2)
    b = (error - a * small) * small
    if a <= 0 or b <= 0:
        return large * FACTOR**2 if a <= 0 else small / FACTOR**2
    return math.sqrt(b / a)

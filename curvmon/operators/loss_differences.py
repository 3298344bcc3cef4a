"""Gain and curvature of a loss along an optimizer step, from three forward passes.

    f(t) = L(θ - t u),   u = θ - θ_after:    g^T u ≈ (f(-h) - f(h)) / 2h,   u^T H u ≈ (f(h) - 2 f(0) + f(-h)) / h²

That is a third of the time of an HVP from second derivatives, and the memory of a forward pass. The second difference
is to be TARGET of the loss: large enough for single precision, small enough for a third derivative not to matter.
Operations stay on the piece that they are on at θ (`fixed_pieces`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from curvmon.errors import CurvmonError, DivergedError, InputError, NonFiniteError
from curvmon.graph.arguments import explained, why_not_finite
from curvmon.graph.autograd import differentiate
from curvmon.graph.fixed_pieces import ChangedCallsError, FixedPieces
from curvmon.graph.pytree import map_all_tensors
from curvmon.graph.taps import checked_scalar
from curvmon.graph.unsaved import NotSavedError, nothing_saved
from curvmon.isolation.fused_attention import fused_attention
from curvmon.isolation.model_state import isolated, own_copy, reseed
from curvmon.numerics import NOT_FINITE, precise
from curvmon.operators.loss_crossing import REACH, TOLERANCE, first_crossing
from curvmon.operators.session import NOISE_SEED, Loss

TARGET = 1e-4
"""|f(h) - 2 f(0) + f(-h)| / |f(0)|"""
SMALLEST, LARGEST = 1e-5, 1e-3
"""what is accepted: the rounding of a loss in single precision is about 1e-7 of it"""
LARGEST_SLOPE = 0.03
"""of h g^T u, as a share of the loss, where the curvature is small"""
REPEATABLE = 1e-6
"""relative difference of the loss between two forward passes of the same"""
MOST_TRIES = 4
MOST_AT_ONCE = 30.0
"""largest factor between two values of h"""
MOST_SPACING = 1e4
"""largest h, and inverse of the smallest: a loss of zero, as of a network that has learned its data, has no best one"""
Watch = Callable[[], AbstractContextManager[None]]


class ChangingLossError(CurvmonError):
    """Two forward passes of the same parameters and the same batch give different losses, or run other operations."""


@dataclass(frozen=True)
class LossDifferences:
    """Attributes:
    gain: g^T u.
    curvature: u^T H u.
    loss: f(0).
    spacing: h.
    next_spacing: the h that would have met the target.
    """

    gain: float
    curvature: float
    loss: float
    spacing: float
    next_spacing: float


class LossAlongStep:
    """f(t) = L(θ_before + t (θ_after - θ_before)) for a batch, on copies of the parameters.

    Attributes:
        loss: f(0).
        takes_constants: something that depends on the parameters is taken for a constant. Gradients do not see it
            change, differences of losses do.
    """

    def __init__(
        self,
        run: Callable[[], Tensor],
        parameters: Sequence[Tensor],
        before: Sequence[Tensor],
        after: Sequence[Tensor],
        watch: Watch = nullcontext,
    ) -> None:
        self._run = run
        self._parameters = parameters
        self._ends = [(a.to(p.dtype), b.to(p.dtype)) for p, a, b in zip(parameters, before, after)]
        self._pieces = FixedPieces()
        self._saves = False
        self._watch = watch
        self.loss = self.value(0.0)
        self._watch = nullcontext

    @property
    def takes_constants(self) -> bool:
        return self._pieces.detaches

    def value(self, t: float) -> float:
        """f(t), on the pieces of t = 0."""
        return self._value(t, self._loss)

    def crossing(self, gain: float, curvature: float, tolerance: float = TOLERANCE, reach: float = REACH) -> float:
        """The first t > 0 with f(t) = f(0), across kinks, as `first_crossing` says."""

        def value(t: float) -> float:
            try:
                return self._value(t, self._loss_across_kinks)
            except Exception:  # a loss may refuse parameters that far away, as it does its own NaN
                return math.inf

        return first_crossing(value, self.loss, gain, curvature, tolerance, reach)

    def _value(self, t: float, loss: Callable[[], Tensor]) -> float:
        self._move_to(t)
        if not self._saves:
            try:
                with nothing_saved():
                    return loss().item()
            except NotSavedError:
                self._saves = True
                self._pieces = FixedPieces()
                self._move_to(t)
        return loss().item()

    def gain(self) -> float:
        """g^T u from the gradient at θ_before."""
        self._move_to(0.0)
        gradients = differentiate([self._loss()], self._parameters, keep_graph=False)
        terms = [
            (precise(g.to_dense() if g.is_sparse else g) * precise(before - after)).sum()
            for g, (before, after) in zip(gradients, self._ends)
            if g is not None
        ]
        return torch.stack(terms).sum().item() if terms else 0.0

    def differences(self, spacing: float) -> LossDifferences:
        """Gain and curvature; tries `spacing` first.

        Raises:
            NonFiniteError: the loss is finite before the step, and not near it.
            ChangingLossError: another forward pass is another function.
        """
        try:
            return self._differences(spacing)
        except ChangedCallsError as error:
            raise ChangingLossError(str(error)) from error

    def _differences(self, h: float) -> LossDifferences:
        at = self.loss
        for attempt in range(MOST_TRIES):
            ahead, behind = self.value(h), self.value(-h)
            slope, second = (behind - ahead) / 2, ahead - 2 * at + behind
            if not math.isfinite(slope):
                if attempt == MOST_TRIES - 1:
                    raise NonFiniteError(NOT_FINITE)
                h /= MOST_AT_ONCE
                continue
            scale = max(abs(at), abs(slope) / h) or 1.0
            bent, sloped = abs(second) / scale, abs(slope) / scale
            factor = math.sqrt(TARGET / max(bent, TARGET / MOST_AT_ONCE**2))
            factor = max(factor, 1 / MOST_AT_ONCE, 1 / (MOST_SPACING * h))
            if factor > 1:
                factor = max(1.0, min(factor, LARGEST_SLOPE / sloped if sloped else factor, MOST_SPACING / h))
                factor = factor if bent or sloped else 1.0  # flat: no other h says more
            if (SMALLEST <= bent <= LARGEST) or factor == 1.0 or attempt == MOST_TRIES - 1:
                break
            h *= factor
        return LossDifferences(slope / h, second / h**2, at, h, h * factor)

    def check_repeats(self) -> None:
        """Raises ChangingLossError unless the loss before the step is the same again."""
        again = self.value(0.0)
        if not math.isclose(again, self.loss, rel_tol=REPEATABLE):
            raise ChangingLossError(f"the loss of the same batch is {self.loss:.7g} and then {again:.7g}")

    def _loss(self) -> Tensor:
        if self._pieces.has_none:
            return self._loss_across_kinks()
        with fused_attention(), self._watch(), self._pieces():
            return self._run()

    def _loss_across_kinks(self) -> Tensor:
        with fused_attention():
            return self._run()

    @torch.no_grad()
    def _move_to(self, t: float) -> None:
        """Below autograd, so that copies that modules hold elsewhere (an LSTM's flat weights) move too."""
        for parameter, (before, after) in zip(self._parameters, self._ends):
            if t:
                torch.lerp(before, after, t, out=parameter.data)
            else:
                parameter.data.copy_(before)


def move_copies(copies: Sequence[Tensor], to: Sequence[Tensor], *, originals: Sequence[Tensor]) -> None:
    """Give copies of parameters other values.

    Raises:
        InputError: they are the originals. Isolation cannot copy the parameters of a scripted module.
    """
    if any(copy.data_ptr() == original.data_ptr() != 0 for copy, original in zip(copies, originals)):
        raise InputError("the parameters of a scripted module cannot be copied")
    for copy, value in zip(copies, to):
        copy.data.copy_(value)


@contextmanager
def open_loss_along_step(
    model: nn.Module,
    batch: Any,
    *,
    loss: Loss,
    before: Sequence[Tensor],
    after: Sequence[Tensor] | None = None,
    watch: Watch = nullcontext,
) -> Iterator[LossAlongStep]:
    """The loss between `before` and `after`. Modules stay in their modes; no trace is left.

    Args:
        model: any module.
        batch: whatever `loss` takes.
        loss: of the model and the batch.
        before: θ_before for every trainable parameter, in the order of `model.parameters()`.
        after: θ_after; None: the parameters as they are.
        watch: a context for the forward pass at θ_before; entered once more where that pass is repeated.
    """
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    originals = [parameter.detach() for parameter in trainable.values()]
    with isolated(model, loss, seed=NOISE_SEED, dtype=None, own_modes=True):
        copies = dict(model.named_parameters())
        working = [copies[name].requires_grad_() for name in trainable]
        move_copies(working, before, originals=originals)

        def run() -> Tensor:
            reseed(NOISE_SEED)
            value: Tensor = explained(
                lambda: checked_scalar(loss(model, map_all_tensors(batch, lambda tensor: own_copy(tensor, None)))),
                model,
                None,
                batch,
            )
            return value

        along = LossAlongStep(run, working, before, originals if after is None else after, watch)
        if not math.isfinite(along.loss):
            raise DivergedError(f"the loss is {along.loss}{why_not_finite(batch, model)}")
        yield along

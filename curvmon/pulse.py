"""Curvature along an optimizer step: does the step still lower the loss of its own batch?

    L(θ - u) ≈ L(θ) - g^T u + u^T H u / 2        u = θ_before - θ_after; g, H: gradient and Hessian at θ_before

The step lowers the loss as long as u^T H u / (2 g^T u) is below 1, to second order: shorter by that factor, it would
leave the loss as it is. Losses of networks are not quadratic that far; `Pulse.critical` is measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor, nn

from curvmon.errors import InputError, NonFiniteError
from curvmon.numerics import NOT_FINITE, precise
from curvmon.operators.derivative import Derivative, Way, with_fallback
from curvmon.operators.gradient_differences import KINDS
from curvmon.operators.loss_differences import ChangingLossError, LossAlongStep, move_copies, open_loss_along_step
from curvmon.operators.parameter_hessian import ParameterOperator, open_parameters
from curvmon.operators.session import Loss


@dataclass(frozen=True)
class Pulse:
    """Gain and curvature of a loss along a step.

    Attributes:
        gain: g^T u, by how much the step lowers the loss to first order.
        curvature: u^T H u.
        loss: before the step.
        critical: how many times longer the step would have to be to leave the loss of its batch as it is: learning rate
            times `critical` is the critical learning rate along this direction. Infinite where that is not reached near
            1 / `ratio`; NaN where it has not been measured, or the step goes uphill.
    """

    gain: float
    curvature: float
    loss: float = math.nan
    critical: float = math.nan

    @property
    def ratio(self) -> float:
        """u^T H u / (2 g^T u): above 1, the step raises the loss of its batch, to second order.

        Negative where the step goes uphill, or along negative curvature; NaN for a step of zero. Single ratios are
        large where g^T u is near zero: a mean of `curvature` over twice a mean of `gain` is steadier.
        """
        if self.gain:
            return self.curvature / (2 * self.gain)
        return math.copysign(math.inf, self.curvature) if self.curvature else math.nan


def pulse(
    model: nn.Module,
    batch: Any,
    *,
    loss: Loss,
    step: Sequence[Tensor],
    critical: bool = False,
    derivative: Derivative = "auto",
) -> Pulse:
    """One Hessian-vector product along an optimizer step.

    Modules stay in the mode that they are in: in training mode, batch norm uses the statistics of the batch, and
    dropout draws the same for the gradient and for the Hessian. The model is left exactly as it was, running statistics
    and random generators included.

    Args:
        model: any module, with the parameters *before* the step.
        batch: whatever `loss` takes; the batch that the step was made for.
        loss: `loss(model, batch)` returns a scalar tensor.
        step: θ_before - θ_after for every trainable parameter, in the order of `model.parameters()`.
        critical: also measure `Pulse.critical`, within about 5 %: five forward passes or so.
        derivative: "double": differentiate the gradient. "differences": a central difference of gradients, exact to a
            few thousandths. "auto": the first where it works, else the second.

    Raises:
        InputError: the step does not fit the trainable parameters, or is not finite.
        LossError: the loss does not depend on the parameters.
        DivergedError: the loss is not finite.
        DifferencesError: with "differences", they are not exact enough.
        DoubleBackwardError: an operation of the loss cannot be differentiated twice, nor do differences replace that.
        NonFiniteError: an HVP is not finite although the loss is.

    Example:
        >>> import torch, curvmon
        >>> net = torch.nn.Linear(3, 1, bias=False)
        >>> x = torch.randn(64, 3)
        >>> square = lambda net, x: net(x).square().mean() / 2
        >>> gradient = torch.autograd.grad(square(net, x), net.parameters())
        >>> ratio = [curvmon.pulse(net, x, loss=square, step=[lr * g for g in gradient]).ratio for lr in (0.1, 0.2)]
        >>> bool(abs(ratio[1] / ratio[0] - 2) < 1e-5)
        True
    """

    def run(way: Way, why: list[str]) -> Pulse:
        with open_parameters(model, [batch], loss=loss, kind=KINDS[way], own_modes=True) as operator:
            u = _flat(step, operator)
            image = operator.hessian(u)
            numbers = [(precise(u) * precise(v)).sum() for v in (operator.gradient, image)]
            gain, curvature = torch.stack(numbers).tolist()
            if not math.isfinite(gain) or not math.isfinite(curvature):
                raise NonFiniteError(NOT_FINITE)
            return Pulse(gain, curvature, operator.loss)

    taken = with_fallback(run, derivative)
    if not critical:
        return taken
    before = [parameter.detach().clone() for parameter in model.parameters() if parameter.requires_grad]
    with open_loss_along_step(
        model, batch, loss=loss, before=before, after=[b - part for b, part in zip(before, step)]
    ) as along:
        return _with_critical(taken, along)


def pulse_at(before: Sequence[Tensor], model: nn.Module, batch: Any, *, loss: Loss, critical: bool = False) -> Pulse:
    """`pulse` at the trainable parameters `before`, along the step from them to those that the model has now."""
    after = [parameter.detach() for parameter in model.parameters() if parameter.requires_grad]

    def loss_before(model: nn.Module, batch: Any) -> Tensor:
        """The model has copies of its parameters here."""
        move_copies([p for p in model.parameters() if p.requires_grad], before, originals=after)
        return loss(model, batch)

    taken = pulse(model, batch, loss=loss_before, step=[b - a for a, b in zip(after, before)])
    if not critical:
        return taken
    with open_loss_along_step(model, batch, loss=loss, before=before) as along:
        return _with_critical(taken, along)


def mean_pulse(pulses: Sequence[Pulse]) -> Pulse:
    """Of one step on several batches: means, and `critical` with the median of what it is relative to 1 / `ratio`."""
    gain, curvature, loss = map(fmean, zip(*((p.gain, p.curvature, p.loss) for p in pulses)))
    mean = Pulse(gain, curvature, loss)
    corrections = [p.critical * p.ratio for p in pulses if p.critical > 0 and p.ratio > 0]
    if corrections and mean.ratio > 0:
        return replace(mean, critical=median(corrections) / mean.ratio)
    measured = [p.critical for p in pulses if p.critical > 0]
    return replace(mean, critical=median(measured)) if measured else mean


def _with_critical(taken: Pulse, along: LossAlongStep) -> Pulse:
    """Without, if the loss of the same parameters is another one in every forward pass."""
    try:
        along.check_repeats()
    except ChangingLossError:
        return taken
    return replace(taken, critical=along.crossing(taken.gain, taken.curvature))


def _flat(step: Any, operator: ParameterOperator) -> Tensor:
    shapes = [tuple(parameter.shape) for parameter in operator.originals]
    if isinstance(step, Tensor) or not all(isinstance(part, Tensor) for part in step):
        raise InputError("step must be a list of tensors, one for every trainable parameter")
    given = [tuple(part.shape) for part in step]
    if given != shapes:
        differing = [name for name, a, b in zip(operator.names, given, shapes) if a != b]
        where = f"; the first that differs is {differing[0]}" if differing else ""
        count = f"{len(given)} tensors, which do not fit the {len(shapes)} trainable parameters of the model"
        raise InputError(f"step has {count}{where}")
    u = torch.cat([part.detach().reshape(-1).to(operator.template) for part in step])
    if not torch.isfinite(u).all():
        raise InputError("step has entries that are NaN or infinite")
    return u

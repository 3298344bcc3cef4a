"""Curvature along an optimizer step: does the step still lower the loss of its own batch?

    L(θ - u) ≈ L(θ) - g^T u + u^T H u / 2        u = θ_before - θ_after; g, H: gradient and Hessian at θ_before

The step lowers the loss as long as u^T H u / (2 g^T u) is below 1, to second order. Shorter by that factor, it would
leave the loss as it is: learning rate / ratio is the critical learning rate along this direction.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from curvmon.errors import InputError, NonFiniteError
from curvmon.numerics import NOT_FINITE, precise
from curvmon.operators.derivative import Derivative, Way, with_fallback
from curvmon.operators.gradient_differences import KINDS
from curvmon.operators.loss_differences import move_copies
from curvmon.operators.parameter_hessian import ParameterOperator, open_parameters
from curvmon.operators.session import Loss


@dataclass(frozen=True)
class Pulse:
    """Gain and curvature of a loss along a step.

    Attributes:
        gain: g^T u, by how much the step lowers the loss to first order.
        curvature: u^T H u.
        loss: before the step.
    """

    gain: float
    curvature: float
    loss: float = math.nan

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
    model: nn.Module, batch: Any, *, loss: Loss, step: Sequence[Tensor], derivative: Derivative = "auto"
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

    return with_fallback(run, derivative)


def pulse_at(before: Sequence[Tensor], model: nn.Module, batch: Any, *, loss: Loss) -> Pulse:
    """`pulse` at the trainable parameters `before`, along the step from them to those that the model has now."""
    after = [parameter.detach() for parameter in model.parameters() if parameter.requires_grad]

    def loss_before(model: nn.Module, batch: Any) -> Tensor:
        """The model has copies of its parameters here."""
        move_copies([p for p in model.parameters() if p.requires_grad], before, originals=after)
        return loss(model, batch)

    return pulse(model, batch, loss=loss_before, step=[b - a for a, b in zip(after, before)])


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

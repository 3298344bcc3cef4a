"""The largest stable sharpness of an optimizer: above it, steps along the top eigenvector overshoot and grow.

    SGD                      λ_1 < 2 / lr
    with momentum β          λ_1 < 2 (1 + β) / lr            Nesterov: 2 (1 + β) / ((1 + 2β) lr)
    Adam, AdamW              λ_1 of D^-1/2 H D^-1/2 < 2 (1 + β1) / ((1 - β1) lr)
    RMSprop                  λ_1 of D^-1/2 H D^-1/2 < 2 (1 + momentum) / lr          Adagrad: 2 / lr

for a quadratic loss and full batches; D = sqrt(second moments) + eps. The limits follow from the roots of the update's
characteristic polynomial. Weight decay that is added to the gradient (not AdamW's) adds to H; dampening scales the
gradient down. Full-batch gradient descent drives λ_1 to its limit and keeps it there, at the edge of stability (Cohen
et al. 2021); adaptive methods do so with the preconditioned λ_1 (Cohen et al. 2022).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from curvmon.errors import InputError
from curvmon.numerics import norms

NEGLIGIBLE = 1e-4
"""compared with the median size of gradients"""


@dataclass(frozen=True, eq=False)
class StabilityLimit:
    """The largest stable sharpness: λ_1 of H, or, with a preconditioner P, λ_1 of P^-1/2 (H + decay) P^-1/2.

    Attributes:
        limit: the largest stable eigenvalue; NaN if no limit is known.
        reason: the formula, or why there is none.
        preconditioner: the diagonal of P for each parameter that the optimizer updates, in its shape.
        decay: what weight decay adds to the diagonal of H, for each parameter that has it.
        common: learning rate η and weight decay, if both are the same for all parameters and there is no other
            preconditioner: then λ_1 of P^-1/2 (H + decay) P^-1/2 is η (λ_1 + decay), without an HVP.
    """

    limit: float
    reason: str
    preconditioner: Mapping[Tensor, Tensor] | None = field(default=None, repr=False)
    decay: Mapping[Tensor, Tensor] = field(default_factory=dict, repr=False)
    common: tuple[float, float] | None = None


def stability_limit(optimizer: torch.optim.Optimizer) -> StabilityLimit:
    """The largest stable sharpness of an optimizer in its current state.

    The learning rates of adaptive optimizers, and those that differ between parameter groups, become part of the
    preconditioner: P = D / lr, and the limit is that of a learning rate of one. Weight decay adds to the diagonal of H.
    Adaptive optimizers have no second moments, and no limit, before their first step. Parameters that are not updated
    (a learning rate of zero, no gradient yet) are skipped.

    Args:
        optimizer: SGD, Adam, AdamW, RMSprop or Adagrad of torch, or a subclass; others have no limit (NaN).

    Raises:
        InputError: if it is not a torch optimizer.

    Example:
        >>> import torch, curvmon
        >>> weights = [torch.nn.Parameter(torch.zeros(3))]
        >>> curvmon.stability_limit(torch.optim.SGD(weights, lr=0.1)).limit
        20.0
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(f"stability_limit takes a torch optimizer, not {type(optimizer).__name__}")
    kind = next((base.__name__ for base in type(optimizer).__mro__ if base.__name__ in _RULES), None)
    if kind is None:
        return _unknown(f"no limit is known for {type(optimizer).__name__}")
    factors: set[float] = set()
    rates: set[float] = set()
    scales: dict[Tensor, Tensor] = {}
    decays: dict[Tensor, Tensor] = {}
    for group in optimizer.param_groups:
        if group.get("maximize"):
            return _unknown("the optimizer maximises")
        rate = float(group["lr"])
        if rate <= 0:
            continue  # not updated
        factor, reason = _RULES[kind](group)
        if math.isnan(factor):
            return _unknown(reason)
        factors.add(factor)
        rates.add(rate)
        for parameter in group["params"]:
            scale = _divisor(kind, group, optimizer.state.get(parameter, {}), parameter)
            if scale is not None:
                scales[parameter] = scale / rate
                if kind != "AdamW" and group["weight_decay"] and not group.get("decoupled_weight_decay"):
                    decays[parameter] = torch.full_like(parameter, float(group["weight_decay"]))
    if not factors:
        return _unknown("the learning rate is zero: no parameter is updated")
    if not scales:
        return _unknown(f"{type(optimizer).__name__} has not taken a step yet: it has no second moments")
    if len(factors) > 1:
        return _unknown("momentum differs between parameter groups")
    (factor,) = factors
    if math.isinf(factor):
        return _unknown("dampening of one: the gradient has no effect")
    idle = [] if kind == "SGD" else _idle(scales)
    for parameter in idle:
        del scales[parameter]
    if idle:
        reason += f" ({len(idle)} tensors with vanishing gradients skipped)"
    all_updated = len(scales) == sum(len(group["params"]) for group in optimizer.param_groups)
    if kind == "SGD" and len(rates) == 1 and not decays and all_updated:
        return StabilityLimit(factor / rates.pop(), reason)
    common = None
    if kind == "SGD" and len(rates) == 1 and all_updated:
        own = {float(group["weight_decay"]) for group in optimizer.param_groups if group["params"]}
        common = (rates.pop(), own.pop()) if len(own) == 1 else None
    return StabilityLimit(factor, f"{reason}, of the Hessian preconditioned by the optimizer", scales, decays, common)


def _idle(scales: Mapping[Tensor, Tensor]) -> list[Tensor]:
    """Parameters whose gradients are negligible compared with the others', such as a bias before batch norm.

    Their second moments are rounding errors; divided by them, their curvature would appear as the largest of all.
    """
    sizes = [size / math.sqrt(p.numel()) for p, size in zip(scales, norms(list(scales.values())))]
    median = statistics.median(sizes)
    return [parameter for parameter, size in zip(scales, sizes) if size < NEGLIGIBLE * median]


def _unknown(reason: str) -> StabilityLimit:
    return StabilityLimit(math.nan, reason)


def _sgd(group: Mapping[str, Any]) -> tuple[float, str]:
    beta, damped = float(group["momentum"]), 1 - float(group["dampening"])
    if beta == 0:
        return 2.0, "2 / lr"
    if damped < 0:
        # one root of z² - (1 + β - lr (1 - dampening) λ) z + β is above one for every λ > 0
        return (
            math.nan,
            "no limit is known for a dampening above one: the momentum term reverses the sign of the gradient",
        )
    if group["nesterov"]:
        return 2 * (1 + beta) / (1 + 2 * beta), "2 (1 + β) / ((1 + 2β) lr), Nesterov momentum"
    return 2 * (1 + beta) / damped if damped else math.inf, "2 (1 + β) / lr, momentum"


def _adam(group: Mapping[str, Any]) -> tuple[float, str]:
    beta = float(group["betas"][0])
    return 2 * (1 + beta) / (1 - beta), "2 (1 + β1) / ((1 - β1) lr)"


def _rmsprop(group: Mapping[str, Any]) -> tuple[float, str]:
    beta = float(group["momentum"])
    return 2 * (1 + beta), "2 (1 + momentum) / lr"


def _adagrad(group: Mapping[str, Any]) -> tuple[float, str]:
    return 2.0, "2 / lr"


_RULES: dict[str, Any] = {
    "SGD": _sgd,
    "Adam": _adam,
    "AdamW": _adam,
    "RMSprop": _rmsprop,
    "Adagrad": _adagrad,
}


def _divisor(kind: str, group: Mapping[str, Any], state: Mapping[str, Any], parameter: Tensor) -> Tensor | None:
    """The diagonal of D in the shape of the parameter; None before its first step."""
    if kind == "SGD":
        return torch.ones_like(parameter.detach())
    eps = float(group["eps"])
    if kind == "Adagrad":
        steps = float(state.get("step", 0))
        if not steps:
            return None  # its sum exists before the first step, but holds no gradient yet
        decayed: Tensor = (state["sum"].sqrt() + eps) * (1 + (steps - 1) * float(group["lr_decay"]))
        return decayed
    name = "square_avg" if kind == "RMSprop" else "max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq"
    if name not in state:
        return None
    moments: Tensor = state[name]
    if kind == "RMSprop":
        if group.get("centered"):
            moments = moments - state["grad_avg"].square()
        return moments.clamp_min(0).sqrt() + eps
    corrected: Tensor = (moments / (1 - float(group["betas"][1]) ** float(state["step"]))).sqrt() + eps
    return corrected

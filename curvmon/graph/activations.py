"""Elementwise operations: smooth activations, whose f'(x) and f''(x) are computed once, and ReLU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Activation(torch.autograd.Function):
    """y = f(x), elementwise."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, proxy: Tensor, mode: Any, function: Any) -> Tensor:
        with torch.enable_grad():
            at = x.detach().requires_grad_()
            y = function(at)
            (first,) = torch.autograd.grad(y, at, torch.ones_like(y), create_graph=True)
            second = torch.autograd.grad(first, at, torch.ones_like(y))[0] if first.requires_grad else None
        ctx.save_for_backward(proxy, first.detach())
        ctx.second = [torch.zeros_like(x) if second is None else second]
        mode.second.append(ctx.second)
        ctx.mode, ctx.replaced_node = mode, y.grad_fn.name()
        value: Tensor = y.detach()
        return value

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        proxy, first = ctx.saved_tensors
        ctx.mode.loss_differentiates |= ctx.mode.active
        if not torch.is_grad_enabled():
            return gradient * first, None, None, None
        result = _ActivationGradient.apply(gradient, proxy, first, *ctx.second, ctx.mode)  # type: ignore[no-untyped-call]
        return result, None, None, None


class Relu(torch.autograd.Function):
    """Linear in pieces; torch adds zeros for the second derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, in_place: bool) -> Tensor:
        y = torch.relu_(x) if in_place else torch.relu(x)
        if in_place:
            ctx.mark_dirty(x)
        ctx.save_for_backward(y > 0, x.new_zeros(()))
        ctx.replaced_node = "ReluBackward0"
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        positive, zero = ctx.saved_tensors
        return _passed(gradient, positive, zero), None


def _passed(gradient: Tensor, positive: Tensor, zero: Tensor) -> Tensor:
    """The gradient where the input was positive."""
    if torch.is_grad_enabled():
        result: Tensor = _Passed.apply(gradient, positive, zero)  # type: ignore[no-untyped-call]
        return result
    return torch.where(positive, gradient, zero)


class _Passed(torch.autograd.Function):
    """torch.where, whose own derivative makes a new zero every time."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, positive: Tensor, zero: Tensor) -> Tensor:
        ctx.save_for_backward(positive, zero)
        ctx.replaced_node = None
        return torch.where(positive, gradient, zero)

    @staticmethod
    def backward(ctx: Any, tangent: Tensor) -> Any:
        return _passed(tangent, *ctx.saved_tensors), None, None


class _ActivationGradient(torch.autograd.Function):
    """g f'(x), as a function of g and x."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, proxy: Tensor, first: Tensor, second: Tensor, mode: Any) -> Tensor:
        ctx.save_for_backward(first, gradient * second)
        ctx.mode, ctx.replaced_node = mode, None
        return gradient * first

    @staticmethod
    @once_differentiable  # a third derivative would be wrong: an error instead
    def backward(ctx: Any, tangent: Tensor) -> Any:
        first, weighted_second = ctx.saved_tensors
        for_x = None if ctx.mode.only_cotangents else tangent * weighted_second
        return tangent * first, for_x, None, None, None

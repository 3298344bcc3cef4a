"""Layer normalisation with a second derivative in closed form; torch composes it of some seventy operations.

y = x̂ w + b,  x̂ = (x - mean x) r,  r = 1 / sqrt(var x + eps)
N a = r (a - mean a - x̂ mean(a x̂))                 the derivative of x̂, symmetric: dx = N h with h = g w
∂<u, dx>/∂x  =  -r (x̂ mean(u dx) + N u mean(h x̂) + dx mean(u x̂))
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from curvmon.isolation.patches import LAYER_NORM_BACKWARD


class LayerNorm(torch.autograd.Function):
    """y; `mode.loss_differentiates` is set if the loss itself takes its gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor | None, b: Tensor | None, shape: list[int], eps: float, mode: Any
    ) -> Tensor:
        y, mean, rsqrt = torch.native_layer_norm(x, shape, w, b, eps)
        ctx.save_for_backward(x, w, b, mean, rsqrt)
        ctx.shape, ctx.mode, ctx.replaced_node = shape, mode, "NativeLayerNormBackward0"
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w, b, mean, rsqrt = ctx.saved_tensors
        ctx.mode.loss_differentiates |= ctx.mode.active
        needed = list(ctx.needs_input_grad[:3])
        if not torch.is_grad_enabled():
            return *LAYER_NORM_BACKWARD.get()(g, x, ctx.shape, mean, rsqrt, w, b, needed), None, None, None
        dx, dw = _Gradient.apply(g, x, w, mean, rsqrt, ctx.shape, ctx.mode)  # type: ignore[no-untyped-call]
        return dx, dw, g.sum(_leading(g, ctx.shape)) if needed[2] else None, None, None, None


class _Gradient(torch.autograd.Function):
    """dx = N(g w) and dw = Σ g x̂ as functions of g, x and w."""

    @staticmethod
    def forward(
        ctx: Any, g: Tensor, x: Tensor, w: Tensor | None, mean: Tensor, rsqrt: Tensor, shape: list[int], mode: Any
    ) -> tuple[Tensor, Tensor | None]:
        needed = [True, ctx.needs_input_grad[2], False]
        dx, dw, _ = LAYER_NORM_BACKWARD.get()(g, x, shape, mean, rsqrt, w, None, needed)
        h = g if w is None else g * w
        offset = -mean * rsqrt
        along_normal = _row_mean(h * torch.addcmul(offset, x, rsqrt), shape)
        ctx.save_for_backward(g, x, w, mean, rsqrt, dx, offset, -rsqrt, -rsqrt * along_normal)
        ctx.shape, ctx.mode, ctx.replaced_node = shape, mode, None
        return dx, dw

    @staticmethod
    @once_differentiable  # a third derivative would be wrong: an error instead
    def backward(ctx: Any, u: Tensor, z: Tensor | None) -> Any:
        g, x, w, mean, rsqrt, dx, offset, factor, scaled = ctx.saved_tensors
        shape = ctx.shape

        def pulled_back(a: Tensor, weight: Tensor | None) -> Tensor:
            """N(a weight)."""
            only_input = [True, False, False]
            result: Tensor = LAYER_NORM_BACKWARD.get()(a, x, shape, mean, rsqrt, weight, None, only_input)[0]
            return result

        normal = torch.addcmul(offset, x, rsqrt)
        v = pulled_back(u, None)
        for_g = v if w is None else v * w
        for_g = for_g if z is None else for_g.addcmul(normal, z)
        if ctx.mode.only_cotangents:
            return for_g, *(None,) * 6
        along_normal, along_dx = factor * _row_mean(u * dx, shape), factor * _row_mean(u * normal, shape)
        for_x = (normal * along_normal).addcmul(v, scaled).addcmul(dx, along_dx)
        for_x = for_x if z is None else for_x + pulled_back(g, z)
        for_w = None if z is None else (g * v).sum(_leading(v, shape))
        return for_g, for_x, for_w, *(None,) * 4


def _row_mean(values: Tensor, shape: list[int]) -> Tensor:
    return values.mean([*range(-len(shape), 0)], keepdim=True)


def _leading(values: Tensor, shape: list[int]) -> list[int]:
    return [*range(values.ndim - len(shape))]

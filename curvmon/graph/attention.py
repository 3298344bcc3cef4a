"""Scaled dot-product attention with a second derivative in closed form; torch composes it of some forty operations.

O = P V,  P = softmax(S),  S = s Q K^T + mask
σ(A) = P ∘ (A - Σ_j P ∘ A)                          the derivative of the softmax, symmetric, for every row
dV = P^T G,  dQ = s Z K,  dK = s Z^T Q              with Z = σ(G V^T) = P ∘ N for a gradient G w.r.t. O

and for φ = <a, dQ> + <b, dK> + <c, dV>, with P' = σ(s a K^T + s Q b^T), the tangent of P:

∂φ/∂G = P c + P' V,  ∂φ/∂V = P'^T G
∂φ/∂Q = s (Y K + Z b),  ∂φ/∂K = s (Y^T Q + Z^T a)   with Y = W - P Σ_j W,  W = P ∘ G c^T + P' ∘ N
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from curvmon.isolation.patches import SOFTMAX_BACKWARD

PART, PART_ON_CPU = 2**26, 2**16
"""entries of P that are used at a time; on a CPU, what fits into its cache"""


def is_supported(q: Any, k: Any, v: Any, mask: Any, dropout_p: float, is_causal: bool, enable_gqa: bool) -> bool:
    """Plain tensors, as many heads and samples in each of them; the mask is a constant, and nothing is dropped."""
    given = [q, k, v] if mask is None else [q, k, v, mask]
    if dropout_p or enable_gqa or (is_causal and mask is not None):
        return False
    if not all(type(x) in (Tensor, nn.Parameter) and x.ndim >= 2 for x in given):
        return False
    # torch computes half precision in single precision
    if q.dtype not in (torch.float32, torch.float64) or not q.dtype == k.dtype == v.dtype:
        return False
    if mask is not None and (mask.requires_grad or mask.dtype not in (torch.bool, q.dtype)):
        return False
    same = q.shape[:-2] == k.shape[:-2] == v.shape[:-2]
    return same and any(x.requires_grad for x in (q, k, v)) and all(x.numel() for x in given)


class Attention(torch.autograd.Function):
    """O; `mode.loss_differentiates` is set if the loss itself takes its gradient.

    `proxies` stand for q, k and v where only the path of the graph to them is needed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        is_causal: bool,
        scale: float | None,
        mode: Any,
        *proxies: Tensor,
    ) -> Tensor:
        call = _Call(q, k, v, scale, mode)
        q, k, v = _matrices(q) * call.scale, _matrices(k), _matrices(v)
        p = _weights(torch.bmm(q, k.mT), mask, is_causal, call.shapes[0][:-2])
        ctx.save_for_backward(q, k, v, p, *proxies)
        ctx.call, ctx.replaced_node = call, "ScaledDotProductAttentionBackward0"
        return torch.bmm(p, v).reshape(*call.shapes[0][:-1], v.shape[-1])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        q, k, v, p, *proxies = ctx.saved_tensors
        call: _Call = ctx.call
        call.mode.loss_differentiates |= call.mode.active
        if torch.is_grad_enabled():
            gradients = _Gradient.apply(g, q, k, v, p, call, *proxies)  # type: ignore[no-untyped-call]
        else:
            gradients = call.gradients(_matrices(g), q, k, v, p)
        return *gradients, *(None,) * 7


class _Call:
    """Of one attention: the shapes of q, k and v, and the scale."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, mode: Any) -> None:
        self.shapes = q.shape, k.shape, v.shape
        self.scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        self.mode = mode

    def gradients(self, g: Tensor, q: Tensor, k: Tensor, v: Tensor, p: Tensor) -> list[Tensor]:
        """dQ, dK, dV; q is s Q, here and everywhere."""

        def part(g: Tensor, q: Tensor, k: Tensor, v: Tensor, p: Tensor) -> list[Tensor]:
            z = _softmax_gradient(torch.bmm(g, v.mT), p)
            return [torch.bmm(z, k) * self.scale, torch.bmm(z.mT, q), torch.bmm(p.mT, g)]

        return self.shaped(_in_parts(part, p, g, q, k, v, p))

    def shaped(self, matrices: Sequence[Tensor]) -> list[Tensor]:
        return [x.reshape(shape) for x, shape in zip(matrices, self.shapes)]


class _Gradient(torch.autograd.Function):
    """dQ, dK and dV as functions of G, Q, K and V."""

    @staticmethod
    def forward(
        ctx: Any, g: Tensor, q: Tensor, k: Tensor, v: Tensor, p: Tensor, call: _Call, *proxies: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.call, ctx.shape, ctx.replaced_node = call, g.shape, None
        g = _matrices(g)
        ctx.save_for_backward(g, q, k, v, p)
        return tuple(call.gradients(g, q, k, v, p))

    @staticmethod
    @once_differentiable  # a third derivative would be wrong: an error instead
    def backward(ctx: Any, a: Tensor, b: Tensor, c: Tensor) -> Any:
        call, only_g = ctx.call, ctx.call.mode.only_cotangents

        def part(
            g: Tensor, q: Tensor, k: Tensor, v: Tensor, p: Tensor, a: Tensor, b: Tensor, c: Tensor
        ) -> list[Tensor]:
            tangent = _softmax_gradient(torch.baddbmm(torch.bmm(a, k.mT), q, b.mT), p)
            for_g = torch.baddbmm(torch.bmm(p, c), tangent, v)
            if only_g:
                return [for_g]
            n = torch.bmm(g, v.mT)
            n -= (p * n).sum(-1, keepdim=True)
            w = torch.addcmul(p * torch.bmm(g, c.mT), tangent, n)
            y, z = torch.addcmul(w, p, w.sum(-1, keepdim=True), value=-1), p * n
            for_q = torch.baddbmm(torch.bmm(y, k), z, b) * call.scale
            return [for_g, for_q, torch.baddbmm(torch.bmm(y.mT, q), z.mT, a), torch.bmm(tangent.mT, g)]

        tensors = *ctx.saved_tensors, _matrices(a) * call.scale, _matrices(b), _matrices(c)
        for_g, *others = _in_parts(part, ctx.saved_tensors[-1], *tensors)
        return for_g.reshape(ctx.shape), *(None,) * 5, *(call.shaped(others) or (None,) * 3)


def _in_parts(function: Callable[..., list[Tensor]], weights: Tensor, *tensors: Tensor) -> list[Tensor]:
    """A few matrices at a time: on a CPU, what is computed between arguments and results stays in its cache."""
    entries = PART_ON_CPU if weights.device.type == "cpu" else PART
    step = max(1, entries // weights[0].numel())
    if step >= len(weights):
        return function(*tensors)
    parts = [function(*part) for part in zip(*(torch.split(x, step) for x in tensors))]
    return [torch.cat(results) for results in zip(*parts)]


def _matrices(x: Tensor) -> Tensor:
    return x.reshape(-1, *x.shape[-2:])


def _softmax_gradient(a: Tensor, p: Tensor) -> Tensor:
    """σ(A)"""
    result: Tensor = SOFTMAX_BACKWARD.get()(a, p, -1, p.dtype)
    return result


def _weights(scores: Tensor, mask: Tensor | None, is_causal: bool, batch: Sequence[int]) -> Tensor:
    """P; zero in rows in which everything is masked, as in torch."""
    rows, columns = scores.shape[-2:]
    if is_causal:
        future = torch.ones(rows, columns, dtype=torch.bool, device=scores.device).triu(1)
        return scores.masked_fill_(future, -math.inf).softmax(-1)
    if mask is None:
        return scores.softmax(-1)
    scores = scores.reshape(*batch, rows, columns)
    scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    nothing = (scores == -math.inf).all(-1, keepdim=True)
    return _matrices(scores.softmax(-1).masked_fill(nothing, 0))

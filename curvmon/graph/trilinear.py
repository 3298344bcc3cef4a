"""Operations y = f(x, w) that are linear in the input x and in the weights w, with derivatives to all orders.

    τ(g, x, w) = <g, f(x, w)>        f = ∂τ/∂g,   dx(g, w) = ∂τ/∂x,   dw(g, x) = ∂τ/∂w

The derivatives of each of the three are the other two, so one autograd function serves all orders. Only what is needed
is differentiated and kept: with constant weights there is no dw, and x is not kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from curvmon.isolation.patches import BATCH_NORM_BACKWARD, CONVOLUTION_BACKWARD, is_transformed

OUTPUT, INPUT, WEIGHT = SLOTS = range(3)
"""the arguments g, x, w of τ"""
Mask = tuple[bool, bool, bool]
"""which gradients are needed: w.r.t. x, w and the bias"""


class Form(Protocol):
    """τ of one call of an operation."""

    @property
    def name(self) -> str:
        """The node that torch makes for the operation."""

    @property
    def homogeneous(self) -> Form:
        """The form for a tangent in place of x, if f(x, w) has a term that does not depend on x."""

    def output(self, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        """f(x, w) + bias."""

    def gradients(self, g: Tensor, x: Tensor | None, w: Tensor | None, needed: Mask) -> Sequence[Tensor | None]:
        """dx(g, w), dw(g, x) and the gradient w.r.t. the bias; x is given if dw is needed, w if dx is."""

    def bias_gradient(self, g: Tensor) -> Tensor:
        """The gradient w.r.t. the bias alone, by operations that autograd differentiates."""


def trilinear(form: Form, mode: Any, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """f(x, w) + bias. While `mode.only_cotangents`, dx and dw are differentiated w.r.t. g alone."""
    result: Tensor = _Partial.apply(OUTPUT, form, mode, x, w, bias)  # type: ignore[no-untyped-call]
    return result


def _partial(slot: int, form: Form, mode: Any, first: Tensor, second: Tensor) -> Tensor:
    """∂τ/∂slot as a function of the other two arguments, in their order."""
    if not torch.is_grad_enabled():  # under vmap an autograd function cannot be applied
        return _value(slot, form, first, second)
    result: Tensor = _Partial.apply(slot, form, mode, first, second, None)  # type: ignore[no-untyped-call]
    return result


def _value(slot: int, form: Form, first: Tensor, second: Tensor) -> Tensor:
    if slot == OUTPUT:
        return form.output(first, second, None)
    if slot == INPUT:
        result = form.gradients(first, None, second, (True, False, False))[0]
    else:
        result = form.gradients(first, second, None, (False, True, False))[1]
    assert result is not None
    return result


class _Partial(torch.autograd.Function):
    """∂τ/∂slot + bias."""

    @staticmethod
    def forward(
        ctx: Any, slot: int, form: Form, mode: Any, first: Tensor, second: Tensor, bias: Tensor | None
    ) -> Tensor:
        first_needed, second_needed, _ = ctx.needs_input_grad[3:]
        ctx.save_for_backward(first if second_needed else None, second if first_needed else None)
        ctx.slot, ctx.form, ctx.mode = slot, form, mode
        ctx.replaced_node = form.name if slot == OUTPUT else None
        return _value(slot, form, first, second) if bias is None else form.output(first, second, bias)

    @staticmethod
    def backward(ctx: Any, tangent: Tensor) -> Any:
        first, second = ctx.saved_tensors
        needed = ctx.needs_input_grad[3:]
        if ctx.slot == OUTPUT and not torch.is_grad_enabled():
            return None, None, None, *ctx.form.gradients(tangent, first, second, needed)
        form = ctx.form.homogeneous if ctx.slot == INPUT else ctx.form
        if ctx.slot != OUTPUT and ctx.mode.only_cotangents:
            needed = needed[0], False, False
        others = [slot for slot in SLOTS if slot != ctx.slot]
        arguments = dict(zip((ctx.slot, *others), (tangent, first, second)))
        gradients = [
            _partial(slot, form, ctx.mode, *(arguments[other] for other in SLOTS if other != slot))
            if is_needed
            else None
            for slot, is_needed in zip(others, needed)
        ]
        return None, None, None, *gradients, ctx.form.bias_gradient(tangent) if needed[2] else None


class Linear:
    """x W^T over the last dimension."""

    name = "AddmmBackward0"

    @property
    def homogeneous(self) -> Linear:
        return self

    def output(self, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        if is_transformed():
            return _by_rows(x, w.mT) if bias is None else F.linear(x, w, bias)
        y = x.new_empty((*x.shape[:-1], len(w)))  # no view: the network may change it in place
        rows = y.view(-1, len(w))
        if bias is None:
            torch.mm(_rows(x), w.mT, out=rows)
        else:
            torch.addmm(bias, _rows(x), w.mT, out=rows)
        return y

    def gradients(self, g: Tensor, x: Tensor | None, w: Tensor | None, needed: Mask) -> Sequence[Tensor | None]:
        dx = _by_rows(g, w) if needed[0] and w is not None else None
        dw = _matrix_product(_rows(g).mT, _rows(x)) if needed[1] and x is not None else None
        return dx, dw, self.bias_gradient(g) if needed[2] else None

    def bias_gradient(self, g: Tensor) -> Tensor:
        return _rows(g).sum(0)


def _rows(values: Tensor) -> Tensor:
    return values.reshape(-1, values.shape[-1])


def _by_rows(x: Tensor, matrix: Tensor) -> Tensor:
    return _matrix_product(_rows(x), matrix).reshape(*x.shape[:-1], -1)


def _matrix_product(a: Tensor, b: Tensor) -> Tensor:
    # vmap makes one large product of `@`, for which it copies a matrix; not so for bmm
    return torch.bmm(a.unsqueeze(0), b.unsqueeze(0)).squeeze(0) if is_transformed() else a @ b


class Convolution:
    """A convolution; the options as arguments of torch.convolution, in their order."""

    name = "ConvolutionBackward0"

    def __init__(self, x: Tensor, w: Tensor, *options: Any) -> None:
        # with constant weights x is not kept: only its shape is used
        self._x = x.detach() if w.requires_grad else x.new_empty(1).expand(x.shape)
        self._w = w.detach()
        self._options = options

    @property
    def homogeneous(self) -> Convolution:
        return self

    def output(self, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        return torch.convolution(x, w, bias, *self._options)

    def gradients(self, g: Tensor, x: Tensor | None, w: Tensor | None, needed: Mask) -> Sequence[Tensor | None]:
        x, w = self._x if x is None else x, self._w if w is None else w
        result: Sequence[Tensor | None] = CONVOLUTION_BACKWARD.get()(
            g, x, w, [g.shape[1]], *self._options, list(needed)
        )
        return result

    def bias_gradient(self, g: Tensor) -> Tensor:
        return _over_channels(g)


class BatchNorm:
    """(x - mean) / sqrt(variance + eps) * w + bias; for a tangent in place of x without the mean."""

    name = "NativeBatchNormBackward0"

    def __init__(self, mean: Tensor, variance: Tensor, eps: float, centred: bool = True) -> None:
        self._variance, self._eps, self._centred = variance, eps, centred
        self._mean = mean if centred else torch.zeros_like(mean)
        self._rsqrt = (variance + eps).rsqrt()
        self._shift = -mean * self._rsqrt
        self.homogeneous = BatchNorm(mean, variance, eps, centred=False) if centred else self

    def output(self, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        scale = _per_channel(w * self._rsqrt, x)
        if not self._centred:
            return x * scale
        shift = w * self._shift
        return torch.addcmul(_per_channel(shift if bias is None else shift + bias, x), x, scale)

    def gradients(self, g: Tensor, x: Tensor | None, w: Tensor | None, needed: Mask) -> Sequence[Tensor | None]:
        if x is not None and not is_transformed():
            options = self._mean, self._variance, None, None, False, self._eps, list(needed)
            result: Sequence[Tensor | None] = BATCH_NORM_BACKWARD.get()(g, x, w, *options)
            return result
        dx = dw = None
        if w is not None and needed[0]:
            dx = g * _per_channel(w * self._rsqrt, g)
        if x is not None and needed[1]:
            dw = _over_channels(g * (x - _per_channel(self._mean, x) if self._centred else x)) * self._rsqrt
        return dx, dw, _over_channels(g) if needed[2] else None

    def bias_gradient(self, g: Tensor) -> Tensor:
        return _over_channels(g)


def _per_channel(values: Tensor, like: Tensor) -> Tensor:
    return values.reshape([-1, *[1] * (like.ndim - 2)])


def _over_channels(values: Tensor) -> Tensor:
    return values.sum([0, *range(2, values.ndim)])

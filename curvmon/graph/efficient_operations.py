"""Replacements of operations whose second derivatives are expensive in torch.

    convolution     with constant weights, x -> W x is linear; torch also differentiates w.r.t. W, and keeps x
    batch norm      in eval mode it is x * scale + shift
    activation      elementwise f(x): f'(x) and f''(x) are computed once; torch composes them in every product from
                    several operations, each of which keeps its inputs

Values and derivatives up to the second are the same up to rounding; those of a convolution to all orders. A loss that
takes gradients itself (a gradient penalty, a PINN) needs three orders: it is run with torch's own operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from curvmon.isolation.patches import CONVOLUTION_BACKWARD, NATIVE_FUNCTIONS, is_transformed

_ACTIVATION_NAMES = "silu gelu tanh sigmoid softplus elu selu celu mish hardswish logsigmoid softsign"
_ACTIVATIONS = frozenset(
    getattr(space, name)
    for space in (F, torch, NATIVE_FUNCTIONS.get(), Tensor)
    for name in _ACTIVATION_NAMES.split()
    if hasattr(space, name)
)
_CONVOLUTIONS: dict[Any, tuple[int, bool]] = {
    torch.conv1d: (1, False),
    torch.conv2d: (2, False),
    torch.conv3d: (3, False),
    torch.conv_transpose1d: (1, True),
    torch.conv_transpose2d: (2, True),
    torch.conv_transpose3d: (3, True),
}
"""spatial dimensions, transposed"""


_REPLACED_NODE = "replaced_node"
"""attribute of the nodes of the replacements: the name of torch's own node"""


class EfficientOperations(TorchFunctionMode):
    """While active, replaces the operations above where their input depends on a tap and their weights are constant.

    Attributes:
        loss_differentiates: a gradient was taken while active, so the loss must be computed without replacements.
    """

    def __init__(self) -> None:
        super().__init__()
        self.active = False
        self.loss_differentiates = False

    def __enter__(self) -> EfficientOperations:
        self.active = True
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc: Any) -> None:
        self.active = False
        super().__exit__(*exc)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = None
        if func in _CONVOLUTIONS and _is_replaceable_call():
            result = _convolution(*_CONVOLUTIONS[func], *args, **kwargs)
        elif func is F.batch_norm and _is_replaceable_call():
            result = _affine(*args, **kwargs)
        elif func in _ACTIVATIONS and args and _is_replaceable_call():
            result = self._activation(func, args[0], args[1:], kwargs)
        return func(*args, **kwargs) if result is None else result

    def _activation(self, func: Any, x: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        options = *args, *kwargs.values()
        in_place = kwargs.get("inplace", False) or args[-1:] == (True,)
        # a tensor among the options would be a second input, or an output to write to
        if in_place or not _is_tapped(x) or not all(isinstance(value, (bool, int, float, str)) for value in options):
            return None
        return _apply(_Activation, x, _apply(_InputProxy, x), self, lambda at: func(at, *args, **kwargs))


def _is_replaceable_call() -> bool:
    """Neither under torch.func nor in forward mode: these need rules that the replacements do not have."""
    return torch.is_grad_enabled() and not is_transformed()


def _is_tapped(x: Any) -> bool:
    return type(x) is Tensor and x.requires_grad and x.is_floating_point()


def _is_constant(value: Any) -> bool:
    return value is None or (type(value) in (Tensor, nn.Parameter) and not value.requires_grad)


def _apply(function: Any, *args: Any) -> Tensor:
    """`Function.apply`, which torch leaves untyped."""
    result: Tensor = function.apply(*args)
    return result


def is_efficient_operation(function: Any) -> bool:
    """Whether a node of an autograd graph comes from these replacements."""
    return hasattr(function, _REPLACED_NODE)


def torch_name(function: Any) -> str | None:
    """The name that a node of an autograd graph has in torch without replacements; None if it has none there."""
    name: str | None = getattr(function, _REPLACED_NODE, function.name())
    return name


class _Activation(torch.autograd.Function):
    """y = f(x), elementwise."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, proxy: Tensor, mode: EfficientOperations, function: Any) -> Tensor:
        with torch.enable_grad():
            at = x.detach().requires_grad_()
            y = function(at)
            (first,) = torch.autograd.grad(y, at, torch.ones_like(y), create_graph=True)
            second = torch.autograd.grad(first, at, torch.ones_like(y))[0] if first.requires_grad else None
        ctx.save_for_backward(proxy, first.detach(), torch.zeros_like(x) if second is None else second)
        ctx.mode, ctx.replaced_node = mode, y.grad_fn.name()
        value: Tensor = y.detach()
        return value

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        proxy, first, second = ctx.saved_tensors
        ctx.mode.loss_differentiates |= ctx.mode.active
        if not torch.is_grad_enabled():
            return gradient * first, None, None, None
        return _apply(_ActivationGradient, gradient, proxy, first, second), None, None, None


class _InputProxy(torch.autograd.Function):
    """In place of x where only the path of the graph to x is needed: takes no memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.replaced_node = None
        return x.new_zeros(()).expand_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class _ActivationGradient(torch.autograd.Function):
    """g f'(x), as a function of g and x."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, proxy: Tensor, first: Tensor, second: Tensor) -> Tensor:
        ctx.save_for_backward(first, gradient * second)
        ctx.replaced_node = None
        return gradient * first

    @staticmethod
    @once_differentiable  # a third derivative would be wrong: an error instead
    def backward(ctx: Any, tangent: Tensor) -> Any:
        first, weighted_second = ctx.saved_tensors
        return tangent * first, tangent * weighted_second, None, None


def _affine(
    input: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor | None:
    """(x - mean) / sqrt(variance + eps) * weight + bias, eval mode only; arguments as those of F.batch_norm."""
    constants = running_mean, running_var, weight, bias
    if training or running_mean is None or running_var is None or not _is_tapped(input):
        return None
    if not all(_is_constant(c) and (c is None or c.dtype == input.dtype) for c in constants):
        return None  # in mixed precision torch's result has the dtype of the input
    scale = (running_var + eps).rsqrt()
    scale = scale if weight is None else scale * weight
    shift = -running_mean * scale if bias is None else bias - running_mean * scale
    shape = [1, -1, *[1] * (input.ndim - 2)]
    result: Tensor = input * scale.reshape(shape) + shift.reshape(shape)
    return result


class _Geometry(NamedTuple):
    """The options of a convolution, in the order of the arguments of torch.convolution."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    transposed: bool
    output_padding: list[int]
    groups: int


def _convolution(
    dims: int, transposed: bool, input: Any, weight: Any, bias: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """W x + bias with constant weights; None for any other call. Arguments as those of torch's convolutions."""
    if (
        CONVOLUTION_BACKWARD.get() is None
        or not _is_tapped(input)
        or input.ndim != dims + 2
        or not (_is_constant(weight) and _is_constant(bias))
    ):
        return None
    tail = ("output_padding", "groups", "dilation") if transposed else ("dilation", "groups")
    options = dict(zip(("stride", "padding", *tail), args)) | kwargs

    def per_dimension(name: str, default: int) -> list[int]:
        value = options.get(name, default)
        values = [int(v) for v in value] if isinstance(value, Sequence) else [int(value)]
        return values * dims if len(values) == 1 else values

    dilation = per_dimension("dilation", 1)
    if isinstance(options.get("padding"), str):
        reach = [d * (size - 1) for d, size in zip(dilation, weight.shape[2:])]
        if options["padding"] == "same" and any(r % 2 for r in reach):
            return None  # the padding is not symmetric
        options["padding"] = [r // 2 if options["padding"] == "same" else 0 for r in reach]
    geometry = _Geometry(
        per_dimension("stride", 1),
        per_dimension("padding", 0),
        dilation,
        transposed,
        per_dimension("output_padding", 0),
        int(options.get("groups", 1)),
    )
    return _apply(_Convolution, input, weight, bias, geometry)


class _Convolution(torch.autograd.Function):
    """x -> W x + bias, linear in x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: _Geometry) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.geometry, ctx.shape = geometry, x.shape
        ctx.replaced_node = "ConvolutionBackward0"
        return torch.convolution(x, weight, bias, *geometry)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return _adjoint(gradient, weight, ctx.shape, ctx.geometry), None, None, None
        return _apply(_Adjoint, gradient, weight, ctx.shape, ctx.geometry), None, None, None


class _Adjoint(torch.autograd.Function):
    """g -> W^T g."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, weight: Tensor, shape: torch.Size, geometry: _Geometry) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.geometry, ctx.replaced_node = geometry, None
        return _adjoint(gradient, weight, shape, geometry)

    @staticmethod
    def backward(ctx: Any, tangent: Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return torch.convolution(tangent, weight, None, *ctx.geometry), None, None, None
        return _apply(_Convolution, tangent, weight, None, ctx.geometry), None, None, None


def _adjoint(gradient: Tensor, weight: Tensor, shape: torch.Size, geometry: _Geometry) -> Tensor:
    like = gradient.new_empty(1).expand(shape)  # only its shape is used
    only_input = [True, False, False]
    result: Tensor = CONVOLUTION_BACKWARD.get()(gradient, like, weight, None, *geometry, only_input)[0]
    return result

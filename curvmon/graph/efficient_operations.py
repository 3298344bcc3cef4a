"""Operations of a network whose second derivatives torch computes at too high a price, done another way meanwhile.

    convolution     with constant weights it is linear: torch differentiates by the weights as well, and keeps the input
    batch norm      in eval mode it is x * scale + shift
    activation      elementwise f(x): f'(x) and f''(x) are computed once; torch rebuilds them in every product from a
                    composition of several operations, each of which keeps its inputs

Values and derivatives up to the second are the same, to rounding; a convolution is right to all orders. Where a loss
differentiates by itself (a gradient penalty, a PINN) three orders are needed, and torch's own operations stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

_ACTIVATION_NAMES = "silu gelu tanh sigmoid softplus elu selu celu mish hardswish logsigmoid softsign"
_ACTIVATIONS = frozenset(
    getattr(space, name)
    for space in (F, torch, torch._C._nn, Tensor)
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


class LeanOperations(TorchFunctionMode):
    """While active, replaces the operations above where they depend on a tap and on no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.active = False
        self.loss_differentiates = False
        """a derivative was taken while active: what was computed must not be used"""

    def __enter__(self) -> LeanOperations:
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
        if func in _CONVOLUTIONS and _is_plain_call():
            result = _convolution(*_CONVOLUTIONS[func], *args, **kwargs)
        elif func is F.batch_norm and _is_plain_call():
            result = _affine(*args, **kwargs)
        elif func in _ACTIVATIONS and args and _is_plain_call():
            result = self._activation(func, args[0], args[1:], kwargs)
        return func(*args, **kwargs) if result is None else result

    def _activation(self, func: Any, x: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        options = *args, *kwargs.values()
        in_place = kwargs.get("inplace", False) or args[-1:] == (True,)
        # another tensor among the options would be a second input, or one to write to
        if in_place or not _is_tapped(x) or not all(isinstance(value, (bool, int, float, str)) for value in options):
            return None
        return _apply(_Activation, x, _apply(_Handle, x), self, lambda at: func(at, *args, **kwargs))


def _is_plain_call() -> bool:
    """Neither under torch.func nor under forward-mode differentiation, which want rules of their own."""
    plain = torch._C._functorch.peek_interpreter_stack() is None and torch.autograd.forward_ad._current_level < 0
    return plain and torch.is_grad_enabled()


def _is_tapped(x: Any) -> bool:
    return type(x) is Tensor and x.requires_grad and x.is_floating_point()


def _is_constant(value: Any) -> bool:
    return value is None or (type(value) in (Tensor, nn.Parameter) and not value.requires_grad)


def _apply(function: Any, *args: Any) -> Tensor:
    """`Function.apply`, which torch leaves untyped."""
    result: Tensor = function.apply(*args)
    return result


def is_ours(function: Any) -> bool:
    """A node of a graph that is here because of these operations, not of the user's."""
    kinds: tuple[Any, ...] = (_Activation, _Handle, _Slope, _Convolution, _Adjoint)
    return isinstance(function, tuple(kind._backward_cls for kind in kinds))


def users_name(function: Any) -> str | None:
    """What torch would call a node of a graph without these operations; None if it would not be there."""
    if isinstance(function, _Handle._backward_cls):
        return None
    name: str = getattr(function, "stands_for", None) or function.name()
    return name


class _Activation(torch.autograd.Function):
    """y = f(x), elementwise."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, handle: Tensor, mode: LeanOperations, function: Any) -> Tensor:
        with torch.enable_grad():
            at = x.detach().requires_grad_()
            y = function(at)
            (slope,) = torch.autograd.grad(y, at, torch.ones_like(y), create_graph=True)
            bend = torch.autograd.grad(slope, at, torch.ones_like(y))[0] if slope.requires_grad else None
        ctx.save_for_backward(handle, slope.detach(), torch.zeros_like(x) if bend is None else bend)
        ctx.mode, ctx.stands_for = mode, y.grad_fn.name()
        value: Tensor = y.detach()
        return value

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        handle, slope, bend = ctx.saved_tensors
        ctx.mode.loss_differentiates |= ctx.mode.active
        through = _apply(_Slope, gradient, handle, slope, bend) if torch.is_grad_enabled() else gradient * slope
        return through, None, None, None


class _Handle(torch.autograd.Function):
    """Stands for x in a graph and takes no memory, where only the way to x is needed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.new_zeros(()).expand_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class _Slope(torch.autograd.Function):
    """g f'(x), as a function of g and x."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, handle: Tensor, slope: Tensor, bend: Tensor) -> Tensor:
        ctx.save_for_backward(slope, gradient * bend)
        return gradient * slope

    @staticmethod
    @once_differentiable  # a third derivative would be wrong, and must not pass
    def backward(ctx: Any, tangent: Tensor) -> Any:
        slope, bent = ctx.saved_tensors
        return tangent * slope, tangent * bent, None, None


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
    """(x - mean) / sqrt(variance + eps) * weight + bias in eval mode; arguments as F.batch_norm names them."""
    constants = running_mean, running_var, weight, bias
    if training or running_mean is None or running_var is None or not _is_tapped(input):
        return None
    if not all(_is_constant(c) and (c is None or c.dtype == input.dtype) for c in constants):
        return None  # in mixed precision the result has the precision of the input
    scale = (running_var + eps).rsqrt()
    scale = scale if weight is None else scale * weight
    shift = -running_mean * scale if bias is None else bias - running_mean * scale
    shape = [1, -1, *[1] * (input.ndim - 2)]
    moved: Tensor = input * scale.reshape(shape) + shift.reshape(shape)
    return moved


class _Geometry(NamedTuple):
    """How a convolution is laid out, in the order that torch.convolution takes it."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    transposed: bool
    output_padding: list[int]
    groups: int


def _convolution(
    dims: int, transposed: bool, input: Any, weight: Any, bias: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """With constant weights; None where this is not such a call. Arguments as torch names them."""
    if not _is_tapped(input) or input.ndim != dims + 2 or not (_is_constant(weight) and _is_constant(bias)):
        return None
    tail = ("output_padding", "groups", "dilation") if transposed else ("dilation", "groups")
    given = dict(zip(("stride", "padding", *tail), args)) | kwargs

    def per_dimension(name: str, default: int) -> list[int]:
        value = given.get(name, default)
        values = [int(v) for v in value] if isinstance(value, Sequence) else [int(value)]
        return values * dims if len(values) == 1 else values

    dilation = per_dimension("dilation", 1)
    if isinstance(given.get("padding"), str):
        reach = [d * (size - 1) for d, size in zip(dilation, weight.shape[2:])]
        if given["padding"] == "same" and any(r % 2 for r in reach):
            return None  # padded on one side more than on the other
        given["padding"] = [r // 2 if given["padding"] == "same" else 0 for r in reach]
    geometry = _Geometry(
        per_dimension("stride", 1),
        per_dimension("padding", 0),
        dilation,
        transposed,
        per_dimension("output_padding", 0),
        int(given.get("groups", 1)),
    )
    return _apply(_Convolution, input, weight, bias, geometry)


class _Convolution(torch.autograd.Function):
    """x -> W x + bias, linear in x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: _Geometry) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.geometry, ctx.shape = geometry, x.shape
        ctx.stands_for = "ConvolutionBackward0"
        return torch.convolution(x, weight, bias, *geometry)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _apply(_Adjoint, gradient, *ctx.saved_tensors, ctx.shape, ctx.geometry), None, None, None


class _Adjoint(torch.autograd.Function):
    """g -> W^T g."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, weight: Tensor, shape: torch.Size, geometry: _Geometry) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.geometry = geometry
        like = gradient.new_empty(1).expand(shape)  # only its shape matters
        only_input = [True, False, False]
        backward = torch.ops.aten.convolution_backward
        result: Tensor = backward(gradient, like, weight, None, *geometry, only_input)[0]
        return result

    @staticmethod
    def backward(ctx: Any, tangent: Tensor) -> Any:
        return _apply(_Convolution, tangent, *ctx.saved_tensors, None, ctx.geometry), None, None, None

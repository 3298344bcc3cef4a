"""Replacements of operations whose second derivatives are expensive in torch.

    convolution     W x is linear in W and in x (`trilinear`); torch also computes derivatives that are not needed
    batch norm      in eval mode likewise; torch composes its second derivative of some thirty operations
    layer norm      a second derivative in closed form; torch composes it of some seventy operations
    attention       likewise (`attention`); torch composes it of some forty operations
    cross-entropy   the softmax one, in parts: torch holds several tensors of the size of the logits
    activation      elementwise f(x): f'(x) and f''(x) are computed once; torch composes them in every product from
                    several operations, each of which keeps its inputs

Values and derivatives up to the second are the same up to rounding; those of convolutions and batch norm to all orders.
A loss that takes gradients itself (a gradient penalty, a PINN) needs three orders: it is run with torch's own
operations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from curvmon.graph.activations import Activation, Relu
from curvmon.graph.attention import Attention, is_supported
from curvmon.graph.cross_entropy import cross_entropy
from curvmon.graph.layer_norm import LayerNorm
from curvmon.graph.proxy import without_values
from curvmon.graph.trilinear import BatchNorm, Convolution, Linear, trilinear
from curvmon.isolation.patches import (
    BATCH_NORM_BACKWARD,
    CONVOLUTION_BACKWARD,
    LAYER_NORM_BACKWARD,
    NATIVE_FUNCTIONS,
    SOFTMAX_BACKWARD,
    is_transformed,
    version,
)

_ACTIVATION_NAMES = "silu gelu tanh sigmoid softplus elu selu celu mish hardswish logsigmoid softsign"
_ACTIVATIONS = frozenset(
    getattr(space, name)
    for space in (F, torch, NATIVE_FUNCTIONS.get(), Tensor)
    for name in _ACTIVATION_NAMES.split()
    if hasattr(space, name)
)
_RELU = {torch.relu: False, Tensor.relu: False, torch.relu_: True, Tensor.relu_: True}
"""whether it is in place; F.relu takes an argument"""
_CONVOLUTIONS: dict[Any, tuple[int, bool]] = {
    torch.conv1d: (1, False),
    torch.conv2d: (2, False),
    torch.conv3d: (3, False),
    torch.conv_transpose1d: (1, True),
    torch.conv_transpose2d: (2, True),
    torch.conv_transpose3d: (3, True),
}
"""spatial dimensions, transposed"""
LARGE = 2**21
"""logits whose copies matter"""
_REPLACED_NODE = "replaced_node"
"""attribute of the nodes of the replacements: the names of torch's own nodes, separated by spaces"""


class EfficientOperations(TorchFunctionMode):
    """While active, replaces the operations above where their input or their parameters require gradients.

    Attributes:
        loss_differentiates: a gradient was taken while active, so the loss must be computed without replacements.
        stale: on exit, whether a tensor was changed in place that a replacement keeps, so that it must not be used.
        only_cotangents: see `cotangents_only`.
        second: f''(x) of every activation, each in a list of its own.
        entries: of all tensors that were computed and require gradients: about those of the activations.
    """

    def __init__(self, loss_only: bool = False) -> None:
        """`loss_only`: for passes that are differentiated once; replaces the cross-entropy of large logits alone."""
        super().__init__()
        self._loss_only = loss_only
        self.active = False
        self.loss_differentiates = False
        self.only_cotangents = False
        self.entries = 0
        self.stale = False
        self._kept: list[tuple[Tensor, int | None]] = []
        self.second: list[list[Tensor]] = []

    def free_second(self) -> None:
        """Free all f''(x), once the gradients that are to be differentiated have their graphs, which hold g f''(x)."""
        for held in self.second:
            held.clear()

    def keep(self, tensor: Tensor) -> None:
        """Note a tensor that torch does not need for derivatives, but a replacement does."""
        with torch.no_grad():  # not `detach`, which would look like one of the user's
            self._kept.append((tensor.view_as(tensor), version(tensor)))

    def __enter__(self) -> EfficientOperations:
        self.active = True
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc: Any) -> None:
        self.active = False
        self.stale = any(version(tensor) != before for tensor, before in self._kept)
        self._kept.clear()
        super().__exit__(*exc)  # type: ignore[no-untyped-call]

    @contextmanager
    def cotangents_only(self) -> Iterator[None]:
        """Differentiate a gradient J^T c w.r.t. c alone, and skip the derivatives w.r.t. what J depends on.

        autograd asks for them too: it does not know that they lead to no variable that is wanted.
        """
        self.only_cotangents = True
        try:
            yield
        finally:
            self.only_cotangents = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = None
        few = self._loss_only and args and isinstance(args[0], Tensor) and args[0].numel() < LARGE
        if func is F.cross_entropy and not few and _is_replaceable_call():
            result = cross_entropy(self, *args, **kwargs)
        elif self._loss_only:
            return func(*args, **kwargs)
        elif func in _CONVOLUTIONS and _is_replaceable_call():
            result = self._convolution(*_CONVOLUTIONS[func], *args, **kwargs)
        elif func is F.linear and _is_replaceable_call():
            result = self._linear(*args, **kwargs)
        elif func is F.batch_norm and _is_replaceable_call():
            result = self._batch_norm(*args, **kwargs)
        elif func is F.layer_norm and _is_replaceable_call():
            result = self._layer_norm(*args, **kwargs)
        elif func is F.scaled_dot_product_attention and _is_replaceable_call():
            result = self._attention(*args, **kwargs)
        elif func in _ACTIVATIONS and args and _is_replaceable_call():
            result = self._activation(func, args[0], args[1:], kwargs)
        elif func is F.relu and _is_replaceable_call():
            result = _relu(*args, **kwargs)
        elif func in _RELU and args and _is_replaceable_call():
            result = _relu(args[0], _RELU[func])
        result = func(*args, **kwargs) if result is None else result
        if isinstance(result, Tensor) and result.requires_grad:
            self.entries += result.numel()
        return result

    def _activation(self, func: Any, x: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        options = *args, *kwargs.values()
        in_place = kwargs.get("inplace", False) or args[-1:] == (True,)
        # a tensor among the options would be a second input, or an output to write to
        if in_place or not _is_tapped(x) or not all(isinstance(value, (bool, int, float, str)) for value in options):
            return None
        return _apply(Activation, x, without_values(x), self, lambda at: func(at, *args, **kwargs))

    def _linear(self, input: Any, weight: Any, bias: Any = None) -> Tensor | None:
        """Arguments as those of F.linear."""
        if not _is_replaceable(input, weight, bias) or weight.ndim != 2:
            return None
        return trilinear(Linear(), self, input, weight, bias)

    def _batch_norm(
        self,
        input: Any,
        running_mean: Any,
        running_var: Any,
        weight: Any = None,
        bias: Any = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor | None:
        """Eval mode only; arguments as those of F.batch_norm."""
        statistics = running_mean, running_var
        if training or not all(type(t) is Tensor and not t.requires_grad for t in statistics):
            return None
        if BATCH_NORM_BACKWARD.get() is None or not _is_replaceable(input, weight, bias):
            return None
        if any(t is not None and t.dtype != input.dtype for t in (*statistics, weight, bias)):
            return None  # in mixed precision torch's result has the dtype of the input
        form = BatchNorm(running_mean, running_var, eps)
        return trilinear(form, self, input, torch.ones_like(running_var) if weight is None else weight, bias)

    def _convolution(
        self, dims: int, transposed: bool, input: Any, weight: Any, bias: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """W x + bias; None for a call that is not replaced. Arguments as those of torch's convolutions."""
        if CONVOLUTION_BACKWARD.get() is None or not _is_replaceable(input, weight, bias) or input.ndim != dims + 2:
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
        form = Convolution(
            input,
            weight,
            per_dimension("stride", 1),
            per_dimension("padding", 0),
            dilation,
            transposed,
            per_dimension("output_padding", 0),
            int(options.get("groups", 1)),
        )
        return trilinear(form, self, input, weight, bias)

    def _layer_norm(
        self, input: Any, normalized_shape: Sequence[int], weight: Any = None, bias: Any = None, eps: float = 1e-5
    ) -> Tensor | None:
        """Arguments as those of F.layer_norm."""
        if LAYER_NORM_BACKWARD.get() is None or not _is_replaceable(input, weight, bias):
            return None
        if any(p is not None and p.dtype != input.dtype for p in (weight, bias)):
            return None
        return _apply(LayerNorm, input, weight, bias, list(normalized_shape), eps, self)

    def _attention(
        self,
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor | None:
        """Arguments as those of F.scaled_dot_product_attention."""
        supported = is_supported(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
        if not supported or SOFTMAX_BACKWARD.get() is None:
            return None
        proxies = (without_values(x) for x in (query, key, value))
        return _apply(Attention, query, key, value, attn_mask, is_causal, scale, self, *proxies)


def _is_replaceable_call() -> bool:
    """Neither under torch.func nor in forward mode: these need rules that the replacements do not have."""
    return torch.is_grad_enabled() and not is_transformed()


def _is_tapped(x: Any) -> bool:
    return type(x) is Tensor and x.requires_grad and x.is_floating_point()


def _is_replaceable(x: Any, *parameters: Any) -> bool:
    """Whether one of them requires gradients, and none is of a class of its own."""
    given = [x, *(p for p in parameters if p is not None)]
    plain = type(x) is Tensor and x.is_floating_point() and all(type(t) in (Tensor, nn.Parameter) for t in given)
    return plain and any(t.requires_grad for t in given)


def _apply(function: Any, *args: Any) -> Tensor:
    """`Function.apply`, which torch leaves untyped."""
    result: Tensor = function.apply(*args)
    return result


def is_efficient_operation(function: Any) -> bool:
    """Whether a node of an autograd graph comes from these replacements."""
    return hasattr(function, _REPLACED_NODE)


def torch_names(function: Any) -> list[str]:
    """The names that a node of an autograd graph has in torch without replacements."""
    names: str | None = getattr(function, _REPLACED_NODE, function.name())
    return (names or "").split()


def _relu(input: Any, inplace: bool = False) -> Tensor | None:
    """Arguments as those of F.relu."""
    return _apply(Relu, input, inplace) if _is_tapped(input) else None

"""Hold piecewise linear operations on the piece that they are on, while the parameters are shifted.

    y = s x + c,    s = f'(x_0),  c = f(x_0) - s x_0        x_0: the input before the shift

The Hessian is that of the piece, so a difference of gradients must not cross a kink. A max-pool keeps taking the same
entries, the larger of two tensors stays the one that was larger, and `torch.where` keeps its condition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from curvmon.isolation.patches import NATIVE_FUNCTIONS


def _functions(names: str) -> frozenset[Any]:
    spaces = F, torch, Tensor, NATIVE_FUNCTIONS.get()
    return frozenset(getattr(space, name) for space in spaces for name in names.split() if hasattr(space, name))


_RELU = _functions("relu relu_")
_ELEMENTWISE = _functions(
    """relu6 leaky_relu leaky_relu_ hardtanh hardtanh_ threshold threshold_ hardsigmoid hardshrink
    abs abs_ absolute __abs__ clamp clamp_ clamp_min clamp_min_ clamp_max clamp_max_ clip clip_"""
)
_DETACHING = frozenset(
    [
        torch.detach,
        Tensor.detach,
        Tensor.detach_,
        Tensor.item,
        Tensor.tolist,
        Tensor.numpy,
        Tensor.__float__,
        Tensor.data.__get__,  # type: ignore[attr-defined]
    ]
)
_WHERE = _functions("where")
_LARGER = _functions("maximum minimum fmax fmin max min")
"""of two tensors"""
_PRELU = _functions("prelu")
_POOLS = {
    getattr(F, f"{name}{dims}d"): (dims, getattr(F, f"{name}{dims}d_with_indices"))
    for name in ("max_pool", "adaptive_max_pool")
    for dims in (1, 2, 3)
}
"""spatial dimensions, and the function that also returns which entries were taken"""
Piece = Callable[..., Tensor]
"""takes the arguments of the operation"""


class ChangedCallsError(RuntimeError):
    """A forward pass with shifted parameters calls other operations, for which there are no pieces."""


class FixedPieces:
    """The pieces of one forward pass, for later ones with the same calls.

    Attributes:
        detaches: something that depends on the parameters was taken for a constant. Differences of gradients shift it,
            too; second derivatives do not.
    """

    def __init__(self) -> None:
        self.detaches = False
        self._pieces: list[tuple[Any, torch.Size, Piece]] | None = None

    @property
    def has_none(self) -> bool:
        """The recorded pass is smooth: nothing has to be held."""
        return self._pieces is not None and not self._pieces

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """The first time, record the pieces; then stay on them.

        Raises:
            ChangedCallsError: the calls are not those of the first time.
        """
        if self._pieces is None:
            with _Recording() as mode:
                yield
            self._pieces, self.detaches = mode.pieces, mode.detaches
            return
        with _Staying(self._pieces) as staying:
            yield
        if staying.calls != len(self._pieces):
            raise ChangedCallsError(f"{staying.calls} piecewise linear operations, and {len(self._pieces)} before")


class _Mode(TorchFunctionMode):
    """Hands piecewise linear operations that depend on the parameters to `_call`."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.is_grad_enabled() and _is_fixed(func, args, kwargs):
            return self._call(func, args, kwargs)
        return func(*args, **kwargs)

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        raise NotImplementedError


class _Recording(_Mode):
    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[tuple[Any, torch.Size, Piece]] = []
        self.detaches = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.is_grad_enabled():
            self.detaches |= func in _DETACHING and bool(args) and args[0].requires_grad
        else:
            self.detaches |= any(isinstance(arg, nn.Parameter) and arg.requires_grad for arg in args)
        return super().__torch_function__(func, types, args, kwargs)

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        shape = args[0].shape
        y, piece = _recorded(func, args, kwargs)
        self.pieces.append((func, shape, piece))
        return y


class _Staying(_Mode):
    def __init__(self, pieces: list[tuple[Any, torch.Size, Piece]]) -> None:
        super().__init__()
        self._pieces = pieces
        self.calls = 0

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        self.calls += 1
        before, shape, piece = self._pieces[self.calls - 1] if self.calls <= len(self._pieces) else (None, None, None)
        if before is not func or shape != args[0].shape or piece is None:
            raise ChangedCallsError(f"{getattr(func, '__name__', func)} is called where it was not before")
        return piece(*args)


def _is_fixed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if func in _WHERE or func in _LARGER:
        return _are_tensors(args[: 3 if func in _WHERE else 2]) and not kwargs and len(args) == (2 + (func in _WHERE))
    if not args or not _are_tensors(args[:1]):
        return False
    if func in _PRELU:
        return len(args) == 2 and not kwargs
    options = (*args[1:], *kwargs.values())
    if any(isinstance(option, Tensor) and option.requires_grad for option in options):
        return False
    if func in _POOLS:  # not one whose indices are returned: they may be used
        return not kwargs.get("return_indices") and True not in args[2 if "adaptive" in func.__name__ else 6 :]
    return func in _RELU or func in _ELEMENTWISE


def _are_tensors(args: tuple[Any, ...]) -> bool:
    """Plain ones, of which one depends on the parameters."""
    plain = all(type(arg) in (Tensor, nn.Parameter) and not arg.is_complex() for arg in args)
    return plain and any(arg.requires_grad for arg in args)


def _recorded(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Piece]:
    """The result, and the piece on which it was computed."""
    x = args[0]
    if func in _WHERE:
        at = 1 if func is Tensor.where else 0
        condition = args[at].clone()
        others = [i for i in range(3) if i != at]
        return func(*args), lambda *now: torch.where(condition, now[others[0]], now[others[1]])
    if func in _LARGER:
        y = func(*args)
        first = y.detach() == x.detach()
        return y, lambda one, other: torch.where(first, one, other)
    if func in _PRELU:
        positive = x.detach() > 0
        return func(*args), lambda now, weight: torch.where(positive, now, now * _per_channel(weight, now))
    if func in _POOLS:
        dims, with_indices = _POOLS[func]
        y, indices = with_indices(*args, **kwargs)
        return y, lambda now, *_: now.flatten(-dims).gather(-1, indices.flatten(-dims)).reshape(indices.shape)
    if func in _RELU:
        y = func(*args, **kwargs)
        return y, _scaled(y.detach() > 0, None, in_place=y is x)
    leaf = x.detach().clone().requires_grad_()
    value = func(leaf * 1, *args[1:], **kwargs)  # it may be in place
    (slope,) = torch.autograd.grad(value, leaf, torch.ones_like(value))
    y = func(*args, **kwargs)
    return y, _scaled(slope, value.detach() - slope * leaf.detach(), in_place=y is x)


def _scaled(slope: Tensor, offset: Tensor | None, *, in_place: bool) -> Piece:
    """s x + c."""

    def piece(x: Tensor, *_: Any) -> Tensor:
        if in_place:
            return x.mul_(slope) if offset is None else x.mul_(slope).add_(offset)
        return x * slope if offset is None else torch.addcmul(offset, x, slope)

    return piece


def _per_channel(weight: Tensor, like: Tensor) -> Tensor:
    return weight if weight.numel() == 1 else weight.reshape([-1, *[1] * (like.ndim - 2)])

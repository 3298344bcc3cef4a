"""Hold piecewise linear operations on the piece that they are on, while the parameters are shifted.

    y = s x + c,    s = f'(x_0),  c = f(x_0) - s x_0        x_0: the input before the shift

The Hessian is that of the piece, so a difference of gradients must not cross a kink. A max-pool keeps taking the same
entries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from curvmon.isolation.patches import NATIVE_FUNCTIONS


def _functions(names: str) -> frozenset[Any]:
    spaces = F, torch, Tensor, NATIVE_FUNCTIONS.get()
    return frozenset(getattr(space, name) for space in spaces for name in names.split() if hasattr(space, name))


_RELU = _functions("relu relu_")
_ELEMENTWISE = _functions(
    """relu6 leaky_relu leaky_relu_ hardtanh hardtanh_ threshold threshold_ hardsigmoid abs abs_ absolute __abs__
    clamp clamp_ clamp_min clamp_min_ clamp_max clamp_max_ clip clip_"""
)
_POOLS = {
    getattr(F, f"{name}{dims}d"): (dims, getattr(F, f"{name}{dims}d_with_indices"))
    for name in ("max_pool", "adaptive_max_pool")
    for dims in (1, 2, 3)
}
"""spatial dimensions, and the function that also returns which entries were taken"""
Piece = Callable[[Tensor], Tensor]


class ChangedCallsError(RuntimeError):
    """A forward pass with shifted parameters calls other operations, for which there are no pieces."""


class FixedPieces:
    """The pieces of one forward pass, for later ones with the same calls."""

    def __init__(self) -> None:
        self._pieces: list[tuple[Any, torch.Size, Piece]] | None = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """The first time, record the pieces; then stay on them.

        Raises:
            ChangedCallsError: the calls are not those of the first time.
        """
        if self._pieces is None:
            with _Recording() as mode:
                yield
            self._pieces = mode.pieces
            return
        with _Staying(self._pieces) as staying:
            yield
        if staying.calls != len(self._pieces):
            raise ChangedCallsError(f"{staying.calls} piecewise linear operations, and {len(self._pieces)} before")


class _Mode(TorchFunctionMode):
    """Hands piecewise linear operations with an input that requires gradients to `_call`."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        linear = func in _RELU or func in _ELEMENTWISE or (func in _POOLS and not _returns_indices(args, kwargs))
        if linear and args and type(args[0]) is Tensor and args[0].requires_grad and torch.is_grad_enabled():
            return self._call(func, args[0], args[1:], kwargs)
        return func(*args, **kwargs)

    def _call(self, func: Any, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        raise NotImplementedError


class _Recording(_Mode):
    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[tuple[Any, torch.Size, Piece]] = []

    def _call(self, func: Any, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        shape = x.shape
        y: Tensor
        piece: Piece
        if func in _POOLS:
            dims, with_indices = _POOLS[func]
            y, indices = with_indices(x, *args, **kwargs)
            piece = _taken(indices, dims)
        elif func in _RELU:
            y = func(x, *args, **kwargs)
            piece = _scaled(y.detach() > 0, None, in_place=y is x)
        else:
            at = x.detach().clone().requires_grad_()
            value = func(at * 1, *args, **kwargs)  # it may be in place
            (slope,) = torch.autograd.grad(value, at, torch.ones_like(value))
            y = func(x, *args, **kwargs)
            piece = _scaled(slope, value.detach() - slope * at.detach(), in_place=y is x)
        self.pieces.append((func, shape, piece))
        return y


class _Staying(_Mode):
    def __init__(self, pieces: list[tuple[Any, torch.Size, Piece]]) -> None:
        super().__init__()
        self._pieces = pieces
        self.calls = 0

    def _call(self, func: Any, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        self.calls += 1
        before, shape, piece = self._pieces[self.calls - 1] if self.calls <= len(self._pieces) else (None, None, None)
        if before is not func or shape != x.shape or piece is None:
            raise ChangedCallsError(f"{getattr(func, '__name__', func)} is called where it was not before")
        return piece(x)


def _scaled(slope: Tensor, offset: Tensor | None, *, in_place: bool) -> Piece:
    """s x + c."""

    def piece(x: Tensor) -> Tensor:
        if in_place:
            return x.mul_(slope) if offset is None else x.mul_(slope).add_(offset)
        return x * slope if offset is None else torch.addcmul(offset, x, slope)

    return piece


def _taken(indices: Tensor, dims: int) -> Piece:
    """The entries with these indices into the spatial dimensions."""

    def piece(x: Tensor) -> Tensor:
        return x.flatten(-dims).gather(-1, indices.flatten(-dims)).reshape(indices.shape)

    return piece


def _returns_indices(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Such a pool is not recorded: its indices may be used."""
    return bool(kwargs.get("return_indices")) or any(arg is True for arg in args)

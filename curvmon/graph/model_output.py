"""Find the output of a network: the tensors that enter a torch loss function.

A `TorchFunctionMode` sees `F.cross_entropy` and other loss functions wherever they are called: through
`nn.CrossEntropyLoss`, in a training step, inside a model that computes its own loss. The argument `out` is replaced by
`out + e_out` with a zero leaf e_out *for that call only*, so d²L / de_out² is the loss's own curvature even if other
layers use `out` too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from curvmon.graph.autograd import leads_to
from curvmon.isolation.patches import NATIVE_FUNCTIONS, is_transformed, version

_LOSS_NAMES = """
    cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy kl_div poisson_nll_loss
    binary_cross_entropy_with_logits gaussian_nll_loss hinge_embedding_loss margin_ranking_loss multi_margin_loss
    multilabel_margin_loss multilabel_soft_margin_loss soft_margin_loss triplet_margin_loss ctc_loss
    triplet_margin_with_distance_loss cosine_embedding_loss linear_cross_entropy cross_entropy_loss nll_loss_nd
"""


def _functions(names: str, *spaces: Any) -> frozenset[Any]:
    """The functions with these names: a TorchFunctionMode sees the one that the caller used."""
    return frozenset(getattr(space, name) for space in spaces for name in names.split() if hasattr(space, name))


_LOSSES = _functions(_LOSS_NAMES, F, torch, NATIVE_FUNCTIONS.get())
# losses of probabilities: the logits are before an activation (a "link"). The gradient of ctc_loss holds there alone
_BEHIND_LINK = _functions("nll_loss nll_loss_nd kl_div binary_cross_entropy ctc_loss", F, torch, NATIVE_FUNCTIONS.get())
_LINKS = _functions("log_softmax softmax sigmoid logsigmoid expit", F, torch, Tensor, torch.special)
# what may be between a link and the loss without being a layer
_CARRIERS = _functions(
    """add sub rsub mul div neg exp __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __neg__
    log clamp clamp_min clamp_max clip view reshape flatten unflatten squeeze unsqueeze transpose permute movedim
    contiguous clone float double to narrow select __getitem__""",
    torch,
    Tensor,
)


def zero_leaf(like: Tensor) -> Tensor:
    """A zero leaf in the shape of `like` that takes no memory: logits can be large."""
    return like.new_zeros(()).expand_as(like).requires_grad_()


def output_leaf(output: Tensor, at: Sequence[Tensor], index: int) -> Tensor:
    """A tap for the output with this index: at its value, or of zeros."""
    return at[index].detach().clone().requires_grad_() if at else zero_leaf(output)


class _Tapped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tap: Tensor) -> Tensor:
        ctx.replaced_node = None  # not a custom function of the user
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, gradient


def _tapped(x: Tensor, tap: Tensor) -> Tensor:
    """x + tap in the memory of x, for a tap of zeros."""
    if is_transformed():
        return x + tap
    result: Tensor = _Tapped.apply(x, tap)  # type: ignore[no-untyped-call]
    return result


class _Step(NamedTuple):
    """`result = function(source, *args, **kwargs)`; `result` is kept, so that its id is not used again."""

    result: Tensor
    function: Callable[..., Tensor]
    source: Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    versions: tuple[int | None, int | None]

    @property
    def is_current(self) -> bool:
        """Neither tensor was changed in place since; a replay would compute something else."""
        return None not in self.versions and self.versions == (version(self.source), version(self.result))


class OutputFinder(TorchFunctionMode):
    """While active, taps every differentiable input of every torch loss function.

    With log_softmax + nll_loss or sigmoid + binary_cross_entropy the output is the logits: the steps in between are
    replayed on logits + e_out.

    Attributes:
        outputs: the tensors that entered a loss.
        taps: the zero leaves that were added to them there.
        losses: names of the loss functions.
        unlinked: names of losses of probabilities whose logits were not found.
    """

    def __init__(self, at: Sequence[Tensor] = ()) -> None:
        """`at`: values of the taps; none: zeros."""
        super().__init__()
        self._at = at
        self.outputs: list[Tensor] = []
        self.taps: list[Tensor] = []
        self.losses: list[str] = []
        self.unlinked: list[str] = []
        self._steps: dict[int, _Step] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _LOSSES and torch.is_grad_enabled():
            args, kwargs = self._tap_arguments(func, args, kwargs)
        result = func(*args, **kwargs)
        if args and (func in _LINKS or (func in _CARRIERS and id(args[0]) in self._steps)):
            self._remember(result, func, args[0], args[1:], kwargs)
        return result

    def _remember(self, result: Any, func: Any, source: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # with a second differentiable argument there is no single source
        mixed = any(isinstance(arg, Tensor) and arg.requires_grad for arg in (*args, *kwargs.values()))
        if not mixed and isinstance(result, Tensor) and result is not source:
            versions = version(source), version(result)
            self._steps[id(result)] = _Step(result, func, source, args, kwargs, versions)

    def __exit__(self, *exc: Any) -> None:
        self._steps.clear()
        super().__exit__(*exc)  # type: ignore[no-untyped-call]

    def _tap_arguments(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        before = len(self.outputs)
        args = tuple(self._tapped(func, arg) for arg in args)
        kwargs = {key: self._tapped(func, value) for key, value in kwargs.items()}
        if len(self.outputs) > before:
            self.losses.append(func.__name__)
        return args, kwargs

    def _tapped(self, func: Any, argument: Any) -> Any:
        if not (isinstance(argument, Tensor) and argument.requires_grad and argument.is_floating_point()):
            return argument
        if self.taps and leads_to([argument], self.taps):
            return argument  # a loss of another loss: the output entered the inner one
        steps = self._steps_to(argument) if func in _BEHIND_LINK else []
        output = steps[-1].source if steps else argument
        if func in _BEHIND_LINK and not steps:
            self.unlinked.append(func.__name__)
        tap = output_leaf(output, self._at, len(self.taps))
        self.outputs.append(output)
        self.taps.append(tap)
        value = output + tap if self._at else _tapped(output, tap)
        for step in reversed(steps):
            value = step.function(value, *step.args, **step.kwargs)
        return value

    def _steps_to(self, argument: Tensor) -> list[_Step]:
        """The steps from the logits to `argument`, last first; empty if none of them is a link."""
        steps: list[_Step] = []
        while (step := self._steps.get(id(argument))) is not None and step.is_current:
            steps.append(step)
            if step.function in _LINKS:
                return steps
            argument = step.source
        return []

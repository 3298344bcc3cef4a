"""Softmax cross-entropy that keeps the logits and nothing else of their size; its derivatives are computed in parts.

    L = Σ_s a_s log Σ_j exp z_sj - <t, z>           a_s = Σ_j t_sj;  p = softmax z
    c = g (a p - t)                                 the gradient, for a gradient g w.r.t. L
    ∂<u, c>/∂z = g a (p u - p <p, u>)               the curvature of the loss, applied to u
    ∂<u, c>/∂g = a <p, u> - <t, u>

for every site s, a row of logits. Labels, `ignore_index`, class weights, label smoothing, probabilities as targets and
the reduction only change t. With a large vocabulary the logits are the largest tensor of a network: torch keeps their
log-softmax as well, and composes the second derivative of several tensors of that size. Here a few rows are computed at
a time. The value is torch's own.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from curvmon.isolation.patches import is_transformed

PART, PART_ON_CPU = 2**22, 2**18
"""entries that are computed at a time; on a CPU, what fits into its cache"""
Part = tuple[slice, ...]


def parts_of(x: Tensor, dim: int) -> list[Part]:
    """Slices of x with at most `PART` entries each, if possible, along its largest dimension other than `dim`."""
    entries = PART_ON_CPU if x.device.type == "cpu" else PART
    others = [axis for axis in range(x.ndim) if axis != dim % x.ndim]
    if x.numel() <= entries or not others:
        return [()]
    axis = max(others, key=lambda other: x.shape[other])
    step = max(1, x.shape[axis] * entries // x.numel())
    return [(slice(None),) * axis + (slice(i, i + step),) for i in range(0, x.shape[axis], step)]


def softmax_product(p: Tensor, vector: Tensor, dim: int) -> Tensor:
    """(diag p - p p^T) u for every site."""
    weighted = p * vector
    return torch.addcmul(weighted, p, weighted.sum(dim, keepdim=True), value=-1)


def joined(values: list[Tensor], parts: list[Part]) -> Tensor:
    return values[0] if len(values) == 1 else torch.cat(values, dim=len(parts[0]) - 1)


def cross_entropy(
    mode: Any,
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """Arguments as those of F.cross_entropy; None for a call that is not replaced.

    `mode.keep` is called with what has to stay as it is. `mode.loss_differentiates` is set if the loss takes gradients.
    """
    given = [x for x in (input, target, weight) if x is not None]
    if not all(isinstance(x, Tensor) and type(x) in (Tensor, nn.Parameter) and x.numel() for x in given):
        return None
    if not input.requires_grad or input.dtype not in (torch.float32, torch.float64):
        return None
    if any(x.requires_grad or x.dtype not in (torch.long, input.dtype) for x in given[1:]):
        return None
    dim = min(1, input.ndim - 1)
    by_label = target.shape == input.shape[:dim] + input.shape[dim + 1 :] and not target.is_floating_point()
    if not by_label and not (target.shape == input.shape and target.is_floating_point()):
        return None
    if size_average is not None or reduce is not None or reduction not in ("none", "mean", "sum"):
        return None
    options = {"weight": weight, "ignore_index": ignore_index, "label_smoothing": label_smoothing}
    mode.keep(input)
    if not by_label:
        mode.keep(target)
    result: Tensor = _CrossEntropy.apply(input, target, dim, reduction, options, mode)  # type: ignore[no-untyped-call]
    return result


class _Target(Protocol):
    """t; tensors per site have a dimension of size one for the classes.

    Attributes:
        total: a = Σ_j t_j of every site.
        divisor: of a mean.
    """

    @property
    def total(self) -> Tensor: ...

    @property
    def divisor(self) -> Tensor | int: ...

    def subtract(self, gradient: Tensor, g: Tensor, part: Part) -> None:
        """Subtract g t from a part, in place."""

    def dot(self, u: Tensor, part: Part) -> Tensor:
        """<t, u> for every site of a part."""


class _Labels:
    """t_j = [j = label] (1 - smoothing) w_label + smoothing w_j / classes; zero where the label is ignored."""

    def __init__(self, labels: Tensor, weights: Tensor, dim: int, ignored: int, smoothing: float) -> None:
        counted = (labels != ignored).unsqueeze(dim)
        self._dim = dim
        self._labels = torch.where(counted, labels.unsqueeze(dim), 0)
        scale = weights.flatten()[self._labels] * counted
        self.divisor = scale.sum()
        self._own = scale * (1 - smoothing)
        self._weights = weights
        self._spread = counted.to(weights) * (smoothing / weights.numel()) if smoothing else None
        self.total = self._own if self._spread is None else self._own + self._spread * weights.sum()

    def subtract(self, gradient: Tensor, g: Tensor, part: Part) -> None:
        gradient.scatter_add_(self._dim, self._labels[part], -g * self._own[part])
        if self._spread is not None:
            gradient.addcmul_(g * self._spread[part], self._weights, value=-1)

    def dot(self, u: Tensor, part: Part) -> Tensor:
        own = self._own[part] * u.gather(self._dim, self._labels[part])
        if self._spread is None:
            return own
        return own + self._spread[part] * (self._weights * u).sum(self._dim, keepdim=True)


class _Probabilities:
    """t_j = w_j ((1 - smoothing) q_j + smoothing / classes)"""

    def __init__(self, q: Tensor, weights: Tensor, dim: int, smoothing: float) -> None:
        self._dim, self._q, self._weights, self._smoothing = dim, q, weights, smoothing
        self.divisor = q.numel() // weights.numel()
        sums = [self._values(part).sum(dim, keepdim=True) for part in parts_of(q, dim)]
        self.total = joined(sums, parts_of(q, dim))

    def _values(self, part: Part) -> Tensor:
        return self._weights * ((1 - self._smoothing) * self._q[part] + self._smoothing / self._weights.numel())

    def subtract(self, gradient: Tensor, g: Tensor, part: Part) -> None:
        gradient.sub_(g * self._values(part))

    def dot(self, u: Tensor, part: Part) -> Tensor:
        return (self._values(part) * u).sum(self._dim, keepdim=True)


class _Call:
    """Of one loss: what its derivatives need besides the logits."""

    def __init__(self, target: _Target, dim: int, reduction: str, mode: Any) -> None:
        self.target, self.dim, self.mode = target, dim, mode
        self._reduction = reduction

    def per_site(self, g: Tensor) -> Tensor:
        """The gradient w.r.t. the loss of every site, from that w.r.t. the result."""
        if self._reduction == "none":
            return g.unsqueeze(self.dim)
        g = g / self.target.divisor if self._reduction == "mean" else g
        return g.reshape([1] * self.target.total.ndim).expand(self.target.total.shape)

    def reduced(self, sites: Tensor) -> Tensor:
        """The transpose of `per_site`."""
        if self._reduction == "none":
            return sites.squeeze(self.dim)
        return sites.sum() / self.target.divisor if self._reduction == "mean" else sites.sum()

    def gradient(self, g: Tensor, logits: Tensor) -> Tensor:
        g, parts = self.per_site(g), parts_of(logits, self.dim)
        scale = g * self.target.total
        if is_transformed():  # under vmap nothing can be written into a tensor that is not batched
            results = [logits[part].softmax(self.dim) * scale[part] for part in parts]
            for part, result in zip(parts, results):
                self.target.subtract(result, g[part], part)
            return joined(results, parts)
        gradient = torch.empty_like(logits)
        for part in parts:
            own = torch.softmax(logits[part], self.dim, out=gradient[part])
            self.target.subtract(own.mul_(scale[part]), g[part], part)
        return gradient

    def curvature(self, u: Tensor, g: Tensor, logits: Tensor) -> Tensor:
        """∂<u, c>/∂z"""
        scale, parts = self.per_site(g) * self.target.total, parts_of(logits, self.dim)
        if is_transformed():
            results = [softmax_product(logits[at].softmax(self.dim), u[at], self.dim) * scale[at] for at in parts]
            return joined(results, parts)
        image = torch.empty_like(logits)
        memory = torch.empty_like(logits[parts[0]])
        for part in parts:
            p = torch.softmax(logits[part], self.dim, out=image[part])
            difference = memory[tuple(slice(size) for size in p.shape)]
            mean = torch.mul(p, u[part], out=difference).sum(self.dim, keepdim=True)
            p.mul_(torch.sub(u[part], mean, out=difference)).mul_(scale[part])
        return image

    def slope(self, u: Tensor, logits: Tensor) -> Tensor:
        """∂<u, c>/∂g"""
        parts = parts_of(logits, self.dim)
        mean = [(logits[part].softmax(self.dim) * u[part]).sum(self.dim, keepdim=True) for part in parts]
        dots = [self.target.total[part] * m - self.target.dot(u[part], part) for part, m in zip(parts, mean)]
        return self.reduced(joined(dots, parts))


class _CrossEntropy(torch.autograd.Function):
    """L, its value by torch."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, dim: int, reduction: str, options: dict[str, Any], mode: Any
    ) -> Tensor:
        by_label, parts = not target.is_floating_point(), parts_of(logits, dim)
        values = []
        for part in parts:
            own = target.unsqueeze(dim)[part].squeeze(dim) if by_label else target[part]
            kind = reduction if len(parts) == 1 else "none"
            values.append(F.cross_entropy(logits[part], own, reduction=kind, **options))
        smoothing, weights = options["label_smoothing"], options["weight"]
        weights = logits.new_ones(logits.shape[dim]) if weights is None else weights.detach()
        weights = weights.reshape([-1 if axis == dim else 1 for axis in range(logits.ndim)])
        t: _Target = (
            _Labels(target, weights, dim, options["ignore_index"], smoothing)
            if by_label
            else _Probabilities(target, weights, dim, smoothing)
        )
        ctx.call = _Call(t, dim, reduction, mode)
        ctx.save_for_backward(logits)
        ctx.replaced_node = "LogSoftmaxBackward0 NllLossBackward0"
        if len(parts) == 1:
            return values[0]
        value: Tensor = ctx.call.reduced(joined([value.unsqueeze(dim) for value in values], parts))
        return value

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (logits,) = ctx.saved_tensors
        ctx.call.mode.loss_differentiates |= ctx.call.mode.active
        if not torch.is_grad_enabled():
            return ctx.call.gradient(g, logits), *(None,) * 5
        gradient = _Gradient.apply(g, logits, ctx.call)  # type: ignore[no-untyped-call]
        return gradient, *(None,) * 5


class _Gradient(torch.autograd.Function):
    """c, as a function of g and z."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, logits: Tensor, call: _Call) -> Tensor:
        ctx.save_for_backward(g, logits)
        ctx.call, ctx.replaced_node = call, None
        return call.gradient(g, logits)

    @staticmethod
    @once_differentiable  # a third derivative would be wrong: an error instead
    def backward(ctx: Any, u: Tensor) -> Any:
        g, logits = ctx.saved_tensors
        for_g = ctx.call.slope(u, logits) if ctx.needs_input_grad[0] else None
        return for_g, ctx.call.curvature(u, g, logits), None

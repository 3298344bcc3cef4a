"""The curvature of a loss at the output, S = d²L / d out², as a factor: S_b = A_b A_b^T for every sample b.

What the loss is called does not matter; products with S tell its form, and one more product checks it:

    few outputs per sample     S_b is computed entry by entry and diagonalised (signs kept: S may be indefinite)
    elementwise losses         S is diagonal: MSE, BCE with logits, Huber, Poisson, ...
    softmax cross-entropy      S = a (diag p - p p^T) at every site, a > 0; class weights, label smoothing, soft
                               targets, ignore_index and the reduction only change a

The last two serve any number of outputs, with random vectors in place of columns. Other losses have no factor here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from curvmon.numerics import gaussian, norm_squared, rademacher

Product = Callable[[Sequence[Tensor]], list[Tensor]]
TOLERANCE = 1e-3
"""A form is recognised if a random product agrees to this; rounding is 1e-6, another form is off by one."""


class Layout:
    """Which entries of the outputs belong to which sample."""

    def __init__(self, outputs: Sequence[Tensor], samples: int, batch_dim: int) -> None:
        self.samples = samples
        self._outputs = outputs
        self.batch_dim = batch_dim
        alike = len({(output.device, output.dtype) for output in outputs}) == 1
        self.fits = alike and all(self._split(output) is not None for output in outputs)
        self.width = sum(output.numel() for output in outputs) // samples
        """outputs per sample"""

    def rows(self, tensors: Sequence[Tensor]) -> Tensor:
        """samples x width."""
        parts = [self._samples_first(t).reshape(self.samples, -1) for t in tensors]
        return torch.cat(parts, dim=1)

    def tensors(self, rows: Tensor) -> list[Tensor]:
        """The inverse of `rows`."""
        found = []
        widths = [output.numel() // self.samples for output in self._outputs]
        for output, part in zip(self._outputs, torch.split(rows, widths, dim=1)):
            split = self._split(output)
            assert split is not None
            shape, axis = split
            moved = [self.samples, *shape[:axis], *shape[axis + 1 :]]
            found.append(part.reshape(moved).movedim(0, axis).reshape(output.shape).to(output.dtype))
        return found

    def axis(self, output: Tensor) -> int:
        """The dimension of an output along which samples are found."""
        split = self._split(output)
        return 0 if split is None or len(split[0]) > output.ndim else split[1]

    def _samples_first(self, tensor: Tensor) -> Tensor:
        split = self._split(tensor)
        assert split is not None
        shape, axis = split
        return tensor.reshape(shape).movedim(axis, 0)

    def _split(self, tensor: Tensor) -> tuple[list[int], int] | None:
        """A shape with an axis that counts samples: tokens may be folded into the first one (B T x V, or T B x V)."""
        shape, samples, dim = list(tensor.shape), self.samples, self.batch_dim
        if -len(shape) <= dim < len(shape) and shape[dim] == samples:
            return shape, dim % len(shape)
        if shape and shape[0] and shape[0] % samples == 0:
            folded = shape[0] // samples
            return ([samples, folded, *shape[1:]], 0) if dim == 0 else ([folded, samples, *shape[1:]], 1)
        return None


class Factor(NamedTuple):
    """A_b for all samples at once, `columns[k]` being column k of every A_b; S_b = A_b diag(signs_b) A_b^T."""

    columns: Tensor
    """rank x samples x width"""
    signs: Tensor
    """samples x rank"""


def dense_factor(layout: Layout, product: Product, like: Tensor) -> Factor | None:
    """By one product per output of a sample, all samples at once; None if samples interact in the loss."""
    width = layout.width
    units = torch.eye(width, dtype=like.dtype, device=like.device)
    blocks = torch.stack([layout.rows(product(_everywhere(layout, unit))) for unit in units], dim=2)
    vector = _normal(blocks[:, :, 0])
    expected = torch.einsum("bij,bj->bi", blocks, vector)
    if not _agree(layout.rows(product(layout.tensors(vector))), expected):
        return None
    # a loss scaled by 1e-9 is no reason to lose digits
    blocks = blocks.cpu().double()
    values, vectors = torch.linalg.eigh((blocks + blocks.mT) / 2)
    order = values.abs().argsort(dim=1, descending=True)
    values = values.gather(1, order)
    vectors = vectors.gather(2, order.unsqueeze(1).expand_as(vectors))
    size = values.abs().max()
    rank = max(1, int((values.abs() > 10 * torch.finfo(like.dtype).eps * size).any(dim=0).sum().item()))
    columns = (vectors * values.abs().sqrt().unsqueeze(1))[:, :, :rank].permute(2, 0, 1)
    return Factor(columns.to(like), values[:, :rank].sign())


def _everywhere(layout: Layout, unit: Tensor) -> list[Tensor]:
    return layout.tensors(unit.expand(layout.samples, -1))


class Sketch(NamedTuple):
    """Random combinations of the columns of A_b: E[x x^T] = S_b for every x = draw(generator)."""

    form: str
    draw: Callable[[torch.Generator], list[Tensor]]


def sketch(layout: Layout, outputs: Sequence[Tensor], product: Product) -> Sketch | None:
    """Each output on its own has a diagonal or a softmax curvature; None where one has neither, or they interact."""
    outputs = [output.detach() for output in outputs]
    vectors = [_normal(output) for output in outputs]
    together = product(vectors)
    roots: list[Callable[[Tensor], Tensor]] = []
    forms = []
    for i, (output, vector) in enumerate(zip(outputs, vectors)):

        def alone(x: Tensor, i: int = i) -> Tensor:
            return product([x if j == i else torch.zeros_like(o) for j, o in enumerate(outputs)])[i]

        image = alone(vector)
        if not _agree(image, together[i]):
            return None
        form = _diagonal(output, vector, image, alone) or _softmax(layout, output, vector, image)
        if form is None:
            return None
        forms.append(form[0])
        roots.append(form[1])

    def draw(generator: torch.Generator) -> list[Tensor]:
        return [root(rademacher(output, generator)) for root, output in zip(roots, outputs)]

    return Sketch(" and ".join(dict.fromkeys(forms)), draw)


Root = tuple[str, Callable[[Tensor], Tensor]]


def _diagonal(output: Tensor, vector: Tensor, image: Tensor, product: Callable[[Tensor], Tensor]) -> Root | None:
    scale = product(torch.ones_like(output))
    if not _agree(image, scale * vector) or (scale < -TOLERANCE * scale.abs().max()).any():
        return None
    root = scale.clamp_min(0).sqrt()
    return "an elementwise loss", lambda signs: root * signs


def _softmax(layout: Layout, output: Tensor, vector: Tensor, image: Tensor) -> Root | None:
    """a (diag p - p p^T) along the second or the last dimension, but never over the samples."""
    dims = [dim for dim in dict.fromkeys((1 % output.ndim, output.ndim - 1)) if dim != layout.axis(output)]
    found = (_softmax_along(dim, output, vector, image) for dim in dims)
    return next((root for root in found if root is not None), None)


def _softmax_along(dim: int, output: Tensor, vector: Tensor, image: Tensor) -> Root | None:
    """a (diag p - p p^T) = A A^T with A = sqrt(a) (diag sqrt(p) - p sqrt(p)^T)."""
    p = output.softmax(dim)
    unscaled = p * (vector - (p * vector).sum(dim, keepdim=True))
    spread = (vector * unscaled).sum(dim, keepdim=True)
    weight = torch.where(spread > 0, (vector * image).sum(dim, keepdim=True) / spread, 0)
    if not _agree(image, weight * unscaled) or (weight < -TOLERANCE * weight.abs().max()).any():
        return None
    scale, p_root = weight.clamp_min(0).sqrt(), p.sqrt()
    return (
        "softmax cross-entropy",
        lambda signs: scale * p_root * (signs - p_root * (p_root * signs).sum(dim, keepdim=True)),
    )


def _agree(one: Tensor, other: Tensor) -> bool:
    return norm_squared(one - other) <= TOLERANCE**2 * norm_squared(one)


def _normal(like: Tensor) -> Tensor:
    """Normal numbers, always the same: recognising a loss is no place for chance."""
    return gaussian(like, 1, torch.Generator("cpu").manual_seed(0)).reshape(like.shape)

"""The curvature of a loss at the output, S = d²L / d out², as a factor: S_b = A_b A_b^T for every sample b.

The form of S is recognised from products with S, whatever the loss is called, and checked by one more product:

    few outputs per sample     S_b is computed column by column and diagonalised (with signs: S may be indefinite)
    elementwise losses         S is diagonal: MSE, BCE with logits, Huber, Poisson, ...
    softmax cross-entropy      S = a (diag p - p p^T) at every site, a > 0; class weights, label smoothing, soft
                               targets, ignore_index and the reduction only change a

The last two work for any number of outputs, with random vectors instead of columns. Other losses have no factor here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from curvmon.graph.cross_entropy import Part, joined, parts_of, softmax_product
from curvmon.numerics import gaussian, norms, rademacher

Product = Callable[[Sequence[Tensor]], list[Tensor]]
TOLERANCE = 1e-3
"""relative error of a random product up to which a form is recognised; rounding gives 1e-6, another form about 1"""
MAX_COLUMNS = 24
"""most outputs per sample for which the Gauss-Newton part is computed exactly: one backward pass per output"""


def sample_weights(samples: int) -> Tensor:
    """Different powers of two: where samples do not interact, J^T (ω c) = ω J^T c to the last bit."""
    generator = torch.Generator("cpu").manual_seed(0)
    weights: Tensor = 2.0 ** (torch.randperm(samples, generator=generator, device="cpu") % 9 - 4)
    return weights


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
        """Tensors in the shapes of the outputs as one matrix, samples x width."""
        parts = [self._samples_first(t).reshape(self.samples, -1) for t in tensors]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def tensors(self, rows: Tensor) -> list[Tensor]:
        """The inverse of `rows`."""
        tensors = []
        widths = [output.numel() // self.samples for output in self._outputs]
        for output, part in zip(self._outputs, torch.split(rows, widths, dim=1)):
            split = self._split(output)
            assert split is not None
            shape, axis = split
            samples_first = [self.samples, *shape[:axis], *shape[axis + 1 :]]
            tensors.append(part.reshape(samples_first).movedim(0, axis).reshape(output.shape).to(output.dtype))
        return tensors

    def axis(self, output: Tensor) -> int:
        """The dimension of an output that counts samples."""
        split = self._split(output)
        return 0 if split is None or len(split[0]) > output.ndim else split[1]

    def _samples_first(self, tensor: Tensor) -> Tensor:
        split = self._split(tensor)
        assert split is not None
        shape, axis = split
        return tensor.reshape(shape).movedim(axis, 0)

    def _split(self, tensor: Tensor) -> tuple[list[int], int] | None:
        """A shape with an axis for the samples, and that axis; tokens may be folded into it (B T x V, or T B x V)."""
        shape, samples, dim = list(tensor.shape), self.samples, self.batch_dim
        if -len(shape) <= dim < len(shape) and shape[dim] == samples:
            return shape, dim % len(shape)
        if shape and shape[0] and shape[0] % samples == 0:
            folded = shape[0] // samples
            return ([samples, folded, *shape[1:]], 0) if dim == 0 else ([folded, samples, *shape[1:]], 1)
        return None


class Factor(NamedTuple):
    """S_b = A_b diag(signs_b) A_b^T for all samples b; `columns[k]` is column k of every A_b."""

    columns: Tensor
    """rank x samples x width"""
    signs: Tensor
    """samples x rank"""


def dense_factor(layout: Layout, product: Product, like: Tensor) -> Factor | None:
    """All S_b from one product per output of a sample, then eigenvectors; None if samples interact in the loss."""
    width = layout.width
    units = torch.eye(width, dtype=like.dtype, device=like.device)
    blocks = torch.stack([layout.rows(product(_everywhere(layout, unit))) for unit in units], dim=2)
    vector = _normal(blocks[:, :, 0])
    expected = torch.einsum("bij,bj->bi", blocks, vector)
    if not _agree(layout.rows(product(layout.tensors(vector))), expected):
        return None
    # float64: no digits are lost if the loss is scaled by 1e-9
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
    """E[x x^T] = S_b for x = draw(generator): random combinations of the columns of A_b."""

    form: str
    draw: Callable[[torch.Generator], list[Tensor]]


def sketch(layout: Layout, outputs: Sequence[Tensor], product: Product) -> Sketch | None:
    """For outputs with a diagonal or a softmax curvature each; None if one has neither, or if outputs interact."""
    outputs = [output.detach() for output in outputs]
    vectors = [_normal(output) for output in outputs]
    images = product(vectors)
    roots: list[Callable[[Tensor], Tensor]] = []
    forms = []
    for i, (output, vector) in enumerate(zip(outputs, vectors)):

        def own_product(x: Tensor, i: int = i) -> Tensor:
            return product([x if j == i else torch.zeros_like(o) for j, o in enumerate(outputs)])[i]

        image = images[i] if len(outputs) == 1 else own_product(vector)
        if len(outputs) > 1 and not _agree(image, images[i]):
            return None
        form = _softmax(layout, output, vector, image) or _diagonal(output, vector, image, own_product)
        if form is None:
            return None
        forms.append(form[0])
        roots.append(form[1])

    def draw(generator: torch.Generator) -> list[Tensor]:
        return [root(rademacher(output, generator)) for root, output in zip(roots, outputs)]

    return Sketch(" and ".join(dict.fromkeys(forms)), draw)


Root = tuple[str, Callable[[Tensor], Tensor]]
"""the form, and A applied to a tensor of signs, in its memory"""


def _diagonal(output: Tensor, vector: Tensor, image: Tensor, product: Callable[[Tensor], Tensor]) -> Root | None:
    scale = product(torch.ones_like(output))
    parts = parts_of(output, -1)
    if not _agree_in_parts(image, parts, lambda part: scale[part] * vector[part]):
        return None
    low, high = torch.stack(scale.aminmax()).tolist()
    if low < -TOLERANCE * max(-low, high):
        return None
    root = scale.clamp_min(0).sqrt_()
    return "an elementwise loss", lambda signs: signs.mul_(root)


def _softmax(layout: Layout, output: Tensor, vector: Tensor, image: Tensor) -> Root | None:
    """a (diag p - p p^T) along the second or the last dimension, but never along that of the samples."""
    dims = [dim for dim in dict.fromkeys((1 % output.ndim, output.ndim - 1)) if dim != layout.axis(output)]
    roots = (_softmax_along(dim, output, vector, image) for dim in dims)
    return next((root for root in roots if root is not None), None)


def _softmax_along(dim: int, output: Tensor, vector: Tensor, image: Tensor) -> Root | None:
    """a (diag p - p p^T) = A A^T with A = sqrt(a) (diag sqrt(p) - p sqrt(p)^T)."""
    parts = parts_of(output, dim)

    def unscaled(part: Part) -> Tensor:
        return softmax_product(output[part].softmax(dim), vector[part], dim)

    weights = []
    for part in parts:
        spread = (vector[part] * unscaled(part)).sum(dim, keepdim=True)
        weights.append(torch.where(spread > 0, (vector[part] * image[part]).sum(dim, keepdim=True) / spread, 0))
    weight = joined(weights, parts)
    if (weight < -TOLERANCE * weight.abs().max()).any() or not weight.any():
        return None
    if not _agree_in_parts(image, parts, lambda part: weight[part] * unscaled(part)):
        return None
    scale = weight.clamp_min_(0).sqrt_()

    def root(signs: Tensor) -> Tensor:
        for part in parts:
            p_root, own = output[part].softmax(dim).sqrt_(), signs[part]
            own.addcmul_(p_root, (p_root * own).sum(dim, keepdim=True), value=-1).mul_(p_root).mul_(scale[part])
        return signs

    return "softmax cross-entropy", root


def _agree(one: Tensor, other: Tensor) -> bool:
    return _agree_in_parts(one, [()], lambda part: other)


def _agree_in_parts(one: Tensor, parts: Sequence[Part], other: Callable[[Part], Tensor]) -> bool:
    sizes = [norms([one[part] - other(part), one[part]]) for part in parts]
    difference, whole = (math.hypot(*each) for each in zip(*sizes))
    return difference <= TOLERANCE * whole


def _normal(like: Tensor) -> Tensor:
    """Normal entries from a fixed seed: whether a loss is recognised does not depend on chance."""
    return gaussian(like, 1, torch.Generator("cpu").manual_seed(0)).reshape(like.shape)

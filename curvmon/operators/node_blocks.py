"""Products with the blocks of H and of its Gauss-Newton part, from one tapped graph and `autograd.grad` alone.

    q_w = J_w^T c,  c = dL/d out                           the gradient at node w, as a function of e and of c
    T[:, w] z  = d/de <q_w, z>  at fixed c                  one backward pass serves all rows v ...
    J_w z      = d/dc <q_w, z>                              ... and in the same pass
    GN[:, w] z = J^T S J_w z                                the loss's own curvature at the output, one more pass

with J_v = d out / d e_v and S = d²L / d out²; H = GN + T. T comes out by itself, not as a difference: where no layer
bends, it is exactly zero. (If part of the loss bypasses `out`, H is differentiated whole.) Nothing is stored that is
larger than the nodes themselves.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from curvmon.errors import LossError
from curvmon.graph.autograd import bypassed, custom_functions, differentiate, has_convolutions, product
from curvmon.graph.taps import TappedGraph
from curvmon.numerics import check_finite, norm_squared, precise

NEGLECTED = 0.05
"""GN is reported as long as no more than this share of the gradient bypasses the outputs."""
LARGEST_BATCH, BATCHED_ENTRIES = 32, 2**16
"""Products are batched by vmap while a node has no more entries than this for the whole batch (docs/speed.md)."""
Columns = list[Tensor]
"""A product for every row v."""


class Products(NamedTuple):
    """GN[v, w] Z and T[v, w] Z for all rows v, each d_v x k. Where the output is not known, GN is None and T is H."""

    remainder: Columns
    gauss_newton: Columns | None
    spent: int
    """how many products with H or GN these took"""

    def hessian(self, v: int) -> Tensor:
        """H[v, w] Z in double precision."""
        known = precise(self.remainder[v])
        return known if self.gauss_newton is None else known + precise(self.gauss_newton[v])


class BlockOperator(Protocol):
    """What an estimator needs to know of a network: products with column blocks of H and GN."""

    templates: Sequence[Tensor]
    """a tensor per node with d_v entries, for its dtype and device"""
    price: int
    """products per column"""

    def columns(self, w: int, z: Tensor) -> Products:
        """Products with the columns of z (d_w x k). How they are batched is up to the operator."""


def columns_of_all(operator: BlockOperator, requests: Sequence[tuple[int, Tensor]]) -> list[Products]:
    """`columns` for several nodes; an operator that divides its work among processes has `many`, and gets them all."""
    many: Callable[[Sequence[tuple[int, Tensor]]], list[Products]] | None = getattr(operator, "many", None)
    return [operator.columns(w, z) for w, z in requests] if many is None else many(requests)


class GraphOperator:
    """The `BlockOperator` of a tapped graph. Valid for any DAG and loss, also where samples interact."""

    def __init__(self, graph: TappedGraph) -> None:
        self.graph = graph
        self.templates: Sequence[Tensor] = graph.taps
        self.gradients = differentiate([graph.loss], graph.taps)
        if all(gradient is None for gradient in self.gradients):
            raise LossError(
                "the loss does not depend on any of the nodes "
                f"({', '.join(node.label for node in graph.nodes)}); is it detached, or computed by another model?"
            )
        self._output_gradients = differentiate([graph.loss], graph.output_taps, create_graph=True)
        self.cotangents = [
            torch.zeros_like(output) if gradient is None else gradient.detach()
            for output, gradient in zip(graph.outputs, self._output_gradients)
        ]
        self._pullbacks = self._pulled_back()
        self.unexplained = self._unexplained()
        self.has_gauss_newton = self.unexplained < NEGLECTED
        eps = max(torch.finfo(tap.dtype).eps for tap in graph.taps)
        self.splits = self.unexplained < 100 * eps and not bypassed(graph.loss, graph.taps, graph.output_taps)
        """H = J^T S J + d(J^T c), exactly; otherwise part of the loss bypasses the outputs, and H is taken whole"""
        if self.splits:
            self._slopes = self._pullbacks
        else:
            self._slopes = differentiate([graph.loss], graph.taps, create_graph=True)
        self.price = 2 if self.has_gauss_newton else 1
        small = max(x.numel() for x in (*graph.tapped, *graph.outputs)) <= BATCHED_ENTRIES
        self._batches = small and not has_convolutions([graph.loss])
        known = (*self._slopes, *self._output_gradients)
        self.custom_functions = custom_functions([graph.loss, *(g for g in known if g is not None)])

    def _pulled_back(self) -> list[Tensor | None]:
        """q_v = J_v^T c, with a graph that leads to e and to c."""
        if not self.graph.outputs:
            return [None] * len(self.graph.taps)
        for cotangent in self.cotangents:
            cotangent.requires_grad_()
        return differentiate(self.graph.outputs, self.graph.taps, self.cotangents, create_graph=True)

    def _unexplained(self) -> float:
        """‖dL/de - J^T dL/d out‖ / ‖dL/de‖: the share of the loss that does not pass through the known outputs."""
        if all(gradient is None for gradient in self._output_gradients):
            return 1.0
        difference = whole = 0.0
        for gradient, through in zip(self.gradients, self._pullbacks):
            if gradient is not None:
                missing = gradient if through is None else gradient - through.detach()
                difference, whole = difference + norm_squared(missing), whole + norm_squared(gradient)
        return float((difference / whole) ** 0.5) if whole else 0.0

    def columns(self, w: int, z: Tensor) -> Products:
        return self._in_batches(z, lambda vectors, batched: self.joint({w: vectors}, batched))

    def remainders(self, w: int, z: Tensor) -> Products:
        """`columns` without GN: only where `splits`."""
        taps = self.graph.taps
        return self._in_batches(z, lambda vectors, batched: (self._slope({w: vectors}, taps, batched), None))

    def joint(self, vectors: dict[int, Tensor], batched: bool = False) -> tuple[Columns, Columns | None]:
        """Σ_w T[:, w] z_w and Σ_w GN[:, w] z_w for vectors at several nodes at once; rows of z_w if `batched`."""
        taps, outputs = self.graph.taps, self.cotangents if self.has_gauss_newton else []
        if self.splits:
            images = self._slope(vectors, [*taps, *outputs], batched)
            return images[: len(taps)], self._pull_curved(images[len(taps) :], batched)
        hessian = self._slope(vectors, taps, batched)
        if not self.has_gauss_newton:
            return hessian, None
        shaped = self._shaped(vectors, batched)
        tangents = product([self._pullbacks[w] for w in vectors], outputs, shaped, batched)
        gauss_newton = self._pull_curved(tangents, batched)
        return [h - g for h, g in zip(hessian, gauss_newton)], gauss_newton

    def curved(self, tangents: Sequence[Tensor], batched: bool = False) -> list[Tensor]:
        """S u: the loss's own curvature at the output."""
        return product(self._output_gradients, self.graph.output_taps, tangents, batched)

    def _pull_curved(self, tangents: Sequence[Tensor], batched: bool) -> Columns:
        return product(self.graph.outputs, self.graph.taps, self.curved(tangents, batched), batched)

    def _slope(self, vectors: dict[int, Tensor], variables: Sequence[Tensor], batched: bool) -> Columns:
        return product([self._slopes[w] for w in vectors], variables, self._shaped(vectors, batched), batched)

    def _shaped(self, vectors: dict[int, Tensor], batched: bool) -> list[Tensor]:
        taps = self.graph.taps
        many = (-1,) if batched else ()
        return [z.to(taps[w].dtype).reshape(*many, *taps[w].shape) for w, z in vectors.items()]

    def _in_batches(self, z: Tensor, image: Callable[[Tensor, bool], tuple[Columns, Columns | None]]) -> Products:
        """The images of the columns of z, several at a time where that is faster."""
        if self._batches and z.shape[1] > 1:
            try:
                with warnings.catch_warnings():
                    # an operation that vmap would run in a slow loop of its own
                    warnings.filterwarnings("error", message=".*batching rule.*")
                    parts = [image(rows, True) for rows in torch.split(z.T, LARGEST_BATCH)]
                return _stacked([[_as_columns(x) for x in columns] for columns in zip(*parts)], z.shape[1])
            except (RuntimeError, Warning):
                self._batches = False
        images = [image(column, False) for column in z.unbind(1)]
        return _stacked([[_one(x) for x in columns] for columns in zip(*images)], z.shape[1])


def _as_columns(batch: Columns | None) -> Columns | None:
    """Rows of several products as columns."""
    return None if batch is None else [image.flatten(1).T for image in batch]


def _one(image: Columns | None) -> Columns | None:
    return None if image is None else [x.reshape(-1, 1) for x in image]


def _stacked(parts: list[list[Columns | None]], columns: int) -> Products:
    """T and GN, in pieces that are to stand side by side."""
    remainder, gauss_newton = (_side_by_side([piece for piece in pieces if piece is not None]) for pieces in parts)
    return Products(remainder, gauss_newton or None, columns * (2 if gauss_newton else 1))


def _side_by_side(images: list[Columns]) -> Columns:
    stacked = [torch.cat(rows, dim=1) for rows in zip(*images)]
    check_finite(stacked)
    return stacked

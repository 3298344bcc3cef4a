"""Products with the blocks of H and of its Gauss-Newton part, from one tapped graph.

    q_w = J_w^T c,  c = dL/d out                           the gradient at node w, as a function of e and of c
    T[:, w] z  = d/de <q_w, z>  at fixed c                 one backward pass serves all rows v ...
    J_w z      = d/dc <q_w, z>                             ... and gives J_w z as well (double backward)
    GN[:, w] z = J^T S J_w z                               the curvature of the loss at the output, one more pass

with J_v = d out / d e_v and S = d²L / d out²; H = GN + T. T is computed directly and not as a difference: where the
network is piecewise linear, it is exactly zero. If part of the loss bypasses `out`, H is differentiated directly, and
T = H - GN. Nothing is stored that is larger than the nodes themselves.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from curvmon.errors import LossError
from curvmon.graph.autograd import bypassed, custom_functions, differentiate, has_convolutions, product
from curvmon.graph.taps import TappedGraph
from curvmon.numerics import check_finite, norm_squared, precise

NEGLECTED = 0.05
"""GN is reported as long as no more than this share of the gradient bypasses the outputs."""
MAX_BATCH, BATCHED_ENTRIES = 32, 2**16
"""Products are batched by vmap while a node has no more entries than this for the whole batch (docs/cost.md)."""
Columns = list[Tensor]
"""A product for every row v."""
Part = Literal["hessian", "gauss_newton", "remainder"]
"""H, GN, T = H - GN"""


class Products(NamedTuple):
    """GN[v, w] Z and T[v, w] Z for all rows v, each d_v x k. Where the output is unknown, GN is None and T is H."""

    remainder: Columns
    gauss_newton: Columns | None
    spent: int
    """number of products with H or GN"""

    def hessian(self, v: int) -> Tensor:
        """H[v, w] Z in double precision."""
        remainder = precise(self.remainder[v])
        return remainder if self.gauss_newton is None else remainder + precise(self.gauss_newton[v])


class BlockOperator(Protocol):
    """What the estimator needs: products with the block columns H[:, w] and GN[:, w]."""

    templates: Sequence[Tensor]
    """a tensor per node with d_v entries, for its dtype and device"""
    hvps_per_column: int
    """2 if a column takes a product with H and one with GN"""

    def columns(self, w: int, z: Tensor) -> Products:
        """H[:, w] Z and GN[:, w] Z for the columns of Z (d_w x k). The operator decides how they are batched."""

    def columns_of(self, requests: Mapping[int, Tensor]) -> dict[int, Products]:
        """`columns` for several nodes w at once. Nothing is read back: the products may be NaN."""


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
        self.bypass_fraction = self._bypass_fraction()
        self.has_gauss_newton = self.bypass_fraction < NEGLECTED
        eps = max(torch.finfo(tap.dtype).eps for tap in graph.taps)
        self.splits = self.bypass_fraction < 100 * eps and not bypassed(graph.loss, graph.taps, graph.output_taps)
        """H = J^T S J + d(J^T c) holds exactly; otherwise part of the loss bypasses the outputs"""
        self._gradients: list[Tensor | None] | None = None
        # T is the derivative of the pullbacks; where they do not hold the whole loss, H that of the gradients
        self._slopes = self._pullbacks if self.splits else self._differentiable_gradients()
        self.hvps_per_column = 2 if self.has_gauss_newton else 1
        small = max(x.numel() for x in (*graph.tapped, *graph.outputs)) <= BATCHED_ENTRIES
        self._batches = small and not has_convolutions([graph.loss])
        derivatives = (*self._slopes, *self._output_gradients)
        self.custom_functions = custom_functions([graph.loss, *(g for g in derivatives if g is not None)])

    def _pulled_back(self) -> list[Tensor | None]:
        """q_v = J_v^T c, with a graph that leads to e and to c."""
        if not self.graph.outputs:
            return [None] * len(self.graph.taps)
        for cotangent in self.cotangents:
            cotangent.requires_grad_()
        return differentiate(self.graph.outputs, self.graph.taps, self.cotangents, create_graph=True)

    def _differentiable_gradients(self) -> list[Tensor | None]:
        """dL/de_v, with a graph that leads to e."""
        if self._gradients is None:
            self._gradients = differentiate([self.graph.loss], self.graph.taps, create_graph=True)
        return self._gradients

    def _bypass_fraction(self) -> float:
        """‖dL/de - J^T dL/d out‖ / ‖dL/de‖: the share of the gradient that does not pass through the outputs."""
        if all(gradient is None for gradient in self._output_gradients):
            return 1.0
        difference = whole = 0.0
        for gradient, through in zip(self.gradients, self._pullbacks):
            if gradient is not None:
                missing = gradient if through is None else gradient - through.detach()
                difference, whole = difference + norm_squared(missing), whole + norm_squared(gradient)
        return float((difference / whole) ** 0.5) if whole else 0.0

    def columns(self, w: int, z: Tensor) -> Products:
        def image(vectors: Tensor, batched: bool) -> Columns:
            remainder, gauss_newton = self.joint({w: vectors}, batched)
            return [*remainder, *(gauss_newton or [])]

        images, rows = self._in_batches(z, image), len(self.graph.taps)
        return Products(images[:rows], images[rows:] or None, z.shape[1] * len(images) // rows)

    def columns_of(self, requests: Mapping[int, Tensor]) -> dict[int, Products]:
        return {w: self.columns(w, z) for w, z in requests.items()}

    def remainders_of(self, requests: Mapping[int, Tensor]) -> dict[int, Products]:
        """`columns_of` without GN: only where `splits`."""
        return {w: self.remainders(w, z) for w, z in requests.items()}

    def remainders(self, w: int, z: Tensor) -> Products:
        """`columns` without GN: only where `splits`."""
        taps = self.graph.taps
        images = self._in_batches(z, lambda vectors, batched: self._slope({w: vectors}, taps, batched))
        return Products(images, None, z.shape[1])

    def block(self, part: Part, v: int, w: int, z: Tensor) -> Tensor:
        """A[v, w] Z (d_v x k) for A = H, GN or T; GN and T only where `has_gauss_newton`."""
        (image,) = self._in_batches(z, lambda vectors, batched: [self._block(part, v, w, vectors, batched)])
        return image

    def _block(self, part: Part, v: int, w: int, vectors: Tensor, batched: bool) -> Tensor:
        tap, shaped = self.graph.taps[v], self._shaped({w: vectors}, batched)
        if part == "remainder" and self.splits:
            return product([self._slopes[w]], [tap], shaped, batched)[0]
        if part == "remainder":
            hessian, gauss_newton = (self._block(p, v, w, vectors, batched) for p in ("hessian", "gauss_newton"))
            return hessian - gauss_newton
        if part == "hessian":
            return product([self._differentiable_gradients()[w]], [tap], shaped, batched)[0]
        tangents = product([self._pullbacks[w]], self.cotangents, shaped, batched)
        return product(self.graph.outputs, [tap], self.output_curvature(tangents, batched), batched)[0]

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

    def output_curvature(self, tangents: Sequence[Tensor], batched: bool = False) -> list[Tensor]:
        """S u for S = d²L / d out², the curvature of the loss at the output."""
        return product(self._output_gradients, self.graph.output_taps, tangents, batched)

    def _pull_curved(self, tangents: Sequence[Tensor], batched: bool) -> Columns:
        return product(self.graph.outputs, self.graph.taps, self.output_curvature(tangents, batched), batched)

    def _slope(self, vectors: dict[int, Tensor], variables: Sequence[Tensor], batched: bool) -> Columns:
        return product([self._slopes[w] for w in vectors], variables, self._shaped(vectors, batched), batched)

    def _shaped(self, vectors: dict[int, Tensor], batched: bool) -> list[Tensor]:
        taps = self.graph.taps
        many = (-1,) if batched else ()
        return [z.to(taps[w].dtype).reshape(*many, *taps[w].shape) for w, z in vectors.items()]

    def _in_batches(self, z: Tensor, image: Callable[[Tensor, bool], Columns]) -> Columns:
        """The images of the columns of z (d x k), several at a time where that is faster."""
        if self._batches and z.shape[1] > 1:
            try:
                with warnings.catch_warnings():
                    # an operation without a batching rule would run in a slow loop under vmap
                    warnings.filterwarnings("error", message=".*batching rule.*")
                    parts = [image(rows, True) for rows in torch.split(z.T, MAX_BATCH)]
                return _side_by_side([[batch.flatten(1).T for batch in images] for images in parts])
            except (RuntimeError, Warning):
                self._batches = False
        parts = [image(column, False) for column in z.unbind(1)]
        return _side_by_side([[x.reshape(-1, 1) for x in images] for images in parts])


def _side_by_side(parts: list[Columns]) -> Columns:
    """Images of some columns each, put together for every row v."""
    stacked = [torch.cat(images, dim=1) for images in zip(*parts)]
    check_finite(stacked)
    return stacked

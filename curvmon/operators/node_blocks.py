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

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from curvmon.errors import LossError
from curvmon.graph.autograd import bypassed, custom_functions, differentiate, has_convolutions, operands, product
from curvmon.graph.taps import TappedGraph
from curvmon.numerics import check_finite, norms, precise
from curvmon.operators.batching import Batched, batches_products, check_batched
from curvmon.operators.launches import Launches

BATCHED_BYTES = 2**30
"""what the products of one launch may hold on an accelerator"""
CACHED_BYTES = 2**23
"""the same on a CPU, where batching is faster only within the cache (docs/cost.md)"""
HELD_AT_A_TIME = 4
"""tensors that a backward pass holds at a time"""
NEGLECTED = 0.05
"""GN is reported as long as no more than this share of the gradient bypasses the outputs."""
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
        """H[:, w] Z and GN[:, w] Z for the columns of Z (d_w x k), checked to be finite."""

    def columns_of(self, requests: Mapping[int, Tensor]) -> dict[int, Products]:
        """H[:, w] Z_w and GN[:, w] Z_w for several nodes w at once, without synchronisation and unchecked."""


class GraphOperator:
    """The `BlockOperator` of a tapped graph. Valid for any DAG and loss, also where samples interact."""

    differentiates_twice = True

    def __init__(self, graph: TappedGraph, batched: Batched = "auto") -> None:
        check_batched(batched)
        self.graph = graph
        self.templates: Sequence[Tensor] = graph.taps
        self.gradients = differentiate([graph.loss], graph.taps)
        if all(gradient is None for gradient in self.gradients):
            raise LossError(
                "the loss does not depend on any of the nodes "
                f"({', '.join(node.label for node in graph.nodes)}); is it detached, or computed by another model?"
            )
        twice = self.differentiates_twice
        self._output_gradients = differentiate([graph.loss], graph.output_taps, create_graph=twice)
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
        self._launches = Launches(self._held(), _capacity(graph, batched))
        derivatives = (*self._slopes, *self._output_gradients)
        self.custom_functions = custom_functions([graph.loss, *(g for g in derivatives if g is not None)])

    def _held(self) -> list[int]:
        """About how many bytes a product with T[:, w] holds, by w.

        Double backward keeps a gradient w.r.t. every operand behind w of a nonlinear operation, and a few at a time
        in its last half, from the loss back to the first node.
        """
        graph = self.graph
        stages = [*graph.tapped, max(graph.outputs, key=Tensor.numel, default=graph.loss)]
        sizes = [stage.numel() * stage.element_size() for stage in stages]
        counts = operands([*graph.tapped, graph.loss], [slope for slope in self._slopes if slope is not None])
        left = [count * max(pair) for count, pair in zip(counts[1:], pairwise(sizes))]
        return list(accumulate(reversed(left), initial=HELD_AT_A_TIME * max(sizes)))[:0:-1]

    def _pulled_back(self) -> list[Tensor | None]:
        """q_v = J_v^T c, with a graph that leads to e and to c."""
        if not self.graph.outputs:
            return [None] * len(self.graph.taps)
        for cotangent in self.cotangents:
            cotangent.requires_grad_()
        twice = self.differentiates_twice
        return differentiate(self.graph.outputs, self.graph.taps, self.cotangents, create_graph=twice)

    def _differentiable_gradients(self) -> list[Tensor | None]:
        """dL/de_v, with a graph that leads to e."""
        if self._gradients is None:
            twice = self.differentiates_twice
            self._gradients = differentiate([self.graph.loss], self.graph.taps, create_graph=twice)
        return self._gradients

    def _bypass_fraction(self) -> float:
        """‖dL/de - J^T dL/d out‖ / ‖dL/de‖: the share of the gradient that does not pass through the outputs."""
        if all(gradient is None for gradient in self._output_gradients):
            return 1.0
        missing, gradients = [], []
        for gradient, through in zip(self.gradients, self._pullbacks):
            if gradient is not None:
                gradients.append(gradient)
                missing.append(gradient if through is None else gradient - through.detach())
        sizes = norms([*missing, *gradients])
        whole = math.hypot(*sizes[len(missing) :])
        return math.hypot(*sizes[: len(missing)]) / whole if whole else 0.0

    def relative_error(self, v: int, w: int, hessian: float, remainder: float, gauss_newton: float) -> float:
        """Of the products with H[v, w] so far, beyond rounding; the norms of H, T and GN are given."""
        return 0.0

    def columns(self, w: int, z: Tensor) -> Products:
        return checked(self.columns_of({w: z})[w])

    def columns_of(self, requests: Mapping[int, Tensor]) -> dict[int, Products]:
        def image(vectors: Mapping[int, Tensor], batched: bool) -> Columns:
            remainder, gauss_newton = self.joint(vectors, batched)
            return [*remainder, *(gauss_newton or [])]

        rows, images = len(self.graph.taps), self._launches.images(requests, image)
        spent = 2 if self.has_gauss_newton else 1
        return {w: Products(x[:rows], x[rows:] or None, spent * requests[w].shape[1]) for w, x in images.items()}

    def remainders_of(self, requests: Mapping[int, Tensor]) -> dict[int, Products]:
        """`columns_of` without GN: only where `splits`."""
        taps = self.graph.taps
        images = self._launches.images(requests, lambda vectors, batched: self._slope(vectors, taps, batched))
        return {w: Products(x, None, requests[w].shape[1]) for w, x in images.items()}

    def block(self, part: Part, v: int, w: int, z: Tensor) -> Tensor:
        """A[v, w] Z (d_v x k) for A = H, GN or T; GN and T only where `has_gauss_newton`."""
        images = self._launches.images({w: z}, lambda vectors, batched: [self._block(part, v, w, vectors[w], batched)])
        (image,) = images[w]
        check_finite([image])
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

    def joint(self, vectors: Mapping[int, Tensor], batched: bool = False) -> tuple[Columns, Columns | None]:
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

    def _slope(self, vectors: Mapping[int, Tensor], variables: Sequence[Tensor], batched: bool) -> Columns:
        return product([self._slopes[w] for w in vectors], variables, self._shaped(vectors, batched), batched)

    def _shaped(self, vectors: Mapping[int, Tensor], batched: bool) -> list[Tensor]:
        taps = self.graph.taps
        many = (-1,) if batched else ()
        return [z.to(taps[w].dtype).reshape(*many, *taps[w].shape) for w, z in vectors.items()]


def checked(products: Products) -> Products:
    """Raise `NonFiniteError` if a product is not finite."""
    check_finite([*products.remainder, *(products.gauss_newton or [])])
    return products


def _capacity(graph: TappedGraph, batched: Batched) -> int:
    """Bytes that the products of one launch may hold; zero for one by one."""
    if batches_products(batched, graph.loss.device):
        return BATCHED_BYTES
    return 0 if batched is False or has_convolutions([graph.loss]) else CACHED_BYTES

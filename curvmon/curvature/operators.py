"""Products with the blocks of H and of its Gauss-Newton part, from one tapped graph and `autograd.grad` alone.

    q_w = J_w^T c,  c = dL/d out                           the gradient at node w, as a function of e and of c
    T[:, w] z  = d/de <q_w, z>  at fixed c                  one backward pass serves all rows v ...
    J_w z      = d/dc <q_w, z>                              ... and in the same pass
    GN[:, w] z = J^T S J_w z                                the loss's own curvature at the output, one more pass

with J_v = d out / d e_v and S = d²L / d out²; H = GN + T. T comes out by itself, not as a difference: where no layer
bends, it is exactly zero. Nothing is stored that is larger than the nodes themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from curvmon.curvature.autograd import custom_functions, differentiate, product
from curvmon.curvature.taps import TappedGraph
from curvmon.errors import LossError, NonFiniteError

NEGLECTED = 0.05
"""GN is reported as long as no more than this share of the gradient bypasses the outputs."""
Columns = list[Tensor]
"""A product for every row v."""


class Products(NamedTuple):
    """GN[v, w] Z and T[v, w] Z for all rows v, each d_v x k. Where the output is not known, GN is None and T is H."""

    remainder: Columns
    gauss_newton: Columns | None
    spent: int
    """how many products with H or GN these took"""

    def joined(self, other: Products) -> Products:
        """Side by side."""
        remainder = [torch.cat(pair, dim=1) for pair in zip(self.remainder, other.remainder)]
        gauss_newton = None
        if self.gauss_newton is not None and other.gauss_newton is not None:
            gauss_newton = [torch.cat(pair, dim=1) for pair in zip(self.gauss_newton, other.gauss_newton)]
        return Products(remainder, gauss_newton, self.spent + other.spent)

    def scaled(self, factor: float) -> Products:
        gauss_newton = None if self.gauss_newton is None else [x * factor for x in self.gauss_newton]
        return Products([x * factor for x in self.remainder], gauss_newton, self.spent)

    def hessian(self, v: int) -> Tensor:
        """H[v, w] Z in double precision."""
        known = precise(self.remainder[v])
        return known if self.gauss_newton is None else known + precise(self.gauss_newton[v])


class BlockOperator(Protocol):
    """What an estimator needs to know of a network: products with column blocks of H and GN."""

    templates: Sequence[Tensor]
    """a tensor per node with d_v entries, for its dtype and device"""
    has_gauss_newton: bool
    price: int
    """products per column"""

    def columns(self, w: int, z: Tensor) -> Products:
        """Products with the columns of z (d_w x k). How they are batched is up to the operator."""


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
            torch.zeros_like(output) if gradient is None else gradient.detach().clone()
            for output, gradient in zip(graph.outputs, self._output_gradients)
        ]
        self._pullbacks = self._pulled_back()
        self.unexplained = self._unexplained()
        self.has_gauss_newton = self.unexplained < NEGLECTED
        eps = max(torch.finfo(tap.dtype).eps for tap in graph.taps)
        self.splits = self.unexplained < 100 * eps
        """H = J^T S J + d(J^T c), exactly; otherwise part of the loss bypasses the outputs, and H is taken whole"""
        if self.splits:
            self._slopes = self._pullbacks
        else:
            self._slopes = differentiate([graph.loss], graph.taps, create_graph=True)
        self.price = 2 if self.has_gauss_newton else 1
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
        return self._stacked([self.joint({w: vector}) for vector in z.unbind(1)])

    def remainders(self, w: int, z: Tensor) -> Products:
        """`columns` without GN: only where `splits`."""
        return self._stacked([([*product(*self._slope({w: vector}, self.graph.taps))], None) for vector in z.unbind(1)])

    def joint(self, vectors: dict[int, Tensor]) -> tuple[Columns, Columns | None]:
        """Σ_w T[:, w] z_w and Σ_w GN[:, w] z_w for vectors at several nodes at once."""
        taps, outputs = self.graph.taps, self.cotangents if self.has_gauss_newton else []
        if self.splits:
            images = product(*self._slope(vectors, [*taps, *outputs]))
            remainder, tangents = images[: len(taps)], images[len(taps) :]
            return remainder, self._pull_curved(tangents)
        hessian = product(*self._slope(vectors, taps))
        if not self.has_gauss_newton:
            return hessian, None
        shaped = [self._shaped(w, z) for w, z in vectors.items()]
        gauss_newton = self._pull_curved(product([self._pullbacks[w] for w in vectors], outputs, shaped))
        return [h - g for h, g in zip(hessian, gauss_newton)], gauss_newton

    def curved(self, tangents: Sequence[Tensor]) -> list[Tensor]:
        """S u: the loss's own curvature at the output."""
        return product(self._output_gradients, self.graph.output_taps, tangents)

    def _pull_curved(self, tangents: Sequence[Tensor]) -> Columns:
        return product(self.graph.outputs, self.graph.taps, self.curved(tangents))

    def _slope(
        self, vectors: dict[int, Tensor], variables: list[Tensor]
    ) -> tuple[list[Tensor | None], list[Tensor], list[Tensor]]:
        return [self._slopes[w] for w in vectors], variables, [self._shaped(w, z) for w, z in vectors.items()]

    def _shaped(self, w: int, z: Tensor) -> Tensor:
        tap = self.graph.taps[w]
        return z.to(tap.dtype).reshape(tap.shape)

    def _stacked(self, images: list[tuple[Columns, Columns | None]]) -> Products:
        remainder = _side_by_side([remainder for remainder, _ in images])
        known = [gauss_newton for _, gauss_newton in images if gauss_newton is not None]
        gauss_newton = _side_by_side(known) if known else None
        return Products(remainder, gauss_newton, len(images) * (1 if gauss_newton is None else 2))


def precise(x: Tensor) -> Tensor:
    """Double precision where the device has it."""
    return x if x.device.type == "mps" else x.double()


def norm_squared(x: Tensor) -> float:
    """‖x‖² in double precision: a loss scaled by 1e-9 must not underflow."""
    return float(torch.linalg.vector_norm(precise(x)).item()) ** 2


def _side_by_side(images: list[Columns]) -> Columns:
    stacked = [torch.stack([image.reshape(-1) for image in rows], dim=1) for rows in zip(*images)]
    if not all(torch.isfinite(image).all() for image in stacked):
        raise NonFiniteError(
            "a Hessian-vector product is not finite although the loss is; "
            "look for sqrt, norm or log at zero, or overflow in low precision"
        )
    return stacked

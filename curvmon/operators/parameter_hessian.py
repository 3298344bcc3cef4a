"""Products with the Hessian of a loss w.r.t. the parameters of a model, and with its Gauss-Newton part.

    H z   = d/dθ <dL/dθ, z>                    GGN z = J^T S J z,  J = d out / dθ,  S = d²L / d out²

H z is Pearlmutter's trick (1994, "Fast exact multiplication by the Hessian"), GGN z that of Schraudolph (2002) with a
double backward pass for J z (`batch_graph`). Vectors are flat. The parameters are those that require gradients; shared
ones count once.
The loss of several batches is the mean over all samples. Their graphs are built one after the other for every product,
so that memory is that of one batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from curvmon.errors import DivergedError, InputError, LossError
from curvmon.graph.arguments import check_arguments, explained, why_not_finite
from curvmon.graph.linear_layers import LayeredGraph, by_layers
from curvmon.graph.pytree import map_all_tensors
from curvmon.graph.taps import TappedGraph, checked_scalar, tapped_forward
from curvmon.isolation.freed_memory import return_freed_memory
from curvmon.isolation.model_state import isolated, own_copy, reseed
from curvmon.isolation.open_isolations import one_at_a_time
from curvmon.numerics import check_finite
from curvmon.operators.batch_graph import BatchGraph
from curvmon.operators.batch_shares import samples_of, shares_of
from curvmon.operators.batching import Batched, InBatches, batches_products
from curvmon.operators.protocol import SymmetricOperator
from curvmon.operators.session import NOISE_SEED, Loss

GraphImage = Callable[[BatchGraph, list[Tensor], bool], Sequence[Tensor]]
"""parts of the images of a vector, given by its parts; or of several vectors, if True"""
Build = Callable[..., TappedGraph]
"""a forward pass; `efficient=False`: with torch's own operations; `finite=False`: the loss is not looked at"""
BATCHED_BYTES = 2**31
"""most memory for the activations of all products that run at once"""
SAME_LOSS = 1e-3
"""Largest relative difference of a loss between two forward passes of the same batch: rounding on a device."""
SYMMETRIC = 1e-3
"""relative tolerance; rounding is 1e-6 in float32, and a wrong double backward is off by more"""
NOT_SYMMETRIC = "suspect: Hessian-vector products are not symmetric"
REPEATABLE = 1e-5
"""up to this relative difference, a model without a state computes the same again"""


class ParameterOperator(SymmetricOperator):
    """H w.r.t. the parameters, of a loss or of the weighted sum of several; also its blocks, and GGN.

    Attributes:
        names: names of the parameters, in the order of a flat vector.
        originals: the user's parameters, of which the measured ones are copies.
        sizes: entries of every parameter.
        loss: the loss at the current parameters.
        gradient: dL/dθ, flat.
        has_ggn: the outputs that enter the loss were recognised, and nothing bypasses them.
        custom_functions: names of the custom autograd functions in the graph.
    """

    def __init__(
        self,
        losses: Sequence[tuple[float, Build]],
        parameters: Mapping[str, Tensor],
        originals: Sequence[Tensor],
        layered: Callable[[Mapping[str, Tensor]], Iterator[tuple[float, LayeredGraph]]],
        notes: Sequence[str],
        on_product: Callable[[int], None],
        batched: Batched = "auto",
    ) -> None:
        """`on_product` is called with the number of HVPs after each of them."""
        self.notes = notes
        self._losses = losses
        self._layered = layered
        self.names = tuple(parameters)
        self.originals = originals
        self._parameters = list(parameters.values())
        self.sizes = [parameter.numel() for parameter in self._parameters]
        super().__init__(sum(self.sizes), self._parameters[0])
        self._on_product = on_product
        self.loss, self.has_ggn, depends = 0.0, True, False
        self.gradient = self.template.new_zeros(self.size)
        functions: set[str] = set()
        self._once = set(range(len(self.sizes)))
        self._kept: BatchGraph | None = None
        self._losses_before: dict[int, float] = {}
        """the loss of every batch in its first forward pass"""
        entries = 1
        for weight, graph in self._graphs():
            self.loss += weight * graph.loss
            parts = graph.take_gradient()
            depends |= any(part is not None for part in parts)
            self.gradient.add_(self._joined(parts), alpha=weight)
            self.has_ggn &= graph.has_ggn
            entries = max(entries, graph.entries)
            functions.update(graph.custom_functions())
            self._once &= graph.used_once()
        self._in_batches = InBatches(_width(entries, self.template) if batches_products(batched, self.device) else 1)
        self.gradient = self.gradient.as_subclass(Tensor)  # of the batch's own class, maybe
        if not depends:
            raise LossError("the loss does not depend on any trainable parameter of the model; is it detached?")
        self.custom_functions = sorted(functions)

    def _columns(self, z: Tensor) -> Tensor:
        every = range(len(self._parameters))
        return self._checked(self._block(every, every, z))

    def unchecked(self, z: Tensor) -> Tensor:
        every = range(len(self._parameters))
        image = self._block(every, every, z)
        self._spend(z.shape[1])
        return image

    def hessian(self, z: Tensor) -> Tensor:
        """H z for one vector."""
        return self.matvec(z)

    def block(self, rows: Sequence[int], columns: Sequence[int], z: Tensor) -> Tensor:
        """H[rows, columns] z for a subset of the parameters, given by their indices; one vector or n x k."""
        return self._computed(z, lambda matrix: self._block(rows, columns, matrix))

    def ggn(self, z: Tensor) -> Tensor:
        """GGN z for one vector or the columns of a matrix n x k; only where `has_ggn`."""
        return self._computed(z, self._ggn)

    def unchecked_ggn(self, z: Tensor) -> Tensor:
        """GGN Z for the columns of a matrix, as `unchecked`."""
        image = self._ggn(z)
        self._spend(z.shape[1])
        return image

    def _ggn(self, z: Tensor) -> Tensor:
        every = range(len(self._parameters))
        return self._images(z, every, lambda graph, parts, batched: graph.ggn(parts, batched))

    def hessian_and_ggn(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """H Z and GGN Z for the columns of Z (n x k), at 4/3 of the cost of H Z; only where `has_ggn`."""
        parts = self._computed(z, lambda matrix: self._images(matrix, range(len(self._parameters)), _both))
        return parts[: self.size], parts[self.size :]

    def _computed(self, z: Tensor, images: Callable[[Tensor], Tensor]) -> Tensor:
        """Counted and checked."""
        matrix = z.unsqueeze(1) if z.ndim == 1 else z
        image = self._checked(images(matrix))
        self._spend(matrix.shape[1])
        return image.squeeze(1) if z.ndim == 1 else image

    def _block(self, rows: Sequence[int], columns: Sequence[int], z: Tensor) -> Tensor:
        return self._images(z, columns, lambda graph, parts, batched: graph.hessian(rows, columns, parts, batched))

    def _checked(self, image: Tensor) -> Tensor:
        # one synchronisation for all columns, and no temporary tensors in the size of the image
        if not torch.isfinite(image.sum()):
            check_finite([image])  # the sum alone may overflow
        return image

    def layered(self) -> Iterator[tuple[float, LayeredGraph]]:
        """The weight of every batch, and its loss as a function of taps on the layers; only where `has_ggn`.

        Where another forward pass gives the same, the graph for products is dropped, and built again when it is needed:
        both together take too much memory.
        """
        for weight, layered in self._layered({self.names[i]: self._parameters[i] for i in self._once}):
            if self._kept and math.isclose(self._kept.loss, layered.graph.loss.item(), rel_tol=REPEATABLE):
                self._kept = None
                return_freed_memory(self.device)
            yield weight, layered

    def close(self) -> None:
        """Free the graph."""
        self._kept = None
        return_freed_memory(self.device)

    @property
    def batches(self) -> int:
        return len(self._losses)

    @property
    def width(self) -> int:
        """How many products run in one launch."""
        return self._in_batches.width

    def pullback(self, cotangents: Sequence[Tensor]) -> Tensor:
        """Σ_b J_b^T c_b over the batches b, for cotangents that hold the weights; only where `has_ggn`, not counted."""
        total = self.template.new_zeros(self.size)
        for (_, graph), rows in zip(self._graphs(), cotangents):
            total += self._joined(graph.pullback(rows))
        return total.as_subclass(Tensor)  # a network may pass on a class of the batch's own

    def gathered(self, pieces: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
        """Gradients w.r.t. single parameters as one flat vector, with zeros for the others."""
        gradients = {id(parameter): gradient for parameter, gradient in pieces}
        return self._joined([gradients.get(id(parameter)) for parameter in self._parameters])

    def notes_on_symmetry(self, asymmetry: float) -> list[str]:
        """`asymmetry`: of the products so far, relative to the norm of H."""
        if asymmetry <= SYMMETRIC:
            return []
        return [
            f"{NOT_SYMMETRIC} (by {asymmetry:.2g} of the norm of H): some operation "
            f"has a wrong double backward, and none of these numbers is reliable"
        ]

    def spend(self, products: int) -> None:
        """Count HVPs (or work of the same cost) that were computed elsewhere."""
        self._spend(products)

    def _spend(self, hvps: int) -> None:
        super()._spend(hvps)
        self._on_product(hvps)

    def flat(self, values: Mapping[Tensor, Tensor], default: float) -> Tensor:
        """Values that belong to the user's parameters, as one flat vector."""
        given = [values.get(original) for original in self.originals]
        whole = [torch.full_like(p, default) if value is None else value for value, p in zip(given, self._parameters)]
        return torch.cat([value.detach().reshape(-1).to(self.template) for value in whole])

    def _graphs(self) -> Iterator[tuple[float, BatchGraph]]:
        for index, (weight, build) in enumerate(self._losses):
            graph = self._kept
            if graph is None:
                graph = self._open(index, build)
                if index in self._losses_before:
                    graph.drop_gradient()  # it is known
                if len(self._losses) == 1:
                    self._kept = graph
                    return_freed_memory(self.device)
            first = self._losses_before.setdefault(index, graph.loss)
            if not math.isclose(graph.loss, first, rel_tol=SAME_LOSS):
                raise LossError(
                    f"the loss of the same batch is {first:.6g} and then {graph.loss:.6g}: the model or the loss has a "
                    f"state or a random generator of its own that a forward pass changes, and several passes are "
                    f"needed; reset it at the start of loss(model, batch), or do not pass more_batches"
                )
            yield weight, graph

    def _joined(self, parts: Sequence[Tensor | None]) -> Tensor:
        """One flat vector from the parts that belong to the parameters; None: zeros."""
        whole = (torch.zeros_like(p) if part is None else part for part, p in zip(parts, self._parameters))
        return torch.cat([part.reshape(-1).to(self.template) for part in whole])

    def _open(self, index: int, build: Build) -> BatchGraph:
        return BatchGraph(build(), self._parameters)

    def _images(self, z: Tensor, columns: Sequence[int], image: GraphImage) -> Tensor:
        """The images of the columns of Z as columns, summed over the batches."""

        def rows(vectors: Tensor, batched: bool) -> Tensor:
            shaped = self._shaped(vectors, columns)
            total: Tensor | None = None
            for weight, graph in self._graphs():
                parts = image(graph, shaped, batched)
                flat = torch.cat([part.reshape(*vectors.shape[:-1], -1).to(self.template) for part in parts], dim=-1)
                if len(self._losses) > 1:
                    flat = flat * weight
                total = flat if total is None else total.add_(flat)
            assert total is not None
            return total if batched else total.unsqueeze(0)

        parts = self._in_batches(z.T, rows)
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).T

    def _shaped(self, vectors: Tensor, columns: Sequence[int]) -> list[Tensor]:
        """The parts of a vector, or of the rows of a matrix, in the shapes of the parameters."""
        many = vectors.shape[:-1]
        parts = zip(torch.split(vectors, [self.sizes[i] for i in columns], dim=-1), columns)
        return [part.reshape((*many, *self._parameters[i].shape)).to(self._parameters[i]) for part, i in parts]


def _both(graph: BatchGraph, z: Sequence[Tensor], batched: bool) -> list[Tensor]:
    hessian, ggn = graph.hessian_and_ggn(z, batched)
    return [*hessian, *ggn]


@contextmanager
def open_parameters(
    model: nn.Module,
    batches: Sequence[Any],
    *,
    loss: Loss,
    on_product: Callable[[int], None] | None = None,
    batched: Batched = "auto",
    kind: type[ParameterOperator] = ParameterOperator,
    own_modes: bool = False,
) -> Iterator[ParameterOperator]:
    """Yields the operator. When the context ends, with or without an error, the model is exactly as before.

    `on_product` is called with the number of HVPs after each of them. `batched`: whether several are computed in one
    launch. `kind`: how they are computed. `own_modes`: modules in training mode stay in it.
    """
    check_arguments(model, loss, None, None, 0)
    # while another thread measures the same model, its parameters do not require gradients
    with one_at_a_time:
        yield from _opened(model, batches, loss, on_product or (lambda hvps: None), batched, kind, own_modes)


def _opened(
    model: nn.Module,
    batches: Sequence[Any],
    loss: Loss,
    on_product: Callable[[int], None],
    batched: Batched,
    kind: type[ParameterOperator],
    own_modes: bool,
) -> Iterator[ParameterOperator]:
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not trainable:
        raise InputError("the model has no parameter that requires gradients, so there is no Hessian to look at")
    odd = [name for name, parameter in trainable.items() if parameter.is_complex()]
    if odd:
        raise InputError(f"complex parameters ({', '.join(odd)}): use their real views, torch.view_as_real")
    with isolated(model, loss, seed=NOISE_SEED, dtype=None, own_modes=own_modes) as isolation:
        copies = dict(model.named_parameters())
        parameters = {name: copies[name].requires_grad_() for name in trainable}

        def build(batch: Any, efficient: bool = True, finite: bool = True) -> TappedGraph:
            def run() -> Tensor:
                reseed(NOISE_SEED)
                return checked_scalar(loss(model, map_all_tensors(batch, lambda tensor: own_copy(tensor, None))))

            graph: TappedGraph = explained(
                lambda: tapped_forward([], run, batch_dim=0, efficient=efficient or "loss"), model, None, batch
            )
            if finite and not torch.isfinite(graph.loss):
                raise DivergedError(f"the loss is {graph.loss.item()}{why_not_finite(batch, model)}")
            return graph

        def layered(once: Mapping[str, Tensor]) -> Iterator[tuple[float, LayeredGraph]]:
            for share, batch in zip(shares, batches):
                graph, layers, owned = by_layers(model, once, partial(build, batch))
                rest = [parameter for name, parameter in parameters.items() if name not in owned]
                yield share, LayeredGraph(graph, layers, rest, samples_of(batch))

        shares = shares_of(batches)
        losses = [(share, partial(build, batch)) for share, batch in zip(shares, batches)]
        operator = kind(losses, parameters, list(trainable.values()), layered, isolation.notes, on_product, batched)
        try:
            yield operator
        finally:
            operator.close()


def _width(entries: int, like: Tensor) -> int:
    """How many products run at once: a cotangent for every activation and product."""
    return max(1, BATCHED_BYTES // (entries * like.element_size()))

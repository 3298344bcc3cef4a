"""Products with the Hessian of a loss by the parameters of a model, and with its Gauss-Newton part.

    H z   = d/dθ <dL/dθ, z>                    GGN z = J^T S J z,  J = d out / dθ,  S = d²L / d out²

by `autograd.grad` alone. Vectors are flat; the parameters are those that require gradients, shared ones once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from curvmon.curvature.arguments import check_arguments, explained, why_not_finite
from curvmon.curvature.autograd import bypassed, custom_functions, differentiate, product
from curvmon.curvature.isolation import isolated, own_copy
from curvmon.curvature.operators import check_finite
from curvmon.curvature.randomness import reseed
from curvmon.curvature.session import NOISE_SEED, Loss
from curvmon.curvature.taps import TappedGraph, checked_scalar, tapped_forward
from curvmon.curvature.trees import map_tensors
from curvmon.errors import InputError, LossError


class ParameterOperator:
    """Products by the parameters of one tapped graph, whose output is tapped and whose layers are not."""

    def __init__(self, graph: TappedGraph, parameters: Mapping[str, Tensor], originals: Sequence[Tensor]) -> None:
        self._graph = graph
        self.names = tuple(parameters)
        self.originals = originals
        """the user's parameters, of which these are copies"""
        self._parameters = list(parameters.values())
        self._sizes = [parameter.numel() for parameter in self._parameters]
        self.size = sum(self._sizes)
        self.loss = graph.loss.item()
        self._slopes = differentiate([graph.loss], self._parameters, create_graph=True)
        if all(slope is None for slope in self._slopes):
            raise LossError("the loss does not depend on any trainable parameter of the model; is it detached?")
        self.custom_functions = custom_functions([graph.loss, *(s for s in self._slopes if s is not None)])
        self.has_ggn = bool(graph.outputs) and not bypassed(graph.loss, self._parameters, graph.output_taps)
        self._pullbacks: list[Tensor | None] | None = None
        self.products = 0

    @property
    def template(self) -> Tensor:
        """A flat vector's dtype and device."""
        return self._parameters[0].detach().new_zeros(())

    def hessian(self, z: Tensor) -> Tensor:
        self.products += 1
        return self._flat(product(self._slopes, self._parameters, self._shaped(z)))

    def ggn(self, z: Tensor) -> Tensor:
        """Only where `has_ggn`."""
        self.products += 1
        graph = self._graph
        if self._pullbacks is None:
            self._output_slopes = differentiate([graph.loss], graph.output_taps, create_graph=True)
            self._cotangents = [torch.zeros_like(out, requires_grad=True) for out in graph.outputs]
            self._pullbacks = differentiate(graph.outputs, self._parameters, self._cotangents, create_graph=True)
        tangents = product(self._pullbacks, self._cotangents, self._shaped(z))
        curved = product(self._output_slopes, graph.output_taps, tangents)
        return self._flat(product(graph.outputs, self._parameters, curved))

    def flat(self, values: Mapping[Tensor, Tensor], default: float) -> Tensor:
        """Values that belong to the user's parameters, as one vector."""
        known = [values.get(original) for original in self.originals]
        whole = [torch.full_like(p, default) if value is None else value for value, p in zip(known, self._parameters)]
        return torch.cat([value.detach().reshape(-1).to(self.template) for value in whole])

    def _shaped(self, z: Tensor) -> list[Tensor]:
        parts = torch.split(z, self._sizes)
        return [part.reshape(p.shape).to(p) for part, p in zip(parts, self._parameters)]

    def _flat(self, tensors: Sequence[Tensor]) -> Tensor:
        flat = torch.cat([tensor.reshape(-1).to(self.template) for tensor in tensors])
        check_finite([flat])
        return flat


@contextmanager
def open_parameters(
    model: nn.Module, batch: Any, *, loss: Loss, dtype: torch.dtype | None = None
) -> Iterator[ParameterOperator]:
    """The operator for the life of the context; the model is as before when it ends, however it ends."""
    check_arguments(model, loss, None, None, 0)
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not trainable:
        raise InputError("the model has no parameter that requires gradients, so there is no Hessian to look at")
    odd = [name for name, parameter in trainable.items() if parameter.is_complex()]
    if odd:
        raise InputError(f"complex parameters ({', '.join(odd)}): use their real views, torch.view_as_real")
    with isolated(model, loss, seed=NOISE_SEED, dtype=dtype):
        copies = dict(model.named_parameters())
        parameters = {name: copies[name].requires_grad_() for name in trainable}

        def run() -> Tensor:
            reseed(NOISE_SEED)
            return checked_scalar(loss(model, map_tensors(batch, lambda tensor: own_copy(tensor, dtype))))

        graph = explained(lambda: tapped_forward([], run, batch_dim=0), model, dtype)
        if not torch.isfinite(graph.loss):
            raise LossError(f"the loss is {graph.loss.item()}{why_not_finite(batch, model)}")
        yield ParameterOperator(graph, parameters, list(trainable.values()))

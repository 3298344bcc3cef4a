"""What is looked at in every validation, whatever the budget: is everything finite, where is the loss, how sharp is it.

One forward pass of the probe batch, one norm per tensor, and a few HVPs where there is time for them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from curvmon.alerts.context import MIN_ENTRIES, Source, has_norm, norms_at_once
from curvmon.graph.pytree import map_all_tensors
from curvmon.isolation.model_state import isolated, own_copy, reseed
from curvmon.monitor.fallbacks import is_out_of_memory
from curvmon.monitor.pairs_and_spectrum import release_memory
from curvmon.numerics import norm
from curvmon.operators.batch_shares import shares_of
from curvmon.operators.session import NOISE_SEED, Loss
from curvmon.records import PROBE_LOSS, VitalSigns
from curvmon.spectrum.findings import Findings
from curvmon.spectrum.warm_sharpness import warm_sharpness

MOST_COPIED = 2**27
"""entries of parameters and buffers that are copied to the host for the norm of an update"""


def probe_loss(model: nn.Module, batches: Sequence[Any], loss: Loss) -> float:
    """The mean loss over all samples, without a graph."""
    with isolated(model, loss, seed=NOISE_SEED, dtype=None) as isolation:

        def compute(batch: Any) -> float:
            reseed(NOISE_SEED)
            value = loss(model, map_all_tensors(batch, lambda tensor: own_copy(tensor, None)))
            return value.detach().item()

        def mean() -> float:
            return sum(share * compute(batch) for share, batch in zip(shares_of(batches), batches))

        try:
            return mean()
        except RuntimeError:  # the loss takes gradients itself
            isolation.require_gradients()
            return mean()


class Taken(NamedTuple):
    signs: VitalSigns
    norms: Mapping[Source, float]
    """of every parameter and buffer, see `TensorNorms.look`"""
    eigenvector: Tensor | None = None


class VitalSignsTaker:
    """Takes vital signs, one after the other, of the same model."""

    def __init__(self) -> None:
        self._norms = TensorNorms()

    def take(
        self, model: nn.Module, batches: Sequence[Any], loss: Loss, start: Tensor | None, findings: Findings
    ) -> Taken:
        """The vital signs, the norms of all tensors, and the leading eigenvector if there is a new one.

        Nothing raises but interrupts: what cannot be computed is NaN. `batches`: none for no loss. `start`: an earlier
        leading eigenvector; None for no HVPs.
        """
        weight_norm, update_norm, not_finite, norms = self._norms.look(model)
        signs = VitalSigns(weight_norm=weight_norm, update_norm=update_norm, not_finite=not_finite)
        if not batches:
            return Taken(signs, norms)
        trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
        if start is not None and len(start) == trainable and not not_finite:
            try:
                warm = warm_sharpness(model, batches, loss=loss, start=start, findings=findings)
            except Exception as error:
                if is_out_of_memory(error):
                    release_memory()
            else:
                signs = replace(signs, sharpness=warm.value, sharpness_error=warm.error, hvps=warm.hvps)
                return Taken(replace(signs, loss=warm.loss), norms, warm.vector)
        try:
            value = probe_loss(model, batches, loss)
        except Exception:  # the next measurement says why
            return Taken(signs, norms)
        if not math.isfinite(value):
            signs = replace(signs, not_finite=(*not_finite, PROBE_LOSS))
        return Taken(replace(signs, loss=value), norms)


class Look(NamedTuple):
    weight_norm: float
    update_norm: float
    """of all trainable parameters since the last look; NaN if there is none"""
    not_finite: tuple[str, ...]
    """names"""
    norms: dict[Source, float]


class TensorNorms:
    """Norms of parameters and buffers and of their last updates, and what is not finite."""

    def __init__(self) -> None:
        self._before: dict[str, Tensor] = {}
        """parameters and buffers at the last look, on the host"""
        self._usually_infinite: set[str] | None = None
        """names of buffers, attention masks for example"""

    @torch.no_grad()
    def look(self, model: nn.Module) -> Look:
        """By kind and name: "weights" and "statistics", ‖w‖ of parameters and buffers; "update", ‖w - w_before‖ / ‖w‖;
        "zeros", the share of zeros. Large models have no updates and no zeros, small tensors nothing at all.
        """
        parameters = {name: p for name, p in model.named_parameters() if has_norm(p)}
        buffers = {name: b for name, b in model.named_buffers() if has_norm(b)}
        tensors, trainable = {**parameters, **buffers}, {name for name, p in parameters.items() if p.requires_grad}
        before, values = self._before, {}
        if sum(tensor.numel() for tensor in tensors.values()) <= MOST_COPIED:
            values = _on_host(tensors)
            sizes = {name: norm(value) for name, value in values.items()}
        else:
            sizes = dict(zip(tensors, norms_at_once(list(tensors.values()))))
        self._before = values
        updates = {
            name: norm(value - before[name])
            for name, value in values.items()
            if name in before and before[name].shape == value.shape
        }
        odd = {name for name, size in sizes.items() if not math.isfinite(size)}
        if self._usually_infinite is None:
            self._usually_infinite = odd - parameters.keys()
        not_finite = tuple(name for name in tensors if name in odd - self._usually_infinite)
        update_norm = math.nan
        if trainable and trainable <= updates.keys():
            update_norm = math.hypot(*(updates[name] for name in trainable))
        norms: dict[Source, float] = {}
        for name, size in sizes.items():
            if tensors[name].numel() < MIN_ENTRIES:
                continue
            norms["weights" if name in parameters else "statistics", name] = size
            if name in updates and size > 0:
                norms["update", name] = updates[name] / size
            if name in values:
                norms["zeros", name] = 1 - values[name].count_nonzero().item() / values[name].numel()
        return Look(math.hypot(*(sizes[name] for name in trainable)), update_norm, not_finite, norms)


def _on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies, flat, with one transfer from every device."""
    values: dict[str, Tensor] = {}
    for device in {tensor.device for tensor in tensors.values()}:
        own = {name: tensor.reshape(-1) for name, tensor in tensors.items() if tensor.device == device}
        flat = torch.cat(list(own.values())).to("cpu", copy=True)
        values.update(zip(own, torch.split(flat, [len(tensor) for tensor in own.values()])))
    return {name: values[name] for name in tensors}

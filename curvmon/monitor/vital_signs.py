"""What is looked at in every validation, whatever the budget: is everything finite, where is the loss, how sharp is it.

One forward pass of the probe batch, one norm per tensor, and a few HVPs where there is time for them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from curvmon.alerts.context import has_norm, norms_at_once
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


class VitalSignsTaker:
    """Takes vital signs, one after the other, of the same model."""

    def __init__(self) -> None:
        self._norms = TensorNorms()

    def take(
        self, model: nn.Module, batches: Sequence[Any], loss: Loss, start: Tensor | None, findings: Findings
    ) -> tuple[VitalSigns, Tensor | None]:
        """The vital signs, and the leading eigenvector if there is a new one.

        Nothing raises but interrupts: what cannot be computed is NaN. `batches`: none for no loss. `start`: an earlier
        leading eigenvector; None for no HVPs.
        """
        weight_norm, update_norm, not_finite = self._norms.look(model)
        signs = VitalSigns(weight_norm=weight_norm, update_norm=update_norm, not_finite=not_finite)
        if not batches:
            return signs, None
        trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
        if start is not None and len(start) == trainable and not not_finite:
            try:
                warm = warm_sharpness(model, batches, loss=loss, start=start, findings=findings)
            except Exception as error:
                if is_out_of_memory(error):
                    release_memory()
            else:
                signs = replace(signs, sharpness=warm.value, sharpness_error=warm.error, hvps=warm.hvps)
                return replace(signs, loss=warm.loss), warm.vector
        try:
            value = probe_loss(model, batches, loss)
        except Exception:  # the next measurement says why
            return signs, None
        if not math.isfinite(value):
            signs = replace(signs, not_finite=(*not_finite, PROBE_LOSS))
        return replace(signs, loss=value), None


class TensorNorms:
    """Norms of the trainable parameters and of their last update, and what is not finite."""

    def __init__(self) -> None:
        self._before: dict[str, Tensor] = {}
        """the parameters at the last look, on the host"""
        self._usually_infinite: set[str] | None = None
        """names of buffers, attention masks for example"""

    @torch.no_grad()
    def look(self, model: nn.Module) -> tuple[float, float, tuple[str, ...]]:
        """Norm of the parameters, norm of their change since the last look, and names of what is not finite."""
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad and has_norm(p)}
        buffers = {name: b for name, b in model.named_buffers() if has_norm(b)}
        tensors, update_norm = {**parameters, **buffers}, math.nan
        if sum(tensor.numel() for tensor in tensors.values()) <= MOST_COPIED:
            values = _on_host(tensors)
            norms = {name: norm(value) for name, value in values.items()}
            now = {name: values[name] for name in parameters}
            before, self._before = self._before, now
            if now and all(name in before and before[name].shape == value.shape for name, value in now.items()):
                update_norm = math.hypot(*(norm(value - before[name]) for name, value in now.items()))
        else:
            norms = dict(zip(tensors, norms_at_once(list(tensors.values()))))
        odd = {name for name, size in norms.items() if not math.isfinite(size)}
        if self._usually_infinite is None:
            self._usually_infinite = odd - parameters.keys()
        not_finite = tuple(name for name in tensors if name in odd - self._usually_infinite)
        return math.hypot(*(norms[name] for name in parameters)), update_norm, not_finite


def _on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies, flat, with one transfer from every device."""
    values: dict[str, Tensor] = {}
    for device in {tensor.device for tensor in tensors.values()}:
        own = {name: tensor.reshape(-1) for name, tensor in tensors.items() if tensor.device == device}
        flat = torch.cat(list(own.values())).to("cpu", copy=True)
        values.update(zip(own, torch.split(flat, [len(tensor) for tensor in own.values()])))
    return {name: values[name] for name in tensors}

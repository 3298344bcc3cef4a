"""The context of a measurement: learning rate, training loss, weights, statistics, data, settings, operations.

`ContextTracker` lists what changed in values and operations at the same time as a rule was broken.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from curvmon.alerts.forecast import Forecast
from curvmon.alerts.wording import before_after, times
from curvmon.records import AFTER_LAST_NODE

Kind = str
"""learning rate, training loss, weights, statistics, operations"""
Source = tuple[Kind, str]
"""kind of a value, and the name of its tensor; empty for learning rate and training loss"""
TEXTS: dict[Kind, str] = {
    "learning rate": "learning rate",
    "training loss": "training loss",
    "weights": "norm of {}",
    "statistics": "norm of {}",
    "operations": "operations of {}:",
}
MIN_ENTRIES = 8
"""smaller tensors are ignored"""
MIN_SCORE, MIN_SPREAD = 6.0, 0.015
"""a value has changed if it deviates from its forecast by this many standard deviations; lower bound of a standard
deviation: 1.5 percent"""
MIN_CHANGES: dict[Kind, float] = {"learning rate": 0.4, "training loss": 0.4}
MIN_CHANGE = 0.1
"""and by ten percent, learning rate and training loss by half"""
WARM_UP = 3
"""measurements before the context can have changed"""


class Context(NamedTuple):
    """At one measurement: values by source, and the operations of each node (`Measurement.operations`)."""

    values: Mapping[Source, float] = {}
    operations: Mapping[str, Mapping[str, int]] = {}
    signs: Mapping[Source, float] = {}
    """what else was observed: updates and zeros of tensors, the training data, metrics that the user logs"""
    settings: Mapping[str, str] = {}
    """of modules, parameters and optimizers (`run_settings`)"""


class Cause(NamedTuple):
    """A change of the context at this measurement."""

    kind: Kind
    name: str
    """name of the tensor, or of the node whose operations changed; empty for learning rate and training loss"""
    change: str
    """`x 20`, `1 fewer Add`"""
    score: float
    before: float = math.nan
    after: float = math.nan
    """values; NaN for operations"""

    @property
    def text(self) -> str:
        """`learning rate 0.001 → 0.02 (x 20)`, `operations of blocks.2: 1 fewer Add`"""
        name = "the loss" if self.kind == "operations" and self.name == AFTER_LAST_NODE else self.name
        text = TEXTS[self.kind].format(name)
        if math.isnan(self.before):
            return f"{text} {self.change}"
        return f"{text} {before_after(self.before, self.after)} ({self.change})"


def context_values(
    norms: Mapping[Source, float], learning_rate: float = math.nan, training_loss: float = math.nan
) -> dict[Source, float]:
    """Learning rate and training loss if they are finite, norms of the parameters and of the floating-point buffers."""
    scalars: tuple[tuple[Source, float], ...] = (
        (("learning rate", ""), learning_rate),
        (("training loss", ""), training_loss),
    )
    values = {source: value for source, value in scalars if math.isfinite(value)}
    return {**values, **{source: norm for source, norm in norms.items() if source[0] in ("weights", "statistics")}}


@torch.no_grad()
def norms_at_once(tensors: Sequence[Tensor]) -> list[float]:
    """Of tensors that have one, computed where they are, with one transfer for all of them."""
    norms = [torch.linalg.vector_norm(tensor, dtype=_norm_dtype(tensor)) for tensor in tensors]
    values: list[float] = torch.stack([n.to(norms[0]) for n in norms]).tolist()
    return values


def has_norm(tensor: Tensor) -> bool:
    """Eight-bit tensors have no common dtype with others; lazy, meta, nested and sparse ones lack data or shape."""
    if (
        is_lazy(tensor)
        or not tensor.is_floating_point()
        or tensor.is_meta
        or tensor.is_nested
        or tensor.layout != torch.strided
    ):
        return False
    return tensor.element_size() > 1


def _norm_dtype(tensor: Tensor) -> torch.dtype:
    """Norms of half-precision tensors overflow in half precision."""
    return torch.promote_types(tensor.dtype, torch.float32)


class ContextTracker:
    """Takes the context of every measurement and lists what changed, by decreasing score."""

    def __init__(self) -> None:
        self._forecasts: dict[Source, Forecast] = {}
        self._operations: dict[str, dict[str, int]] = {}
        self._unchanged = 0
        """measurements since the operations last changed"""

    def update(self, context: Context) -> list[Cause]:
        causes = [cause for source, value in context.values.items() if (cause := self._changed(source, value))]
        return sorted([*causes, *self._changed_operations(context.operations)], key=lambda cause: -cause.score)

    def _changed(self, source: Source, value: float) -> Cause | None:
        if not value > 0 or not math.isfinite(value):
            return None
        forecast = self._forecasts.setdefault(source, Forecast(MIN_SPREAD))
        size, score, _ = forecast.deviation(math.log(value))
        kind, name = source
        if len(forecast) < WARM_UP or score <= MIN_SCORE or abs(size) <= MIN_CHANGES.get(kind, MIN_CHANGE):
            forecast.append(math.log(value))
            return None
        before = math.exp(forecast.last)
        forecast.restart(math.log(value))
        return Cause(kind, name, times(before, value), score, before, value)

    def _changed_operations(self, operations: Mapping[str, Mapping[str, int]]) -> list[Cause]:
        """Nodes that compute something else than before, unless they often do."""
        before, unchanged = self._operations, self._unchanged
        if not operations:
            return []
        self._operations = {node: dict(counts) for node, counts in operations.items()}
        changed = [node for node in operations if node in before and dict(operations[node]) != before[node]]
        self._unchanged = 0 if changed or before.keys() != operations.keys() else unchanged + 1
        if unchanged < WARM_UP or before.keys() != operations.keys():
            return []
        causes = []
        for node in changed:
            kinds = sorted({*before[node], *operations[node]})
            differences = {kind: operations[node].get(kind, 0) - before[node].get(kind, 0) for kind in kinds}
            listed = [f"{abs(n)} {'more' if n > 0 else 'fewer'} {kind}" for kind, n in differences.items() if n]
            causes.append(Cause("operations", node, ", ".join(listed), math.inf))
        return causes

    def state_dict(self) -> dict[str, Any]:
        """Lists, dicts, strings and numbers only."""
        return {
            "forecasts": [[*source, forecast.state_dict()] for source, forecast in self._forecasts.items()],
            "operations": {node: dict(counts) for node, counts in self._operations.items()},
            "unchanged": self._unchanged,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._forecasts = {}
        for kind, name, saved in state["forecasts"]:
            self._forecasts[kind, name] = Forecast(MIN_SPREAD)
            self._forecasts[kind, name].load_state_dict(saved)
        self._operations = {node: dict(counts) for node, counts in state["operations"].items()}
        self._unchanged = state["unchanged"]

"""A pulse of a training run: gain and curvature of the batch's loss along one optimizer step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class AttentionSigns:
    """How concentrated one attention of a forward pass is.

    Attributes:
        name: the module that calls it.
        largest_logit: the largest absolute value that enters its softmax, scaled, masked entries aside.
        lowest_entropy: the entropy of its weights over that of uniform ones, a mean over rows and samples, of the head
            in which it is lowest; NaN if no row has more than one key.
    """

    name: str
    largest_logit: float
    lowest_entropy: float


@dataclass(frozen=True)
class PulseRecord:
    """One pulse (`curvmon.pulse`), and when it was measured.

    Attributes:
        step: the optimizer step that it was measured at.
        epoch: of the run.
        gain: g^T u, by how much the step lowers the loss of its batch to first order.
        curvature: u^T H u.
        learning_rate: of the step; the largest of all parameter groups.
        loss: of the batch, before the step.
        step_ratio: the mean curvature of the last pulses over twice their mean gain; NaN before there are enough.
        critical_lr: the learning rate at which a step would leave the loss of its batch as it is, a mean over pulses;
            infinite where none is known, 0 where steps go uphill.
        critical: how many times longer this step would have to be for that, measured in one of three pulses, and NaN in
            the others; infinite where it is not reached near 1 / `ratio`.
        attention: the attentions of the forward pass before the step, in the order of their calls.
    """

    step: int
    epoch: int
    gain: float
    curvature: float
    learning_rate: float = math.nan
    loss: float = math.nan
    step_ratio: float = math.nan
    critical_lr: float = math.nan
    critical: float = math.nan
    attention: tuple[AttentionSigns, ...] = ()

    @property
    def attention_largest_logit(self) -> float:
        """Of all attentions; NaN without any."""
        return max(_numbers(signs.largest_logit for signs in self.attention), default=math.nan)

    @property
    def attention_lowest_entropy(self) -> float:
        """Of all attentions; NaN without any."""
        return min(_numbers(signs.lowest_entropy for signs in self.attention), default=math.nan)

    @property
    def ratio(self) -> float:
        """u^T H u / (2 g^T u) of this step alone: above 1, it raises the loss of its batch, to second order."""
        if self.gain:
            return self.curvature / (2 * self.gain)
        return math.copysign(math.inf, self.curvature) if self.curvature else math.nan

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> PulseRecord:
        attention = tuple(AttentionSigns(**signs) for signs in state.get("attention", ()))
        return cls(**{**state, "attention": attention})


def most_concentrated(attentions: Sequence[tuple[AttentionSigns, ...]]) -> tuple[AttentionSigns, ...]:
    """The largest logit and the lowest entropy of every attention, over several forward passes."""
    by_name: dict[str, list[AttentionSigns]] = {}
    for signs in (signs for attention in attentions for signs in attention):
        by_name.setdefault(signs.name, []).append(signs)
    return tuple(
        AttentionSigns(
            name,
            max(_numbers(signs.largest_logit for signs in several), default=math.nan),
            min(_numbers(signs.lowest_entropy for signs in several), default=math.nan),
        )
        for name, several in by_name.items()
    )


def _numbers(values: Iterable[float]) -> list[float]:
    """Those that are not NaN."""
    return [value for value in values if not math.isnan(value)]

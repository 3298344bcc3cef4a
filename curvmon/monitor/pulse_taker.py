"""One pulse: θ and the batch are copied before an optimizer step, gain and curvature computed after it.

    u = θ_before - θ_after, whatever changed θ: an optimizer, clipping, weight decay

Every CROSSING_EVERY-th also looks for the length of the step at which the loss is again what it was.

The loss is that of the batch, or of its first samples. They are a random sample of the batch that the step was made
for, so that g^T u and u^T H u are unbiased; with accumulated gradients, the last batch of the step is that sample.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from curvmon.errors import DivergedError
from curvmon.graph.attention_watch import AttentionWatch
from curvmon.monitor.batch_samples import detached_copy, first_samples, sample_count
from curvmon.monitor.fallbacks import is_out_of_memory
from curvmon.monitor.pairs_and_spectrum import release_memory
from curvmon.monitor.target import Target, undisturbed
from curvmon.operators.loss_crossing import REACH
from curvmon.operators.loss_differences import ChangingLossError, LossAlongStep, Watch, open_loss_along_step
from curvmon.pulse import Pulse, pulse_at
from curvmon.records import AttentionSigns

WHOLE, SLICE = 64, 32
"""samples up to which a batch is taken as a whole, and samples of a larger one"""
LEAST = 8
"""samples that a slice has at least, unless memory is short"""
CHECKED = 8
"""samples on which losses are compared with second derivatives"""
CHECK_EVERY = 100
"""pulses between two comparisons"""
CROSSING_EVERY = 3
"""pulses from one that looks for the crossing to the next: 0.4 to 0.46 more forward passes in the mean, 13 to 15 %"""
CLOSE = math.log(2)
"""tolerance of that crossing, in log t: those of single steps scatter by as much, and more of them say more than a
closer look at fewer"""
REACHES = 4.0
"""times the last crossing, in steps: the first try for the next one at most"""
SAME = 0.05
"""tolerance of gain and curvature, relative to the larger of them"""


class TakenPulse(NamedTuple):
    """A pulse, and the attentions of the forward pass at θ_before."""

    pulse: Pulse
    attention: tuple[AttentionSigns, ...]


class PulseTaker:
    """Takes pulses, one after the other, of the same model.

    Attributes:
        samples: of a batch that are used; None: as WHOLE and SLICE say.
        from_losses: whether gain and curvature come from differences of losses. False once they have been seen to
            differ from derivatives: the loss is another function in every forward pass, or has kinks.
        has_attention: whether to look for it. False once a pulse has seen none.
    """

    def __init__(self) -> None:
        self.samples: int | None = None
        self.from_losses = True
        self.has_attention = True
        self._before: dict[str, Tensor] = {}
        self._batch: Any = None
        self._error: Exception | None = None
        self._spacing = 1.0
        self._reach = REACH
        """for the next crossing"""
        self._pulses = 0

    @property
    def is_prepared(self) -> bool:
        return self._error is not None or bool(self._before)

    def prepare(self, model: nn.Module, batch: Any) -> None:
        """Before a step: copy the parameters, unless they have been, and the samples. Nothing raises but interrupts."""
        try:
            trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
            if any(is_lazy(p) for p in trainable.values()):
                return
            if self._before.keys() != trainable.keys():
                self._before = {name: p.detach().clone() for name, p in trainable.items()}
            self._batch = detached_copy(self._slice(batch))
        except Exception as error:  # `take` raises it: all ranks take together
            self.forget()
            self._error = error

    def _slice(self, batch: Any) -> Any:
        size = sample_count(batch)
        if self.samples is None and size is not None and size > WHOLE:
            return first_samples(batch, SLICE)
        return batch if self.samples is None else first_samples(batch, self.samples)

    def forget(self) -> None:
        """Free the copies."""
        self._before, self._batch, self._error = {}, None, None

    @property
    def prepared_samples(self) -> int:
        """Of the batch that is prepared; 0 where they cannot be counted, or there is none."""
        return (sample_count(self._batch) or 0) if self._batch is not None else 0

    def _has_moved(self, model: nn.Module) -> bool:
        now = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
        if now.keys() != self._before.keys():  # frozen or replaced meanwhile
            return False
        return any(not torch.equal(now[name], before) for name, before in self._before.items())

    def check(self, target: Target, world_size: int) -> None:
        """Before `take`: compare differences of losses with derivatives, if that is due, on a few samples.

        Nothing raises but interrupts.
        """
        if not self.from_losses or self._error is not None or self._pulses % CHECK_EVERY:
            return
        with suppress(Exception):  # `take` fails in the same way, and raises
            if self._has_moved(target.model):
                with undisturbed(target, world_size):
                    self.from_losses = self._agree(target, first_samples(self._batch, CHECKED))

    def _agree(self, target: Target, batch: Any) -> bool:
        before = list(self._before.values())
        with open_loss_along_step(target.model, batch, loss=target.loss, before=before) as along:
            try:
                differences = along.differences(self._spacing)
                along.check_repeats()
            except ChangingLossError:
                return False
            self._spacing = differences.next_spacing
            size = max(abs(differences.gain), abs(differences.curvature))
            if abs(along.gain() - differences.gain) > SAME * size:
                return False
        try:
            second = pulse_at(before, target.model, batch, loss=target.loss)
        except DivergedError:
            raise
        except Exception as error:  # no double backward, no memory for it: the gradient has to do
            if is_out_of_memory(error):
                release_memory()
            return True
        return abs(second.curvature - differences.curvature) <= SAME * size

    def take(self, target: Target, world_size: int) -> TakenPulse | None:
        """After the step; None if it has not moved the parameters. Leaves no trace; raises whatever goes wrong."""
        if self._error is not None:
            raise self._error
        if not self._has_moved(target.model):
            return None
        self._pulses += 1
        watch = AttentionWatch(target.model)
        with undisturbed(target, world_size):
            pulse = self._pulse(target, watch)
            attention = watch.signs()
        self.has_attention = bool(attention)
        return TakenPulse(pulse, attention)

    def _pulse(self, target: Target, watch: AttentionWatch) -> Pulse:
        """For second derivatives, a forward pass of its own shows the attentions."""
        model, batch, loss, before = target.model, self._batch, target.loss, list(self._before.values())
        looks: Watch = watch if self.has_attention else nullcontext
        if self.from_losses or self.has_attention:
            with open_loss_along_step(model, batch, loss=loss, before=before, watch=looks) as along:
                pulse = self._pulse_from(along) if self.from_losses else None
            if pulse is not None:
                return pulse
        return pulse_at(before, model, batch, loss=loss, critical=self._looks_for_crossing)

    @property
    def _looks_for_crossing(self) -> bool:
        """The first pulse does."""
        return self._pulses % CROSSING_EVERY == 1

    def _pulse_from(self, along: LossAlongStep) -> Pulse | None:
        """None if second derivatives have to do, from now on."""
        try:
            seen = along.differences(self._spacing)
        except ChangingLossError:
            self.from_losses = False
            return None
        self._spacing = seen.next_spacing
        critical = math.nan
        if self._looks_for_crossing:
            critical = along.crossing(seen.gain, seen.curvature, CLOSE, self._reach)
            if math.isfinite(critical):
                self._reach = max(REACH, REACHES * critical)
        return Pulse(seen.gain, seen.curvature, seen.loss, critical)

    def state_dict(self) -> dict[str, Any]:
        return {
            "samples": self.samples,
            "from_losses": self.from_losses,
            "spacing": self._spacing,
            "reach": self._reach,
            "pulses": self._pulses,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.samples, self.from_losses = state["samples"], state["from_losses"]
        self._spacing, self._reach, self._pulses = state["spacing"], state["reach"], state["pulses"]

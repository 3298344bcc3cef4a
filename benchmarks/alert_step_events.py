"""Events in how steps are made: learning rate, optimizer, and what users change themselves."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.alert_event import Apply, NotApplicableError, Place
from benchmarks.alert_training import Run


def rate_times(factor: float) -> Apply:
    """On top of the schedule."""

    def apply(run: Run, random: torch.Generator) -> Place:
        run.factor = factor
        return None

    return apply


def rate_grows(per_epoch: float) -> Apply:
    """A schedule that never ends."""

    def apply(run: Run, random: torch.Generator) -> Place:
        before, start = run.schedule, run.epoch
        run.schedule = lambda epoch: before(start) * (1 + per_epoch) ** (1 + int(epoch) - start)
        return None

    return apply


def ascent(run: Run, random: torch.Generator) -> Place:
    run.ascends = True
    return None


def optimizer_state_damaged(run: Run, random: torch.Generator) -> Place:
    """As after a checkpoint in too low a precision: second moments are lost, although the count of steps is not, or the
    momentum is far too large. The next steps are too large."""
    factors = {"exp_avg_sq": 1e-4, "square_avg": 1e-4, "momentum_buffer": 30.0}
    for state in run.optimizer.state.values():
        for key, value in state.items():
            if key in factors and isinstance(value, Tensor):
                value.mul_(factors[key])
    return None


def weight_decay_negative(run: Run, random: torch.Generator) -> Place:
    """Weights grow by about 5 % per epoch, on top of their gradients."""
    if not isinstance(run.optimizer, (torch.optim.SGD, torch.optim.AdamW)):
        raise NotApplicableError("the gradients of weight decay are normalized")
    for group, rate in zip(run.optimizer.param_groups, run.rates):
        effective = rate * run.schedule(run.epoch) / (1 - group.get("momentum", 0.0))
        group["weight_decay"] = -0.05 / (run.family.steps * effective)
    return None


# ---- the user's own hand ----


def warm_restart(run: Run, random: torch.Generator) -> Place:
    """The schedule begins again, as when training is continued."""
    before, start = run.schedule, run.epoch
    if before(start) == before(0):
        raise NotApplicableError("the learning rate is constant")
    run.schedule = lambda epoch: before(epoch - start)
    return None


def step_decay(run: Run, random: torch.Generator) -> Place:
    """To a tenth."""
    before = run.schedule
    run.schedule = lambda epoch: 0.1 * before(epoch)
    return None


def batch_times(factor: float) -> Apply:
    def apply(run: Run, random: torch.Generator) -> Place:
        run.batch = round(run.batch * factor)
        return None

    return apply


def weight_decay_changed(run: Run, random: torch.Generator) -> Place:
    """Ten times as much, or 0.001 where there was none."""
    for group in run.optimizer.param_groups:
        group["weight_decay"] = 10 * group["weight_decay"] or 1e-3
    return None


def first_half_frozen(run: Run, random: torch.Generator) -> Place:
    parameters = list(run.model.parameters())
    if not all(parameter.requires_grad for parameter in parameters):
        raise NotApplicableError("a part is frozen already")
    for parameter in parameters[: len(parameters) // 2]:
        parameter.requires_grad_(False)
    return None

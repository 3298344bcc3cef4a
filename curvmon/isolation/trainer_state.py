"""What a training step can reach through its Trainer stands still while the step is measured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from curvmon.errors import InputError

_LEFT_ALONE = ("should_stop",)
"""A signal may ask for it in the seconds that a measurement takes; `step_loss` undoes what the step itself asks for."""


@contextmanager
def standing_still(trainer: Any) -> Iterator[None]:
    """The stage is training, learning rates and schedules do not move, and no optimizer steps.

    A step may look at `self.trainer.training`, set `lr` in `self.optimizers().param_groups`, step a scheduler, or count
    on the Trainer or the datamodule. A measurement at the end of a validation would otherwise run it in another stage,
    and training would go on with other learning rates.
    """
    with ExitStack() as stack:
        stack.callback(setattr, trainer.state, "stage", trainer.state.stage)
        trainer.training = True
        for owner in (trainer, getattr(trainer, "datamodule", None)):
            if owner is not None:
                stack.enter_context(_attributes_kept(owner))
        for optimizer in trainer.optimizers:
            stack.enter_context(_groups_kept(optimizer.param_groups))
        # `self.optimizers()` gives wrappers that inherit from the optimizer's class, with methods of their own
        for optimizer in (*trainer.optimizers, *getattr(trainer.strategy, "_lightning_optimizers", ())):
            stack.enter_context(shadowed(optimizer, step=_refuse, zero_grad=_nothing))
        for config in trainer.lr_scheduler_configs:
            stack.enter_context(shadowed(config.scheduler, step=_nothing))
        yield


@contextmanager
def shadowed(owner: Any, **attributes: Any) -> Iterator[None]:
    """Attributes of the instance, past a `__setattr__` of its own; gone afterwards."""
    if not hasattr(owner, "__dict__"):  # it has slots
        yield
        return
    before = {name: owner.__dict__[name] for name in attributes if name in owner.__dict__}
    owner.__dict__.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            if name in before:
                owner.__dict__[name] = before[name]
            else:
                owner.__dict__.pop(name, None)


@contextmanager
def _attributes_kept(owner: Any) -> Iterator[None]:
    before = dict(owner.__dict__)
    try:
        yield
    finally:
        for name in [name for name in owner.__dict__ if name not in before and name not in _LEFT_ALONE]:
            del owner.__dict__[name]
        owner.__dict__.update({name: value for name, value in before.items() if name not in _LEFT_ALONE})


@contextmanager
def _groups_kept(groups: list[dict[str, Any]]) -> Iterator[None]:
    """Learning rate, momentum, …: what a step sets by hand. The dicts stay the same objects, a scheduler knows them."""
    before = [(group, dict(group)) for group in groups]
    try:
        yield
    finally:
        for group, entries in before:
            group.clear()
            group.update(entries)


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise InputError("the training step steps its optimizer, which a measurement must not; pass loss=...")

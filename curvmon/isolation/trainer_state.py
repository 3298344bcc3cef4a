"""Freeze what a training step can change through its Trainer, while the step is measured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from curvmon.errors import InputError

_NOT_RESTORED = ("should_stop",)
"""a signal may set it during a measurement; `step_loss` undoes what the step itself sets"""


@contextmanager
def frozen_trainer_state(trainer: Any) -> Iterator[None]:
    """The stage is training, optimizers and schedulers do not step, and attributes are restored on exit.

    A step may read `self.trainer.training`, set `lr` in `self.optimizers().param_groups`, step a scheduler, or keep a
    counter on the Trainer or the datamodule. A measurement at the end of a validation would run it in another stage,
    and training would continue with other learning rates.
    """
    with ExitStack() as stack:
        stack.callback(setattr, trainer.state, "stage", trainer.state.stage)
        trainer.training = True
        for owner in (trainer, getattr(trainer, "datamodule", None)):
            if owner is not None:
                stack.enter_context(_attributes_restored(owner))
        for optimizer in trainer.optimizers:
            stack.enter_context(_groups_restored(optimizer.param_groups))
        # `self.optimizers()` returns wrappers that inherit from the optimizer's class and have their own methods
        for optimizer in (*trainer.optimizers, *getattr(trainer.strategy, "_lightning_optimizers", ())):
            stack.enter_context(shadowed(optimizer, step=_refuse, zero_grad=_nothing))
        for config in trainer.lr_scheduler_configs:
            stack.enter_context(shadowed(config.scheduler, step=_nothing))
        yield


@contextmanager
def shadowed(owner: Any, **attributes: Any) -> Iterator[None]:
    """Instance attributes for the life of the context, set without the class's `__setattr__`."""
    if not hasattr(owner, "__dict__"):  # a class with slots
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
def _attributes_restored(owner: Any) -> Iterator[None]:
    before = dict(owner.__dict__)
    try:
        yield
    finally:
        for name in [name for name in owner.__dict__ if name not in before and name not in _NOT_RESTORED]:
            del owner.__dict__[name]
        owner.__dict__.update({name: value for name, value in before.items() if name not in _NOT_RESTORED})


@contextmanager
def _groups_restored(groups: list[dict[str, Any]]) -> Iterator[None]:
    """Learning rate, momentum, …: what a step may set. The dicts stay the same objects: schedulers refer to them."""
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

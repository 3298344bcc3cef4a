"""The loss of a LightningModule: its own `training_step`, in eval mode, with its logging silenced."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from curvmon.errors import LossError
from curvmon.integrations.lightning.compatibility import attached_trainer
from curvmon.isolation.trainer_state import frozen_trainer_state, shadowed

if TYPE_CHECKING:
    import pytorch_lightning as pl

Loss = Callable[[Any, Any], Tensor]
_WRITERS = (
    ("lightning_fabric", "Logger"),
    ("lightning", "Logger"),
    ("torch", "SummaryWriter"),
    ("tensorboardX", "SummaryWriter"),
    ("wandb", "Run"),
)
"""package and class of attributes through which a module may write to a dashboard by itself"""
_DASHBOARDS = {"wandb": ("run", "log"), "mlflow": ("log_metric", "log_metrics", "log_image", "log_figure", "log_text")}
"""functions and attributes of a package that write to a dashboard"""


def step_loss(module: pl.LightningModule) -> Loss:
    """`training_step(batch, 0)` as a loss of (model, batch)."""
    takes_index = _takes_two(module.training_step)

    def loss(model: Any, batch: Any) -> Tensor:
        with _not_stopped(attached_trainer(model)):
            returned = model.training_step(batch, 0) if takes_index else model.training_step(batch)
        if isinstance(returned, Mapping):
            returned = returned.get("loss")
        if returned is None:
            raise LossError("training_step returned no loss for the probe batch; pass loss= to CurvatureMonitor")
        result: Tensor = returned
        return result

    return loss


@contextmanager
def _not_stopped(trainer: Any) -> Iterator[None]:
    """A step may end training at a small loss; that of the probe batch must not count."""
    before = getattr(trainer, "should_stop", None)
    try:
        yield
    finally:
        if before is not None:
            trainer.should_stop = before


def _takes_two(function: Callable[..., Any]) -> bool:
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return True
    return sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters) >= 2


@contextmanager
def isolated_step(trainer: pl.Trainer, module: nn.Module) -> Iterator[None]:
    """Inside the context a training step neither logs nor changes the Trainer, its optimizers or its schedulers."""
    with frozen_trainer_state(trainer), without_logging(trainer, module):
        yield


@contextmanager
def without_logging(trainer: pl.Trainer, module: nn.Module) -> Iterator[None]:
    """Inside the context `self.log`, `self.logger`, `self.print`, `wandb.log` and summary writers do nothing.

    Outside its hooks, `log` raises or overwrites `callback_metrics`.
    """
    gathered = partial(_gather_of_one, trainer.world_size, getattr(module, "device", None))
    with ExitStack() as stack:
        for inner in module.modules():
            if hasattr(inner, "log_dict") and hasattr(inner, "training_step"):
                stack.enter_context(
                    shadowed(inner, log=_nothing, log_dict=_nothing, print=_nothing, all_gather=gathered)
                )
            writers = [name for name, value in inner.__dict__.items() if _is_writer(value)]
            stack.enter_context(shadowed(inner, **dict.fromkeys(writers, _NullLogger())))
        for package, names in _DASHBOARDS.items():
            if getattr(sys.modules.get(package), names[0], None) is not None:
                stack.enter_context(shadowed(sys.modules[package], **dict.fromkeys(names, _NullLogger())))
        loggers = list(trainer.loggers)
        if loggers:
            trainer.loggers = [cast(Any, _NullLogger())]
            stack.callback(setattr, trainer, "loggers", loggers)
        yield


def _is_writer(value: Any) -> bool:
    return any((base.__module__.split(".")[0], base.__name__) in _WRITERS for base in type(value).__mro__)


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _gather_of_one(world_size: int, device: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
    """`all_gather` of this rank alone: every rank measures by itself, and a collective would wait for the others.

    If several ranks train, the step expects a dimension for them.
    """

    def gathered(value: Any) -> Tensor:
        tensor = torch.as_tensor(value, device=device)
        return tensor.unsqueeze(0) if world_size > 1 else tensor

    return apply_to_collection(data, (Tensor, bool, int, float), gathered)


class _NullLogger:
    """Every attribute can be called, entered or iterated over, and does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self

    def __getitem__(self, key: Any) -> Any:
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        return None

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *args: Any) -> None:
        return None

"""The loss of a LightningModule: its own `training_step`, in eval mode, with its logging silenced."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from curvmon.errors import LossError
from curvmon.isolation.trainer_state import shadowed

Loss = Callable[[Any, Any], Tensor]
_WRITERS = (
    ("lightning_fabric", "Logger"),
    ("lightning", "Logger"),
    ("torch", "SummaryWriter"),
    ("tensorboardX", "SummaryWriter"),
    ("wandb", "Run"),
)
"""package and class of what a module may hold to write to a dashboard by itself"""
_DASHBOARDS = {"wandb": ("run", "log"), "mlflow": ("log_metric", "log_metrics", "log_image", "log_figure", "log_text")}
"""names in a package that do so without being handed anything"""


def step_loss(module: Any) -> Loss:
    """`training_step(batch, 0)` as a loss of (model, batch)."""
    takes_index = _takes_two(module.training_step)

    def loss(model: Any, batch: Any) -> Tensor:
        with _not_stopped(getattr(model, "_trainer", None)):
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
    """A step that ends training at a small loss has not seen that of the probe batch."""
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


def takes_iterator(module: Any) -> bool:
    """`training_step(self, dataloader_iter)` draws its batches itself."""
    return "dataloader_iter" in inspect.signature(module.training_step).parameters


@contextmanager
def silenced(trainer: Any, module: nn.Module) -> Iterator[None]:
    """What the step logs in the meantime goes nowhere: `self.log`, `self.logger`, `self.print`, `wandb.log`, a writer.

    `log` outside its place raises, or silently overwrites `callback_metrics`.
    """
    gathered = partial(_alone, trainer.world_size, getattr(module, "device", None))
    with ExitStack() as stack:
        for inner in module.modules():
            if hasattr(inner, "log_dict") and hasattr(inner, "training_step"):
                stack.enter_context(
                    shadowed(inner, log=_nothing, log_dict=_nothing, print=_nothing, all_gather=gathered)
                )
            writers = [name for name, value in inner.__dict__.items() if _is_writer(value)]
            stack.enter_context(shadowed(inner, **dict.fromkeys(writers, _DeafLogger())))
        for package, names in _DASHBOARDS.items():
            if getattr(sys.modules.get(package), names[0], None) is not None:
                stack.enter_context(shadowed(sys.modules[package], **dict.fromkeys(names, _DeafLogger())))
        loggers = list(trainer.loggers)
        if loggers:
            trainer.loggers = [_DeafLogger()]
            stack.callback(setattr, trainer, "loggers", loggers)
        yield


def _is_writer(value: Any) -> bool:
    return any((base.__module__.split(".")[0], base.__name__) in _WRITERS for base in type(value).__mro__)


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _alone(world: int, device: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
    """`all_gather` of one process: every process measures by itself, a collective would wait for the others.

    Where there are several in training, the step expects a dimension for them.
    """

    def gathered(value: Any) -> Tensor:
        tensor = torch.as_tensor(value, device=device)
        return tensor.unsqueeze(0) if world > 1 else tensor

    return apply_to_collection(data, (Tensor, bool, int, float), gathered)


class _DeafLogger:
    """Any attribute of it can be called, entered, iterated, and does nothing."""

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

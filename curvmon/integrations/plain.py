"""`Monitor`: what `CurvatureMonitor` does, in a training loop of one's own, in Fabric or with Accelerate."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from curvmon.errors import InputError
from curvmon.monitor.target import Target
from curvmon.recorder.loop import Loop, largest_scheduled
from curvmon.recorder.monitored_run import MonitoredRun
from curvmon.records import Alert
from curvmon.reporting.loop_loggers import loggers_of

_WRAPPERS = ("DistributedDataParallel", "_FabricModule")
"""classes whose `.module` is the model itself"""


class Monitor(MonitoredRun):
    """Measures the curvature between the layers of a network in any training loop, and its top eigenvalues.

        monitor = curvmon.Monitor(log=writer)
        monitor.attach(model, optimizer, loss=loss, total_steps=10_000)
        for step, batch in enumerate(batches):
            monitor.observe(batch)                      # before the forward pass
            value = loss(model, batch)
            ...                                         # backward, optimizer.step()
            monitor.step(step, loss=value)              # after the optimizer step
            if step % 500 == 0:
                monitor.measure(step)                   # at every validation
        monitor.close()

    Training is bit for bit the same as without. With several processes, all of them make the same calls.

    Args:
        log: where numbers, pictures and alerts go: a function of (dict, step), a SummaryWriter, a W&B run, an
            MlflowClient with an active run, a logger of Lightning or Fabric, or a list of these.
        folder: where `history.jsonl` goes; None: the folder of the first logger that has one.
        settings: those of `CurvatureMonitor`, by name. `data`: which of the batches that are observed are measured.
            `initial`: at the first batch that is observed. `every_n_validations`: at every n-th call of `measure`.
            `on_alert="stop"` sets `should_stop`.

    Attributes:
        should_stop: `on_alert="stop"` asks the loop to end.
        history: the latest `Measurement`s of pairs of layers, oldest first.
        spectra: the latest `Spectrum`s, oldest first, without eigenvectors.
        snapshots: both, with the step.
        pulses: the latest `PulseRecord`s, oldest first: gain and curvature along single optimizer steps.
        alerts: all alerts of the run, oldest first, those before a resume included.
        notices: informational events, not counted as alerts, such as the edge of stability.

    Raises:
        InputError: an argument has a wrong type or value.

    Example:
        >>> import torch, curvmon
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> monitor = curvmon.Monitor(log=lambda numbers, step: None, eigenvalues=1)
        >>> monitor.attach(model, loss=lambda model, batch: model(batch).square().mean())
        >>> monitor.observe(torch.ones(8, 4))
        >>> len(monitor.history), monitor.history[0].nodes
        (1, ('0', '2'))
    """

    _name = "Monitor"

    def __init__(self, log: Any = None, *, folder: str | os.PathLike[str] | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        if self._settings.on_alert == "checkpoint":
            raise InputError("on_alert='checkpoint' needs a Trainer that writes one; pass a function that does")
        self._loggers = loggers_of(log)
        self._folder = None if folder is None else Path(folder)
        self._loop: PlainLoop | None = None
        self._steps = 0
        self._has_started = False
        self.should_stop = False

    def attach(
        self,
        model: nn.Module,
        optimizer: Any = None,
        loss: Callable[[Any, Any], Tensor] | None = None,
        *,
        scheduler: Any = None,
        total_steps: int | None = None,
    ) -> None:
        """Before training; `load_state_dict` may come before or after.

        Args:
            model: also wrapped by DistributedDataParallel or Fabric.
            optimizer: one, a list, or None. Stability limits are those of a single one.
            loss: `loss(model, batch)` returns a scalar tensor. It gets the model without its wrapper.
            scheduler: one, a list, or None: what explains a learning rate that changes.
            total_steps: of the whole run, so that measurements can be planned over it; None: its end is not known.

        Raises:
            InputError: there is no loss.
            NodeError: `nodes` or `output` match no module.
        """
        given = loss or self._settings.loss
        if not callable(given):
            raise InputError("attach needs loss=, a function of (model, batch) that returns a scalar tensor")
        if total_steps is not None and total_steps < 1:
            raise InputError(f"total_steps must be None or at least 1, not {total_steps!r}")
        distributed = dist.is_available() and dist.is_initialized()
        self._activate(None, dist.get_world_size() if distributed else 1)
        loop = PlainLoop(_unwrapped(model), given, self._loggers, self._folder, self._stop)
        loop.optimizers = [getattr(each, "optimizer", each) for each in _listed(optimizer)]
        loop.schedulers, loop.total_steps, loop.steps = _listed(scheduler), total_steps, self._steps
        loop.is_global_zero = not distributed or dist.get_rank() == 0
        self._recorder.check(loop.model)
        self._loop, self._has_started = loop, False

    def observe(self, batch: Any, source: Literal["train", "val"] = "train") -> None:
        """A batch, before its forward pass; a validation batch with `source="val"`.

        The first of them become the probe batch. Training batches also say what the data looks like, and are what
        pulses are computed on. With accumulated gradients: every batch of a step.
        """
        loop = self._started()
        if source == "val":
            self._observe_validation_batch(batch)
        elif source == "train":
            self._before_batch(loop, batch)
        else:
            raise InputError(f'source must be "train" or "val", not {source!r}')

    def step(self, step: int, loss: Tensor | float | None = None) -> None:
        """After an optimizer step. `step`: its number, on the x-axis of the loggers; `loss`: of its batches."""
        loop = self._started()
        loop.steps += 1
        loop.step = step
        self._after_batch(loop, torch.tensor(loss) if isinstance(loss, float) else loss)

    def measure(self, step: int, metrics: Mapping[str, float] | None = None) -> None:
        """At a validation: vital signs, and a measurement as often as the budget allows.

        `metrics`: what the validation has found, by name, as evidence for alerts.
        """
        loop = self._started()
        loop.step, loop.steps, loop.metrics = step, max(loop.steps, step), dict(metrics or {})
        self._after_validation(loop, step)

    def close(self) -> None:
        """At the end of training: the last measurement, if it was skipped, and the last pictures."""
        if self._loop is not None and self._has_started:
            self._end(self._loop)
            self._has_started = False

    def _started(self) -> PlainLoop:
        if self._loop is None:
            raise InputError("Monitor.attach(model, optimizer, loss=...) comes first")
        if not self._has_started:
            self._has_started = True
            self._start(self._loop)
        return self._loop

    def _stop(self) -> None:
        self.should_stop = True

    def state_dict(self) -> dict[str, Any]:
        """Primitives, lists, dicts and tensors only, so that it can be loaded with `weights_only`."""
        return {**super().state_dict(), "steps": self._steps if self._loop is None else self._loop.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """All of the state; if it cannot be read, one warning and none of it."""
        super().load_state_dict(state_dict)
        self._steps = int(state_dict.get("steps", 0))
        if self._loop is not None:
            self._loop.steps = self._steps


class PlainLoop(Loop):
    """What the calls of a `Monitor` say about a loop."""

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Any, Any], Tensor],
        loggers: Sequence[Any],
        folder: Path | None,
        stop: Callable[[], None],
    ) -> None:
        self.model = model
        self.loggers = loggers
        self.folder = folder
        self.optimizers: Sequence[Any] = ()
        self.schedulers: Sequence[Any] = ()
        self.total_steps: int | None = None
        self.steps = self.step = 0
        self.metrics: dict[str, float] = {}
        self._loss, self._stop = loss, stop

    @property
    def progress(self) -> float | None:
        return None if self.total_steps is None else min(1.0, self.steps / self.total_steps)

    @property
    def batches_ahead(self) -> float | None:
        return None if self.total_steps is None else max(0, self.total_steps - self.steps)

    @property
    def scheduled_rate(self) -> float | None:
        return largest_scheduled(self.schedulers)

    def target(self) -> Target:
        tensor = next(iter(self.model.parameters()), None)
        return Target(
            model=self.model,
            loss=self._loss,
            device=torch.device("cpu") if tensor is None else tensor.device,
            optimizer=self.optimizers[0] if len(self.optimizers) == 1 else None,
        )

    def validation_metrics(self) -> Mapping[str, float]:
        return self.metrics

    def stop(self, alert: Alert) -> None:
        self._stop()
        self.announce(f"curvmon asks to stop at step {alert.step}: {alert.headline}; should_stop is True")

    def save_checkpoint(self, alert: Alert) -> None:
        raise NotImplementedError("refused by Monitor")


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _unwrapped(model: nn.Module) -> nn.Module:
    while type(model).__name__ in _WRAPPERS and isinstance(model.module, nn.Module):
        model = model.module
    return model

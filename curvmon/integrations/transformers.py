"""`CurvatureCallback`: what `CurvatureMonitor` does, in the `Trainer` of the transformers library.

The Trainer tells its callbacks neither the batches nor the losses: hooks on the model's forward pass see them. Nor does
it hand them what writes its logs, or the checkpoint that it resumes from: `_variable_of_a_caller` finds both.
"""

from __future__ import annotations

import copy
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback
from transformers.trainer_callback import CallbackHandler

from curvmon.errors import LossError, warn
from curvmon.monitor.target import Target
from curvmon.recorder.loop import Loop, largest_scheduled
from curvmon.recorder.monitored_run import MonitoredRun
from curvmon.records import Alert

STATE_FILE = "curvmon.pt"
"""in the folder of every checkpoint"""
_NOT_OF_THE_BATCH = ("num_items_in_batch", "past_key_values")
"""arguments of the model that the Trainer and `generate` add"""
_TIMINGS = ("_runtime", "_per_second", "_time", "epoch")
"""endings of metrics that say nothing about the model"""


class CurvatureCallback(MonitoredRun, TrainerCallback):
    """Measures the curvature between the layers of a network, and its top eigenvalues, in `transformers.Trainer`.

    `Trainer(callbacks=[CurvatureCallback()])` is all it needs: it measures before the first step and after every
    evaluation (without `eval_strategy`, after every epoch), and logs to whatever `report_to` names. Training is bit for
    bit the same as without. Its state is in `curvmon.pt` of every checkpoint, and goes on with
    `resume_from_checkpoint`.

    Args:
        settings: those of `CurvatureMonitor`, by name. `loss(model, batch)`, with `batch` the arguments of the model,
            is the model's own by default. `on_alert="checkpoint"` saves one as the Trainer does.

    Attributes:
        history: the latest `Measurement`s of pairs of layers, oldest first.
        spectra: the latest `Spectrum`s, oldest first, without eigenvectors.
        snapshots: both, with step and epoch.
        pulses: the latest `PulseRecord`s, oldest first: gain and curvature along single optimizer steps.
        alerts: all alerts of the run, oldest first, those before a resume included.
        notices: informational events, not counted as alerts, such as the edge of stability.

    Raises:
        InputError: an argument has a wrong type or value.
        NodeError: `nodes` or `output` match no module, before training starts.
        CurvmonError: the run cannot be monitored, with `strict=True`, before training starts.
    """

    _name = "CurvatureCallback"

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._training: _Training | None = None
        self._hooks: list[Any] = []
        self._losses: list[Tensor] = []
        """of the batches of the step that is being made"""
        self._arguments: AbstractSet[str] = frozenset()
        """of the model in training"""
        self._is_measuring = False

    # ---- events of the Trainer ----

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._close()
        model = given["model"]
        self._activate(_unsupported(args), args.world_size)
        if not self._active:
            return
        optimizer = given["optimizer"]
        handler = _variable_of_a_caller("self", lambda value: isinstance(value, CallbackHandler))
        self._training = _Training(
            args, state, control, model, getattr(optimizer, "optimizer", optimizer), given["lr_scheduler"], handler
        )
        self._recorder.check(model)
        if state.global_step > 0:
            self._resume(args, state)
        self._start(self._loop())
        self._hooks = [
            model.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            model.register_forward_hook(self._after_forward, with_kwargs=True),
        ]

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._losses = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if self._training is not None:
            self._recorder.pulsing.before_optimizer_step(self._training.optimizer)

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if self._training is not None:
            with self._measuring():
                self._after_batch(self._loop(), torch.stack(self._losses).mean() if self._losses else None)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **given: Any) -> None:
        if self._training is not None:
            with self._measuring():
                self._after_validation(self._loop(metrics), state.global_step)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if self._training is not None and not _evaluates(args):
            with self._measuring():
                self._after_validation(self._loop(), state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        folder = _checkpoint(args, state)
        if self._training is not None and state.is_world_process_zero and folder.is_dir():
            try:
                torch.save(self.state_dict(), folder / STATE_FILE)
            except Exception as error:  # a full disk, for instance
                warn(f"{folder / STATE_FILE} was not written ({type(error).__name__}: {error}); training goes on")

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if self._training is not None:
            with self._measuring():
                # the Trainer has gone back to other parameters than those of the last step
                self._end(self._loop(), measures=not args.load_best_model_at_end)
        self._close()

    # ---- the model's forward pass ----

    def _before_forward(self, module: nn.Module, positional: Any, named: dict[str, Any]) -> None:
        if self._is_measuring or positional or named.get("past_key_values") is not None:
            return
        batch = {key: value for key, value in named.items() if key not in _NOT_OF_THE_BATCH}
        with self._measuring():
            if module.training:
                self._arguments = batch.keys()
                self._before_batch(self._loop(), batch)
            elif batch.keys() >= self._arguments:  # an evaluation may also generate text, without labels
                self._observe_validation_batch(batch)

    def _after_forward(self, module: nn.Module, positional: Any, named: dict[str, Any], outputs: Any) -> None:
        loss = None if self._is_measuring or not module.training else _loss_of(outputs)
        if loss is not None and self._training is not None:
            # divided by the number of items in all batches of the step
            scale = 1 if named.get("num_items_in_batch") is None else self._training.args.gradient_accumulation_steps
            self._losses.append(loss.detach().float() * scale)

    @contextmanager
    def _measuring(self) -> Iterator[None]:
        """Forward passes of measurements are none of the Trainer's."""
        before, self._is_measuring = self._is_measuring, True
        try:
            yield
        finally:
            self._is_measuring = before

    # ---- helpers ----

    def _loop(self, metrics: Mapping[str, Any] | None = None) -> TransformersLoop:
        assert self._training is not None
        return TransformersLoop(self._training, self._settings.loss or _model_loss, metrics or {})

    def _resume(self, args: Any, state: Any) -> None:
        resumed = _variable_of_a_caller("resume_from_checkpoint", lambda value: isinstance(value, (str, os.PathLike)))
        path = (_checkpoint(args, state) if resumed is None else Path(resumed)) / STATE_FILE
        if path.is_file():
            self.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))

    def _close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._training, self._hooks, self._losses = None, [], []


@dataclass(frozen=True)
class _Training:
    """What belongs to one call of `Trainer.train`."""

    args: Any
    state: Any
    control: Any
    model: nn.Module
    optimizer: Any
    scheduler: Any
    handler: Any


class TransformersLoop(Loop):
    """Made again in every event."""

    def __init__(
        self, training: _Training, loss: Callable[[Any, Any], Tensor], metrics: Mapping[str, Any] | None = None
    ) -> None:
        args, state = training.args, training.state
        self._training, self._loss, self._metrics = training, loss, metrics or {}
        self.model = training.model
        self.optimizers = [training.optimizer]
        self.steps = self.step = state.global_step
        self.loggers = [TrainerLogs(training)]
        self.is_global_zero = state.is_world_process_zero
        self.log_every_n_steps = max(1, int(state.logging_steps or args.logging_steps))
        self.has_validation = _evaluates(args)
        self.folder = Path(args.output_dir)

    @property
    def epoch(self) -> int:
        return int(self._training.state.epoch or 0)

    @property
    def progress(self) -> float | None:
        state = self._training.state
        return min(1.0, state.global_step / state.max_steps) if state.max_steps > 0 else None

    @property
    def batches_ahead(self) -> float | None:
        state = self._training.state
        left = state.max_steps - state.global_step
        return left * self._training.args.gradient_accumulation_steps if state.max_steps > 0 else None

    @property
    def scheduled_rate(self) -> float | None:
        return largest_scheduled([self._training.scheduler])

    def target(self) -> Target:
        return Target(self.model, self._loss, self._training.args.device, self._training.optimizer)

    def validation_metrics(self) -> Mapping[str, float]:
        return {
            name: float(value)
            for name, value in self._metrics.items()
            if isinstance(value, (int, float)) and not name.endswith(_TIMINGS)
        }

    def stop(self, alert: Alert) -> None:
        self._training.control.should_training_stop = True
        self.announce(f"curvmon stopped this run at step {alert.step}: {alert.headline}; on_alert='stop'")

    def save_checkpoint(self, alert: Alert) -> None:
        self._training.control.should_save = True
        self.announce(f"curvmon asks for a checkpoint at step {alert.step}: {alert.headline}; on_alert='checkpoint'")


class TrainerLogs:
    """Logs as `Trainer.log` does: into `log_history`, and to every callback, those of `report_to` among them."""

    def __init__(self, training: _Training) -> None:
        self._training = training

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        t = self._training
        logs = {name: value for name, value in metrics.items() if math.isfinite(value)}  # log_history becomes JSON
        if t.state.epoch is not None:
            logs["epoch"] = t.state.epoch
        t.state.log_history.append({**logs, "step": step})
        # with a copy: the event takes back what another callback has asked for, to log the training loss
        t.handler.on_log(t.args, t.state, copy.copy(t.control), logs)

    def save(self) -> None:
        return None


def _unsupported(args: Any) -> str | None:
    """Why this run cannot be monitored."""
    if args.deepspeed or args.fsdp:
        return "DeepSpeed and FSDP shard parameters below autograd; use DDP or one device"
    if args.n_gpu > 1:
        return "DataParallel runs copies of the model; start one process for each device, with torchrun"
    if args.label_smoothing_factor:
        return "with label_smoothing_factor the Trainer computes the loss, and the model gets no labels"
    if args.torch_compile:
        return "torch_compile=True hides the batches from hooks; train without it, or measure a checkpoint"
    return None


def _evaluates(args: Any) -> bool:
    # its name up to transformers 4.40
    strategy = getattr(args, "eval_strategy", None) or getattr(args, "evaluation_strategy", "no")
    return bool(strategy != "no")


def _checkpoint(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


def _model_loss(model: Any, batch: Mapping[str, Any]) -> Tensor:
    loss = _loss_of(model(**batch))
    if loss is None:
        raise LossError(
            "the model returned no loss, perhaps as the Trainer computes it itself; pass loss= to CurvatureCallback, a "
            "function of (model, arguments of the model)"
        )
    return loss


def _loss_of(outputs: Any) -> Tensor | None:
    """The first of its outputs, by the library's convention, where it is a scalar."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs[0] if isinstance(outputs, tuple) else None
    return loss if isinstance(loss, Tensor) and loss.numel() == 1 else None


def _variable_of_a_caller(name: str, accepts: Callable[[Any], bool]) -> Any:
    """The nearest local variable of that name among the functions that have called this one; None without any."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        value = frame.f_locals.get(name)
        if accepts(value):
            return value
        frame = frame.f_back
    return None

"""What all monitors share, whatever the training loop: when to measure, and what the user can read.

An integration inherits from `MonitoredRun` and calls its methods from the hooks of its loop, each time with a `Loop`.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from curvmon.errors import CurvmonError
from curvmon.monitor.budget import Budget
from curvmon.monitor.history import History
from curvmon.monitor.measurement import MeasurementRunner
from curvmon.monitor.probe_batch import ProbeBatch
from curvmon.monitor.process_group import Ranks
from curvmon.monitor.pulse_schedule import PulseSchedule
from curvmon.monitor.pulses import Pulses
from curvmon.monitor.settings import MonitorSettings
from curvmon.recorder.alerting import Alerting
from curvmon.recorder.loop import Loop
from curvmon.recorder.recorder import Recorder
from curvmon.records import Alert, Measurement, PulseRecord, Snapshot, Spectrum
from curvmon.reporting.reporter import Report

VERSION = 5
"""version of the state in checkpoints"""


class MonitoredRun:
    """A run and its records.

    Args:
        settings: fields of `MonitorSettings`.

    Raises:
        InputError: a setting has a wrong type or value.
    """

    _name = "CurvatureMonitor"
    """in messages"""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        given = self._settings = MonitorSettings(**settings)
        budget = Budget(given.max_overhead)
        self._recorder = Recorder(
            MeasurementRunner(given.measured, ProbeBatch(given.probe_size, given.probe_batches, given.data)),
            budget,
            History(given.history_size),
            Alerting(given.alerts, given.on_alert, given.log_key_prefix),
            Report(given.pair_metrics, given.log_pairs, given.heatmaps, given.log_key_prefix, given.verbose),
            Pulses(PulseSchedule(given.pulse, given.max_overhead), budget, given.history_size),
        )
        self._ranks: Ranks | None = None
        self._active = False
        self._loaded = False
        self._validations = 0
        self._has_trained = True
        """since the last validation batch"""
        self._measured_at: int | None = None
        """in optimizer steps"""

    @property
    def history(self) -> list[Measurement]:
        return self._recorder.records.history

    @property
    def spectra(self) -> list[Spectrum]:
        return self._recorder.records.spectra

    @property
    def snapshots(self) -> list[Snapshot]:
        return list(self._recorder.history)

    @property
    def pulses(self) -> list[PulseRecord]:
        return list(self._recorder.records.pulses)

    @property
    def alerts(self) -> list[Alert]:
        return self._recorder.records.alerts

    @property
    def notices(self) -> list[Alert]:
        return self._recorder.records.notices

    def to_pandas(self) -> Any:
        """A DataFrame of the run so far, one row per step, columns named like logger keys. Needs pandas."""
        return self._recorder.records.to_pandas()

    def report(self, path: str | None = None) -> str:
        """One HTML page of the run so far, which loads nothing; written to `path` if given."""
        return self._recorder.records.report(path)

    # ---- what an integration calls ----

    def _activate(self, unsupported: str | None, world_size: int) -> None:
        """Before training, by all ranks together; `unsupported`: why this run cannot be monitored."""
        self._active = unsupported is None
        if unsupported is not None:
            if self._settings.strict:
                raise CurvmonError(f"{self._name} cannot monitor this run: {unsupported}")
            self._recorder.warn(f"this run is not monitored: {unsupported}. Training goes on without")
        elif self._ranks is None or self._ranks.world_size != world_size:
            self._ranks = Ranks(world_size)

    def _start(self, loop: Loop) -> None:
        """Training starts, or goes on after a resume."""
        if self._active and loop.steps > 0 and not self._loaded and not len(self._recorder.history):
            self._recorder.warn(f"the checkpoint has no state of this {self._name}: its history starts here")
        self._recorder.start_training()
        self._measured_at = None  # another run may count its steps from 0 again

    def _before_batch(self, loop: Loop, batch: Any) -> None:
        """Before every forward pass of training."""
        if not self._active:
            return
        self._has_trained = True
        self._recorder.start_batch(loop)
        self._recorder.observe_training_batch(loop, batch)
        is_first = loop.steps == 0 and not len(self._recorder.history) and self._measured_at is None
        if self._settings.initial and is_first:
            reason = self._why_not_initial(loop)
            if reason is None:
                self._measure(loop, step=loop.step)
            else:
                self._measured_at = loop.steps
                self._recorder.warn(f"not measured before the first step: {reason}")
        self._recorder.pulsing.before_batch(loop, batch)

    def _observe_validation_batch(self, batch: Any) -> None:
        """For loops that do not say when a validation begins."""
        if self._has_trained:
            self._recorder.start_validation()
        self._has_trained = False
        self._recorder.observe_batch("val", batch)

    def _why_not_initial(self, loop: Loop) -> str | None:
        return "lazy modules get their parameters in it" if has_lazy_tensors(loop.model) else None

    def _after_batch(self, loop: Loop, outputs: Any) -> None:
        """After every batch of training, or after the last one of an optimizer step; `outputs`: its loss, or None."""
        if not self._active:
            return
        assert self._ranks is not None
        self._recorder.observe_step(loop, outputs)
        self._recorder.pulsing.after_batch(loop, self._ranks)
        every, steps = self._settings.every_n_train_steps, loop.steps
        if every is not None and steps > 0 and steps % every == 0 and steps != self._measured_at:
            self._measure(loop, step=loop.step, validates=False)

    def _after_validation(self, loop: Loop, step: int) -> None:
        """After a validation, or after an epoch without one."""
        if not self._active:
            return
        self._validations += 1
        every = self._settings.every_n_validations
        due = every is not None and self._validations % every == 0
        if loop.steps != self._measured_at or loop.steps == 0:
            self._measure(loop, step=step, due=due)

    def _end(self, loop: Loop, measures: bool = True) -> None:
        """Training has ended; `measures`: the model still has the parameters of the last step."""
        if self._active and self._ranks is not None:
            self._recorder.end_training(loop, self._ranks, measures)

    def _measure(self, loop: Loop, step: int, due: bool = True, validates: bool = True) -> None:
        assert self._ranks is not None
        if self._recorder.measure(loop, self._ranks, step, due=due, validates=validates):
            self._measured_at = loop.steps

    # ---- checkpoints ----

    def state_dict(self) -> dict[str, Any]:
        """Primitives, lists, dicts and tensors only, so that it can be loaded with `weights_only`."""
        return {"version": VERSION, "validations": self._validations, **self._recorder.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """All of the state; if it cannot be read, one warning and none of it."""
        self._loaded = True
        reason = "is of another version" if state_dict.get("version") != VERSION else None
        if reason is None:
            try:
                validations = state_dict["validations"]
                self._recorder.load_state_dict(state_dict)
                self._validations = validations
            except Exception as error:
                reason = f"cannot be read ({type(error).__name__}: {error})"
        if reason is not None:
            self._recorder.warn(f"the checkpoint's state of {self._name} {reason}: its history starts here")


def has_lazy_tensors(module: nn.Module) -> bool:
    """Lazy modules get their parameters in the first forward pass."""
    return any(is_lazy(tensor) for tensor in (*module.parameters(), *module.buffers()))

"""The Lightning callback: when to measure, and what happens to the result. Hooks only, no mathematics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Optional, Union

from curvmon.alerts.rules import AlertRules
from curvmon.errors import CurvmonError
from curvmon.integrations.lightning.alerting import Alerting
from curvmon.integrations.lightning.compatibility import (
    CallbackBase,
    batches_that_stepped,
    has_lazy_tensors,
    has_validation,
    publish,
    ranks_may_skip_validation,
    unsupported,
)
from curvmon.integrations.lightning.recorder import Recorder
from curvmon.integrations.lightning.state_keys import StateKey, same_prefix
from curvmon.metrics.registry import pair_metric_names
from curvmon.monitor.budget import Budget
from curvmon.monitor.history import History
from curvmon.monitor.measurement import MeasurementRunner
from curvmon.monitor.probe_batch import ProbeBatch
from curvmon.monitor.process_group import Ranks
from curvmon.monitor.pulse_schedule import PulseSchedule
from curvmon.monitor.pulses import Pulses
from curvmon.monitor.settings import Settings, check_settings
from curvmon.records import Alert, Measurement, PulseRecord, Snapshot, Spectrum
from curvmon.reporting.reporter import Report

if TYPE_CHECKING:
    import pytorch_lightning as pl

VERSION = 5
"""version of the state in checkpoints"""


class CurvatureMonitor(CallbackBase):
    """Measures the curvature between the layers of a network during training, and its top eigenvalues.

    `Trainer(callbacks=[CurvatureMonitor()])` is all it needs: layers, loss and output are found automatically. Before
    the first step and after every validation, R, C, D and GN-Gap of all pairs of layers and the extremal eigenvalues of
    the Hessian of the loss go to all loggers and to `callback_metrics`. Training is bit for bit the same as without.

    Args:
        nodes: submodule names or glob patterns, as in `curvmon.measure`; None chooses five to eight blocks.
        metrics: which of resonance, coupling, stable_rank, gn_gap to log; [] measures no pairs.
        eigenvalues: how many of the largest; 0 for none. `metrics=[], eigenvalues=1` measures λ_1 and nothing else.
        probe_size: samples in the probe batch, which is captured once and stays the same for the whole run.
        probe_batches: number of probe batches; several are measured one by one and averaged.
        data: "val" or "train": where the probe batch comes from. It is the first training batch if there is no
            validation, if the first measurement comes before any validation batch, or if training_step does not accept
            a validation batch.
        every_n_validations: measure at every n-th validation (every n-th epoch if there is no validation).
        every_n_train_steps: also every n optimizer steps; vital signs alone only as far as they cost next to nothing.
        initial: also before the first optimizer step. Skipped if Lightning's sanity check has run on fewer than half of
            the samples of a probe batch, or if modules are still lazy.
        loss: `loss(module, batch)` returns a scalar tensor; None: training_step in eval mode, without its logging.
        output: name of the module that returns the predictions, if it is not found automatically; see
            `curvmon.measure`.
        max_overhead: measuring takes at most this share of the training time, beyond 30 free seconds; None: no limit.
        pulse: between validations, also measure the curvature along the optimizer's own step; an integer: every so many
            optimizer steps; True: as often as 1 % of the training time allows, at most every tenth; False: never.
        rtol: relative standard error at which a measurement stops.
        log_pairs: also log every pair as a scalar; means over all pairs and by distance are always logged.
        heatmaps: also log figures (needs matplotlib): of the first measurement, of every one with an alert, of the last
            one, and of as many between them as drawing stays below a tenth of the time of measuring.
        alerts: raise alerts on abrupt changes and on the rules of `AlertRules`; False for none.
        on_alert: a function that is called with every `Alert` (on rank 0); "stop" ends training, "checkpoint" writes a
            checkpoint, and both say so.
        seed: seed of the random probes.
        log_key_prefix: in front of every key; two monitors in one Trainer need different ones.
        verbose: print a line for every measurement.
        strict: raise if a run cannot be monitored (FSDP, manual optimisation without `loss`) instead of warning.
        history_size: how many measurements are kept in `history`, and how many records in `pulses`.

    Attributes:
        history: the latest `Measurement`s of pairs of layers, oldest first.
        spectra: the latest `Spectrum`s, oldest first, without eigenvectors.
        snapshots: both, with step and epoch.
        pulses: the latest `PulseRecord`s, oldest first: gain and curvature along single optimizer steps.
        alerts: all alerts of the run, oldest first, those before a resume included.
        notices: informational events, not counted as alerts, such as the edge of stability.

    Raises:
        InputError: an argument has a wrong type or value, in the constructor; two monitors of one Trainer have the same
            `log_key_prefix`, in the Trainer's constructor.
        NodeError: `nodes` or `output` match no module, before training starts.
        CurvmonError: the run cannot be monitored, with `strict=True`, before training starts.
    """

    def __init__(
        self,
        nodes: Optional[list[str]] = None,  # noqa: UP045 - jsonargparse on older Pythons
        metrics: Optional[list[str]] = None,  # noqa: UP045
        eigenvalues: int = 5,
        probe_size: int = 32,
        probe_batches: int = 1,
        data: Literal["val", "train"] = "val",
        every_n_validations: Optional[int] = 1,  # noqa: UP045
        every_n_train_steps: Optional[int] = None,  # noqa: UP045
        initial: bool = True,
        loss: Optional[Callable] = None,  # type: ignore[type-arg]  # noqa: UP045
        output: Optional[str] = None,  # noqa: UP045
        max_overhead: Optional[float] = 0.05,  # noqa: UP045
        pulse: Union[bool, int] = True,  # noqa: UP007
        rtol: float = 0.05,
        log_pairs: bool = False,
        heatmaps: bool = True,
        alerts: Union[bool, AlertRules] = True,  # noqa: UP007
        on_alert: Union[Literal["stop", "checkpoint"], Callable, None] = None,  # type: ignore[type-arg]  # noqa: UP007
        seed: int = 0,
        log_key_prefix: str = "",
        verbose: bool = False,
        strict: bool = False,
        history_size: int = 1000,
    ) -> None:
        super().__init__()
        self._metrics: Sequence[str] = pair_metric_names() if metrics is None else metrics
        nodes = [nodes] if isinstance(nodes, str) else nodes
        check_settings(
            metrics=self._metrics,
            eigenvalues=eigenvalues,
            probe_size=probe_size,
            probe_batches=probe_batches,
            data=data,
            every_n_validations=every_n_validations,
            every_n_train_steps=every_n_train_steps,
            max_overhead=max_overhead,
            pulse=pulse,
            log_pairs=log_pairs,
            initial=initial,
            heatmaps=heatmaps,
            verbose=verbose,
            strict=strict,
            log_key_prefix=log_key_prefix,
            alerts=alerts,
            on_alert=on_alert,
            history_size=history_size,
            rtol=rtol,
            seed=seed,
            loss=loss,
            nodes=nodes,
            output=output,
        )
        self._every_n_validations = every_n_validations
        self._every_n_train_steps = every_n_train_steps
        self._initial = initial
        self._loss = loss
        self._prefix = log_key_prefix
        self._strict = strict
        settings = Settings(
            pairs=bool(self._metrics), nodes=nodes, output=output, rtol=rtol, eigenvalues=eigenvalues, seed=seed
        )
        budget = Budget(max_overhead)
        self._recorder = Recorder(
            MeasurementRunner(settings, ProbeBatch(probe_size, probe_batches, data)),
            budget,
            History(history_size),
            Alerting(alerts, on_alert, log_key_prefix),
            Report(self._metrics, log_pairs, heatmaps, log_key_prefix, verbose, publish),
            loss,
            Pulses(PulseSchedule(pulse, max_overhead), budget, history_size),
        )
        self._ranks: Ranks | None = None
        self._was_set_up = False
        self._active = False
        self._loaded = False
        self._validations = 0
        self._measured_at: int | None = None

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

    def report(self, path: Optional[str] = None) -> str:  # noqa: UP045
        """One HTML page of the run so far, which loads nothing; written to `path` if given."""
        return self._recorder.records.report(path)

    # ---- hooks: before training ----

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._was_set_up = True
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        monitors = [callback for callback in callbacks if isinstance(callback, CurvatureMonitor)]
        if any(other is not self and other._prefix == self._prefix for other in monitors):
            raise same_prefix(self._prefix)
        if stage not in ("fit", "validate"):
            return
        reason = unsupported(trainer, pl_module, self._loss is not None)
        self._active = reason is None
        if reason is not None:
            if self._strict:
                raise CurvmonError(f"CurvatureMonitor cannot monitor this run: {reason}")
            self._recorder.warn(f"this run is not monitored: {reason}. Training goes on without")
        elif self._ranks is None or self._ranks.world_size != trainer.world_size:
            self._ranks = Ranks(trainer.world_size)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._active:
            self._recorder.check(pl_module)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._active and trainer.global_step > 0 and not self._loaded and not len(self._recorder.history):
            self._recorder.warn("the checkpoint has no state of this CurvatureMonitor: its history starts here")
        self._recorder.start_training()
        self._measured_at = None  # another fit may count its steps from 0 again

    # ---- hooks: capture batches ----

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._recorder.start_validation()

    def on_validation_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if self._active and dataloader_idx == 0:
            self._recorder.observe_batch("val", batch)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if not self._active:
            return
        self._recorder.start_batch(trainer)
        self._recorder.observe_training_batch(trainer, batch)
        if self._initial and trainer.global_step == 0 and not len(self._recorder.history) and self._measured_at is None:
            reason = self._why_not_initial(trainer, pl_module)
            if reason is None:
                self._measure(trainer, pl_module, step=batches_that_stepped(trainer))
            else:
                self._measured_at = trainer.global_step
                self._recorder.warn(f"not measured before the first step: {reason}")
        self._recorder.pulsing.before_batch(trainer, pl_module, batch)

    def _why_not_initial(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> str | None:
        """A probe batch of the two samples of a sanity check, for example, would stay for the whole run."""
        assert self._ranks is not None
        if has_lazy_tensors(pl_module):
            return "lazy modules get their parameters in it"
        if self._every_n_train_steps is not None:
            return None
        incomplete = trainer.num_sanity_val_batches[:1] < trainer.num_val_batches[:1]
        if not self._ranks.broadcast(trainer.enable_validation and self._recorder.probe_is_short and incomplete):
            return None
        return (
            "the sanity check has run on too few validation samples for a probe batch; "
            "a larger num_sanity_val_steps of the Trainer gives more"
        )

    # ---- hooks: measure ----

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        if self._active:
            self._recorder.pulsing.before_optimizer_step(optimizer)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._active:
            assert self._ranks is not None
            self._recorder.observe_step(trainer, pl_module, outputs)
            self._recorder.pulsing.after_batch(trainer, pl_module, self._ranks)
        every, step = self._every_n_train_steps, trainer.global_step
        if self._active and every is not None and step > 0 and step % every == 0 and step != self._measured_at:
            self._measure(trainer, pl_module, step=batches_that_stepped(trainer), validates=False)

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._active and not trainer.sanity_checking and not ranks_may_skip_validation(trainer, pl_module):
            self._on_validated(trainer, pl_module, step=batches_that_stepped(trainer))

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._active and (not has_validation(trainer) or ranks_may_skip_validation(trainer, pl_module)):
            # Lightning logs the metrics of an epoch at its last step
            self._on_validated(trainer, pl_module, step=max(0, batches_that_stepped(trainer) - 1))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._active and self._ranks is not None:
            self._recorder.end_training(trainer, pl_module, self._ranks, batches_that_stepped(trainer))

    def _on_validated(self, trainer: pl.Trainer, pl_module: pl.LightningModule, step: int) -> None:
        self._validations += 1
        every = self._every_n_validations
        due = every is not None and self._validations % every == 0
        if trainer.global_step != self._measured_at or trainer.global_step == 0:
            self._measure(trainer, pl_module, step=step, due=due)

    def _measure(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, step: int, due: bool = True, validates: bool = True
    ) -> None:
        assert self._ranks is not None
        if self._recorder.measure(trainer, pl_module, self._ranks, step, due=due, validates=validates):
            self._measured_at = trainer.global_step

    # ---- checkpoints ----

    @property
    def state_key(self) -> str:
        key = f"CurvatureMonitor[{self._prefix}]" if self._prefix else "CurvatureMonitor"
        return key if self._was_set_up else StateKey(key, self, self._prefix)

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
            self._recorder.warn(f"the checkpoint's state of CurvatureMonitor {reason}: its history starts here")

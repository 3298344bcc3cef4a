"""The Lightning callback: which hook does what. Hooks only, no mathematics."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, Optional, Union

from curvmon.alerts.rules import AlertRules
from curvmon.integrations.lightning.compatibility import (
    CallbackBase,
    batches_that_stepped,
    has_validation,
    ranks_may_skip_validation,
    unsupported,
)
from curvmon.integrations.lightning.loop import LightningLoop
from curvmon.integrations.lightning.state_keys import StateKey, same_prefix
from curvmon.recorder.loop import Loop
from curvmon.recorder.monitored_run import MonitoredRun

if TYPE_CHECKING:
    import pytorch_lightning as pl


class CurvatureMonitor(MonitoredRun, CallbackBase):
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
        super().__init__(
            nodes=nodes,
            metrics=metrics,
            eigenvalues=eigenvalues,
            probe_size=probe_size,
            probe_batches=probe_batches,
            data=data,
            every_n_validations=every_n_validations,
            every_n_train_steps=every_n_train_steps,
            initial=initial,
            loss=loss,
            output=output,
            max_overhead=max_overhead,
            pulse=pulse,
            rtol=rtol,
            log_pairs=log_pairs,
            heatmaps=heatmaps,
            alerts=alerts,
            on_alert=on_alert,
            seed=seed,
            log_key_prefix=log_key_prefix,
            verbose=verbose,
            strict=strict,
            history_size=history_size,
        )
        self._prefix = log_key_prefix
        self._was_set_up = False

    def _loop(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> LightningLoop:
        return LightningLoop(trainer, pl_module, self._settings.loss)

    # ---- hooks: before training ----

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._was_set_up = True
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        monitors = [callback for callback in callbacks if isinstance(callback, CurvatureMonitor)]
        if any(other is not self and other._prefix == self._prefix for other in monitors):
            raise same_prefix(self._prefix)
        if stage not in ("fit", "validate"):
            return
        self._activate(unsupported(trainer, pl_module, self._settings.loss is not None), trainer.world_size)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._active:
            self._recorder.check(pl_module)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._start(self._loop(trainer, pl_module))

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
        self._before_batch(self._loop(trainer, pl_module), batch)

    def _why_not_initial(self, loop: Loop) -> str | None:
        """A probe batch of the two samples of a sanity check, for example, would stay for the whole run."""
        assert self._ranks is not None
        reason = super()._why_not_initial(loop)
        if reason is not None or self._settings.every_n_train_steps is not None:
            return reason
        assert isinstance(loop, LightningLoop)
        if not self._ranks.broadcast(self._recorder.probe_is_short and loop.sanity_check_is_incomplete):
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
        self._after_batch(self._loop(trainer, pl_module), outputs)

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking and not ranks_may_skip_validation(trainer, pl_module):
            self._after_validation(self._loop(trainer, pl_module), step=batches_that_stepped(trainer))

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not has_validation(trainer) or ranks_may_skip_validation(trainer, pl_module):
            # Lightning logs the metrics of an epoch at its last step
            step = max(0, batches_that_stepped(trainer) - 1)
            self._after_validation(self._loop(trainer, pl_module), step)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._end(self._loop(trainer, pl_module))

    # ---- checkpoints ----

    @property
    def state_key(self) -> str:
        key = f"CurvatureMonitor[{self._prefix}]" if self._prefix else "CurvatureMonitor"
        return key if self._was_set_up else StateKey(key, self, self._prefix)

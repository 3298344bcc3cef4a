"""The callback: when to measure in a run, on which batch, and what happens to the result. No mathematics."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, Optional, Union

from curvmon.alerts.rules import AlertRules
from curvmon.errors import CurvmonError, warn
from curvmon.integrations.lightning.alerting import Alerting
from curvmon.integrations.lightning.callback_base import CallbackBase
from curvmon.integrations.lightning.supported_runs import (
    check_nodes,
    has_no_shape_yet,
    refusal,
    validates,
    validates_unevenly,
)
from curvmon.metrics.registry import pair_metric_names
from curvmon.monitor.budget import Budget, Plan
from curvmon.monitor.history import History
from curvmon.monitor.measuring import Measuring
from curvmon.monitor.probe_batch import Probe
from curvmon.monitor.process_group import Ranks
from curvmon.monitor.recipe import Recipe, untold
from curvmon.monitor.settings import check_settings
from curvmon.monitor.taking import Outcome
from curvmon.records import Alert, Measurement, Snapshot, Spectrum
from curvmon.reporting.console import progress
from curvmon.reporting.reporter import Report

log = logging.getLogger("curvmon")


class CurvatureMonitor(CallbackBase):
    """Measures the curvature between the layers of a network while it trains, and its top eigenvalues.

    `Trainer(callbacks=[CurvatureMonitor()])` is all: layers, loss and output are found. At the end of every validation
    (and before the first step) R, C, D and GN-Gap of all pairs of layers and the ends of the spectrum of the loss
    Hessian go to all loggers, and to `callback_metrics`. Training is bit for bit what it would be without.

    Args:
        nodes: submodule names or glob patterns, as in `curvmon.measure`; None chooses five to eight blocks.
        metrics: which of resonance, coupling, stable_rank, gn_gap to log; [] measures no pairs.
        eigenvalues: how many of the largest; 0 for none.
        probe_size: samples in the batch that is measured; it is captured once and stays the same for the whole run.
        probe_batches: how many such batches; several are measured one by one and averaged.
        data: where the batch comes from, "val" or "train". Without validation, without a sanity check before the first
            measurement, or where training_step does not take a validation batch, it is the first training batch.
        every_n_validations: measure at every n-th validation (every n-th epoch where there is no validation).
        every_n_train_steps: also every n optimizer steps.
        initial: also before the first optimizer step, unless Lightning's sanity check has passed some, but less than
            half of the validation samples that a probe batch is to have, or modules are still lazy.
        loss: `loss(module, batch)` returns a scalar tensor; None: training_step in eval mode, its logging silenced.
        output: name of the module that returns the predictions, where it cannot be found; see `curvmon.measure`.
        max_overhead: measuring takes at most this share of the training time, beyond 30 free seconds; None: no limit.
        rtol: relative standard error at which a measurement stops.
        log_pairs: log every pair as a scalar; "auto": up to six nodes. Means by distance are always logged.
        heatmaps: log pictures too (needs matplotlib).
        alerts: tell of abrupt changes and of what `AlertRules` name; False for none.
        on_alert: a function that is called with every `Alert` (on the first process), or "stop" or "checkpoint".
        seed: of the probes.
        log_key_prefix: in front of every key; two monitors in one Trainer need different ones.
        verbose: print a line for every measurement.
        strict: raise where a run cannot be monitored (FSDP, manual optimisation without `loss`) instead of warning.
        history_size: how many measurements are kept in `history`.
    """

    def __init__(
        self,
        nodes: Optional[list[str]] = None,  # noqa: UP045 - jsonargparse on older Pythons
        metrics: Optional[list[str]] = None,  # noqa: UP045
        eigenvalues: int = 5,
        probe_size: int = 32,
        probe_batches: int = 1,
        data: Literal["val", "train"] = "val",
        every_n_validations: int = 1,
        every_n_train_steps: Optional[int] = None,  # noqa: UP045
        initial: bool = True,
        loss: Optional[Callable] = None,  # type: ignore[type-arg]  # noqa: UP045
        output: Optional[str] = None,  # noqa: UP045
        max_overhead: Optional[float] = 0.05,  # noqa: UP045
        rtol: float = 0.05,
        log_pairs: Union[bool, Literal["auto"]] = "auto",  # noqa: UP007
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
        self._nodes = [nodes] if isinstance(nodes, str) else nodes
        check_settings(
            metrics=self._metrics,
            eigenvalues=eigenvalues,
            probe_size=probe_size,
            probe_batches=probe_batches,
            data=data,
            every_n_validations=every_n_validations,
            every_n_train_steps=every_n_train_steps,
            max_overhead=max_overhead,
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
            nodes=self._nodes,
            output=output,
        )
        self._every_n_validations = every_n_validations
        self._every_n_train_steps = every_n_train_steps
        self._initial = initial
        self._loss = loss
        self._prefix = log_key_prefix
        self._strict = strict
        self._recipe = Recipe(
            pairs=bool(self._metrics), nodes=self._nodes, output=output, rtol=rtol, eigenvalues=eigenvalues, seed=seed
        )
        self._budget = Budget(max_overhead)
        self._history = History(history_size)
        self._probe = Probe(probe_size, probe_batches, data)
        self._measuring = Measuring(self._recipe, self._probe, loss)
        self._alerting = Alerting(alerts, on_alert, log_key_prefix)
        self._report = Report(self._metrics, log_pairs, heatmaps, log_key_prefix, verbose)
        self._ranks: Ranks | None = None
        self._active = False
        self._loaded = False
        self._validations = 0
        self._measured_at: int | None = None
        self._warned: set[str] = set()
        self._clock: float | None = None
        self._trained_before = 0.0
        self._measured_before = 0.0

    # ---- what a user looks at ----

    @property
    def history(self) -> list[Measurement]:
        """The latest measurements of pairs of layers, oldest first."""
        return [s.measurement for s in self._history if s.measurement is not None]

    @property
    def spectra(self) -> list[Spectrum]:
        """The latest spectra, oldest first, without eigenvectors."""
        return [s.spectrum for s in self._history if s.spectrum is not None]

    @property
    def alerts(self) -> list[Alert]:
        """What was told in this run, oldest first; earlier runs of a resumed training included."""
        return self._alerting.alerts

    @property
    def notices(self) -> list[Alert]:
        """What is worth knowing but no reason to worry: the edge of stability was reached, say."""
        return self._alerting.notices

    @property
    def snapshots(self) -> list[Snapshot]:
        """Both, with step and epoch."""
        return list(self._history)

    # ---- hooks: before training ----

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage not in ("fit", "validate"):
            return
        reason = refusal(trainer, pl_module, self._loss is not None)
        self._active = reason is None
        if reason is not None:
            if self._strict:
                raise CurvmonError(f"CurvatureMonitor cannot monitor this run: {reason}")
            self._warn(f"this run is not monitored: {reason}. Training goes on without")
        elif self._ranks is None or self._ranks.world != trainer.world_size:
            self._ranks = Ranks(trainer.world_size, pairs=self._recipe.pairs, spectrum=self._recipe.eigenvalues > 0)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if self._active:
            check_nodes(pl_module, self._nodes)
            check_nodes(pl_module, None if self._recipe.output is None else [self._recipe.output])
            if self._report.lacks_pictures:
                self._warn("heatmaps need matplotlib (pip install matplotlib); numbers are logged all the same")

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self._active and trainer.global_step > 0 and not self._loaded and not len(self._history):
            self._warn("the checkpoint has no state of this CurvatureMonitor: its series starts anew here")
        self._trained_before, self._measured_before = self._budget.trained, self._budget.measured
        self._clock = time.perf_counter()
        self._measured_at = None  # another fit may count its steps from the start

    # ---- hooks: batches as they pass ----

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._probe.begin_validation()

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if self._active and dataloader_idx == 0:
            self._probe.see("val", batch)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if not self._active:
            return
        self._probe.see("train", batch)
        if self._initial and trainer.global_step == 0 and not len(self._history) and self._measured_at is None:
            if self._waits(trainer, pl_module):
                self._measured_at = trainer.global_step
                return
            self._measure(trainer, pl_module, step=_step(trainer))

    def _waits(self, trainer: Any, pl_module: Any) -> bool:
        """The sanity check has passed two samples of a loader that has many, say: better no measurement than that."""
        assert self._ranks is not None
        if has_no_shape_yet(pl_module):
            self._warn("not measured before the first step: lazy modules get their parameters in it")
            return True
        if self._every_n_train_steps is not None:
            return False
        passed, all_of_them = trainer.num_sanity_val_batches[:1], trainer.num_val_batches[:1]
        if not self._ranks.agreed(trainer.enable_validation and self._probe.is_short() and passed < all_of_them):
            return False
        self._warn(
            "not measured before the first step: too few validation samples have passed for a probe batch; "
            "a larger num_sanity_val_steps of the Trainer passes more"
        )
        return True

    # ---- hooks: moments to measure ----

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._active:
            self._alerting.observe_step(trainer, pl_module, outputs)
        every, step = self._every_n_train_steps, trainer.global_step
        if self._active and every is not None and step > 0 and step % every == 0 and step != self._measured_at:
            self._measure(trainer, pl_module, step=_step(trainer))

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if self._active and not trainer.sanity_checking and not validates_unevenly(trainer, pl_module):
            self._validated(trainer, pl_module, step=_step(trainer))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if self._active and (not validates(trainer) or validates_unevenly(trainer, pl_module)):
            # Lightning logs what belongs to the end of an epoch at its last step
            self._validated(trainer, pl_module, step=max(0, _step(trainer) - 1))

    def _validated(self, trainer: Any, pl_module: Any, step: int) -> None:
        self._validations += 1
        due = self._validations % self._every_n_validations == 0
        if due and (trainer.global_step != self._measured_at or trainer.global_step == 0):
            self._measure(trainer, pl_module, step=step)

    # ---- one measurement ----

    def _measure(self, trainer: Any, pl_module: Any, step: int) -> None:
        assert self._ranks is not None
        self._measured_at = trainer.global_step
        plan: Plan = self._ranks.agreed(self._budget.plan(self._trained()))
        if plan.skips:
            self._skipped(trainer, step)
            return
        began = time.perf_counter()
        last = self._history.last
        try:
            with progress(trainer, None if last is None else last.hvps) as self._recipe.tick:
                outcome = self._measuring.outcome(
                    trainer, pl_module, self._ranks, plan.share, is_first=last is None, warn=self._warn
                )
        finally:
            self._recipe.tick = untold
        seconds = time.perf_counter() - began
        self._budget.spent(seconds, plan)
        # before the first step there was no training to be a share of: a point of 8000 would hide all later ones
        overhead = self._budget.overhead(self._trained()) if trainer.global_step else float("nan")
        clocks = self._ranks.agreed((seconds, overhead, self._budget.skipped))
        if not outcome.succeeded:
            self._failed(trainer, outcome, step)
            return
        snapshot = Snapshot(
            step=step,
            epoch=trainer.current_epoch,
            measurement=outcome.measurement,
            spectrum=outcome.spectrum,
            seconds=clocks[0],
            overhead=clocks[1],
            skipped=clocks[2],
        )
        self._compare_nodes(snapshot)
        fresh = self._alerting.update(trainer, pl_module, snapshot, list(self._history), self._ranks)
        if outcome.kind == "diverged" and (last is None or last.spectrum is not None):
            # the curvature of the parameters is not finite any more, although that between the layers still is
            fresh += self._alerting.diverged(outcome.error, step, snapshot.epoch, self._ranks)
        self._history.append(replace(snapshot, alerts=len(self.alerts)))
        self._report.write(trainer, list(self._history), self.alerts, fresh)
        self._alerting.deliver(trainer, fresh)
        # pictures and logging cost time as well
        self._budget.measured += time.perf_counter() - began - seconds

    def _skipped(self, trainer: Any, step: int) -> None:
        """Points that are missing show as such, and the first one says why."""
        self._report.skipped(trainer, self._budget.skipped, step)
        if self._budget.skipped == 1 and trainer.is_global_zero:
            log.info(
                "curvmon leaves out measurements to stay within max_overhead=%g of the training time beyond 30 s; "
                "max_overhead=None measures at every validation, heatmaps=False and fewer nodes make it cheaper",
                self._budget.max_overhead,
            )

    def _compare_nodes(self, snapshot: Snapshot) -> None:
        before = self._history.nodes
        if before is not None and snapshot.measurement is not None and before != snapshot.measurement.nodes:
            self._warn(
                f"the nodes are {', '.join(snapshot.measurement.nodes)}, before they were {', '.join(before)}: "
                "the series of pairs start anew"
            )

    def _failed(self, trainer: Any, outcome: Outcome, step: int) -> None:
        """One warning of every kind; what cannot work later is not tried again."""
        if outcome.kind == "diverged":
            assert self._ranks is not None
            fresh = self._alerting.diverged(outcome.error, step, trainer.current_epoch, self._ranks)
            if fresh:
                self._report.count(trainer, self.alerts, step)
            self._alerting.deliver(trainer, fresh)
        if outcome.kind in ("permanent", "input"):
            self._active = False
            self._warn(f"not measured: {outcome.error}. This run is not monitored any more; training goes on")
        else:
            self._warn(
                f"not measured: {outcome.error}. Training goes on; the next validation is tried again", outcome.kind
            )

    def _trained(self) -> float:
        """Seconds of training so far, measuring left out, earlier runs of a resumed training included."""
        if self._clock is None:
            return self._budget.trained
        measured = self._budget.measured - self._measured_before
        return self._trained_before + max(0.0, time.perf_counter() - self._clock - measured)

    def _warn(self, message: str, kind: str | None = None) -> None:
        if (kind or message) not in self._warned:
            self._warned.add(kind or message)
            warn(message)

    # ---- checkpoints ----

    @property
    def state_key(self) -> str:
        return f"CurvatureMonitor[{self._prefix}]" if self._prefix else "CurvatureMonitor"

    def state_dict(self) -> dict[str, Any]:
        """Primitives, lists, dicts and tensors only: what `weights_only` loading accepts."""
        return {
            "version": 1,
            "history": self._history.state_dict(),
            "budget": self._budget.state_dict(),
            "validations": self._validations,
            **self._measuring.state_dict(),
            **self._alerting.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = True
        if state_dict.get("version") != 1:
            self._warn("the checkpoint's state of CurvatureMonitor is of another version: its series starts anew here")
            return
        try:
            self._take_over(state_dict)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            self._warn(f"the checkpoint's state of CurvatureMonitor cannot be read ({reason}): its series starts anew")

    def _take_over(self, state: dict[str, Any]) -> None:
        """All of it or nothing."""
        history, budget, probe = copy.deepcopy((self._history, self._budget, self._probe))
        history.load_state_dict(state["history"])
        budget.load_state_dict(state["budget"])
        probe.load_state_dict(state["probe"])
        start, validations, products = state["start"], state["validations"], state["full_products"]
        self._alerting.load_state_dict(state)
        self._history, self._budget, self._probe, self._measuring.probe = history, budget, probe, probe
        self._measuring.start, self._validations, self._recipe.full_products = start, validations, products


def _step(trainer: Any) -> int:
    """The x-axis of Lightning's own metrics (LearningRateMonitor takes it from the same place)."""
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)

"""The callback: when to measure in a run, on which batch, and what happens to the result. No mathematics."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, Optional, Union

from torch import Tensor

from curvmon.errors import CurvmonError
from curvmon.lightning import figures
from curvmon.lightning.base import CallbackBase, warn
from curvmon.lightning.budget import Budget, Plan
from curvmon.lightning.canvas import available
from curvmon.lightning.crew import RemoteError
from curvmon.lightning.delivery import act, deliver
from curvmon.lightning.probe import Probe
from curvmon.lightning.progress import progress
from curvmon.lightning.ranks import Ranks
from curvmon.lightning.running_loss import RunningLoss
from curvmon.lightning.settings import check_settings
from curvmon.lightning.sinks import Draw, Sinks, publish
from curvmon.lightning.steps import step_loss
from curvmon.lightning.summary import say, summary
from curvmon.lightning.support import check_nodes, has_no_shape_yet, refusal, validates, validates_unevenly
from curvmon.lightning.taking import Outcome, take
from curvmon.tracking.alarms import Alarms
from curvmon.tracking.circumstances import Circumstances, circumstances
from curvmon.tracking.history import History, Snapshot
from curvmon.tracking.keys import scalars
from curvmon.tracking.recipe import Recipe, untold
from curvmon.tracking.rules import AlertRules
from curvmon.types import METRICS, Alert, Measurement, Metric, Spectrum

MOST_STORED_START = 2**24
"""entries of the vector from which the next search for eigenvalues begins that go into a checkpoint: 64 MiB"""


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
        metrics: Optional[list[Metric]] = None,  # noqa: UP045
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
        self._metrics: Sequence[Metric] = METRICS if metrics is None else metrics
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
        self._log_pairs = log_pairs
        self._heatmaps = heatmaps
        self._prefix = log_key_prefix
        self._verbose = verbose
        self._strict = strict
        self._recipe = Recipe(
            pairs=bool(self._metrics), nodes=self._nodes, output=output, rtol=rtol, eigenvalues=eigenvalues, seed=seed
        )
        self._budget = Budget(max_overhead)
        self._history = History(history_size)
        self._sinks = Sinks(log_key_prefix)
        self._alarms = Alarms(alerts if isinstance(alerts, AlertRules) else None) if alerts else None
        self._on_alert = on_alert
        self._told: list[Alert] = []
        self._losses = RunningLoss()
        self._probe = Probe(probe_size, probe_batches, data)
        self._start: Tensor | None = None
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
        return [alert for alert in self._told if alert.level != "info"]

    @property
    def notices(self) -> list[Alert]:
        """What is worth knowing but no reason to worry: the edge of stability was reached, say."""
        return [alert for alert in self._told if alert.level == "info"]

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
            if self._heatmaps and not available():
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
            self._losses.see(outputs)
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
            return
        began = time.perf_counter()
        last = self._history.last
        try:
            with progress(trainer, None if last is None else last.hvps) as self._recipe.tick:
                outcome = self._outcome(trainer, pl_module, plan)
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
            measurement=self._noted(outcome),
            spectrum=outcome.spectrum,
            seconds=clocks[0],
            overhead=clocks[1],
            skipped=clocks[2],
        )
        self._compare_nodes(snapshot)
        fresh: list[Alert] = []
        if self._alarms is not None:
            fresh = self._alarms.update(snapshot, self._history.last, self._circumstances(trainer, pl_module, snapshot))
            fresh += self._lost_eigenvalues(outcome, snapshot)
        self._told += fresh
        snapshot = replace(snapshot, alerts=len(self.alerts))
        self._history.append(snapshot)
        self._report(trainer, snapshot, fresh)
        self._tell(trainer, fresh)
        # pictures and logging cost time as well
        self._budget.measured += time.perf_counter() - began - seconds

    def _outcome(self, trainer: Any, pl_module: Any, plan: Plan) -> Outcome:
        """Try until it works: the other kind of batch if this is the first time, fewer samples if memory is short."""
        assert self._ranks is not None
        begun, refused, missing = self._probe.position(), None, None
        wanted = self._recipe.pairs, self._recipe.eigenvalues
        while True:
            outcome, start = self._attempt(trainer, pl_module, plan, self._ranks)
            if outcome.succeeded:
                if outcome.error is not None:
                    outcome, missing = self._without_eigenvalues(outcome, missing)
                self._start = self._known_to_all(start)
                self._probe.settle()
                if refused is not None:
                    self._warn(f"measured on the first training batch, not on a validation batch: {refused}")
                if missing is not None:
                    what = "pairs of layers" if missing.part == "pairs" else "eigenvalues"
                    self._warn(f"{what} are not measured in this run: {missing.error}")
                return outcome
            if outcome.kind == "memory" and self._probe.halve():
                continue
            of_batch = outcome.kind in ("input", "passing", "diverged") and not len(self._history)
            if of_batch and self._probe.fall_back(self._ranks):
                refused = outcome.error
                continue
            self._probe.back_to(begun)
            if outcome.kind in ("permanent", "input") and self._recipe.without(outcome.part):
                refused, missing = None, outcome
                continue
            self._recipe.pairs, self._recipe.eigenvalues = wanted
            return outcome

    def _without_eigenvalues(self, outcome: Outcome, missing: Outcome | None) -> tuple[Outcome, Outcome | None]:
        """The pairs are there. What can never work is not tried again; of anything else a warning and a note tell."""
        if outcome.kind in ("permanent", "input") and self._recipe.without("spectrum"):
            return replace(outcome, error=None), outcome
        self._warn(
            f"eigenvalues not measured: {outcome.error}. The pairs of layers are; the next validation is tried again",
            f"eigenvalues {outcome.kind}",
        )
        return outcome, missing

    def _attempt(self, trainer: Any, pl_module: Any, plan: Plan, ranks: Ranks) -> tuple[Outcome, Tensor | None]:
        try:
            batches = self._probe.batches(ranks, pl_module.device, self._warn)
        except RemoteError as error:
            return Outcome(error=f"the batch cannot be shared among processes ({error})", kind="input"), None
        if batches is None:
            odd = self._probe.obstacle
            reason = "no batch has passed yet" if odd is None else f"the batches that pass cannot be copied ({odd})"
            return Outcome(error=reason, kind="passing"), None
        loss = self._loss or step_loss(pl_module)
        return take(self._recipe, trainer, pl_module, batches, loss, ranks=ranks, share=plan.share, start=self._start)

    def _known_to_all(self, start: Tensor | None) -> Tensor | None:
        """Another process may look for eigenvalues than the one that writes checkpoints."""
        assert self._ranks is not None
        searcher = self._ranks.spectrum_rank
        if searcher == 0 or not self._recipe.eigenvalues:
            return start
        told = self._ranks.agreed(_storable(start), source=searcher)
        return start if self._ranks.rank == searcher else told

    def _circumstances(self, trainer: Any, pl_module: Any, snapshot: Snapshot) -> Circumstances:
        """The first process's: training losses and running statistics differ from one to the next."""
        assert self._ranks is not None
        values = circumstances(pl_module, trainer.optimizers, self._losses.take())
        found = snapshot.measurement
        return Circumstances(self._ranks.agreed(values), {} if found is None else found.operations)

    def _noted(self, outcome: Outcome) -> Measurement | None:
        found = outcome.measurement
        lacking = () if outcome.error is None else (f"no eigenvalues: {outcome.error}",)
        return None if found is None else replace(found, notes=(*self._probe.notes, *found.notes, *lacking))

    def _compare_nodes(self, snapshot: Snapshot) -> None:
        before = self._history.nodes
        if before is not None and snapshot.measurement is not None and before != snapshot.measurement.nodes:
            self._warn(
                f"the nodes are {', '.join(snapshot.measurement.nodes)}, before they were {', '.join(before)}: "
                "the series of pairs start anew"
            )

    def _tell(self, trainer: Any, alerts: Sequence[Alert]) -> None:
        for alert in alerts:
            if trainer.is_global_zero:
                deliver(trainer, alert, f"{self._prefix}curvmon/alert")
        if any(alert.level != "info" for alert in alerts):
            self._act(trainer, [alert for alert in alerts if alert.level != "info"])

    def _act(self, trainer: Any, alerts: Sequence[Alert]) -> None:
        """A checkpoint is written once, whatever the number of alerts."""
        for alert in alerts[:1] if isinstance(self._on_alert, str) else alerts:
            act(trainer, alert, self._on_alert)

    def _lost_eigenvalues(self, outcome: Outcome, snapshot: Snapshot) -> list[Alert]:
        """Where the curvature of the parameters is not finite any more, although that between the layers still is."""
        last = self._history.last
        if self._alarms is None or outcome.kind != "diverged" or (last is not None and last.spectrum is None):
            return []
        return self._alarms.diverged(outcome.error or "", snapshot.step, snapshot.epoch)

    def _failed(self, trainer: Any, outcome: Outcome, step: int) -> None:
        """One warning of every kind; what cannot work later is not tried again."""
        if outcome.kind == "diverged" and self._alarms is not None:
            fresh = self._alarms.diverged(outcome.error or "", step, trainer.current_epoch)
            self._told += fresh
            if fresh and trainer.is_global_zero:
                count = {f"{self._prefix}curvmon/alerts": float(len(self.alerts))}
                self._sinks.write(trainer, count, {}, step)
            self._tell(trainer, fresh)
        if outcome.kind in ("permanent", "input"):
            self._active = False
            self._warn(f"not measured: {outcome.error}. This run is not monitored any more; training goes on")
        else:
            self._warn(
                f"not measured: {outcome.error}. Training goes on; the next validation is tried again", outcome.kind
            )

    def _report(self, trainer: Any, snapshot: Snapshot, alerts: Sequence[Alert] = ()) -> None:
        values = scalars(snapshot, metrics=self._metrics, pairs=self._log_pairs)
        values = {f"{self._prefix}{key}": value for key, value in values.items()}
        publish(trainer, values)
        if trainer.is_global_zero:
            values["epoch"] = float(snapshot.epoch)
            self._sinks.write(trainer, values, self._pictures(snapshot, alerts), snapshot.step)
            if self._verbose:
                say(trainer, summary(snapshot))

    def _pictures(self, snapshot: Snapshot, alerts: Sequence[Alert]) -> dict[str, Draw]:
        if not self._heatmaps or not available():
            return {}
        pictures: dict[str, Draw] = {}
        found, when = snapshot.measurement, f"step {snapshot.step}"
        marked = [pair for alert in alerts if alert.level != "info" for pair in (alert.where, *alert.others)]
        if found is not None:
            for metric in self._metrics:
                title = f"{figures.TITLES[metric]}, {when}"
                pictures[f"{self._prefix}heatmap/{metric}"] = partial(figures.heatmap, found, metric, title, marked)
            pictures[f"{self._prefix}by_distance"] = partial(figures.by_distance, found, when, self._metrics)
        if snapshot.spectrum is not None:
            pictures[f"{self._prefix}spectrum"] = partial(
                figures.spectrum_over_time, list(self._history), "", [alert.step for alert in self.alerts]
            )
        return pictures

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
            "probe": self._probe.state_dict(),
            "start": _storable(self._start),
            "validations": self._validations,
            "full_products": self._recipe.full_products,
            "alarms": None if self._alarms is None else self._alarms.state_dict(),
            "told": [alert.to_dict() for alert in self._told],
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
        """All of it or nothing; alerts are missing in states from before there were any."""
        parts = copy.deepcopy((self._history, self._budget, self._probe, self._alarms))
        history, budget, probe, alarms = parts
        history.load_state_dict(state["history"])
        budget.load_state_dict(state["budget"])
        probe.load_state_dict(state["probe"])
        if alarms is not None and state.get("alarms") is not None:
            alarms.load_state_dict(state["alarms"])
        told = [Alert.from_dict(alert) for alert in state.get("told", ())]
        self._start, self._validations = state["start"], state["validations"]
        self._recipe.full_products = state["full_products"]
        self._history, self._budget, self._probe, self._alarms = parts
        self._told = told


def _storable(start: Tensor | None) -> Tensor | None:
    return None if start is None or len(start) > MOST_STORED_START else start.cpu()


def _step(trainer: Any) -> int:
    """The x-axis of Lightning's own metrics (LearningRateMonitor takes it from the same place)."""
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)

"""No validation is unwatched: vital signs in every one, alerts where nothing else is measured, and nothing stale."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.alert_runs import EVENTS, Event
from curvmon import CurvatureMonitor
from curvmon.monitor.budget import Budget
from curvmon.monitor.measurement import Outcome, attempt
from tests.helpers.budgets import monitor_with
from tests.helpers.differentiated_once import Apply, KinkedOnce
from tests.helpers.disturbed_runs import fit
from tests.helpers.fake_clock import FakeClock
from tests.helpers.lightning_runs import QUIET, run, trained
from tests.helpers.module_zoo import BATCH, REGRESSION, REGRESSION_VAL, Lit, Regression

EPOCHS, AT = 14, 10


def starved(**options: Any) -> CurvatureMonitor:
    """Measured before the first step and at the end, and never between: a measurement takes a hundred seconds."""
    clock = FakeClock()

    def slow(*args: Any) -> Outcome:
        clock.advance(100.0)
        return attempt(*args)

    return monitor_with(Budget(0.01, 0.0, clock), slow, **{**options, "max_overhead": 0.01})


def test_every_validation_has_vital_signs() -> None:
    monitor = starved()
    assert not run(monitor, epochs=6)
    snapshots = monitor.snapshots
    assert [s.is_full for s in snapshots] == [True, *[False] * 5, True]
    assert len({s.step for s in snapshots}) == 7
    for snapshot in snapshots:
        assert math.isfinite(snapshot.loss) and snapshot.vitals.weight_norm > 0 and not snapshot.vitals.not_finite
        assert 0 < snapshot.vitals.learning_rate < 1
    assert all(s.vitals.update_norm > 0 for s in snapshots[1:]) and math.isnan(snapshots[0].vitals.update_norm)


def test_vital_signs_are_those_of_the_model() -> None:
    modules: list[Any] = []
    norms: list[float] = []

    class Watch(pl.Callback):
        def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            norms.append(math.hypot(*(p.norm().item() for p in pl_module.parameters())))

    monitor = starved()
    run([monitor, Watch()], epochs=3, keep=modules, num_sanity_val_steps=0, module=Regression)
    found = [s.vitals.weight_norm for s in monitor.snapshots[-3:]]
    assert found == pytest.approx(norms[-3:], rel=1e-6)


def test_the_loss_of_vital_signs_is_that_of_a_measurement() -> None:
    full, few = CurvatureMonitor(max_overhead=None), starved()
    run(full, epochs=3)
    run(few, epochs=3)
    for vital, measured in zip(few.snapshots, full.snapshots, strict=True):
        assert vital.loss == pytest.approx(measured.measurement.loss, rel=1e-6)


def learning_rate(data: Any) -> None:
    data.factor = 300.0


LATE: dict[str, Event] = {
    "learning rate x 300": Event(learning_rate, None),
    "NaN in a weight": EVENTS["NaN in a weight"],
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:curvmon. not measured")
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", LATE)
def test_trouble_late_in_a_run_raises_an_alert_at_once(name: str, seed: int, tmp_path: Path) -> None:
    monitor, _ = fit(tmp_path, EPOCHS, LATE[name], AT, seed=seed, make=starved)
    assert not any(s.is_full for s in monitor.snapshots[1:-1])
    steps = [s.step for s in monitor.snapshots]
    # one before the first step, so that this is the first validation after the event
    assert [alert.step for alert in monitor.alerts][:1] == [steps[AT + 1]]
    if name == "NaN in a weight":
        (alert,) = monitor.alerts
        assert alert.kind == "not_finite" and "parameter 'model." in alert.message


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_a_pulse_announces_a_learning_rate_before_the_validation_does(seed: int, tmp_path: Path) -> None:
    name = "learning rate x 300"
    monitor, _ = fit(tmp_path, EPOCHS, LATE[name], AT, seed=seed, make=starved, pulse=5)
    steps = [s.step for s in monitor.snapshots]
    first, *_ = monitor.alerts
    assert first.kind == "approaching_instability" and steps[AT] < first.step < steps[AT + 1]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_a_quiet_run_with_vital_signs_alone_raises_none(seed: int, tmp_path: Path) -> None:
    monitor, _ = fit(tmp_path, EPOCHS, seed=seed, make=starved)
    assert monitor.alerts == []


def test_a_buffer_that_was_infinite_from_the_beginning_is_none_of_our_business() -> None:
    class Masked(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.full((4, 4), -math.inf).triu(1))
            self.register_buffer("mean", torch.zeros(8))

        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 2:
                self.mean.fill_(math.nan)

    monitor = starved()
    run(monitor, epochs=3, module=Masked)
    (alert,) = monitor.alerts
    assert alert.kind == "not_finite" and "buffer 'mean'" in alert.message and alert.epoch == 2


class Kinked(Lit):
    """No second derivative between the layers, and no differences of gradients across its kinks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.kinks = nn.Linear(6, 64), Apply(KinkedOnce.apply)
        self.second, self.smooth, self.head = nn.Linear(64, 6), nn.Tanh(), nn.Linear(6, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.head(self.smooth(self.second(self.kinks(self.first(x))))), y)


def test_a_run_that_cannot_be_measured_still_has_vital_signs() -> None:
    torch.manual_seed(0)
    samples = TensorDataset(torch.randn(512, 6), torch.randint(3, (512,)))
    monitor = CurvatureMonitor(nodes=["first", "second"], eigenvalues=0, probe_size=256)
    loaders = DataLoader(samples, 256), DataLoader(samples, 256)
    (said,) = trained(Kinked(), monitor, loaders, max_epochs=3)
    assert said.endswith("Only vital signs from here on; training goes on") and "KinkedOnce" in said
    assert not monitor.history and len(monitor.snapshots) == 4
    assert all(math.isfinite(s.loss) for s in monitor.snapshots)


# ---- what other callbacks watch ----


class Seen(pl.Callback):
    """The value of a key at the end of every validation, None where there is none."""

    def __init__(self, key: str) -> None:
        self.key, self.values = key, list[Any]()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            value = trainer.callback_metrics.get(self.key)
            self.values.append(None if value is None else value.item())


def test_a_value_that_was_not_measured_is_absent() -> None:
    seen, loss = Seen("curvmon_distance/resonance/0"), Seen("curvmon/probe_loss")
    run([starved(), seen, loss], epochs=4)
    assert [value is None for value in seen.values] == [True, True, True, False]
    assert len(set(loss.values)) == 4 and None not in loss.values


def test_early_stopping_does_not_count_what_was_not_measured() -> None:
    stop = EarlyStopping("curvmon_distance/resonance/0", patience=1, strict=False, min_delta=1e9)
    trainer = pl.Trainer(callbacks=[starved(), stop], **{**QUIET, "max_epochs": 6})
    trainer.fit(Regression(), DataLoader(REGRESSION, BATCH), DataLoader(REGRESSION_VAL, BATCH))
    assert trainer.current_epoch == 6  # a stale value would have stopped it after two
    assert stop.wait_count <= 1


def test_a_checkpoint_is_never_chosen_by_a_value_that_was_not_measured(tmp_path: Path) -> None:
    best = ModelCheckpoint(
        tmp_path, monitor="curvmon_distance/resonance/0", mode="min", save_top_k=1, filename="{epoch}"
    )
    seen = Seen("curvmon_distance/resonance/0")
    options = {**QUIET, "max_epochs": 5, "enable_checkpointing": True}
    trainer = pl.Trainer(callbacks=[starved(), seen, best], **options)
    trainer.fit(Regression(), DataLoader(REGRESSION, BATCH), DataLoader(REGRESSION_VAL, BATCH))
    assert [math.isnan(value) for value in seen.values] == [True] * 4 + [False]
    assert best.best_model_path.endswith("epoch=4.ckpt")


# ---- what is said ----


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "pytorch_lightning.callbacks.curvmon"]


def test_a_run_says_what_it_plans_and_what_it_did(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="pytorch_lightning.callbacks.curvmon")
    run(starved(), epochs=6)
    planned, skipped, last = lines(caplog)
    assert skipped.startswith("curvmon: vital signs only at step 3: ") and "max_overhead=0.01" in skipped
    assert planned.startswith("curvmon: 3 layers (net.0, net.2, net.4), ") and "validation samples" in planned
    assert "full measurements in about every " in planned and planned.endswith("no logger")
    assert last.startswith("curvmon: measured 2 of 7 in full, 7 vital signs, 0 alerts")


@pytest.mark.parametrize("known", [True, False])
def test_the_end_is_measured_also_where_it_comes_early(known: bool) -> None:
    class Stop(pl.Callback):
        def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            trainer.should_stop = trainer.current_epoch == 3

    monitor = starved()
    run([monitor, Stop()], epochs=100 if known else -1)
    assert monitor.snapshots[-1].is_full and monitor.snapshots[-1].epoch >= 3
    steps = [s.step for s in monitor.snapshots]
    assert steps == sorted(steps)


def test_train_steps_alone() -> None:
    monitor = CurvatureMonitor(every_n_validations=None, every_n_train_steps=3, eigenvalues=0)
    run(monitor, epochs=2)
    full = [s.step for s in monitor.snapshots if s.is_full]
    assert full and all(step % 3 == 2 or step == 0 for step in full)
    assert len(monitor.snapshots) > len(full)

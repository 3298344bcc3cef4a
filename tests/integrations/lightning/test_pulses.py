"""Pulses in real runs of a Trainer: what they are of, where they go, and when there are none."""

from __future__ import annotations

import copy
import csv
import math
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import curvmon
from curvmon import CurvatureMonitor
from curvmon.alerts.instability import Instability
from curvmon.monitor import pulses as pulses_module
from curvmon.monitor.budget import Budget
from curvmon.monitor.pulse_schedule import RESERVE, SOON, START
from curvmon.recorder import monitored_run
from tests.helpers.fake_clock import FakeClock
from tests.helpers.lightning_runs import QUIET
from tests.helpers.state_differences import RecordingLogger

Batch = Any


class Lit(pl.LightningModule):
    """Batch norm, ReLU and dropout; a learning rate that changes in every step."""

    optimizer = staticmethod(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))

    def loss(self, batch: Batch) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        optimizer = type(self).optimizer(self.parameters())
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Watch(pl.Callback):
    """Copies of the module before and after every batch, with the batch and its learning rate."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, Any, Batch, float]] = []
        self._before: Any = None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        self._before = copied(pl_module), copy.deepcopy(batch), rate

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        before, batch, rate = self._before
        self.seen.append((before, copied(pl_module), batch, rate))


def copied(module: Any) -> nn.Module:
    return copy.deepcopy(module.net)


def data(samples: int = 96) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(samples, 6, generator=generator)
    return TensorDataset(inputs, torch.randint(3, (samples,), generator=generator))


def fit(module: Any, *callbacks: Any, size: int = 8, epochs: int = 2, **options: Any) -> tuple[pl.Trainer, list[str]]:
    """Twelve batches an epoch; the trainer, and what the monitor warned of."""
    torch.manual_seed(0)
    trainer = pl.Trainer(callbacks=list(callbacks), **{**QUIET, "max_epochs": epochs, **options})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, DataLoader(data(), size), DataLoader(data(16), size))
    return trainer, [str(w.message) for w in caught if str(w.message).startswith("curvmon: ")]


def few(**options: Any) -> CurvatureMonitor:
    """Little besides pulses."""
    return CurvatureMonitor(**{"pulse": 4, "metrics": ["coupling"], "eigenvalues": 0, "heatmaps": False, **options})


def cross_entropy(net: Any, batch: Batch) -> Tensor:
    return F.cross_entropy(net(batch[0]), batch[1])


def exact(before: nn.Module, after: nn.Module, batch: Batch) -> curvmon.Pulse:
    step = [b.detach() - a.detach() for b, a in zip(before.parameters(), after.parameters())]
    return curvmon.pulse(before.train(), batch, loss=cross_entropy, step=step)


def agree(record: curvmon.PulseRecord, truth: curvmon.Pulse) -> None:
    assert record.loss == pytest.approx(truth.loss, rel=1e-4)
    size = max(abs(truth.gain), abs(truth.curvature))
    assert record.gain == pytest.approx(truth.gain, abs=0.03 * size)
    assert record.curvature == pytest.approx(truth.curvature, abs=0.03 * size)


# ---- what they are of ----


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.1)


@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_clip_val": 0.01}, {"limit_train_batches": 9}],
    ids=["plain", "clipped", "limited"],
)
@pytest.mark.parametrize("optimizer", [None, adamw])
def test_a_pulse_is_that_of_the_step_on_its_batch(options: Any, optimizer: Any, monkeypatch: Any) -> None:
    if optimizer is not None:
        monkeypatch.setattr(Lit, "optimizer", staticmethod(optimizer))
    monitor, watch = few(), Watch()
    _, said = fit(Lit(), watch, monitor, **options)
    steps = options.get("limit_train_batches", 12) * 2
    assert [record.step for record in monitor.pulses] == list(range(3, steps, 4)) and said == []
    for record in monitor.pulses:
        before, after, batch, rate = watch.seen[record.step]
        agree(record, exact(before, after, batch))
        assert record.learning_rate == rate and record.epoch == record.step // (steps // 2)


def test_accumulation_takes_the_last_batch_of_the_step() -> None:
    monitor, watch = few(pulse=1), Watch()
    trainer, said = fit(Lit(), watch, monitor, accumulate_grad_batches=3)
    assert len(monitor.pulses) == trainer.global_step == 8 and said == []
    for i, record in enumerate(monitor.pulses):
        first, last = watch.seen[3 * i], watch.seen[3 * i + 2]
        agree(record, exact(last[0], last[1], last[2]))
        assert all(torch.equal(a, b) for a, b in zip(first[0].parameters(), last[0].parameters()))


def lbfgs(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters, lr=0.1, max_iter=3)


def test_several_evaluations_are_one_step(monkeypatch: Any) -> None:
    monkeypatch.setattr(Lit, "optimizer", staticmethod(lbfgs))
    monitor, watch = few(), Watch()
    _, said = fit(Lit(), watch, monitor, epochs=1)
    assert len(monitor.pulses) == 3 and said == []
    for record in monitor.pulses:
        before, after, batch, _ = watch.seen[record.step]
        agree(record, exact(before, after, batch))


def test_mixed_precision_is_looked_at_in_single_precision() -> None:
    monitor, watch = few(), Watch()
    _, said = fit(Lit(), watch, monitor, precision="bf16-mixed")
    assert len(monitor.pulses) == 6 and said == []
    for record in monitor.pulses:
        before, after, batch, _ = watch.seen[record.step]
        agree(record, exact(before, after, batch))


def test_half_precision_parameters() -> None:
    monitor = few(pulse=3)
    _, said = fit(Lit(), monitor, precision="bf16-true")
    assert len(monitor.pulses) == 8 and said == []
    assert all(math.isfinite(record.gain) and math.isfinite(record.curvature) for record in monitor.pulses)


class Scribbles(Lit):
    """The step changes its batch; the learning rate is set right before the optimizer steps."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        batch[0].add_(1.0)
        return self.loss(batch)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (1 + batch_idx)
        super().optimizer_step(epoch, batch_idx, optimizer, closure)


def test_the_batch_is_as_it_came_and_the_rate_as_it_was_used() -> None:
    monitor, watch = few(), Watch()
    _, said = fit(Scribbles(), watch, monitor)
    assert len(monitor.pulses) == 6 and said == []
    for record in monitor.pulses:
        before, after, (x, y), _ = watch.seen[record.step]
        agree(record, exact(before, after, (x + 1, y)))
        assert record.learning_rate == pytest.approx(0.01 * (1 + record.step % 12))


class Scaler(Lit):
    """Skips every other step, as a gradient scaler does that has found infinities."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        weights = [p.detach().clone() for p in self.parameters()]
        super().optimizer_step(epoch, batch_idx, optimizer, closure)
        if batch_idx % 2:
            with torch.no_grad():
                for p, weight in zip(self.parameters(), weights):
                    p.copy_(weight)


def test_a_skipped_step_has_no_pulse_and_the_next_one_has() -> None:
    monitor = few(pulse=4)
    _, said = fit(Scaler(), monitor)
    # batches 0, 2, 4, … step; a pulse is due at the fourth, eighth, … step
    assert [record.step for record in monitor.pulses] == [4, 8, 12, 16, 20] and said == []


# ---- manual optimization ----


class Adversaries(pl.LightningModule):
    """Two networks, two optimizers, one step of either in every batch."""

    def __init__(self, through_lightning: bool = True) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.other = nn.Linear(3, 2)
        self._through_lightning = through_lightning

    def loss(self, batch: Batch) -> Tensor:
        out = self.net(batch[0])
        return F.cross_entropy(out, batch[1]) + self.other(out).square().mean()

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        for optimizer in self.optimizers() if self._through_lightning else self.trainer.optimizers:
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.1), torch.optim.SGD(self.other.parameters(), lr=0.3)


@pytest.mark.parametrize("through_lightning", [True, False])
def test_manual_optimization_takes_all_optimizers_together(through_lightning: bool) -> None:
    kept: list[Any] = []

    class Whole(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            kept.append([copy.deepcopy(batch), [p.detach().clone() for p in pl_module.parameters()]])

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            kept[-1].append([p.detach().clone() for p in pl_module.parameters()])

    monitor = few(loss=lambda module, batch: module.loss(batch))
    _, said = fit(Adversaries(through_lightning), Whole(), monitor, epochs=1)
    assert len(monitor.pulses) == 3 and said == []
    for i, record in enumerate(monitor.pulses):
        batch, before, after = kept[4 * i + 3]
        twin = Adversaries()
        torch.nn.utils.vector_to_parameters(torch.nn.utils.parameters_to_vector(before), twin.parameters())
        step = [b - a for b, a in zip(before, after)]
        agree(record, curvmon.pulse(twin, batch, loss=lambda module, batch: module.loss(batch), step=step))
        assert record.learning_rate == pytest.approx(0.3)


def test_manual_optimization_without_a_loss_is_declined_in_one_line() -> None:
    monitor = few()
    _, said = fit(Adversaries(), monitor)
    (line,) = said
    assert "manual optimisation" in line and "pass loss=" in line and not monitor.pulses


# ---- where they go ----


def test_numbers_go_to_loggers_and_callbacks(tmp_path: Path) -> None:
    logger = RecordingLogger()
    best = ModelCheckpoint(tmp_path, monitor="curvmon/step_ratio", every_n_train_steps=23, save_top_k=1)
    monitor = few(pulse=2)
    trainer, said = fit(Lit(), monitor, best, logger=logger, log_every_n_steps=5, enable_checkpointing=True)
    assert said == []
    rows = {step: row for row, step in logger.rows if "curvmon/step_ratio" in row}
    by_step = {record.step: record for record in monitor.pulses if math.isfinite(record.step_ratio)}
    assert rows and rows.keys() <= by_step.keys()
    assert all(b - a >= 5 for a, b in zip(sorted(rows), sorted(rows)[1:]))
    for step, row in rows.items():
        assert row["curvmon/step_ratio"] == pytest.approx(by_step[step].step_ratio)
        assert row.keys() <= {"curvmon/step_ratio", "curvmon/critical_lr", "epoch"}
    last = monitor.pulses[-1]
    assert trainer.callback_metrics["curvmon/step_ratio"].item() == pytest.approx(last.step_ratio)
    assert best.best_model_score is not None and best.best_model_score.isfinite()
    assert trainer.callback_metrics["curvmon/critical_lr"].item() == pytest.approx(last.critical_lr)


def test_a_value_is_never_stale() -> None:
    """In a validation without a pulse since the last one, it is absent."""
    seen: list[bool] = []

    class Look(pl.Callback):
        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            if not trainer.sanity_checking:
                seen.append("curvmon/step_ratio" in trainer.callback_metrics)

    fit(Lit(), few(pulse=5), Look(), epochs=4, val_check_interval=0.25)  # every third step
    assert seen[:6] == [False] * 6  # before there are enough
    assert {True, False} <= set(seen[6:])


def test_csv_has_a_column(tmp_path: Path) -> None:
    fit(Lit(), few(pulse=2), logger=CSVLogger(tmp_path), log_every_n_steps=1)
    (file,) = tmp_path.rglob("metrics.csv")
    header, *rows = file.read_text().splitlines()
    at = header.split(",").index("curvmon/step_ratio")
    assert sum(bool(row.split(",")[at]) for row in rows) >= 5


class Attending(Lit):
    """The features are tokens."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True)
        self.net = nn.Sequential(nn.Unflatten(1, (6, 1)), nn.Linear(1, 4), block, nn.Flatten(), nn.Linear(24, 3))


def test_attention_goes_to_files_and_callbacks(tmp_path: Path) -> None:
    """Not to dashboards, where its rows would be empty before there is a step ratio."""
    names = ("attention_largest_logit", "attention_lowest_entropy")
    board, monitor = RecordingLogger(), few(pulse=2)
    trainer, said = fit(Attending(), monitor, logger=[CSVLogger(tmp_path), board], log_every_n_steps=1)
    assert said == []
    (file,) = tmp_path.rglob("metrics.csv")
    rows = {int(row["step"]): row for row in csv.DictReader(file.open()) if row["curvmon_detail/" + names[0]]}
    for record in monitor.pulses:
        assert [signs.name for signs in record.attention] == ["net.2.self_attn"]
        for name in names:
            assert float(rows[record.step]["curvmon_detail/" + name]) == pytest.approx(getattr(record, name), rel=1e-5)
    for name in names:
        last = trainer.callback_metrics[f"curvmon_detail/{name}"].item()
        assert last == pytest.approx(getattr(monitor.pulses[-1], name), rel=1e-5)
    logged = [row for row, _ in board.rows]
    assert not any("attention" in key for row in logged for key in row)
    assert all(row.keys() != {"epoch"} for row in logged)


@pytest.fixture
def announcing(monkeypatch: pytest.MonkeyPatch) -> list[Instability | None]:
    """What the detector says, pulse by pulse."""
    events: list[Instability | None] = []

    class Announces(pulses_module.InstabilityDetector):
        def update(self, record: Any) -> Instability | None:
            super().update(record)
            return events.pop(0) if events else None

    monkeypatch.setattr(pulses_module, "InstabilityDetector", Announces)
    return events


def test_an_instability_is_an_alert_and_headroom_a_notice(announcing: Any) -> None:
    announcing += [
        Instability("rate_headroom", 0.02, 0.03, 0.1, 2.5),
        Instability("approaching_instability", 0.5, 0.1, 0.1, 0.1, "step_ratio", 5.0),
    ]
    received: list[Any] = []
    logger = RecordingLogger()
    monitor = few(on_alert=received.append, pulse=3)
    fit(Lit(), monitor, logger=logger, log_every_n_steps=1000)
    (alert,) = monitor.alerts
    (notice,) = monitor.notices
    assert alert.kind == "approaching_instability" and alert.level == "warning" and alert.step == 5
    assert alert.headline == "Approaching instability: step ratio 5 times its usual value, step 5"
    assert "critical learning rate 0.2" in alert.evidence[1] and "to about 0.1," in alert.suggestion
    assert notice.kind == "rate_headroom" and notice.level == "info" and "2.5" in notice.suggestion
    assert received == [alert, notice] or received == [alert]


class Ramp(Lit):
    """A constant learning rate, which grows by a tenth in every step from step 200 on."""

    optimizer = staticmethod(lambda p: torch.optim.SGD(p, lr=0.02))

    def configure_optimizers(self) -> Any:
        optimizer = type(self).optimizer(self.parameters())
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.1 ** max(0, step - 200))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def test_a_growing_learning_rate_is_noticed_between_pulses() -> None:
    monitor = few(pulse=10)
    fit(Ramp(), monitor, epochs=18)  # 216 steps
    (alert,) = monitor.alerts
    pulses = [record.step for record in monitor.pulses]
    assert alert.kind == "approaching_instability" and alert.step not in pulses
    # twice the settled rate is reached after eight steps of growth
    assert 206 <= alert.step <= 212
    assert "learning rate: 0.02 → 0.0" in alert.evidence[0]


def test_an_instability_can_stop_a_run(announcing: Any) -> None:
    announcing += [Instability("approaching_instability", 0.5, 0.1, 0.1, 0.1)]
    trainer, _ = fit(Lit(), few(on_alert="stop", pulse=5), max_epochs=10)
    assert trainer.global_step == 5


@pytest.mark.parametrize("alerts", [False, curvmon.AlertRules(instability=False)])
def test_alerts_can_be_switched_off(announcing: Any, alerts: Any) -> None:
    announcing += [Instability("approaching_instability", 0.5, 0.1, 0.1, 0.1)]
    monitor = few(alerts=alerts)
    fit(Lit(), monitor)
    assert not monitor.alerts and len(monitor.pulses) == 6


def test_a_detector_that_fails_costs_no_pulse(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fails(pulses_module.InstabilityDetector):
        def update(self, record: Any) -> Instability | None:
            raise ZeroDivisionError("a bug")

    monkeypatch.setattr(pulses_module, "InstabilityDetector", Fails)
    monitor = few()
    _, said = fit(Lit(), monitor)
    assert len(monitor.pulses) == 6
    assert said == ["curvmon: the step ratio is not judged: ZeroDivisionError: a bug; training goes on"]


# ---- when ----


@pytest.mark.parametrize(
    ("options", "steps"),
    [({"pulse": False}, []), ({"pulse": 7}, [6, 13, 20]), ({"pulse": True, "max_overhead": None}, [9, 19])],
)
def test_settings(options: Any, steps: list[int]) -> None:
    monitor = few(**options)
    _, said = fit(Lit(), monitor)
    assert [record.step for record in monitor.pulses] == steps and said == []


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "often", None])
def test_wrong_settings(wrong: Any) -> None:
    with pytest.raises(curvmon.InputError, match="pulse must be True, False or an integer of at least 1"):
        CurvatureMonitor(pulse=wrong)


class Timed(Lit):
    """A training step takes a second, a forward pass a tenth of it."""

    clock = FakeClock()

    def loss(self, batch: Batch) -> Tensor:
        type(self).clock.advance(0.1 if self.training else 0.0)
        return super().loss(batch)

    def on_train_batch_end(self, *args: Any) -> None:
        type(self).clock.advance(0.9)


def test_pulses_take_one_percent_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitored_run, "Budget", lambda max_overhead: Budget(max_overhead, clock=Timed.clock))
    monitor = few(pulse=True, probe_size=8, max_overhead=0.05)
    fit(Timed(), monitor, epochs=50)
    budget = monitor._recorder.budget
    steps = [record.step for record in monitor.pulses]
    # three passes are 0.3 s: every 34 steps after the first, sooner after suspicious ones
    assert steps[:START] == list(range(9, 10 * START, 10))
    assert {b - a for a, b in pairwise(steps[START:])} - {SOON} <= {33, 34, 35}
    # the very first one also checks how pulses are computed
    assert budget.starting_pulses == pytest.approx(0.3 * START, rel=0.2)
    check = 2.0
    assert 0 < budget.pulse_seconds - budget.starting_pulses < 0.01 * budget.trained + 0.3 * RESERVE + check
    assert budget.overhead == pytest.approx(budget.measured / budget.trained)


# ---- resumed ----


def test_a_resumed_run_goes_on(tmp_path: Path) -> None:
    whole, first, second = few(pulse=5), few(pulse=5), few(pulse=5)
    fit(Lit(), whole, epochs=4)
    trainer, _ = fit(Lit(), first, epochs=2)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    torch.manual_seed(0)
    resumed = pl.Trainer(callbacks=[second], **{**QUIET, "max_epochs": 4})
    resumed.fit(
        Lit(), DataLoader(data(), 8), DataLoader(data(16), 8), ckpt_path=tmp_path / "half.ckpt", weights_only=True
    )
    assert [r.step for r in second.pulses] == [r.step for r in whole.pulses] == list(range(4, 48, 5))
    assert [str(r) for r in second.pulses[: len(first.pulses)]] == [str(r) for r in first.pulses]
    assert all(math.isfinite(r.step_ratio) for r in second.pulses[len(first.pulses) + 2 :])


def test_the_number_of_records_is_bounded() -> None:
    monitor = few(pulse=2, history_size=3)
    fit(Lit(), monitor)
    assert [record.step for record in monitor.pulses] == [19, 21, 23]


# ---- failures ----


def test_a_loss_that_does_not_take_training_batches() -> None:
    def only_validation(module: Any, batch: Batch) -> Tensor:
        if module.training:
            raise KeyError("image")
        return module.loss(batch)

    monitor = few(pulse=2, loss=only_validation)
    trainer, said = fit(Lit(), monitor)
    assert trainer.state.finished and not monitor.pulses and len(monitor.history) == 3
    reason = "KeyError: 'image'; training goes on"
    assert said == [f"curvmon: a pulse failed: {reason}", f"curvmon: no pulses in this run: {reason}"]


class Lost(Lit):
    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        if self.global_step == 6:
            with torch.no_grad():
                self.net[0].weight.fill_(math.nan)


@pytest.mark.filterwarnings("ignore:curvmon. not measured")
def test_a_run_that_has_diverged_is_not_a_matter_of_pulses() -> None:
    monitor = few(pulse=2)
    trainer, said = fit(Lost(), monitor)
    assert trainer.state.finished and [record.step for record in monitor.pulses] == [1, 3, 5]
    assert len(said) == 1 and "pulse" not in said[0]  # of the validation
    assert [alert.kind for alert in monitor.alerts] == ["not_finite"]


def test_a_step_that_skips_its_batch() -> None:
    class Skips(Lit):
        def training_step(self, batch: Batch, batch_idx: int) -> Any:
            return None if batch_idx % 2 else super().training_step(batch, batch_idx)

    monitor = few(pulse=3)
    trainer, said = fit(Skips(), monitor)
    assert trainer.state.finished and all(record.step % 2 == 0 for record in monitor.pulses) and monitor.pulses
    assert said == []

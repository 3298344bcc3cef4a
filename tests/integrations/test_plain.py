"""`Monitor` in a plain loop: the callback's numbers, training unchanged, logs, alerts, resume."""

from __future__ import annotations

import dataclasses
import inspect
import io
import math
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import curvmon
from curvmon.monitor.settings import MonitorSettings
from tests.helpers.plain_loop import STEPS, Loop, batches, loss, network, unlimited
from tests.helpers.state_differences import differences, flat


def different(one: Any, other: Any) -> list[str]:
    states: list[dict[str, Any]] = [{}, {}]
    for value, state in zip((one, other), states):
        flat(value, "", state, {})
    return differences(*states)


# ---- what it must not change, and what it must find ----


def test_training_is_bit_identical() -> None:
    without = Loop(None).run(batches()).state()
    monitor = unlimited(pulse=3)
    with_monitor = Loop(monitor, total_steps=STEPS).run(batches()).state()
    assert [snapshot.step for snapshot in monitor.snapshots] == [0, 10, 20, 30]
    assert len(monitor.pulses) == STEPS // 3 and len(monitor.history) == 4
    assert different(without, with_monitor) == []


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return loss(self, batch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def test_the_same_numbers_as_the_callback(tmp_path: Path) -> None:
    data = batches()
    samples = TensorDataset(torch.cat([x for x, _ in data]), torch.cat([y for _, y in data]))
    callback = curvmon.CurvatureMonitor(max_overhead=None, data="train", every_n_train_steps=10, pulse=5)
    trainer = pl.Trainer(
        max_epochs=1, callbacks=[callback], logger=False, enable_checkpointing=False, accelerator="cpu",
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    module = Module()
    torch.manual_seed(2)
    trainer.fit(module, DataLoader(samples, batch_size=32))

    monitor = unlimited(data="train", pulse=5)
    loop = Loop(monitor, total_steps=STEPS)
    torch.manual_seed(2)
    torch.empty((), dtype=torch.int64).random_()  # the base seed that a DataLoader draws
    loop.run(data)
    assert different(module.net.state_dict(), loop.model.state_dict()) == []
    # Lightning counts a batch when its hooks are over
    assert [snapshot.step for snapshot in monitor.snapshots] == [0, 10, 20, 30]
    assert [snapshot.step for snapshot in callback.snapshots] == [0, 9, 19, 29]
    for snapshot, other in zip(monitor.snapshots, callback.snapshots):
        assert snapshot.measurement is not None and other.measurement is not None
        assert snapshot.spectrum is not None and other.spectrum is not None
        for name in ("resonance", "coupling", "stable_rank", "gn_gap"):
            assert torch.equal(getattr(snapshot.measurement, name), getattr(other.measurement, name))
        assert torch.equal(snapshot.spectrum.eigenvalues, other.spectrum.eigenvalues)
    pulses = [(p.step + 1, p.gain, p.curvature, p.learning_rate) for p in callback.pulses]
    assert len(pulses) == STEPS // 5
    assert [(p.step, p.gain, p.curvature, p.learning_rate) for p in monitor.pulses] == pulses


def test_pulses_with_accumulated_gradients() -> None:
    monitor = unlimited(pulse=5)
    without = Loop(None).run(batches(), accumulate=3).state()
    assert different(without, Loop(monitor).run(batches(), accumulate=3).state()) == []
    assert [record.step for record in monitor.pulses] == [5, 10]


def test_the_probe_batch() -> None:
    first, second = batches(2)
    for source, batch, note in (("val", second, ()), ("train", first, ("measured on the first training batch",))):
        monitor = unlimited(eigenvalues=1)
        monitor.attach(network(), loss=loss)
        if source == "val":
            monitor.observe((second[0][:16], second[1][:16]), source="val")
            monitor.observe((second[0][16:], second[1][16:]), source="val")
        monitor.observe(first)
        assert [n.split(":")[0] for n in monitor.history[0].notes][: len(note)] == list(note)
        model = network().eval()
        assert monitor.snapshots[0].spectrum is not None
        assert monitor.snapshots[0].spectrum.loss == pytest.approx(loss(model, batch).item(), rel=1e-5)


def test_alerts_and_stop() -> None:
    def break_it(loop: Loop) -> None:
        if loop.done == 15:
            with torch.no_grad():
                next(loop.model.parameters())[0] = math.nan

    heard: list[str] = []
    monitor = unlimited(on_alert=lambda alert: heard.append(alert.kind))
    with pytest.warns(UserWarning, match="not measured: parameter '0.weight'"):
        Loop(monitor).run(batches(), after=break_it)
    assert heard == ["not_finite"] and [alert.step for alert in monitor.alerts] == [20]
    stopping = unlimited(on_alert="stop")
    assert not stopping.should_stop
    with pytest.warns(UserWarning, match="not measured"):
        Loop(stopping).run(batches(), after=break_it)
    assert stopping.should_stop


def test_a_run_ends_with_a_measurement() -> None:
    monitor = curvmon.Monitor(eigenvalues=1, metrics=[], pulse=False, max_overhead=1e-9)
    loop = Loop(monitor, total_steps=STEPS)
    budget = monitor._recorder.budget
    budget.free_seconds = 1e-9
    loop.run(batches()[:20])
    full = [snapshot.step for snapshot in monitor.snapshots if snapshot.is_full]
    assert full == [0] and len(monitor.snapshots) == 3
    monitor.close()
    assert monitor.snapshots[-1].is_full and monitor.snapshots[-1].step == 20


def test_a_function_gets_numbers(tmp_path: Path) -> None:
    rows: list[tuple[int, dict[str, float]]] = []
    monitor = unlimited(lambda numbers, step: rows.append((step, numbers)), pulse=False, folder=tmp_path)
    Loop(monitor).run(batches())
    assert [step for step, _ in rows] == [0, 10, 20, 30]
    assert {"curvmon/lambda_1", "curvmon/resonance", "curvmon/probe_loss"} <= rows[-1][1].keys()
    assert "epoch" not in rows[-1][1] and rows[-1][1]["curvmon/lambda_1"] == monitor.spectra[-1].sharpness
    history = curvmon.load_history(tmp_path / "history.jsonl")
    assert [snapshot.step for snapshot in history.snapshots] == [0, 10, 20, 30]


# ---- resumed ----


def test_resume() -> None:
    data, whole = batches(), unlimited(pulse=5)
    expected = Loop(whole, total_steps=STEPS).run(data)
    first = unlimited(pulse=5)
    half = Loop(first, total_steps=STEPS).run(data[:20])
    file = io.BytesIO()
    torch.save({"curvature": first.state_dict()}, file)
    saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    assert [s.step for s in curvmon.load_history(saved).snapshots] == [0, 10, 20]
    second = unlimited(pulse=5)
    second.load_state_dict(saved["curvature"])
    random = torch.get_rng_state()
    again = Loop(second, total_steps=STEPS)
    torch.set_rng_state(random)
    again.model.load_state_dict(half.model.state_dict())
    again.optimizer.load_state_dict(half.optimizer.state_dict())
    again.scheduler.load_state_dict(half.scheduler.state_dict())
    again.done = 20
    again.run(data[20:])
    assert [s.step for s in second.snapshots] == [0, 10, 20, 30]
    assert [p.step for p in second.pulses] == [p.step for p in whole.pulses]
    assert torch.equal(second.spectra[-1].eigenvalues, whole.spectra[-1].eigenvalues)
    assert different(expected.model.state_dict(), again.model.state_dict()) == []


# ---- mistakes ----


def test_mistakes_say_what_to_do() -> None:
    with pytest.raises(curvmon.InputError, match="attach"):
        curvmon.Monitor().observe(batches(1)[0])
    with pytest.raises(curvmon.InputError, match="attach needs loss="):
        curvmon.Monitor().attach(network())
    with pytest.raises(curvmon.InputError, match="log must be a function"):
        curvmon.Monitor(log=3)
    with pytest.raises(curvmon.InputError, match="checkpoint"):
        curvmon.Monitor(on_alert="checkpoint")
    with pytest.raises(curvmon.InputError, match="probe_size"):
        curvmon.Monitor(probe_size=0)
    with pytest.raises(TypeError, match="probe_sise"):
        curvmon.Monitor(probe_sise=3)
    with pytest.raises(curvmon.NodeError):
        curvmon.Monitor(nodes=["nowhere"]).attach(network(), loss=loss)


def test_a_loop_that_logs_nowhere_and_steps_nowhere() -> None:
    """`measure` alone is enough: someone calls it with checkpoints of an old run."""
    monitor = unlimited(eigenvalues=1, initial=False)
    monitor.attach(network(), loss=loss)
    monitor.observe(batches(1)[0], source="val")
    for step in (0, 100, 200):
        monitor.measure(step)
    assert [snapshot.step for snapshot in monitor.snapshots if snapshot.is_full] == [0, 100, 200]


def test_defaults_are_those_of_the_callback() -> None:
    parameters = inspect.signature(curvmon.CurvatureMonitor).parameters.values()
    settings = {field.name: field.default for field in dataclasses.fields(MonitorSettings)}
    assert {parameter.name: parameter.default for parameter in parameters} == {**settings, "max_overhead": None}

"""Part of a measurement, or what follows it, fails: the rest is reported, training goes on, with one warning."""

from __future__ import annotations

import io
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import curvmon
import curvmon.monitor.measurement as runner_module
from curvmon import AlertRules, CurvatureMonitor
from curvmon.alerts.context import context_values
from curvmon.errors import InputError, NonFiniteError
from curvmon.integrations.lightning import training_step
from curvmon.monitor.fallbacks import Failure, describe
from curvmon.monitor.measurement import Outcome, merge
from curvmon.monitor.vital_signs import TensorNorms
from tests.helpers.lightning_runs import QUIET, assert_same, doctored, first_rows, run, trained
from tests.helpers.module_zoo import BATCH, PROBE, REGRESSION, REGRESSION_VAL, Regression, regression_loss


def loaders() -> tuple[Any, Any]:
    return DataLoader(REGRESSION, BATCH), DataLoader(REGRESSION_VAL, BATCH)


# ---- the search for eigenvalues fails ----


def failing(monkeypatch: pytest.MonkeyPatch, error: Exception, measurements: set[int]) -> list[int]:
    """From now on searches fail at these measurements; counts them."""
    original, calls = runner_module.measure_spectrum, [0]

    def spectrum(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] - 1 in measurements:
            raise error
        return original(*args, **kwargs)

    monkeypatch.setattr(runner_module, "measure_spectrum", spectrum)
    return calls


@pytest.mark.parametrize(
    "error",
    [RuntimeError("no luck"), NonFiniteError("not finite"), torch.OutOfMemoryError("CUDA out of memory")],
    ids=["transient", "diverged", "memory"],
)
def test_pairs_are_reported_without_eigenvalues(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = failing(monkeypatch, error, {1, 2})
    torch.manual_seed(0)
    module, monitor = Regression(), CurvatureMonitor(eigenvalues=2, heatmaps=False)
    (said,) = trained(module, monitor, loaders(), max_epochs=4)
    reason = f"{type(error).__name__}: {error}"
    assert f"eigenvalues not measured: {reason}. The pairs of layers are; the next validation" in said
    assert calls == [5]  # once for each measurement: nothing was measured twice for it
    assert [snapshot.spectrum is not None for snapshot in monitor.snapshots] == [True, False, False, True, True]
    assert len(monitor.history) == 5
    lacking = [f"no eigenvalues: {reason}" in found.notes for found in monitor.history]
    assert lacking == [False, True, True, False, False]
    # the whole batch, although memory was short
    assert_same(monitor.history[-1], curvmon.measure(module, first_rows(PROBE), loss=regression_loss))
    alerts = [alert.kind for alert in monitor.alerts]
    assert alerts == (["not_finite"] if isinstance(error, NonFiniteError) else [])


def test_impossible_eigenvalues_are_not_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = failing(monkeypatch, InputError("complex parameters"), {0, 1, 2})
    monitor = CurvatureMonitor(heatmaps=False)
    (said,) = trained(Regression(), monitor, loaders(), max_epochs=2)
    assert "eigenvalues are not measured in this run: InputError: complex parameters" in said
    assert calls == [1] and len(monitor.history) == 3 and not monitor.spectra
    assert not any("no eigenvalues" in note for found in monitor.history for note in found.notes)


def test_failed_pairs_fail_the_measurement() -> None:
    """Whatever has become of the eigenvalues on another process."""
    found: Any = object()
    pairs = Outcome(failure=Failure("transient", "no", "pairs"))
    values = Outcome(failure=Failure("transient", "none", "spectrum"))
    measured = Outcome(measurement=found)
    assert merge([measured, values]).succeeded and merge([measured, values]).failure == values.failure
    assert not merge([measured, pairs]).succeeded
    assert not merge([measured, pairs, values]).succeeded


def test_failed_preparation_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def odd(*args: Any) -> Any:
        raise AttributeError("a Trainer of another kind")

    monkeypatch.setattr(training_step, "frozen_trainer_state", odd)
    monitor = CurvatureMonitor()
    (said,) = trained(Regression(), monitor, loaders())
    assert "not measured: AttributeError: a Trainer of another kind. Training goes on" in said and not monitor.history


def test_long_message_is_truncated() -> None:
    message = describe(RuntimeError("x" * 5000 + "\nmore"))
    assert message.startswith("RuntimeError: xxx") and message.endswith("x…") and len(message) < 330


def test_warm_start_is_kept_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vector as large as the parameters; training may need the memory of the device."""
    original = curvmon.Spectrum.start_vector
    moved: list[Any] = []

    class Elsewhere(Tensor):
        def cpu(self, *args: Any, **kwargs: Any) -> Tensor:
            moved.append(self)
            return self.as_subclass(Tensor)

    monkeypatch.setattr(curvmon.Spectrum, "start_vector", lambda self: original(self).as_subclass(Elsewhere))
    monitor = CurvatureMonitor(metrics=[], eigenvalues=2, initial=False)
    assert not trained(Regression(), monitor, loaders())
    assert len(moved) == 1 and type(monitor._recorder.runner._start) is Tensor


def test_zero_or_nan_warm_start_is_ignored(tmp_path: Path) -> None:
    run(CurvatureMonitor(), epochs=1, save=tmp_path / "a.ckpt")
    for factor in (0.0, float("nan")):
        start = torch.load(tmp_path / "a.ckpt", weights_only=True)["callbacks"]["CurvatureMonitor"]["start"]
        monitor = CurvatureMonitor()
        assert not run(monitor, epochs=2, ckpt=doctored(tmp_path / "a.ckpt", start=factor * start))
        assert len(monitor.spectra) == 3


# ---- steps that differentiate or autocast by themselves ----


class OwnGradients(Regression):
    """Logs the norm of its gradients."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        gradients = torch.autograd.grad(loss, list(self.parameters()), retain_graph=True)
        self.log("norm", torch.stack([g.norm() for g in gradients]).norm())
        return loss


class OwnAutocast(Regression):
    @torch.autocast("cpu", dtype=torch.bfloat16)
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.autocast(device_type="cpu", dtype=torch.bfloat16):
            return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("kind", [OwnGradients, OwnAutocast])
def test_own_gradients_and_autocast_do_not_change_the_measurement(kind: Any) -> None:
    torch.manual_seed(0)
    module, monitor = kind(), CurvatureMonitor(eigenvalues=2, initial=False)
    assert not trained(module, monitor, loaders())
    batch = first_rows(PROBE)
    assert_same(monitor.history[-1], curvmon.measure(module, batch, loss=regression_loss))
    wanted = curvmon.spectrum(module, batch, loss=regression_loss, k=2)
    (found,) = monitor.spectra
    assert ((found.eigenvalues - wanted.eigenvalues).abs() <= found.residuals + wanted.residuals + 1e-6).all()
    assert abs(found.trace - wanted.trace) <= 4 * (found.trace_stderr + wanted.trace_stderr) + 1e-5 * wanted.trace


def test_autocast_is_restored() -> None:
    net = nn.Linear(4, 4)

    def loss(model: Any, batch: Any) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert model(batch).dtype == torch.float32
        return F.mse_loss(model(batch), batch)

    outer = torch.autocast("cpu", dtype=torch.bfloat16)
    with outer:
        curvmon.measure(net, torch.randn(8, 4), loss=loss, nodes=[""])
        assert net(torch.randn(8, 4)).dtype == torch.bfloat16
    assert net(torch.randn(8, 4)).dtype == torch.float32
    with outer:
        assert net(torch.randn(8, 4)).dtype == torch.bfloat16


# ---- what follows a measurement fails ----


def test_context_skips_tensors_without_a_norm() -> None:
    model = nn.Linear(8, 8)
    model.register_buffer("eight", torch.ones(16).to(torch.float8_e4m3fn))
    model.register_buffer("nowhere", torch.ones(16, device="meta"))
    model.register_buffer("sparse", torch.eye(16).to_sparse())
    model.register_buffer("narrow", torch.ones(16, dtype=torch.bfloat16))
    model.register_parameter("lazy", nn.UninitializedParameter())
    found = context_values(TensorNorms().look(model).norms)
    assert set(found) == {("weights", "weight"), ("weights", "bias"), ("statistics", "narrow")}
    assert found["statistics", "narrow"] == 4.0


class Jump(pl.Callback):
    @torch.no_grad()
    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 9:
            next(module.parameters()).mul_(30.0)


def alarmed(folder: Path, on_alert: Any) -> tuple[CurvatureMonitor, list[str]]:
    torch.manual_seed(0)
    monitor = CurvatureMonitor(
        eigenvalues=1, heatmaps=False, on_alert=on_alert, alerts=AlertRules(edge_of_stability=None)
    )
    options = {**QUIET, "max_epochs": 11, "default_root_dir": folder}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pl.Trainer(callbacks=[monitor, Jump()], **options).fit(Regression(), *loaders())
    return monitor, [str(w.message) for w in caught if str(w.message).startswith("curvmon: ")]


def test_unwritable_checkpoint_warns_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monitor, said = alarmed(tmp_path / "file", "checkpoint")
    assert len(monitor.alerts) == 1 and len(monitor.history) == 12
    assert len(said) == 1 and "no checkpoint of an alert was written" in said[0] and "training goes on" in said[0]


def test_checkpoint_folder_may_be_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which may be in a bucket: `Path("s3://a/b")` is another place."""
    paths: list[str] = []
    monkeypatch.setattr(pl.Trainer, "save_checkpoint", lambda self, path, *args: paths.append(str(path)))
    monkeypatch.setattr(pl.Trainer, "default_root_dir", property(lambda self: "s3://bucket/run/"))
    monitor, said = alarmed(tmp_path, "checkpoint")
    assert paths == [f"s3://bucket/run/curvmon-alert-step={monitor.alerts[0].step}.ckpt"] and not said


class Closed(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


@pytest.mark.parametrize("encoding", ["ascii", "utf-8", None])
def test_every_terminal_works(encoding: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    terminal = Closed() if encoding is None else io.TextIOWrapper(written, encoding=encoding)
    monitor = CurvatureMonitor(eigenvalues=1, verbose=True, heatmaps=False)
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", terminal)
        assert not trained(Regression(), monitor, loaders())
        if encoding is not None:
            terminal.flush()
    assert len(monitor.history) == 2
    if encoding is not None:
        printed = written.getvalue().decode()
        assert printed.count("curvmon: step") == 2 and ("λ_1 " if encoding == "utf-8" else "?_1 ") in printed


# ---- states of other versions ----


def test_state_without_alerts_is_loaded(tmp_path: Path) -> None:
    run(CurvatureMonitor(), epochs=1, save=tmp_path / "a.ckpt")
    checkpoint = torch.load(tmp_path / "a.ckpt", weights_only=True)
    state = checkpoint["callbacks"]["CurvatureMonitor"]
    del state["alerts"]
    for entry in state["history"]:
        del entry["alerts"]
    torch.save(checkpoint, tmp_path / "b.ckpt")
    monitor = CurvatureMonitor()
    assert not run(monitor, epochs=2, ckpt=tmp_path / "b.ckpt")
    assert len(monitor.history) == 3


def test_unreadable_state_warns_once_and_is_ignored(tmp_path: Path) -> None:
    run(CurvatureMonitor(), epochs=2, save=tmp_path / "a.ckpt")
    for changes in (
        {"alerts": {"events": 3}},
        {"history": [{"step": 1}]},
        {"alerts": {"raised": [{}]}},
        {"budget": None},
    ):
        monitor = CurvatureMonitor()
        (said,) = run(monitor, epochs=3, ckpt=doctored(tmp_path / "a.ckpt", **changes))
        assert "the checkpoint's state of CurvatureMonitor cannot be read" in said
        assert len(monitor.snapshots) == 1 and not monitor.alerts

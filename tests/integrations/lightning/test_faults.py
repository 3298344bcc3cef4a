"""What goes wrong in a run: memory, NaN, interrupts, mistakes of the user, checkpoints. Training goes on."""

from __future__ import annotations

import inspect
import math
import signal
import warnings
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
import yaml
from pytorch_lightning.callbacks import BackboneFinetuning, ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader

import curvmon
import curvmon.monitor.measurement as runner_module
from curvmon import CurvatureMonitor, InputError, NodeError
from curvmon.monitor.pairs_and_spectrum import measure_spectrum
from tests.helpers.lightning_runs import QUIET, assert_same, doctored, first_rows, run, seeded, trained
from tests.helpers.module_zoo import (
    BATCH,
    CLASSES,
    CLASSES_VAL,
    FRAMES,
    PROBE,
    REGRESSION,
    REGRESSION_VAL,
    RINGS,
    FrozenBackbone,
    GraphNetwork,
    Regression,
    SpeechRecogniser,
    drawn,
    graphs,
    mlp,
    regression_loss,
    rows,
    without_labels,
)

pytestmark = pytest.mark.slow


def loaders(val: Any = REGRESSION_VAL) -> tuple[Any, Any]:
    return DataLoader(REGRESSION, BATCH), DataLoader(val, BATCH)


def epochs_measured(monitor: CurvatureMonitor) -> list[int]:
    return [s.epoch for s in monitor.snapshots if s.measurement is not None or s.spectrum is not None]


# ---- memory ----


class Hungry(Regression):
    """Runs out of memory when more than `limit(epoch)` samples are measured."""

    def __init__(self, limit: Any, error: Any = None) -> None:
        super().__init__()
        self.limit = limit
        self.error = error or RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if not self.training and len(batch[0]) > self.limit(self.current_epoch):
            raise self.error
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        torch.OutOfMemoryError("no text"),
        MemoryError(),
    ],
    ids=["cuda", "cpu", "cublas", "torch", "python"],
)
def test_out_of_memory_halves_the_batch(error: BaseException) -> None:
    module, monitor = seeded(Hungry, lambda epoch: 10, error), CurvatureMonitor()
    assert not trained(module, monitor, loaders())
    assert len(monitor.history) == 2
    for found in monitor.history:
        assert "out of memory: measured on the first 8 samples of the batch" in found.notes
    assert_same(monitor.history[-1], curvmon.measure(module, first_rows(8), loss=regression_loss))


def test_out_of_memory_later_halves_the_batch_for_the_rest_of_the_run() -> None:
    module, monitor = seeded(Hungry, lambda epoch: 20 if epoch == 1 else 99), CurvatureMonitor(eigenvalues=0)
    assert not trained(module, monitor, loaders(), max_epochs=3)
    halved = [any("first 16 samples" in note for note in found.notes) for found in monitor.history]
    assert halved == [False, False, True, True]


def test_out_of_memory_for_every_size_warns_once_and_retries_the_whole_batch() -> None:
    module, monitor = seeded(Hungry, lambda epoch: 0 if epoch in (1, 2) else 99), CurvatureMonitor()
    (said,) = trained(module, monitor, loaders(), max_epochs=4)
    assert "not measured: RuntimeError: CUDA out of memory" in said and "the next validation measures again" in said
    assert epochs_measured(monitor) == [0, 0, 3]
    assert not any("out of memory" in note for note in monitor.history[-1].notes)
    assert_same(monitor.history[-1], curvmon.measure(module, first_rows(PROBE), loss=regression_loss))


def test_out_of_memory_at_first_does_not_fall_back_to_the_training_batch() -> None:
    module, monitor = seeded(Hungry, lambda epoch: 0 if epoch == 0 else 99), CurvatureMonitor()
    (said,) = trained(module, monitor, loaders(), max_epochs=2)
    assert "out of memory" in said and epochs_measured(monitor) == [1]
    assert_same(monitor.history[-1], curvmon.measure(module, first_rows(PROBE), loss=regression_loss))


def test_batch_that_cannot_be_halved_warns_once() -> None:
    class HungryGraphs(GraphNetwork):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if not self.training:
                raise RuntimeError("CUDA out of memory")
            return super().training_step(batch, batch_idx)

    monitor = CurvatureMonitor()
    both = (DataLoader(RINGS, BATCH, collate_fn=graphs), DataLoader(RINGS, BATCH, collate_fn=graphs))
    (said,) = trained(HungryGraphs(), monitor, both, max_epochs=2)
    assert "out of memory" in said and not epochs_measured(monitor)


@pytest.mark.parametrize("size", [16, 10, 1])
def test_eigenvalues_of_partial_batches_match_the_whole_batch(size: int) -> None:
    spectra = []
    for limit in (size, 99):
        module, monitor = seeded(Hungry, lambda epoch, n=limit: n), CurvatureMonitor(metrics=[], initial=False)
        assert not trained(module, monitor, loaders())
        spectra.append(monitor.spectra[0])
    parts, whole = spectra
    assert parts.loss == pytest.approx(whole.loss, rel=1e-6)
    error = (parts.eigenvalues - whole.eigenvalues).abs()
    assert (error <= parts.residuals + whole.residuals + 1e-5 * whole.eigenvalues[0]).all()
    # the part from second derivatives of activations is estimated, by other probes for other parts
    assert abs(parts.trace - whole.trace) < 4 * math.hypot(parts.trace_stderr, whole.trace_stderr)


# ---- numbers and errors of the user's step ----


class Faulty(Regression):
    """`fault(self, loss)` replaces the loss when it is measured."""

    def __init__(self, fault: Any) -> None:
        super().__init__()
        self.fault = fault

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss if self.training else self.fault(self, loss)


def test_nan_loss_warns_once_and_measuring_resumes() -> None:
    module = seeded(Faulty, lambda self, loss: loss * (float("nan") if self.current_epoch in (1, 2) else 1.0))
    monitor = CurvatureMonitor()
    (said,) = trained(module, monitor, loaders(), max_epochs=5)
    assert "not measured: DivergedError: the loss is nan although inputs and parameters are finite" in said
    assert "Training goes on; the next validation measures again" in said
    assert epochs_measured(monitor) == [0, 0, 3, 4]
    assert_same(monitor.history[-1], curvmon.measure(module, first_rows(PROBE), loss=regression_loss))


def test_nan_loss_at_first_is_measured_on_the_validation_batch_later() -> None:
    module = seeded(Faulty, lambda self, loss: loss * (float("nan") if self.current_epoch == 0 else 1.0))
    monitor = CurvatureMonitor()
    (said,) = trained(module, monitor, loaders(), max_epochs=2)
    assert "the loss is nan" in said and epochs_measured(monitor) == [1]
    assert_same(monitor.history[-1], curvmon.measure(module, first_rows(PROBE), loss=regression_loss))


def test_warning_names_the_diverged_parameter() -> None:
    class Diverged(Regression):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                with torch.no_grad():
                    self.net[2].weight.fill_(float("inf"))

    monitor = CurvatureMonitor()
    (said,) = trained(seeded(Diverged), monitor, loaders(), max_epochs=3)
    assert "not measured: parameter 'net.0.weight' and " in said and "not finite: training has diverged" in said
    assert epochs_measured(monitor) == [0, 0]


def test_missing_second_derivative_is_replaced() -> None:
    """Pairs of layers and eigenvalues come from differences of gradients, and notes say so."""
    monitor = CurvatureMonitor()
    both = DataLoader(FRAMES, BATCH), DataLoader(FRAMES, BATCH)
    assert not trained(SpeechRecogniser(), monitor, both, max_epochs=3)
    assert len(monitor.history) == len(monitor.spectra) == 4
    for pairs, spectrum in zip(monitor.history, monitor.spectra):
        assert pairs.resonance.isfinite().all() and any("differences of gradients: ctc_loss" in n for n in pairs.notes)
        assert spectrum.eigenvalues.isfinite().all() and math.isfinite(spectrum.ggn_eigenvalue)
    assert any("not compared with second derivatives" in note for note in monitor.spectra[0].notes)


def test_step_that_raises_when_measured_warns_once() -> None:
    sizes = []

    def fault(self: Any, loss: Tensor) -> Tensor:
        raise KeyError("only for training")

    class Counted(Faulty):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if not self.training:
                sizes.append(len(batch[0]))
            return super().training_step(batch, batch_idx)

    monitor = CurvatureMonitor()
    (said,) = trained(seeded(Counted, fault), monitor, loaders(), max_epochs=3)
    assert "not measured: KeyError: 'only for training'. Training goes on" in said
    assert not epochs_measured(monitor)
    # before the first step and after every epoch: a validation batch and, as long as none has worked, a training batch;
    # then the loss of the vital signs
    assert len(sizes) == 4 * 3 and sizes[:3] == [PROBE, BATCH, PROBE]


def test_step_that_raises_once_is_retried() -> None:
    def fault(self: Any, loss: Tensor) -> Tensor:
        if self.current_epoch == 1:
            raise ValueError
        return loss

    module, monitor = seeded(Faulty, fault), CurvatureMonitor()
    (said,) = trained(module, monitor, loaders(), max_epochs=3)
    assert "not measured: ValueError. Training goes on" in said
    assert epochs_measured(monitor) == [0, 0, 2]


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        (lambda self, loss: None, "LossError: training_step returned no loss for the probe batch"),
        (lambda self, loss: {"predicted": loss}, "LossError: training_step returned no loss for the probe batch"),
        (lambda self, loss: loss.detach(), "LossError"),
        (lambda self, loss: loss.expand(3), "LossError"),
    ],
)
def test_step_without_a_loss_warns(returned: Any, reason: str) -> None:
    monitor = CurvatureMonitor()
    (said,) = trained(seeded(Faulty, returned), monitor, loaders(), max_epochs=2)
    assert f"not measured: {reason}" in said and not epochs_measured(monitor)


def test_unfrozen_layers_join_the_spectrum() -> None:
    module, monitor = seeded(FrozenBackbone), CurvatureMonitor()
    trainer = pl.Trainer(callbacks=[BackboneFinetuning(2), monitor], **{**QUIET, "max_epochs": 4})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, DataLoader(CLASSES, BATCH), DataLoader(CLASSES_VAL, BATCH))
    assert not [w for w in caught if "curvmon" in str(w.message)]
    assert [len(found.parameters) for found in monitor.spectra] == [4, 4, 4, 8, 8]


# ---- interrupts and exceptions ----


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Lightning ignores SIGINT after the first."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


class Logs(Faulty):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("loss", 1.0)
        self.logger.log_metrics({"own": 1.0})  # type: ignore[union-attr]
        return super().training_step(batch, batch_idx)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_interrupt_propagates_and_restores_everything(interrupt: type[BaseException], tmp_path: Path) -> None:
    def fault(self: Any, loss: Tensor) -> Tensor:
        if self.current_epoch == 1:
            raise interrupt
        return loss

    states, attributes = [], []
    for monitored in (True, False):
        module, monitor = seeded(Logs, fault), CurvatureMonitor()
        module.net.append(nn.BatchNorm1d(2))
        callbacks = [monitor] if monitored else []
        checkpoint = ModelCheckpoint(tmp_path / str(monitored), save_on_exception=True, save_top_k=0)
        options = {**QUIET, "enable_checkpointing": True, "max_epochs": 2, "logger": CSVLogger(tmp_path)}
        trainer = pl.Trainer(callbacks=[*callbacks, checkpoint], **options)
        if monitored:
            with pytest.raises(SystemExit):
                trainer.fit(module, *loaders())
            assert trainer.interrupted and trainer.current_epoch == 1
            assert len(monitor.snapshots) == 2
        else:
            trainer.fit(module, *loaders())
        attributes.append(list(module.__dict__))
        assert trainer.loggers == [options["logger"]]
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())
        assert torch.is_grad_enabled()
        states.append(module.state_dict())
    # it ended in the last validation: all steps were done
    assert attributes[0] == attributes[1] and "log" not in attributes[0]
    assert all(torch.equal(a, b) for a, b in zip(states[0].values(), states[1].values()))
    (saved,) = (tmp_path / "True").glob("*.ckpt")
    state = torch.load(saved, weights_only=True)
    assert len(state["callbacks"]["CurvatureMonitor"]["history"]) == 2
    assert all(torch.equal(a, b) for a, b in zip(state["state_dict"].values(), states[1].values()))


def test_training_exception_propagates_and_a_second_fit_continues() -> None:
    class Breaks(Regression):
        broken = True

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if self.training and self.current_epoch == 1 and self.broken:
                raise ZeroDivisionError("in training")
            return super().training_step(batch, batch_idx)

    module, monitor = seeded(Breaks), CurvatureMonitor()
    with pytest.raises(ZeroDivisionError, match="in training"):
        trained(module, monitor, loaders(), max_epochs=3)
    assert epochs_measured(monitor) == [0, 0]
    module.broken = False
    assert not trained(module, monitor, loaders(), max_epochs=2)
    assert epochs_measured(monitor) == [0, 0, 0, 1]
    assert_same(monitor.history[-1], curvmon.measure(module, first_rows(PROBE), loss=regression_loss))


# ---- mistakes that raise before training ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nodes": ["net.0", "nett.2"]}, r"no module 'nett.2'; did you mean .*'net.2'"),
        ({"nodes": ["layers.*"]}, r"pattern 'layers.\*' matches no module. Modules: .*net"),
        ({"output": "ned"}, r"no module 'ned'; did you mean 'net'"),
    ],
)
def test_unknown_node_raises_before_training(options: Any, message: str) -> None:
    module = seeded()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(NodeError, match=message):
        trained(module, CurvatureMonitor(**options), loaders())
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({name: 0}, f"{name} must be an integer of at least 1, not 0") for name in (
            "probe_size", "probe_batches", "history_size"
        )),
        *(({name: 1.5}, f"{name} must be an integer of at least 1, not 1.5") for name in (
            "probe_size", "probe_batches", "history_size"
        )),
        ({"every_n_train_steps": 0}, "every_n_train_steps must be None or an integer of at least 1, not 0"),
        ({"every_n_train_steps": "5"}, "every_n_train_steps must be None or an integer of at least 1, not '5'"),
        ({"eigenvalues": -1}, "eigenvalues must be an integer, 0 for none, not -1"),
        ({"eigenvalues": 2.0}, "eigenvalues must be an integer, 0 for none, not 2.0"),
        ({"data": "test"}, "data must be \"val\" or \"train\", not 'test'"),
        ({"metrics": ["resonance", "sharpness"]}, "no metric 'sharpness'; the metrics are resonance, coupling"),
        ({"metrics": "resonance"}, r"metrics must be a list, \['resonance'\] say"),
        ({"metrics": [], "eigenvalues": 0}, "there is nothing to measure"),
        ({"max_overhead": -0.1}, "max_overhead must be None or a share of the training time, not -0.1"),
        ({"max_overhead": float("nan")}, "max_overhead must be None or a share of the training time, not nan"),
        ({"max_overhead": "5 %"}, "max_overhead must be None or a share of the training time, not '5 %'"),
        ({"rtol": 0.0}, "rtol must be positive, not 0.0"),
        ({"rtol": float("nan")}, "rtol must be positive, not nan"),
        ({"rtol": True}, "rtol must be positive, not True"),
        ({"probe_size": True}, "probe_size must be an integer of at least 1, not True"),
        ({"every_n_validations": 0}, "every_n_validations must be None or an integer of at least 1, not 0"),
        ({"every_n_validations": None}, "every_n_validations=None needs every_n_train_steps"),
        ({"max_overhead": 5}, "max_overhead=5 is more than the training itself; it is a share of it: 0.05"),
        ({"every_n_train_steps": True}, "every_n_train_steps must be None or an integer of at least 1, not True"),
        ({"eigenvalues": True}, "eigenvalues must be an integer, 0 for none, not True"),
        ({"max_overhead": True}, "max_overhead must be None or a share of the training time, not True"),
        ({"verbose": "no"}, "verbose must be True or False, not 'no'"),
        ({"heatmaps": None}, "heatmaps must be True or False, not None"),
        ({"log_key_prefix": None}, 'log_key_prefix must be a string, "probe/" say, not None'),
        ({"log_pairs": "auto"}, "log_pairs must be True or False, not 'auto'"),
        ({"seed": -1}, r"seed must be in \[0, 2\*\*63\), not -1"),
        ({"seed": 0.5}, "seed must be an integer, not 0.5"),
        ({"seed": True}, "seed must be an integer, not True"),
        ({"nodes": []}, "nodes is empty"),
        ({"nodes": [0]}, "nodes must be names of submodules or glob patterns, not int"),
        ({"output": 3}, "output must be the name of a module, not int"),
        ({"loss": 3}, "loss must be a callable"),
        ({"loss": nn.MSELoss()}, "loss takes the model and the batch, not predictions and targets"),
    ],
    ids=str,
)  # fmt: skip
def test_wrong_arguments(options: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        CurvatureMonitor(**options)


# ---- checkpoints ----

OTHERS = rows(drawn(48, 6, seed=11), drawn(48, 2, seed=13))
"""validation data that a resumed run delivers instead"""


def assert_same_series(found: CurvatureMonitor, wanted: CurvatureMonitor) -> None:
    assert [(s.step, s.epoch) for s in found.snapshots] == [(s.step, s.epoch) for s in wanted.snapshots]
    assert len(found.history) == len(wanted.history) and len(found.spectra) == len(wanted.spectra)
    for one, other in zip(found.history, wanted.history):
        assert_same(one, other)
    for first, second in zip(found.spectra, wanted.spectra):
        assert first.hvps == second.hvps
        torch.testing.assert_close(first.eigenvalues, second.eigenvalues, rtol=1e-6, atol=0)


@pytest.mark.parametrize("how", ["ModelCheckpoint", "save_checkpoint"])
def test_resumed_as_if_never_interrupted(how: str, tmp_path: Path) -> None:
    """Same batch although the loader delivers another, same start vector, same budget."""
    whole, first, second = CurvatureMonitor(), CurvatureMonitor(), CurvatureMonitor()
    run(whole, epochs=4)
    path = tmp_path / "last.ckpt"
    if how == "ModelCheckpoint":
        run([first, ModelCheckpoint(tmp_path, save_last=True)], epochs=2, enable_checkpointing=True)
    else:
        run(first, epochs=2, save=path)
    assert not run(second, epochs=4, ckpt=path, val=OTHERS)
    assert epochs_measured(second) == [0, 0, 1, 2, 3]
    assert_same_series(second, whole)
    assert [s.seconds for s in second.snapshots[:3]] == [s.seconds for s in first.snapshots]


def test_checkpoint_holds_plain_values_only(tmp_path: Path) -> None:
    monitor = CurvatureMonitor()
    run(monitor, epochs=1, save=tmp_path / "a.ckpt")
    state = torch.load(tmp_path / "a.ckpt", weights_only=True)["callbacks"]["CurvatureMonitor"]
    assert len(state["history"]) == 2 and state["validations"] == 1
    assert [len(tensor) for tensor in state["probe"]["tensors"][0]] == [PROBE, PROBE]
    assert torch.equal(state["probe"]["tensors"][0][0], first_rows(PROBE)[0])
    assert state["start"].shape == (2, sum(p.numel() for p in Regression().parameters()))
    assert state["budget"]["measured"] > 0

    def kinds(value: Any) -> set[type]:
        if isinstance(value, dict):
            return {dict}.union(*map(kinds, value), *map(kinds, value.values()))
        return {list}.union(*map(kinds, value)) if isinstance(value, list) else {type(value)}

    assert kinds(monitor.state_dict()) <= {dict, list, str, int, float, bool, type(None), Tensor}


def test_resumed_search_starts_from_the_vector_of_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, starts = tmp_path / "a.ckpt", []

    def recorded(*args: Any, start: Tensor | None, **options: Any) -> Any:
        starts.append(start)
        return measure_spectrum(*args, start=start, **options)

    run(CurvatureMonitor(metrics=[]), epochs=3, save=path)
    monkeypatch.setattr(runner_module, "measure_spectrum", recorded)
    monitor = CurvatureMonitor(metrics=[])
    assert not run(monitor, epochs=4, ckpt=path)
    assert len(monitor.spectra) == 5
    (start,) = starts
    saved = torch.load(path, weights_only=True)["callbacks"]["CurvatureMonitor"]["start"]
    assert torch.equal(start, saved) and not torch.equal(start, monitor.state_dict()["start"])


def test_resumed_run_continues_its_budget(tmp_path: Path) -> None:
    path, first = tmp_path / "a.ckpt", CurvatureMonitor()
    run(first, epochs=2, save=path)
    # weeks: the seconds that this test takes do not matter
    spent = {**first.state_dict()["budget"], "measured": 4e6, "trained": 1e7}
    second = CurvatureMonitor(max_overhead=0.05)
    assert not run(second, epochs=4, ckpt=doctored(path, budget=spent))
    # the last validation is measured in any case
    assert len(second.history) == 4 and second.state_dict()["budget"]["skipped"] == 1
    third = CurvatureMonitor(max_overhead=0.5)
    assert not run(third, epochs=4, ckpt=doctored(path, budget=spent))
    assert len(third.history) == 5
    assert third.snapshots[-1].overhead == pytest.approx(0.4, rel=1e-3)


def test_checkpoint_without_the_monitor_warns(tmp_path: Path) -> None:
    run([], epochs=2, save=tmp_path / "a.ckpt")
    monitor = CurvatureMonitor()
    (said,) = run(monitor, epochs=3, ckpt=tmp_path / "a.ckpt")
    assert "the checkpoint has no state of this CurvatureMonitor: its history starts here" in said
    assert epochs_measured(monitor) == [2]


@pytest.mark.parametrize("version", [0, 2])
def test_state_of_another_version_warns(version: int, tmp_path: Path) -> None:
    run(CurvatureMonitor(), epochs=1, save=tmp_path / "a.ckpt")
    monitor = CurvatureMonitor()
    said = run(monitor, epochs=2, ckpt=doctored(tmp_path / "a.ckpt", version=version))
    assert "of another version" in said[0] and epochs_measured(monitor) == [1]


def test_other_nodes_warn(tmp_path: Path) -> None:
    run(CurvatureMonitor(), epochs=1, save=tmp_path / "a.ckpt")
    monitor = CurvatureMonitor(nodes=["net.0", "net.2"])
    (said,) = run(monitor, epochs=3, ckpt=tmp_path / "a.ckpt")
    assert "the nodes are net.0, net.2, before they were net.0, net.2, net.4: values of pairs before and after" in said
    assert [len(found.nodes) for found in monitor.history] == [3, 3, 2, 2]


def test_two_monitors_resume_independently(tmp_path: Path) -> None:
    def pair() -> list[CurvatureMonitor]:
        return [
            CurvatureMonitor(nodes=["net.0", "net.2"], eigenvalues=0, every_n_validations=2),
            CurvatureMonitor(metrics=[], eigenvalues=2, log_key_prefix="train/", data="train"),
        ]

    whole, second = pair(), pair()
    run(whole, epochs=4)
    run(pair(), epochs=1, save=tmp_path / "a.ckpt")
    assert not run(second, epochs=4, ckpt=tmp_path / "a.ckpt", val=OTHERS)
    for found, wanted in zip(second, whole):
        assert_same_series(found, wanted)
    assert [sum(s.is_full for s in monitor.snapshots) for monitor in second] == [3, 5]
    # the first never saw the second's
    assert not second[0].spectra and not second[1].history


def test_training_batch_is_kept_when_resumed(tmp_path: Path) -> None:
    """Because training_step does not take validation batches; nothing new to warn of."""
    whole, second = CurvatureMonitor(), CurvatureMonitor()
    run(whole, epochs=3, collate=without_labels)
    run(CurvatureMonitor(), epochs=1, collate=without_labels, save=tmp_path / "a.ckpt")
    assert not run(second, epochs=3, collate=without_labels, ckpt=tmp_path / "a.ckpt")
    assert_same_series(second, whole)


def test_halved_batch_is_kept_when_resumed(tmp_path: Path) -> None:
    class Short(Hungry):
        def __init__(self) -> None:
            super().__init__(lambda epoch: 10)

    whole, second = CurvatureMonitor(), CurvatureMonitor()
    run(whole, epochs=3, module=Short)
    run(CurvatureMonitor(), epochs=1, module=Short, save=tmp_path / "a.ckpt")
    assert not run(second, epochs=3, module=Short, ckpt=tmp_path / "a.ckpt")
    assert_same_series(second, whole)
    assert any("measured on the first 8 samples" in note for note in second.history[-1].notes)


@pytest.mark.parametrize("same_kind", [True, False])
def test_resumed_in_the_middle_of_an_epoch(same_kind: bool, tmp_path: Path) -> None:
    """No validation batch has passed when the next measurement is due: a training batch does not take its place."""

    class Either(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch["pair"] if isinstance(batch, dict) else batch, batch_idx)

    def as_dict(samples: list[Any]) -> Any:
        x, y = (torch.stack(column) for column in zip(*samples))
        return {"index": torch.arange(len(x)), "pair": (x, y)}

    options: dict[str, Any] = {"module": Either, "collate": None if same_kind else as_dict}
    first, second = (CurvatureMonitor(every_n_train_steps=3, eigenvalues=0) for _ in range(2))
    saving = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    run([first, saving], epochs=1, enable_checkpointing=True, **options)
    modules: list[Any] = []
    said = run(second, epochs=2, ckpt=tmp_path / "step=1.ckpt", keep=modules, **options)
    assert [s.step for s in first.snapshots] == [0, 2, 3]
    if same_kind:
        assert not said and [s.step for s in second.snapshots] == [0, 2, 3, 5, 7]
    else:
        assert len(said) == 1 and "no batch has been seen yet" in said[0]
        assert [s.step for s in second.snapshots if s.is_full] == [0, 3, 5, 7]
    assert_same(second.history[0], first.history[0])
    assert_same(second.history[-1], curvmon.measure(modules[0], first_rows(PROBE), loss=regression_loss))


def test_another_probe_batch_warns(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    run(CurvatureMonitor(), epochs=1, save=path)
    probe = torch.load(path, weights_only=True)["callbacks"]["CurvatureMonitor"]["probe"]
    large = doctored(path, probe={**probe, "tensors": None})  # as of a batch that was too large to be stored
    assert not run(CurvatureMonitor(), epochs=2, ckpt=large)
    (said,) = run(CurvatureMonitor(), epochs=2, ckpt=large, val=OTHERS)
    assert "the probe batch differs from that of the checkpoint: values before and after are not comparable" in said


# ---- both Lightnings, and their command lines ----

EVERY_ARGUMENT: dict[str, Any] = {
    "nodes": ["net.0", "net.2"],
    "metrics": ["resonance", "gn_gap"],
    "eigenvalues": 2,
    "probe_size": 12,
    "probe_batches": 2,
    "data": "train",
    "every_n_validations": 3,
    "every_n_train_steps": 4,
    "initial": False,
    "loss": "tests.helpers.module_zoo.regression_loss",
    "output": "net",
    "max_overhead": 0.5,
    "rtol": 0.1,
    "log_pairs": True,
    "heatmaps": False,
    "pulse": 25,
    "alerts": {"gn_gap_above": 2.0, "saddle": None},
    "on_alert": "checkpoint",
    "seed": 7,
    "log_key_prefix": "probe/",
    "verbose": True,
    "strict": True,
    "history_size": 9,
}


def module_of(lightning_package: Any) -> Any:
    class Module(lightning_package.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp(6, 2)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = F.mse_loss(self.net(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            return None

        def train_dataloader(self) -> Any:
            return DataLoader(REGRESSION, BATCH)

        def val_dataloader(self) -> Any:
            return DataLoader(REGRESSION_VAL, BATCH)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    return Module


packages = pytest.mark.parametrize("package", [pl, lightning.pytorch], ids=["pytorch_lightning", "lightning"])


@packages
def test_every_trainer_accepts_the_callback(package: Any) -> None:
    module, monitor = seeded(module_of(package)), CurvatureMonitor()
    assert isinstance(monitor, package.Callback)
    package.Trainer(callbacks=[monitor], **QUIET).fit(module)
    assert_same(monitor.history[-1], curvmon.measure(module, first_rows(PROBE), loss=regression_loss))


def described(value: Any) -> Any:
    """The attributes of objects of curvmon, nested; bound methods by their names, as each object has its own."""
    if inspect.ismethod(value):
        return value.__qualname__
    if type(value).__module__.startswith("curvmon") and not isinstance(value, tuple):
        return {name: described(held) for name, held in vars(value).items()}
    return {name: described(held) for name, held in value.items()} if isinstance(value, dict) else value


@packages
def test_every_command_line_accepts_every_argument(package: Any, tmp_path: Path) -> None:
    parameters = inspect.signature(CurvatureMonitor.__init__).parameters
    assert set(EVERY_ARGUMENT) == set(parameters) - {"self"}
    monitored = {"class_path": "curvmon.CurvatureMonitor", "init_args": EVERY_ARGUMENT}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"trainer": {**QUIET, "callbacks": [monitored]}}))
    cli = import_module(f"{package.__name__}.cli")
    found = cli.LightningCLI(module_of(package), args=["--config", str(tmp_path / "config.yaml")], run=False)
    (monitor,) = (callback for callback in found.trainer.callbacks if isinstance(callback, CurvatureMonitor))
    rules = curvmon.AlertRules(**EVERY_ARGUMENT["alerts"])
    arguments = {**EVERY_ARGUMENT, "loss": regression_loss, "alerts": rules}
    assert described(monitor) == described(CurvatureMonitor(**arguments))
    # and each of them would be missed
    for name in arguments:
        rest = {other: value for other, value in arguments.items() if other != name}
        assert described(monitor) != described(CurvatureMonitor(**rest)), name


@packages
def test_run_from_the_command_line(package: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"nodes": ["net.0", "net.4"], "eigenvalues": 1, "verbose": True}
    config = {
        "seed_everything": 3,
        "trainer": {**QUIET, "callbacks": [{"class_path": "curvmon.CurvatureMonitor", "init_args": options}]},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    cli = import_module(f"{package.__name__}.cli")
    found = cli.LightningCLI(
        module_of(package), args=["fit", "--config", str(tmp_path / "config.yaml")], save_config_callback=None
    )
    (monitor,) = (callback for callback in found.trainer.callbacks if isinstance(callback, CurvatureMonitor))
    assert len(monitor.history) == 2 and monitor.history[-1].nodes == ("net.0", "net.4")
    assert capsys.readouterr().out.count("curvmon: step") == 2

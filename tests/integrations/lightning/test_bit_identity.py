"""A run with the monitor is bit for bit the run without it, whatever the training step does besides."""

from __future__ import annotations

import math
import random
import re
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from pytorch_lightning.callbacks import EarlyStopping, EMAWeightAveraging, ModelPruning, StochasticWeightAveraging
from pytorch_lightning.loggers import WandbLogger
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.tensorboard import SummaryWriter

import curvmon
from tests.helpers import side_effects as hazards
from tests.helpers import stateful_modules as stateful
from tests.helpers.compared_runs import Case, both, monitor_of
from tests.helpers.state_differences import PREFIX, RecordingLogger


class Ema(pl.Callback):
    """An average of the weights, kept by a callback that draws random numbers too."""

    def __init__(self) -> None:
        self.average: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        for name, parameter in pl_module.named_parameters():
            before = self.average.setdefault(name, parameter.detach().clone())
            before.lerp_(parameter.detach(), 0.1 + 0.1 * random.random())


class NoisyLayers(hazards.Adam):
    """Batch norm and dropout."""

    def network(self) -> Any:
        hidden = torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Dropout(0.3)
        return torch.nn.Sequential(*hidden, torch.nn.Linear(8, 3))


class TwoOptimizers(NoisyLayers):
    """They take turns: a step of the second leaves the gradients of the first as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()[batch_idx % 2]
        optimizer.zero_grad()
        self.manual_backward(cross_entropy(self, batch))
        optimizer.step()

    def configure_optimizers(self) -> Any:
        first, *rest = self.net.children()
        others = [p for part in rest for p in part.parameters()]
        return torch.optim.Adam(first.parameters(), lr=0.01), torch.optim.SGD(others, lr=0.1, momentum=0.9)


def cross_entropy(module: Any, batch: Any) -> Tensor:
    return F.cross_entropy(module(batch[0]), batch[1])


MODULES: list[Any] = [
    hazards.Plain,
    hazards.BatchNorm,
    hazards.Dropout,
    hazards.MixedFlags,
    hazards.HookedSpectralNorm,
    hazards.ParametrizedSpectralNorm,
    hazards.Transformer,
    hazards.Checkpointed,
    hazards.TiedWeights,
    hazards.InPlaceBatch,
    hazards.MomentumEncoder,
    hazards.GradientPenalty,
    hazards.Recurrent,
    hazards.Compiled,
    hazards.MetricAttribute,
    hazards.MetricModuleDict,
    hazards.MetricList,
    hazards.MetricUpdatedLate,
    hazards.Logs,
    hazards.LogsToExperiment,
    hazards.KeepsItsLogger,
    hazards.Adam,
    hazards.ParameterGroups,
    hazards.StepSchedule,
    hazards.Plateau,
    stateful.GlobalRandomness,
    stateful.OwnRandomness,
    stateful.Counters,
    stateful.Nested,
    stateful.LazyCache,
    stateful.CollectsFeatures,
    stateful.GradientHooks,
]
CASES: dict[str, Case] = {
    **{module.__name__: Case(module) for module in MODULES},
    "late metric without validation": Case(hazards.MetricUpdatedLate, validation=False),
    "every step of accumulation": Case(
        hazards.Adam, trainer={"accumulate_grad_batches": 2}, monitor={"every_n_train_steps": 1}, measured=5
    ),
    "validation amid accumulation": Case(
        hazards.Dropout, trainer={"accumulate_grad_batches": 2, "val_check_interval": 1}, measured=5
    ),
    "every step": Case(hazards.BatchNorm, monitor={"every_n_train_steps": 1}, measured=9),
    "clipping by norm": Case(hazards.Adam, trainer={"gradient_clip_val": 0.01}),
    "clipping by value": Case(trainer={"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "noise, clipping and accumulation": Case(
        NoisyLayers, trainer={"accumulate_grad_batches": 3, "gradient_clip_val": 0.1}, loader={"shuffle": True}
    ),
    "two optimizers": Case(TwoOptimizers, monitor={"loss": cross_entropy}),
    "EMA": Case(callbacks=(Ema,)),
    "EMAWeightAveraging": Case(hazards.BatchNorm, callbacks=(EMAWeightAveraging,)),
    "StochasticWeightAveraging": Case(
        hazards.BatchNorm,
        trainer={"max_epochs": 3},
        callbacks=(lambda: StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1),),
        measured=4,
    ),
    "ModelPruning": Case(callbacks=(lambda: ModelPruning("l1_unstructured", amount=0.3),)),
    "EarlyStopping": Case(
        callbacks=(lambda: EarlyStopping("val_loss", patience=0, min_delta=100.0),), trainer={"max_epochs": 5}
    ),
    "val_check_interval=0.5": Case(trainer={"val_check_interval": 0.5}, measured=5),
    "val_check_interval=3": Case(
        hazards.Dropout, trainer={"val_check_interval": 3, "check_val_every_n_epoch": None}, measured=3
    ),
    "limit_val_batches": Case(trainer={"limit_val_batches": 1}),
    "reload_dataloaders": Case(stateful.GlobalRandomness, trainer={"reload_dataloaders_every_n_epochs": 1}),
    "shuffle": Case(hazards.Dropout, loader={"shuffle": True}),
    "num_workers=1": Case(stateful.GlobalRandomness, loader={"num_workers": 1, "shuffle": True}),
    "bf16-mixed": Case(hazards.Dropout, trainer={"precision": "bf16-mixed"}),
    "bf16-true": Case(hazards.Dropout, trainer={"precision": "bf16-true"}),
    "64-true": Case(hazards.Dropout, trainer={"precision": "64-true"}),
    "no validation": Case(hazards.Dropout, validation=False),
    "no sanity check": Case(hazards.Dropout, trainer={"num_sanity_val_steps": 0}),
    "training batch": Case(hazards.Dropout, monitor={"data": "train"}),
    "two batches": Case(hazards.Dropout, monitor={"probe_batches": 2, "probe_size": 4}),
    "heatmaps": Case(stateful.GlobalRandomness, monitor={"heatmaps": True, "eigenvalues": 2}),
    "validate": Case(hazards.BatchNorm, entry="validate", measured=1),
    "validate with a cache": Case(stateful.LazyCache, entry="validate", measured=1),
    "validate, then fit": Case(stateful.LazyCache, entry="validate and fit", measured=3),
}


QUICK = [module.__name__ for module in MODULES if module is not hazards.Compiled]
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in CASES if name not in QUICK]


@pytest.mark.parametrize("name", [*QUICK, *SLOW])
def test_training_is_bit_identical(name: str) -> None:
    case, monitor = CASES[name], monitor_of(CASES[name])
    found, complaints = both(case, monitor)
    assert complaints == []
    assert len(monitor.history) == len(monitor.spectra) >= case.measured
    assert all(m.resonance.isfinite().all() and m.resonance.any() for m in monitor.history)
    assert all(s.eigenvalues.isfinite().all() for s in monitor.spectra)
    assert all(math.isfinite(p.gain) and math.isfinite(p.curvature) for p in monitor.pulses)
    assert bool(monitor.pulses) == (case.entry != "validate")
    assert found == []


@pytest.mark.parametrize("at", [1, 2, 3, 4, 8])
def test_failed_measurement_keeps_training_bit_identical(at: int) -> None:
    case = Case(lambda: stateful.FailsInEval(at, RuntimeError))
    monitor = monitor_of(case)
    found, complaints = both(case, monitor)
    assert found == []
    if at < 4:  # in the pairs
        assert len(complaints) == 1 and "not in eval mode" in complaints[0]
    elif at == 4:  # in the first look, at a few samples: what it would have shown is looked at later
        assert not complaints and not any("not in eval mode" in note for note in monitor.spectra[0].notes)
    else:  # in differences of gradients: second derivatives are taken instead
        assert not complaints and any("not in eval mode" in note for note in monitor.spectra[0].notes)


@pytest.mark.parametrize("kind", stateful.ITERATORS)
def test_iterator_of_the_module_is_not_consumed(kind: str) -> None:
    """What it would lose cannot be put back: such a run is not measured, with a warning."""
    case = Case(lambda: stateful.Draws(stateful.ITERATORS[kind]))
    monitor = monitor_of(case)
    found, complaints = both(case, monitor)
    assert found == [] and not monitor.history
    assert "draws from an iterator" in complaints[-1]


class Writer(SummaryWriter):
    """Records the tags that it is given, in an attribute of the class, which nothing restores."""

    tags: list[str] = []  # noqa: RUF012 - of the class, on purpose

    def __init__(self) -> None:
        return None

    def add_scalar(self, tag: str, *args: Any, **kwargs: Any) -> None:
        self.tags.append(tag)

    def close(self) -> None:
        return None


class WritesByItself(hazards.Plain):
    def __init__(self) -> None:
        super().__init__()
        self.writer, self.other = Writer(), RecordingLogger()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        import mlflow

        self.writer.add_scalar("loss", 1.0)
        self.other.log_metrics({"loss": 1.0})
        mlflow.log_metric("loss", 1.0)
        return super().training_step(batch, batch_idx)


def test_writers_of_the_module_receive_training_steps_only(monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    tags: list[str] = []
    monkeypatch.setattr(Writer, "tags", tags)
    monkeypatch.setattr(mlflow, "log_metric", lambda name, value: tags.append(name))
    case = Case(WritesByItself)
    monitor = monitor_of(case)
    assert both(case, monitor) == ([], []) and monitor.history
    assert len(tags) == 2 * 2 * 8  # two runs of eight steps


class LogsToWandb(hazards.Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        import wandb

        wandb.log({"direct": batch_idx}, commit=False)
        self.logger.experiment.log({"experiment": batch_idx}, commit=False)  # type: ignore[union-attr]
        return super().training_step(batch, batch_idx)


class MeasuresByHand(pl.Callback):
    """`curvmon.measure` does not know the loggers; nothing may reach them all the same."""

    measured = 0

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        batch = torch.zeros(4, 4), torch.zeros(4, dtype=torch.long)
        curvmon.measure(pl_module, batch, loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]))
        self.measured += 1


@pytest.mark.parametrize("log", ["gradients", "all"])
def test_wandb_watch_sees_the_users_passes_only(log: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`wandb.watch` hooks gradients and, for "all", forward passes; every histogram of it is the same."""
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")

    def logged(*callbacks: Any) -> list[Any]:
        torch.manual_seed(0)
        logger = WandbLogger(offline=True, save_dir=tmp_path, project="no-trace")
        rows: list[Any] = []
        write = logger.experiment._log

        def record(data: Any, *args: Any, **kwargs: Any) -> Any:
            if not any(key.startswith(PREFIX) for key in data):
                rows.append({re.sub(r"graph_\d+", "", k): getattr(v, "histogram", v) for k, v in data.items()})
            return write(data, *args, **kwargs)

        monkeypatch.setattr(logger.experiment, "_log", record)
        module = LogsToWandb()
        logger.watch(module, log=log, log_freq=1)
        loader = DataLoader(TensorDataset(torch.randn(8, 4), torch.randint(3, (8,))), batch_size=4)
        quiet = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
        trainer = pl.Trainer(accelerator="cpu", max_epochs=2, logger=logger, callbacks=[*callbacks], **quiet)
        trainer.fit(module, loader, loader)
        logger.experiment.unwatch(module)
        wandb.finish()
        return rows

    monitor, by_hand = monitor_of(Case()), MeasuresByHand()
    without, monitored = logged(), logged(monitor)
    assert len(monitor.history) >= 3
    assert sum("gradients/net.0.weight" in row for row in without) == 4  # one for every step
    assert any("parameters/net.0.weight" in row for row in without) == (log == "all")
    assert without == monitored == logged(by_hand) and by_hand.measured == 2

"""The comparison of two runs finds every leak, and the monitor leaks neither memory nor hooks."""

from __future__ import annotations

import gc
import os
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from curvmon.integrations.lightning.callback import CurvatureMonitor
from tests.helpers import side_effects as hazards
from tests.helpers import stateful_modules as stateful
from tests.helpers.compared_runs import Case, monitor_of, run, traces


def _one_ulp(module: Any) -> None:
    weight = module.net[0].weight.data.view(-1)
    weight[0] = torch.nextafter(weight[0], torch.tensor(9.0))


def _touch(module: Any, trainer: Any) -> None:
    parameter = next(module.parameters())
    trainer.optimizers[0].state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


LEAKS: dict[str, tuple[type, Callable[[Any, Any], Any]]] = {
    "python": (hazards.Plain, lambda module, trainer: random.random()),
    "numpy": (hazards.Plain, lambda module, trainer: np.random.rand()),
    "torch": (hazards.Plain, lambda module, trainer: torch.rand(())),
    "own generator": (stateful.OwnRandomness, lambda module, trainer: module.jitter.random.random()),
    "last bit of a weight": (hazards.Plain, lambda module, trainer: _one_ulp(module)),
    "buffer": (hazards.BatchNorm, lambda module, trainer: module.net[1].running_mean.add_(1e-6)),
    "sign of a zero": (stateful.Counters, lambda module, trainer: module.total.copy_(-torch.zeros(3))),
    "gradient": (hazards.Plain, lambda module, trainer: module.net[0].weight.grad.mul_(2)),
    "optimizer": (hazards.Plain, lambda module, trainer: _touch(module, trainer)),
    "mode": (hazards.Dropout, lambda module, trainer: module.net[2].train(not module.net[2].training)),
    "forward hook": (hazards.Plain, lambda module, trainer: module.net[1].register_forward_hook(lambda *args: None)),
    "gradient hook": (hazards.Plain, lambda module, trainer: module.net[0].weight.register_hook(lambda grad: None)),
    "attribute": (hazards.Plain, lambda module, trainer: setattr(module, "left_behind", 1)),
    "list": (stateful.Counters, lambda module, trainer: module.losses.append(1.0)),
    "object": (stateful.Counters, lambda module, trainer: module.meter.update(torch.zeros(()))),
    "metric": (hazards.MetricAttribute, lambda module, trainer: module.mean.update(1.0)),
    "metric in a list": (hazards.MetricList, lambda module, trainer: module.metrics[1].update(1.0)),
    "computed early": (hazards.MetricUpdatedLate, lambda module, trainer: trainer.callback_metrics),
    "callback metric": (
        hazards.Plain,
        lambda module, trainer: trainer.callback_metrics.update(val_loss=torch.tensor(0.5)),
    ),
    "logger": (hazards.Plain, lambda module, trainer: trainer.loggers[0].log_metrics({"loss": 1.0}, step=0)),
    "experiment": (hazards.Plain, lambda module, trainer: trainer.loggers[0].experiment.add("x")),
    "fast path": (hazards.Plain, lambda module, trainer: torch.backends.mha.set_fastpath_enabled(False)),
}


class Leaky(pl.Callback):
    """Does something once, when an epoch of two has ended."""

    def __init__(self, leak: Callable[[Any, Any], Any]) -> None:
        self.leak = leak

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 0:
            self.leak(pl_module, trainer)


@pytest.mark.parametrize("name", LEAKS)
def test_comparison_finds_every_leak(name: str) -> None:
    module, leak = LEAKS[name]
    case = Case(module, validation=name == "callback metric")
    try:
        without, leaking = run(case), run(case, Leaky(leak))
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    assert traces(without, leaking)


def test_comparison_of_equal_runs_is_empty() -> None:
    for module in (stateful.Counters, stateful.OwnRandomness, hazards.MetricModuleDict):
        assert traces(run(Case(module)), run(Case(module), Leaky(lambda module, trainer: None))) == []


def _tensors() -> int:
    gc.collect()
    return sum(issubclass(type(item), Tensor) for item in gc.get_objects())


def _resident() -> int:
    """Bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class KeepsLatest(hazards.BatchNorm):
    """A hook keeps the latest activations, and with them the graph behind them."""

    def __init__(self) -> None:
        super().__init__()
        latest: dict[str, Tensor] = {}
        self.net[2].register_forward_hook(lambda module, args, out: latest.update(out=out))  # type: ignore[index]


class Weigh(pl.Callback):
    def __init__(self, every: int) -> None:
        self.every = every
        self.found: list[tuple[int, int]] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step % self.every == 0:
            self.found.append((_tensors(), _resident()))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
def test_two_hundred_measurements_leak_no_memory() -> None:
    monitor = CurvatureMonitor(
        eigenvalues=1,
        probe_size=8,
        every_n_train_steps=1,
        pulse=False,
        heatmaps=False,
        max_overhead=None,
        history_size=5,
    )
    weigh = Weigh(every=50)
    loader = DataLoader(TensorDataset(torch.randn(80, 4), torch.randint(3, (80,))), batch_size=4)
    quiet = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    trainer = pl.Trainer(accelerator="cpu", max_epochs=10, logger=False, callbacks=[monitor, weigh], **quiet)
    trainer.fit(KeepsLatest(), loader)
    (tensors, first), *_, (tensors_later, last) = weigh.found
    print(f"\nlive tensors {[n for n, _ in weigh.found]}, resident MiB {[m / 2**20 for _, m in weigh.found]}")
    assert len(monitor.snapshots) == 5 and monitor.snapshots[-1].step >= 199
    assert tensors_later <= tensors  # fewer where what an earlier test has left is collected meanwhile
    assert last - first < 4 * 2**20


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
def test_eight_hundred_pulses_leak_no_memory() -> None:
    monitor = CurvatureMonitor(
        metrics=["coupling"], eigenvalues=0, pulse=1, heatmaps=False, max_overhead=None, history_size=5
    )
    weigh = Weigh(every=100)
    loader = DataLoader(TensorDataset(torch.randn(80, 4), torch.randint(3, (80,))), batch_size=4)
    quiet = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    trainer = pl.Trainer(accelerator="cpu", max_epochs=40, logger=False, callbacks=[monitor, weigh], **quiet)
    trainer.fit(KeepsLatest(), loader)
    _, (tensors, first), *_, (tensors_later, last) = weigh.found
    assert len(monitor.pulses) == 5 and monitor.pulses[-1].step == 799
    assert tensors_later <= tensors + 2  # in `callback_metrics`, where the step ratio may be infinite at first
    assert last - first < 4 * 2**20


def _hooks(module: nn.Module) -> list[Any]:
    return [
        hook
        for inner in module.modules()
        for name, held in vars(inner).items()
        if "_hooks" in name and isinstance(held, dict)
        for hook in held.values()
    ]


@pytest.mark.parametrize("at", [1, 2, 3, 6])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_hooks_are_removed_after_an_error_in_the_step(at: int, error: type[BaseException]) -> None:
    case = Case(lambda: stateful.FailsInEval(at, error))
    module = case.module()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if error is KeyboardInterrupt:
            with pytest.raises((KeyboardInterrupt, SystemExit)):
                run(Case(lambda: module), monitor_of(case))
        else:
            run(Case(lambda: module), monitor_of(case))
    assert stateful.FailsInEval.passes >= at
    assert _hooks(module) == []
    assert not {"log", "log_dict", "print", "all_gather"} & vars(module).keys()
    assert all(p.is_leaf and p.requires_grad for p in module.parameters())
    assert torch.is_grad_enabled() or error is KeyboardInterrupt

"""Does the budget hold in a real run? A residual network on digits, by the clock on the wall.

    python -m benchmarks.overhead              two minutes: two free seconds instead of thirty
    python -m benchmarks.overhead --free 30 --minutes 20

Every epoch ends in a validation, so that measuring at each of them would take far more than five percent.
"""

from __future__ import annotations

import argparse
import logging
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytorch_lightning as pl
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.header import machine
from curvmon import CurvatureMonitor
from curvmon.integrations.lightning.demo.network import Classifier, ResNet, digits, prepared
from curvmon.monitor.budget import Budget
from tests.helpers.budgets import monitor_with


class Timed(CurvatureMonitor):
    """Every hook with a stopwatch of its own, which the budget knows nothing of."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.seconds_in_hooks = 0.0
        for name in dir(CurvatureMonitor):
            if name.startswith("on_") and getattr(CurvatureMonitor, name) is not getattr(pl.Callback, name, None):
                setattr(self, name, self._timed(getattr(self, name)))

    def _timed(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return hook(*args, **kwargs)
            finally:
                self.seconds_in_hooks += time.perf_counter() - began

        return timed


class Clock(pl.Callback):
    """Seconds of the whole run."""

    def __init__(self) -> None:
        self.whole = 0.0

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self._began = time.perf_counter()

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.whole = time.perf_counter() - self._began


def run(minutes: float, free: float, limit: float | None) -> tuple[Timed, float]:
    pl.seed_everything(0, verbose=False)
    train, val = prepared(digits())
    monitor, clock = monitor_with(Budget(limit, free), kind=Timed, max_overhead=limit), Clock()
    assert isinstance(monitor, Timed)
    trainer = pl.Trainer(
        max_epochs=-1,
        max_time={"seconds": 60 * minutes},
        accelerator="cpu",
        callbacks=[clock, monitor],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(
        Classifier(ResNet(1, 10, 8, nn.ReLU), lr=0.005), DataLoader(train, 64, shuffle=True), DataLoader(val, 256)
    )
    return monitor, clock.whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--free", type=float, default=2.0, help="seconds of measuring that do not count")
    parser.add_argument("--limit", type=float, default=0.05)
    options = parser.parse_args()
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    monitor, whole = run(options.minutes, options.free, options.limit)
    measured = monitor.seconds_in_hooks
    allowed = options.free + options.limit * (whole - measured)
    one = max(snapshot.seconds for snapshot in monitor.snapshots)
    print(f"{machine()}\n")
    print("| run | measuring | allowed | share of training beyond the free seconds | measurements | skipped |")
    print("|---|---|---|---|---|---|")
    share = (measured - options.free) / (whole - measured)
    print(
        f"| {whole:.0f} s | {measured:.1f} s | {allowed:.1f} s, and one measurement of up to {one:.1f} s | "
        f"{share:.1%} | {len(monitor.snapshots)} | {monitor._recorder.budget.skipped} |"
    )


if __name__ == "__main__":
    main()

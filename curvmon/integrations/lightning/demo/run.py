"""curvmon in a minute: a small ResNet, a learning rate that goes wrong, and the alert that tells.

    python -m curvmon demo

Trains on scikit-learn's handwritten digits; nothing is downloaded. In one epoch the learning rate is a hundred times
too large. Numbers and pictures go to TensorBoard, CSV and PNG files, and to W&B where it is installed: offline, unless
there is a key (WANDB_API_KEY, or `wandb login`).
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import math
import netrc
import os
import shutil
import sys
import textwrap
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from torch import nn
from torch.utils.data import DataLoader

from curvmon.errors import InputError
from curvmon.integrations.lightning.callback import CurvatureMonitor
from curvmon.integrations.lightning.demo.network import Classifier, ResNet, digits, prepared
from curvmon.integrations.lightning.demo.picture import draw

LEARNING_RATE, FACTOR = 0.01, 100
NEEDED = {"sklearn": "scikit-learn", "matplotlib": "matplotlib", "tensorboard": "tensorboard"}
"""packages by the names of their modules"""


class Rate(pl.Callback):
    """Cosine decay, and the accident: for one epoch the learning rate is a hundred times as large."""

    def __init__(self, start: float, spike: int) -> None:
        self._start, self._spike = start, spike

    def on_train_epoch_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        epoch, epochs = trainer.current_epoch, trainer.max_epochs or 1
        rate = self._start * 0.5 * (1 + math.cos(math.pi * epoch / epochs))
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = rate * (FACTOR if epoch == self._spike else 1)


class Rows(pl.Callback):
    """Prints a line for every epoch, and alerts where they come up; `on_alert=` would call a function with each."""

    def __init__(self, monitor: CurvatureMonitor, spike: int) -> None:
        self._monitor, self._spike = monitor, spike
        self._reported = 0

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        print("epoch  accuracy  probe loss  top eigenvalue  resonance  coupling  GN-Gap")

    def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if trainer.sanity_checking:
            return
        measurement, spectrum = self._monitor.history[-1], self._monitor.spectra[-1]
        neighbours = [measurement.by_distance(metric)[1].item() for metric in ("resonance", "coupling", "gn_gap")]
        accuracy = trainer.callback_metrics["val_accuracy"].item()
        remark = f"  <- learning rate x {FACTOR}" if trainer.current_epoch == self._spike else ""
        print(
            f"{trainer.current_epoch:5}  {accuracy:8.2f}  {measurement.loss:10.3g}  {spectrum.sharpness:14.3g}"
            f"  {neighbours[0]:9.3g}  {neighbours[1]:8.2f}  {neighbours[2]:6.2g}{remark}",
            flush=True,
        )
        for alert in self._monitor.alerts[self._reported :]:
            print(f"ALERT at step {alert.step}: {alert.headline}")
            for line in alert.details:
                print(textwrap.fill(line, 96, initial_indent="    ", subsequent_indent="      "))
        self._reported = len(self._monitor.alerts)


def loggers(out: Path) -> list[Any]:
    chosen: list[Any] = [TensorBoardLogger(out, name="tensorboard"), CSVLogger(out, name="csv")]
    if importlib.util.find_spec("wandb") is not None and os.environ.get("WANDB_MODE") != "disabled":
        import wandb

        os.environ.setdefault("WANDB_SILENT", "true")
        wandb.setup()  # takes notice of it; otherwise WandbLogger itself is warned about
        mode = "online" if configured() else "offline"
        chosen.append(WandbLogger(project="curvmon-demo", save_dir=out, offline=mode == "offline", mode=mode))
    return chosen


def configured() -> bool:
    """Is there a key for W&B? It must neither ask for one nor send anything without."""
    if "WANDB_MODE" in os.environ:
        return os.environ["WANDB_MODE"] == "online"
    try:
        return "WANDB_API_KEY" in os.environ or netrc.netrc().authenticators("api.wandb.ai") is not None
    except (OSError, netrc.NetrcParseError):
        return False


def quiet() -> None:
    """What Lightning and torch say at every start has nothing to do with curvmon; alerts are printed by `Rows`."""
    for name in ("pytorch_lightning", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("curvmon").addHandler(logging.NullHandler())
    warnings.filterwarnings("ignore", module="pytorch_lightning")


def command(name: str) -> str:
    """Of a program that is installed with this Python, as one would type it: `.venv/bin/tensorboard`."""
    path = Path(sys.executable).with_name(name)
    first = shutil.which(name)
    return name if first is not None and Path(first) == path else os.path.relpath(path)


def main(argv: Sequence[str] | None = None) -> CurvatureMonitor:
    parser = argparse.ArgumentParser(prog="python -m curvmon demo", description="curvmon in a minute")
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--spike", type=int, default=12, help="epoch in which the learning rate goes wrong")
    parser.add_argument("--width", type=int, default=8, help="channels of the first stage")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder for logs and pictures")
    options = parser.parse_args(argv)
    if missing := [NEEDED[name] for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise InputError(f"the demo needs more packages: pip install {' '.join(missing)}")
    options.out.mkdir(parents=True, exist_ok=True)
    quiet()
    pl.seed_everything(options.seed, verbose=False)
    train, val = prepared(digits())

    # `CurvatureMonitor()` would do. Four stages make fewer and clearer charts than all blocks, 64 samples calmer ones
    # than 32; and so small a network trains faster than it is measured, so the limit of the cost is lifted.
    monitor = CurvatureMonitor(nodes=["model.stem", "model.layer*"], probe_size=64, max_overhead=None)
    written = loggers(options.out)
    trainer = pl.Trainer(
        max_epochs=options.epochs,
        accelerator="cpu",
        callbacks=[monitor, Rate(LEARNING_RATE, options.spike), Rows(monitor, options.spike)],
        logger=written,
        log_every_n_steps=10,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    print(
        f"A small ResNet learns handwritten digits. In epoch {options.spike} its learning rate goes wrong.\n"
        "Resonance, coupling and GN-Gap are means over neighbouring layers.\n"
    )
    trainer.fit(
        Classifier(ResNet(1, 10, options.width, nn.SiLU), LEARNING_RATE),
        DataLoader(train, batch_size=64, shuffle=True),
        DataLoader(val, batch_size=300),
    )
    epoch = int(trainer.num_training_batches)
    draw(monitor, options.out / "demo.png", accident=(epoch * options.spike, epoch * (options.spike + 1) - 1))
    print(f"\n{len(monitor.alerts)} alert{'' if len(monitor.alerts) == 1 else 's'}. Where to look:")
    print(f"  the run in one picture  {options.out / 'demo.png'}")
    monitor.report(str(options.out / "report.html"))
    print(f"  the run in one page     {options.out / 'report.html'}")
    print(f"  heatmaps and curves     {Path(written[1].log_dir) / 'curvmon_pictures'}")
    print(f"  every number            {Path(written[1].log_dir) / 'metrics.csv'}")
    # TensorBoard shows ten pictures of each kind, drawn at random, unless an option asks for all
    every = "--samples_per_plugin images=100"
    print(f"  dashboards              {command('tensorboard')} --logdir {written[0].root_dir} {every}")
    print("                          then http://localhost:6006/#custom_scalars: losses and alerts above the rest")
    for logger in written[2:]:
        run = logger.experiment
        where = run.url or f"{command('wandb')} sync {os.path.relpath(Path(run.dir).parent)}"
        print(f"  Weights & Biases        {where}")
        run.finish()
    return monitor

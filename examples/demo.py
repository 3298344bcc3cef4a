"""Five minutes with curvmon: a small ResNet, a learning rate that goes wrong, and the alert that tells.

    make demo

Trains on scikit-learn's handwritten digits, nothing is downloaded. In the middle of training the learning rate is
twenty times too large for one epoch. Logs go to TensorBoard and CSV, and to W&B where it is installed (offline unless
it is configured); heatmaps and curves are also written as PNG files.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from torch import nn
from torch.utils.data import DataLoader

from curvmon import Alert, CurvatureMonitor
from examples.image_classifier import Classifier, ResNet, digits, prepared


class Spike(pl.Callback):
    """The accident: for one epoch the learning rate is twenty times as large."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch

    def on_train_epoch_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if trainer.current_epoch in (self._epoch, self._epoch + 1):
            factor = 20 if trainer.current_epoch == self._epoch else 1 / 20
            for group in trainer.optimizers[0].param_groups:
                group["lr"] *= factor


def curves(monitor: CurvatureMonitor, path: Path) -> None:
    """Resonance by distance, the top eigenvalue and the loss over the run, and where the alerts were."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 8), layout="constrained")
    axes = figure.subplots(3, 1, sharex=True)
    steps = [snapshot.step for snapshot in monitor.snapshots]
    means = torch.stack([found.by_distance("resonance") for found in monitor.history])
    for d, colour in zip(range(means.shape[1]), ("#0072B2", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#000000")):
        axes[0].plot(steps, means[:, d], ".-", color=colour, label=f"distance {d}")
    axes[0].set_ylabel("resonance R")
    axes[0].legend(fontsize=8, ncols=2)
    axes[1].plot(steps, [found.sharpness for found in monitor.spectra], ".-", color="#0072B2")
    axes[1].set_ylabel("top eigenvalue λ₁")
    axes[2].plot(steps, [found.loss for found in monitor.history], ".-", color="#0072B2")
    axes[2].set_ylabel("loss of the probe batch")
    axes[2].set_xlabel("step")
    for axis in axes:
        axis.set_yscale("log")
        axis.grid(alpha=0.3)
        for alert in monitor.alerts:
            axis.axvline(alert.step, color="#D55E00", linestyle=":", linewidth=2)
    for alert in monitor.alerts[:1]:
        axes[0].set_title(f"dotted: alert at step {alert.step}", fontsize=10, color="#D55E00")
    figure.savefig(path, dpi=110)


def loggers(out: Path) -> list[Any]:
    found: list[Any] = [TensorBoardLogger(out, name="tensorboard"), CSVLogger(out, name="csv")]
    if importlib.util.find_spec("wandb") is not None:
        configured = "WANDB_API_KEY" in os.environ
        found.append(WandbLogger(project="curvmon-demo", save_dir=out, offline=not configured))
    return found


def main(argv: Sequence[str] | None = None) -> CurvatureMonitor:
    parser = argparse.ArgumentParser(description="curvmon in a few minutes")
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--spike", type=int, default=12, help="epoch in which the learning rate goes wrong")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder for logs and pictures")
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)

    pl.seed_everything(0, verbose=False)
    train, val = prepared(digits())
    model = Classifier(ResNet(1, 10, 8, nn.ReLU), lr=0.005)

    def shout(alert: Alert) -> None:
        print(f"\n*** curvmon: {alert.message}\n")

    monitor = CurvatureMonitor(nodes=["model.stem", "model.layer*"], on_alert=shout)
    written = loggers(options.out)
    trainer = pl.Trainer(
        max_epochs=options.epochs,
        accelerator="cpu",
        callbacks=[monitor, Spike(options.spike)],
        logger=written,
        log_every_n_steps=10,
        enable_model_summary=False,
        default_root_dir=options.out,
    )
    trainer.fit(model, DataLoader(train, batch_size=64, shuffle=True), DataLoader(val, batch_size=256))

    curves(monitor, options.out / "curves.png")
    print(f"\nThe curvature at the end:\n{monitor.history[-1]}\n")
    for alert in monitor.alerts:
        print(f"alert at step {alert.step}: {alert.message}")
    print(f"\nCurves with the alert:    {options.out / 'curves.png'}")
    print(f"Heatmaps of every moment: {written[1].log_dir}/heatmap")
    print(f"Dashboards:               tensorboard --logdir {written[0].root_dir}")
    return monitor


if __name__ == "__main__":
    main()

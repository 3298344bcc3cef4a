"""A training run in a Trainer, disturbed by an event of `benchmarks/alert_runs.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from benchmarks.alert_runs import BATCH, EVENTS, HELD_OUT, NODES, PROBE, Event, Network, digits
from curvmon import CurvatureMonitor

RATE = 0.004


class Data(Dataset):  # type: ignore[type-arg]
    """What an event can change: it is passed to `Event.apply` in the place of a run."""

    def __init__(self, seed: int, model: Network) -> None:
        x, y = digits(seed)
        self.x, self.y, self.probe = x[:-HELD_OUT], y[:-HELD_OUT], TensorDataset(x[-PROBE:], y[-PROBE:])
        self.model, self.factor = model, 1.0
        self.generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return len(self.x) // BATCH * BATCH

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.x[i], self.y[i]


class Lit(pl.LightningModule):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.model = Network()
        self.data = Data(seed, self.model)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for group in self.optimizers().param_groups:  # type: ignore[union-attr]
            group["lr"] = RATE * self.data.factor

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=RATE, momentum=0.9, weight_decay=5e-4)

    def train_dataloader(self) -> Any:
        shuffle = torch.Generator().manual_seed(self.current_epoch)
        return DataLoader(self.data, BATCH, shuffle=True, generator=shuffle)

    def val_dataloader(self) -> Any:
        return DataLoader(self.data.probe, PROBE)


class ApplyEvent(pl.Callback):
    """The event, in the epoch `at`."""

    def __init__(self, event: Event, at: int) -> None:
        self._event, self._at = event, at

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        moment = {"start": 0, "middle": trainer.num_training_batches // 2}.get(self._event.when)
        if trainer.current_epoch == self._at and batch_idx == moment:
            self._event.apply(module.data)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        last = batch_idx == trainer.num_training_batches - 1
        if trainer.current_epoch == self._at and last and self._event.when == "end":
            self._event.apply(module.data)


def fit(
    folder: Any,
    epochs: int,
    event: str | Event | None = None,
    at: int = 0,
    checkpoint: Any = None,
    logger: Any = False,
    seed: int = 0,
    make: Callable[..., CurvatureMonitor] = CurvatureMonitor,
    **settings: Any,
) -> tuple[CurvatureMonitor, pl.Trainer]:
    options = {"eigenvalues": 1, "max_overhead": None, "heatmaps": False, **settings}
    # between validations, pulses raise alerts of their own
    monitor = make(**{"nodes": [f"model.{node}" for node in NODES], "pulse": False, **options})
    found = EVENTS[event] if isinstance(event, str) else event
    events = [] if found is None else [ApplyEvent(found, at)]
    trainer = pl.Trainer(
        default_root_dir=folder,
        max_epochs=epochs,
        accelerator="cpu",
        devices=1,
        logger=logger,
        callbacks=[monitor, *events],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        reload_dataloaders_every_n_epochs=1,
        log_every_n_steps=1000,
    )
    trainer.fit(Lit(seed), ckpt_path=checkpoint)
    return monitor, trainer

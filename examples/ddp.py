"""CurvatureMonitor in several processes: data-parallel training on two CPU processes that talk through gloo.

    python examples/ddp.py [--processes 2] [--epochs 5] [--out runs/ddp]

Nothing changes in what one writes. All processes measure the same batch together, and all of them have the result, so
that a decision based on it (EarlyStopping, say) is the same everywhere. The first one writes the logs.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.strategies import DDPStrategy
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from curvmon import CurvatureMonitor


class Digits(pl.LightningModule):
    def __init__(self, width: int = 48) -> None:
        super().__init__()
        widths = [64, width, width, width]
        layers = [nn.Sequential(nn.Linear(a, b), nn.SiLU()) for a, b in pairwise(widths)]
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(width, 10)

    def loss(self, batch: list[Tensor]) -> Tensor:
        return F.cross_entropy(self.head(self.layers(batch[0])), batch[1])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="CurvatureMonitor under DDP")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("runs/ddp"), help="folder for the logs")
    options = parser.parse_args(argv)

    # Lightning starts this very file once more for every other process: all of them come by here.
    pl.seed_everything(0, verbose=False)
    torch.set_num_threads(1)  # the processes share the cores
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target))
    train, val = random_split(data, [0.8, 0.2])

    monitor = CurvatureMonitor(nodes=["layers.*"], max_overhead=None, verbose=True)
    logger = CSVLogger(options.out, name="csv")
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=options.processes,
        strategy=DDPStrategy(process_group_backend="gloo"),
        max_epochs=options.epochs,
        callbacks=[monitor],
        logger=logger,
        log_every_n_steps=10,
        enable_progress_bar=False,
    )
    trainer.fit(Digits(), DataLoader(train, batch_size=32, shuffle=True), DataLoader(val, batch_size=32))

    everywhere: list[Tensor] = [torch.empty(0)] * trainer.world_size
    torch.distributed.all_gather_object(everywhere, monitor.history[-1].resonance)
    if trainer.is_global_zero:
        same = all(torch.equal(resonance, everywhere[0]) for resonance in everywhere)
        print(f"\nThe curvature at the end:\n{monitor.history[-1]}")
        print(f"\n{len(everywhere)} processes have {'the same numbers' if same else 'DIFFERENT numbers'}.")
        print(f"Every number as a table: {logger.log_dir}/metrics.csv")


if __name__ == "__main__":
    main()

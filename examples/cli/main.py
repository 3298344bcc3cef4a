"""CurvatureMonitor from a configuration file, by LightningCLI.

    python examples/cli/main.py
    python examples/cli/main.py fit --config examples/cli/config.yaml --trainer.max_epochs 10 --out runs/longer

Model and data are here and do not know of curvmon; the callback stands in config.yaml, with the arguments that it would
have in Python. Needs jsonargparse with its signatures: `pip install "jsonargparse[signatures]"`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from pytorch_lightning.cli import LightningArgumentParser, LightningCLI
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from curvmon import CurvatureMonitor

CONFIG = Path(__file__).with_name("config.yaml")


class DigitsMLP(pl.LightningModule):
    """Residual blocks on handwritten digits.

    Args:
        width: of every layer.
        depth: number of blocks.
    """

    def __init__(self, width: int = 48, depth: int = 3) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(64, width), nn.Linear(width, 10)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(depth)]
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]), prog_bar=True)


class Digits(pl.LightningDataModule):
    """scikit-learn's handwritten digits.

    Args:
        batch_size: of training.
    """

    def __init__(self, batch_size: int = 64) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        from sklearn.datasets import load_digits

        digits = load_digits()
        data = TensorDataset(torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target))
        self.train, self.val = random_split(data, [0.8, 0.2], torch.Generator().manual_seed(0))

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.val, 256)


class CLI(LightningCLI):
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument("--out", default="runs/cli", help="folder for the logs")
        parser.link_arguments("out", "trainer.default_root_dir")
        parser.link_arguments("out", "trainer.logger.init_args.save_dir")


def main(argv: Sequence[str] | None = None) -> LightningCLI:
    if argv is None and len(sys.argv) == 1:
        argv = ["fit", "--config", str(CONFIG)]
    cli = CLI(DigitsMLP, Digits, args=None if argv is None else list(argv))
    for callback in cli.trainer.callbacks:
        if isinstance(callback, CurvatureMonitor) and callback.history:
            print(f"\nThe curvature at the end:\n{callback.history[-1]}")
            print(f"\nEvery number as a table, beside the configuration: {cli.trainer.log_dir}/metrics.csv")
    return cli


if __name__ == "__main__":
    main()

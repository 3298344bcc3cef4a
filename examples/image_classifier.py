"""Watch the curvature between the stages of a ResNet while it learns to tell images apart.

    python examples/image_classifier.py
    python examples/image_classifier.py --data cifar-10-batches-py --width 64 --epochs 30

Without arguments it learns scikit-learn's handwritten digits, and nothing is downloaded. `--data` takes CIFAR-10: the
folder of its Python pickles, or an .npz with uint8 arrays x_train, y_train, x_test, y_test (images as N x 3 x 32 x 32).
All that curvmon needs is the line in `main` that makes a CurvatureMonitor.
"""

from __future__ import annotations

import argparse
import pickle
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader

from curvmon import CurvatureMonitor
from curvmon.integrations.lightning.demo.network import Classifier, ResNet, digits, prepared

ACTIVATIONS = {"relu": nn.ReLU, "silu": nn.SiLU, "gelu": nn.GELU}


def cifar10(path: Path) -> list[Tensor]:
    """The same four of CIFAR-10, from an .npz or from the folder of pickles that its authors distribute."""
    if path.suffix == ".npz":
        with np.load(path) as arrays:
            return [torch.tensor(arrays[name]) for name in ("x_train", "y_train", "x_test", "y_test")]

    def read(*names: str) -> list[Tensor]:
        parts = [pickle.loads((path / name).read_bytes(), encoding="bytes") for name in names]
        images = np.concatenate([part[b"data"] for part in parts]).reshape(-1, 3, 32, 32)
        return [torch.tensor(images), torch.tensor([label for part in parts for label in part[b"labels"]])]

    return read(*(f"data_batch_{i}" for i in range(1, 6))) + read("test_batch")


def main(argv: Sequence[str] | None = None) -> CurvatureMonitor:
    parser = argparse.ArgumentParser(description="A ResNet with a CurvatureMonitor")
    parser.add_argument("--data", type=Path, help="CIFAR-10: a folder of its pickles, or an .npz (default: digits)")
    parser.add_argument("--activation", choices=ACTIVATIONS, default="relu", help="silu and gelu have a GN-Gap")
    parser.add_argument("--width", type=int, default=16, help="channels of the first stage")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--out", type=Path, default=Path("runs/image_classifier"), help="folder for the logs")
    options = parser.parse_args(argv)

    pl.seed_everything(0, verbose=False)
    train, val = prepared(digits() if options.data is None else cifar10(options.data))
    model = ResNet(train.tensors[0].shape[1], 10, options.width, ACTIVATIONS[options.activation])

    # Here it is. `CurvatureMonitor()` would do, and look at every block; four stages make fewer and clearer charts.
    monitor = CurvatureMonitor(nodes=["model.stem", "model.layer*"])
    tensorboard, table = TensorBoardLogger(options.out, name="tensorboard"), CSVLogger(options.out, name="csv")
    trainer = pl.Trainer(
        max_epochs=options.epochs, callbacks=[monitor], logger=[tensorboard, table], log_every_n_steps=10
    )
    trainer.fit(
        Classifier(model, options.lr),
        DataLoader(train, batch_size=64, shuffle=True),
        DataLoader(val, batch_size=256),
    )

    accuracy = trainer.callback_metrics["val_accuracy"]
    print(f"\nAccuracy {accuracy:.3f}. The curvature at the end:\n{monitor.history[-1]}")
    print(f"\nCharts and heatmaps: tensorboard --logdir {tensorboard.root_dir}")
    print(f"Every number as a table: {table.log_dir}/metrics.csv")
    return monitor


if __name__ == "__main__":
    main()

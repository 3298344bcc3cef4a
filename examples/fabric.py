"""curvmon.Monitor in a loop with Lightning Fabric, which wraps model, optimizer and data.

python examples/fabric.py [--steps 200] [--out runs/fabric]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from lightning.fabric.loggers import TensorBoardLogger
from sklearn.datasets import load_digits
from torch import Tensor, nn

import curvmon


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def main(argv: Sequence[str] | None = None) -> curvmon.Monitor:
    parser = argparse.ArgumentParser(description="curvmon.Monitor with Lightning Fabric")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("runs/fabric"), help="folder for the logs")
    options = parser.parse_args(argv)

    logger = TensorBoardLogger(options.out, name="digits")
    fabric = Fabric(accelerator="cpu", devices=1, loggers=logger)
    fabric.seed_everything(0)
    digits = load_digits()
    x, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    network = nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 48), nn.GELU(), nn.Linear(48, 10))
    model, optimizer = fabric.setup(network, torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9))

    monitor = curvmon.Monitor(log=fabric.loggers)
    monitor.attach(model, optimizer, loss=loss, total_steps=options.steps)
    for step in range(1, options.steps + 1):
        rows = torch.randint(len(x), (64,))
        batch = x[rows], y[rows]
        monitor.observe(batch)
        value = loss(model, batch)
        optimizer.zero_grad()
        fabric.backward(value)
        optimizer.step()
        monitor.step(step, loss=value)
        if step % 20 == 0:
            fabric.log("train_loss", value.item(), step=step)
            monitor.measure(step)
    monitor.close()

    state = {"model": model, "optimizer": optimizer, "curvature": monitor.state_dict()}
    fabric.save(options.out / "last.ckpt", state)
    print(monitor.history[-1])
    print(f"\nCharts: tensorboard --logdir {options.out}")
    return monitor


if __name__ == "__main__":
    main()

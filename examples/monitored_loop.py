"""curvmon.Monitor in a training loop of one's own: what CurvatureMonitor does, without Lightning.

    python examples/monitored_loop.py [--steps 600] [--out runs/monitored_loop]

An MLP learns handwritten digits. Four calls go into the loop: `observe` before the forward pass, `step` after the
optimizer's step, `measure` at every validation, `close` at the end. After two thirds of the steps something goes wrong
on purpose: from then on images and labels are shuffled separately. Numbers, heatmaps and alerts go to TensorBoard, and
one HTML page tells the run.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter

import curvmon


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def main(argv: Sequence[str] | None = None) -> curvmon.Monitor:
    parser = argparse.ArgumentParser(description="curvmon.Monitor in a plain loop")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--every", type=int, default=12, help="steps between two validations")
    parser.add_argument("--out", type=Path, default=Path("runs/monitored_loop"), help="folder for the logs")
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    torch.set_num_threads(1)  # tensors this small are not worth a second thread

    digits = load_digits()
    x, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    validation = x[-256:], y[-256:]
    model = nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 48), nn.GELU(), nn.Linear(48, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    writer = SummaryWriter(options.out)
    monitor = curvmon.Monitor(log=writer)
    monitor.attach(model, optimizer, loss=loss, total_steps=options.steps)
    monitor.observe(validation, source="val")  # the first batch that is observed becomes the probe batch
    for step in range(1, options.steps + 1):
        images = labels = torch.randint(len(x) - 256, (128,))
        if step > options.steps * 2 // 3:
            labels = labels[torch.randperm(128)]  # the mishap
        batch = x[images], y[labels]
        monitor.observe(batch)
        value = loss(model, batch)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        monitor.step(step, loss=value)
        if step % options.every == 0:
            with torch.no_grad():
                val_loss = loss(model, validation).item()
            writer.add_scalar("val_loss", val_loss, step)
            monitor.measure(step, {"val_loss": val_loss})
    monitor.close()
    writer.close()

    for alert in monitor.alerts:
        print(f"{alert.level} at step {alert.step}: {alert.message}\n")
    monitor.report(str(options.out / "report.html"))
    print(f"Charts: tensorboard --logdir {options.out}\nOne page: {options.out}/report.html")
    return monitor


if __name__ == "__main__":
    main()

"""curvmon in a training loop of one's own, without Lightning.

    python examples/plain_pytorch.py [--steps 600] [--out runs/plain_pytorch]

An MLP learns handwritten digits. Every 12 steps the loop asks for the curvature between the layers and for the largest
eigenvalue of the Hessian, writes both into a CSV, and shows the latter to a ChangeDetector. After two thirds of the
steps something goes wrong on purpose: from then on images and labels are shuffled separately. The detector should say
so, and otherwise keep silent. It sees what λ_1 shows and no more: with tanh in place of GELU, λ_1 hardly moves and this
mishap goes unnoticed.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import curvmon


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """What curvmon differentiates: any function of the model and of a batch that returns a scalar."""
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def main(argv: Sequence[str] | None = None) -> list[tuple[int, curvmon.Alert]]:
    parser = argparse.ArgumentParser(description="curvmon without Lightning")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--every", type=int, default=12, help="steps between two measurements")
    parser.add_argument("--out", type=Path, default=Path("runs/plain_pytorch"), help="folder for curvature.csv")
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    torch.set_num_threads(1)  # tensors this small are not worth a second thread

    digits = load_digits()
    x, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    probe = x[-64:], y[-64:]  # always the same samples: then only the network can change the numbers
    model = nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 48), nn.GELU(), nn.Linear(48, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    detector = curvmon.ChangeDetector(scale="log")
    alerts: list[tuple[int, curvmon.Alert]] = []
    spectrum: curvmon.Spectrum | None = None
    with (options.out / "curvature.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["step", "loss", "lambda_1", "stability_ratio", "coupling", "coupling_stderr", "gn_gap"])
        for step in range(options.steps + 1):
            if step % options.every == 0:
                between = curvmon.measure(model, probe, loss=loss)
                # The search begins where the last one ended (`start`), which saves products. With the optimizer, the
                # result says how close its steps are to overshooting.
                spectrum = curvmon.spectrum(
                    model, probe, loss=loss, k=1, start=spectrum, optimizer=optimizer, trace=False, verify=False
                )
                coupling, error = between.coupling[0, 1].item(), between.stderr["coupling"][0, 1].item()
                row = [step, spectrum.loss, spectrum.sharpness, spectrum.stability_ratio, coupling, error]
                table.writerow([*row, between.gn_gap[0, 1].item()])
                alert = detector.update(spectrum.sharpness)
                if alert is not None:
                    alerts.append((step, alert))
                    print(f"ALERT at step {step}, λ_1: {alert.message}")

            images = labels = torch.randint(len(x) - 64, (128,))
            if step >= options.steps * 2 // 3:
                labels = labels[torch.randperm(128)]  # the mishap
            optimizer.zero_grad()
            loss(model, (x[images], y[labels])).backward()
            optimizer.step()

    print(f"\nBetween the layers, at the end:\n{between}")
    print(f"\nBy the parameters:\n{spectrum}")
    print(f"\nEvery measurement: {options.out}/curvature.csv")
    return alerts


if __name__ == "__main__":
    main()

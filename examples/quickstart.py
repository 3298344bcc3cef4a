"""Train a small residual network on handwritten digits; print the curvature between its layers before and after.

    python examples/quickstart.py [--epochs 10]

Needs scikit-learn for its digits; nothing is downloaded and nothing is written. About ten seconds on a laptop CPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import curvmon


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def network(width: int = 64, depth: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(64, width), *(Block(width) for _ in range(depth)), nn.Linear(width, 10))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


def main(argv: Sequence[str] | None = None) -> tuple[curvmon.Measurement, curvmon.Measurement]:
    """The measurements before and after training."""
    parser = argparse.ArgumentParser(description="Curvature between layers, before and after training")
    parser.add_argument("--epochs", type=int, default=10)
    epochs = parser.parse_args(argv).epochs
    torch.manual_seed(0)
    torch.set_num_threads(1)  # tensors this small are not worth a second thread
    digits = load_digits()
    x, y = torch.tensor(digits.data / 16.0, dtype=torch.float32), torch.tensor(digits.target)
    train, probe = (x[:1500], y[:1500]), (x[1500:1532], y[1500:1532])  # 32 samples are enough to see the geometry
    model = network()

    print("Node 0 is the first linear layer, 1 to 4 are the residual blocks; the head is left out.\n")
    print("Before training")
    before = curvmon.measure(model, probe, loss=loss)
    print(before)

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(epochs):
        for chosen in torch.randperm(1500).split(50):
            optimizer.zero_grad()
            value = loss(model, (train[0][chosen], train[1][chosen]))
            value.backward()
            optimizer.step()
    accuracy = (model(x[1500:]).argmax(1) == y[1500:]).float().mean()

    print(f"\nAfter {epochs} epochs, test accuracy {accuracy:.3f}")
    after = curvmon.measure(model, probe, loss=loss)
    print(after)

    print("\nMean over pairs of layers that are d apart, before -> after")
    print("d      coupling       stable rank         GN-Gap")
    metrics = ("coupling", "stable_rank", "gn_gap")
    for d in range(len(before.nodes)):
        pairs = [(before.by_distance(m)[d], after.by_distance(m)[d]) for m in metrics]
        print(f"{d}  " + "  ".join(f"{old:6.3f} -> {new:6.3f}" for old, new in pairs))
    print(
        "\nTraining has aligned the layers: coupling near 1 at every distance, curvature in a single direction\n"
        "(stable rank 1), most of it seen by Gauss-Newton. The gap of node 4 is 0: only a linear layer follows it."
    )
    return before, after


if __name__ == "__main__":
    main()

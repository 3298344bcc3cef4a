"""Train a small residual network on handwritten digits; print the curvature between its layers before and after.

    python examples/quickstart.py

Needs scikit-learn for its digits; nothing is downloaded. About half a minute on a laptop CPU.
"""

from __future__ import annotations

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


def main() -> None:
    torch.manual_seed(0)
    digits = load_digits()
    x, y = torch.tensor(digits.data / 16.0, dtype=torch.float32), torch.tensor(digits.target)
    train, probe = (x[:1500], y[:1500]), (x[1500:1532], y[1500:1532])  # 32 samples are enough to see the geometry
    model = network()

    print("Before training")
    print(curvmon.measure(model, probe, loss=loss))

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    epochs = 10
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

    print("\nMean over pairs of layers that are d apart")
    print("d  resonance  coupling  gn_gap")
    for d, row in enumerate(zip(*(after.by_distance(m) for m in ("resonance", "coupling", "gn_gap")))):
        print(f"{d}  {row[0]:9.3g}  {row[1]:8.3f}  {row[2]:6.3f}")


if __name__ == "__main__":
    main()

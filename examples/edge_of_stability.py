"""Progressive sharpening and the edge of stability, in a single attention layer and in an MLP.

    python examples/edge_of_stability.py [--quick] [--out runs/edge_of_stability]

Gradient descent with learning rate lr bears curvature up to 2 / lr. Training with full batches raises the largest
eigenvalue of the Hessian up to this limit and no further: there it hovers, while the loss goes on falling, though no
longer at every step. Seen in a tanh MLP on handwritten digits, and in a self-attention layer of one dimension that
learns to reverse a sequence of two numbers. All exact solutions of the latter are sharper than 2 / lr (by a fifth at
least), so that it ends up jumping to and fro about one of them.

Needs scikit-learn for its digits, and matplotlib. About twenty seconds on a laptop CPU.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvmon

Batch = tuple[Tensor, Tensor]


class SelfAttention(nn.Module):
    """f(x) = w_V softmax(x <w_Q, w_K> x^T / sqrt(d)) x for a sequence x of numbers"""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.value = nn.Parameter(0.1 * torch.randn(()))
        self.query, self.key = nn.Parameter(0.1 * torch.randn(width)), nn.Parameter(0.1 * torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.outer(x, x) * self.query.dot(self.key) / math.sqrt(len(self.query))
        return self.value * (scores.softmax(1) @ x)


@dataclass(frozen=True)
class Series:
    title: str
    steps: list[int]
    sharpness: list[float]
    losses: list[float]
    limit: float

    @property
    def relative(self) -> list[float]:
        """λ_1 over 2 / lr"""
        return [value / self.limit for value in self.sharpness]

    @property
    def hovering(self) -> float:
        """λ_1 over 2 / lr, mean over the last third of the run"""
        late = self.relative[-(len(self.relative) // 3) :]
        return sum(late) / len(late)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """1/(2n) Σ |f - y|²"""
    return F.mse_loss(model(batch[0]), batch[1], reduction="sum") / (2 * len(batch[0]))


def train(title: str, model: nn.Module, batch: Batch, lr: float, steps: int, every: int) -> Series:
    """Gradient descent on one batch, with λ_1 every so often; each search begins at the last eigenvector."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    found: curvmon.Spectrum | None = None
    sharpness, losses = [], []
    for step in range(steps):
        if step % every == 0:
            found = curvmon.spectrum(
                model, batch, loss=loss, k=1, start=found, verify=False, ggn=False, trace=False, rtol=1e-3
            )
            sharpness.append(found.sharpness)
            losses.append(found.loss)
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()
    return Series(title, list(range(0, steps, every)), sharpness, losses, curvmon.stability_limit(optimizer).limit)


def attention(seed: int = 0) -> Series:
    torch.manual_seed(seed)
    x = torch.tensor([1.1, -0.7])  # smaller numbers end in a minimum below the limit, larger ones diverge
    return train("Self-attention, 5 parameters, lr 2.3", SelfAttention(2), (x, x.flip(0)), lr=2.3, steps=300, every=1)


def mlp(quick: bool = False, seed: int = 0) -> Series:
    from sklearn.datasets import load_digits

    torch.manual_seed(seed)
    samples, width, lr, steps, every = (100, 16, 0.4, 600, 20) if quick else (500, 64, 0.3, 2000, 10)
    digits = load_digits()
    x = torch.tensor(digits.data[:samples] / 16, dtype=torch.float32)
    y = F.one_hot(torch.tensor(digits.target[:samples]), 10).float()
    hidden = nn.Linear(64, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()
    model = nn.Sequential(*hidden, nn.Linear(width, 10))
    size = sum(parameter.numel() for parameter in model.parameters())
    return train(f"tanh MLP, {size:,} parameters, lr {lr}", model, (x - x.mean(0), y), lr, steps, every)


def plot(found: Sequence[Series], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5 * len(found), 6), layout="constrained")
    axes = figure.subplots(2, len(found), sharex="col")
    for (top, bottom), series in zip(axes.T, found):
        top.plot(series.steps, series.sharpness, color="#0072B2", label="λ₁, curvmon.spectrum")
        top.axhline(series.limit, color="#D55E00", ls="--", label=f"2 / lr = {series.limit:.3g}")
        top.set(title=series.title, ylabel="sharpness", ylim=(0, None))
        top.legend(loc="lower right")
        bottom.semilogy(series.steps, series.losses, color="#000000")
        bottom.set(xlabel="step of gradient descent", ylabel="loss")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Progressive sharpening and the edge of stability")
    parser.add_argument("--quick", action="store_true", help="a smaller MLP, trained for less long")
    parser.add_argument("--out", type=Path, default=Path("runs/edge_of_stability"), help="folder for the figure")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    found = [attention(), mlp(options.quick)]
    for series in found:
        print(f"{series.title}: loss {series.losses[0]:.3g} -> {series.losses[-1]:.3g}; sharpness relative to 2 / lr:")
        print(f"  start {series.relative[0]:.2f}, maximum {max(series.relative):.2f}, last third {series.hovering:.3f}")
    figure = options.out / "edge_of_stability.png"
    plot(found, figure)
    print(f"Figure: {figure}")


if __name__ == "__main__":
    main()

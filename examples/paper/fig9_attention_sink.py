"""Figure 9 of the paper on closed-form spectra: an attention sink shrinks the bulk and raises the outliers.

    python -m examples.paper.fig9_attention_sink [--quick] [--figure sink.png]

One self-attention layer, embedding 10, d_K = 100, ten sequences of ten tokens; the sink is a bias on the scores of the
first token. Dense Hessians of 2,100 dimensions; the bulk are the eigenvalues that repeat. Two minutes on one core.

The paper also needs the first token's activation to be large ("massive"), but does not say how large in this figure.
Shown with the first token as the others, and five times as large. Targets are random.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

import curvmon
from examples.paper.report import BLUE, ORANGE, Options, Table, canvas, finish, options, save
from examples.paper.spectra import Batch, dense_hessian, half_mean_square, standard

BIASES = (0.0, 1.0, 2.0, 4.0, 6.0)
MASSES = {"tokens alike": 1.0, "first token five times as large": 5.0}


class Attention(nn.Module):
    """X -> softmax(X W_Q W_K^T X^T / sqrt d_K + sink) X W_V; `sink` is added to the scores of the first token."""

    def __init__(self, embedding: int, keys: int, sink: float, generator: torch.Generator) -> None:
        super().__init__()
        self.query, self.key = (nn.Parameter(standard(keys, embedding, generator)) for _ in range(2))
        self.value, self.sink = nn.Parameter(standard(embedding, embedding, generator)), sink

    def attention(self, x: Tensor) -> Tensor:
        scores = (x @ self.query) @ (x @ self.key).transpose(1, 2) / math.sqrt(self.query.shape[1])
        return (scores + self.sink * (torch.arange(x.shape[1]) == 0)).softmax(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x) @ x @ self.value


class Point(NamedTuple):
    share: float
    """mean attention to the first token"""
    top: float
    bulk: float
    """the largest eigenvalue that repeats"""
    off: float
    """of curvmon.spectrum's top eigenvalue, relative"""


def repeated(eigenvalues: Tensor, times: int) -> Tensor:
    """Those that are equal to `times` others, to rounding; ascending."""
    near = 1e-9 * eigenvalues.abs().max()
    return eigenvalues[times:][(eigenvalues[times:] - eigenvalues[:-times]) < near]


def points(given: Options, mass: float, seed: int) -> list[Point]:
    embedding, keys = (4, 20) if given.tiny else (10, 100)
    found = []
    for sink in (0.0, 4.0) if given.tiny else BIASES:
        generator = torch.Generator().manual_seed(seed)
        model = Attention(embedding, keys, sink, generator)
        x, y = torch.randn(2, 10, 10, embedding, dtype=torch.float64, generator=generator)
        x[:, 0] *= mass
        batch: Batch = x, y
        values = torch.linalg.eigvalsh(dense_hessian(model, batch))
        # outside the span of the rows of both weights, every direction of the keys carries the same eigenvalues
        bulk = repeated(values, keys - 2 * embedding - 1)
        seen = curvmon.spectrum(model, batch, loss=half_mean_square, k=1, ggn=False, trace=False, verify=False)
        off = abs(seen.sharpness / values[-1].item() - 1)
        share = model.attention(x)[:, :, 0].mean().item()
        found.append(Point(share, values[-1].item(), bulk.max().item(), off))
    return found


def plot(runs: dict[str, list[list[Point]]], path: str) -> None:
    figure, axes = canvas(2)
    for axis, (name, by_seed) in zip(axes[0], runs.items()):
        for field, colour, marker, label in (("top", ORANGE, "o", "largest eigenvalue"), ("bulk", BLUE, "^", "bulk")):
            for i, run in enumerate(by_seed):
                values = [getattr(point, field) for point in run]
                axis.plot(
                    [p.share for p in run],
                    values,
                    color=colour,
                    marker=marker,
                    alpha=0.8,
                    label=label if i == 0 else None,
                )
        axis.set(title=name, xlabel="mean attention to the first token", ylabel="eigenvalue", yscale="log")
    axes[0, 0].legend()
    save(figure, path)


def main(argv: Sequence[str] | None = None) -> Table:
    given = options(__doc__, argv, seeds=3, images=False)
    table = Table("Figure 9: attention sinks", "synthetic")
    runs = {name: [points(given, mass, seed) for seed in given.seeds] for name, mass in MASSES.items()}
    for name, by_seed in runs.items():
        table.compare(
            f"{name}: curvmon.spectrum against the dense Hessian", "<1e-3", [max(p.off for p in run) for run in by_seed]
        )
        bulk, top = ([[getattr(p, field) for p in run] for run in by_seed] for field in ("bulk", "top"))
        shares = f"attention {by_seed[0][0].share:.2f} → {by_seed[0][-1].share:.2f}"
        shrinks = all(values[-1] < values[0] for values in bulk)
        table.claim(f"{name}: the bulk shrinks", "yes", f"{_ratios(bulk)}fold, {shares}", shrinks)
        grows = all(values[-1] > values[0] for values in top)
        table.claim(f"{name}: the largest eigenvalue grows", "yes", f"{_ratios(top)}fold", grows)
    if given.figure:
        plot(runs, given.figure)
    return finish(table, given)


def _ratios(values: Sequence[Sequence[float]]) -> str:
    return ", ".join(f"{run[-1] / run[0]:.2g}" for run in values) + " "


if __name__ == "__main__":
    main()

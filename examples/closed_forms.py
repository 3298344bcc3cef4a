"""Where the eigenvalues of a Hessian come from: closed forms beside measured ones, along three training runs.

    python examples/closed_forms.py [--quick] [--out runs/closed_forms]

A linear network f(x) = <w, v> x of width m has 2m eigenvalues, but only four different ones: the bulk ±δ, m - 1 times
each, δ = mean x (f - y), and two outliers Λ± that add up to the trace. The sign of Λ- says how far learning has come:
with t = mean(xy) / mean(x²), it is negative up to <w, v> = t / 3 (early), positive up to t (late), negative beyond
(divergent). A single self-attention layer has a bulk ±γ and three outliers. Lines are `curvmon.closed_form`, markers
all eigenvalues that `curvmon.spectrum` finds from Hessian-vector products, copies included.

Needs matplotlib. A few seconds on a laptop CPU.
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
from curvmon import closed_form

Batch = tuple[Tensor, Tensor]
OUTLIER, BULK, PHASES = "#D55E00", "#0072B2", {"early": "#DDDDDD", "late": "#FFFFFF", "divergent": "#F3D9E8"}


class LinearNetwork(nn.Module):
    def __init__(self, w: Tensor, v: Tensor) -> None:
        super().__init__()
        self.w, self.v = nn.Parameter(w), nn.Parameter(v)

    def forward(self, x: Tensor) -> Tensor:
        return self.w.dot(self.v) * x

    def closed_form(self, batch: Batch) -> closed_form.ClosedForm:
        return closed_form.linear_network(self.w, self.v, *batch)


class SelfAttention(nn.Module):
    def __init__(self, value: Tensor, query: Tensor, key: Tensor) -> None:
        super().__init__()
        self.value, self.query, self.key = nn.Parameter(value), nn.Parameter(query), nn.Parameter(key)

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.outer(x, x) * self.query.dot(self.key) / math.sqrt(len(self.query))
        return self.value * (scores.softmax(1) @ x)

    def closed_form(self, batch: Batch) -> closed_form.ClosedForm:
        return closed_form.self_attention(self.value, self.query, self.key, *batch)


@dataclass(frozen=True)
class Run:
    """Both spectra along one training run, after each of `steps`."""

    title: str
    steps: list[int]
    forms: list[closed_form.ClosedForm]
    measured: list[curvmon.Spectrum]

    @property
    def disagreement(self) -> float:
        """The largest difference between two eigenvalues, relative to the largest of its Hessian."""
        pairs = [(form.eigenvalues, found.eigenvalues) for form, found in zip(self.forms, self.measured)]
        return max(((true - found).abs().max() / true.abs().max()).item() for true, found in pairs)

    @property
    def phases(self) -> list[str | None]:
        return [form.phase for form in self.forms]


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """1/(2n) Σ (f - y)²"""
    return F.mse_loss(model(batch[0]), batch[1]) / 2


def train(title: str, model: LinearNetwork | SelfAttention, batch: Batch, lr: float, steps: range) -> Run:
    """Gradient descent, looking at the spectra after each of `steps`."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    size = sum(parameter.numel() for parameter in model.parameters())
    forms, measured = [], []
    for step in range(steps.stop):
        if step in steps:
            forms.append(model.closed_form(batch))
            measured.append(curvmon.spectrum(model, batch, loss=loss, k=size, ggn=False, trace=False))
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()
    return Run(title, list(steps), forms, measured)


def runs(quick: bool = False, seed: int = 0) -> list[Run]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    x, direction = normal(20), F.normalize(normal(6), dim=0)
    line, sequence = (x, 2 * x + 0.3 * normal(20)), torch.linspace(-1, 1.5, 6, dtype=torch.float64)
    small = LinearNetwork(0.2 * normal(6), 0.2 * normal(6))
    large = LinearNetwork(1.8 * direction, 1.8 * direction + 0.2 * normal(6))
    attention = SelfAttention(0.3 * normal(), 0.3 * normal(4), 0.3 * normal(4))
    steps = range(0, 91, 15 if quick else 3)
    return [
        train("Linear network, from small weights", small, line, 0.05, steps),
        train("Linear network, from large weights", large, line, 0.02, steps),
        train("Self-attention, reversing a sequence", attention, (sequence, sequence.flip(0)), 0.2, steps),
    ]


def plot(seen: Sequence[Run], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * len(seen), 4.3), layout="constrained")
    axes = figure.subplots(1, len(seen))
    for axis, run in zip(axes, seen):
        for phase, colour in PHASES.items():
            inside = [step for step, name in zip(run.steps, run.phases) if name == phase]
            if inside:
                axis.axvspan(inside[0], inside[-1], color=colour, lw=0)
                middle = (inside[0] + inside[-1]) / 2
                axis.text(middle, 1.01, phase, transform=axis.get_xaxis_transform(), ha="center")
        outliers = axis.plot(run.steps, torch.stack([form.outliers for form in run.forms]), color=OUTLIER, lw=3.5)
        bulk = axis.plot(run.steps, torch.stack([form.bulk for form in run.forms]), color=BULK, lw=1.5)
        values = torch.stack([spectrum.eigenvalues for spectrum in run.measured])
        markers = axis.plot(run.steps, values, "o", ms=4, mfc="none", mec="black", mew=0.8)
        axis.set(title=f"{run.title}\n", xlabel="step of gradient descent", ylabel="eigenvalue")
    labels = "outliers, closed form", "bulk, closed form", "curvmon.spectrum"
    figure.legend([outliers[0], bulk[0], markers[0]], labels, loc="outside lower center", ncols=3, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Closed-form Hessian spectra beside measured ones")
    parser.add_argument("--quick", action="store_true", help="a quarter of the points")
    parser.add_argument("--out", type=Path, default=Path("runs/closed_forms"), help="folder for the figure")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    seen = runs(options.quick)
    for run in seen:
        phases = ", ".join(dict.fromkeys(phase for phase in run.phases if phase))
        print(f"{run.title}{f' ({phases})' if phases else ''}")
        print(f"  loss {run.measured[0].loss:.3g} -> {run.measured[-1].loss:.3g}", end="; ")
        print(f"all {len(run.forms[0].eigenvalues)} eigenvalues, {len(run.steps)} times", end="; ")
        print(f"largest disagreement {run.disagreement:.1e} of the largest eigenvalue")
    figure = options.out / "closed_forms.png"
    plot(seen, figure)
    print(f"Figure: {figure}")


if __name__ == "__main__":
    main()

"""Does Gauss-Newton miss more of the sharpness of a Transformer than of an MLP?

    python examples/gauss_newton_error.py [--quick] [--out runs/gauss_newton_error]

The relative error |λ_1 - λ_GGN| / λ_1 of the top eigenvalue of the Gauss-Newton part, while two models learn to predict
the next character of Python's own documentation: a small GPT2 (pre-norm, GELU, tied embeddings, AdamW with warm-up),
and the same with every two attention layers replaced by one more MLP, which has as many parameters. They are compared
at equal losses, and at equal residuals: what Gauss-Newton leaves out is proportional to these. The paper whose closed
forms are in docs/spectrum.md found the larger error in GPT2, of 124 M parameters, almost everywhere.

Needs matplotlib. About four minutes on a laptop CPU.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvmon

Batch = tuple[Tensor, Tensor]
COLOURS = {"Transformer": "#D55E00", "MLP only": "#0072B2"}
QUICK = {"width": 16, "depth": 2, "context": 16, "steps": 40, "looks": 4}
FULL = {"width": 64, "depth": 4, "context": 64, "steps": 600, "looks": 30}


class Point(NamedTuple):
    step: int
    loss: float
    residual: float
    """mean norm of softmax(logits) - target"""
    error: float
    """of the top eigenvalue of Gauss-Newton"""


Runs = Mapping[str, Sequence[Sequence[Point]]]


class Attention(nn.MultiheadAttention):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return super().forward(x, x, x, attn_mask=future)[0]


class Network(nn.Module):
    def __init__(self, characters: int, context: int, width: int, depth: int, attention: bool) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(characters, width), nn.Embedding(context, width)
        self.parts = nn.ModuleList()
        for _ in range(depth if attention else depth + depth // 2):
            if attention:
                self.parts.append(Attention(width, 4, bias=False, batch_first=True))
            up, down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
            self.parts.append(nn.Sequential(up, nn.GELU(), down))
        self.norms = nn.ModuleList([nn.LayerNorm(width, bias=False) for _ in range(len(self.parts) + 1)])
        for name, weight in self.named_parameters():
            if weight.ndim > 1:  # as in GPT2, where width 768 makes 0.02 of it; less where a residual branch ends
                ends = name.endswith(("out_proj.weight", "2.weight"))
                nn.init.normal_(weight, std=0.55 / math.sqrt(width * (len(self.parts) if ends else 1)))

    def forward(self, text: Tensor) -> Tensor:
        x = self.characters(text) + self.places.weight
        for norm, part in zip(self.norms, self.parts):
            x = x + part(norm(x))
        return F.linear(self.norms[-1](x), self.characters.weight)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def residual(model: nn.Module, batch: Batch) -> float:
    with torch.no_grad():
        logits = model(batch[0])
    off = logits.softmax(2) - F.one_hot(batch[1], logits.shape[2])
    return float(torch.linalg.vector_norm(off, dim=2).mean())


def train(attention: bool, seed: int, *, width: int, depth: int, context: int, steps: int, looks: int) -> list[Point]:
    """AdamW, warming up over a sixth of the steps; measured on eight fixed sequences, most often in the beginning."""
    corpus = "\n".join(topics.values())
    index = {character: i for i, character in enumerate(sorted(set(corpus)))}
    text = torch.tensor([index[character] for character in corpus])

    def draw(count: int, generator: torch.Generator) -> Batch:
        starts = torch.randint(len(text) - context, (count, 1), generator=generator)
        chosen = text[starts + torch.arange(context + 1)]
        return chosen[:, :-1], chosen[:, 1:]

    probe = draw(8, torch.Generator().manual_seed(0))
    torch.manual_seed(seed)
    model, generator = Network(len(index), context, width, depth, attention), torch.Generator().manual_seed(seed + 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, 6 * (step + 1) / steps))
    when = {round(steps * (i / looks) ** 2) for i in range(looks + 1)}
    found: curvmon.Spectrum | None = None
    points = []
    for step in range(steps + 1):
        if step in when:
            found = curvmon.spectrum(model, probe, loss=loss, k=1, start=found, verify=False, trace=False, rtol=1e-3)
            points.append(Point(step, found.loss, residual(model, probe), found.ggn_error))
        optimizer.zero_grad()
        loss(model, draw(16, generator)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return points


def train_all(quick: bool = False, seeds: Sequence[int] = range(3)) -> Runs:
    size = QUICK if quick else FULL
    return {name: [train(name == "Transformer", seed, **size) for seed in seeds] for name in COLOURS}


def interpolated(points: Sequence[Point], by: str, at: Tensor) -> Tensor:
    """The error as a piecewise linear function of the loss, the residual or the step."""
    x, y = torch.tensor(
        sorted((getattr(point, by), point.error) for point in points), dtype=torch.float64
    ).T.contiguous()
    right = torch.searchsorted(x, at).clamp(1, len(x) - 1)
    share = (at - x[right - 1]) / (x[right] - x[right - 1]).clamp_min(torch.finfo(x.dtype).tiny)
    return torch.lerp(y[right - 1], y[right], share)


def at_equal(runs: Runs, by: str, count: int = 15) -> tuple[Tensor, dict[str, Tensor]]:
    """Values of the loss, residual or step that all runs pass, and the errors of each model there, seeds x values."""
    reached = [[getattr(point, by) for point in points] for seeds in runs.values() for points in seeds]
    at = torch.linspace(max(map(min, reached)), min(map(max, reached)), count, dtype=torch.float64)
    return at, {name: torch.stack([interpolated(p, by, at) for p in seeds]) for name, seeds in runs.items()}


def share_larger(runs: Runs, by: str) -> float:
    """At how many of these values the Transformer's error is the larger one, mean over seeds."""
    _, errors = at_equal(runs, by, 100)
    return (errors["Transformer"].mean(0) > errors["MLP only"].mean(0)).double().mean().item()


def plot(runs: Runs, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for axis, by, label in zip(axes, ("loss", "residual"), ("loss", "mean norm of the residual")):
        at, errors = at_equal(runs, by, 60)
        for name, colour in COLOURS.items():
            points = [point for seed in runs[name] for point in seed]
            axis.plot([getattr(p, by) for p in points], [p.error for p in points], ".", color=colour, alpha=0.35)
            axis.plot(at, errors[name].mean(0), color=colour, lw=2, label=f"{name}, mean of {len(runs[name])} seeds")
            axis.fill_between(at, errors[name].amin(0), errors[name].amax(0), color=colour, alpha=0.15, lw=0)
        axis.set(xlabel=f"{label} (training goes to the right)", yscale="log")
        axis.invert_xaxis()
    axes[0].set(ylabel="relative error of the top GGN eigenvalue")
    axes[0].legend(loc="lower left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="The error of Gauss-Newton in a Transformer and in an MLP")
    parser.add_argument("--quick", action="store_true", help="tiny models, only to see that it runs")
    parser.add_argument("--out", type=Path, default=Path("runs/gauss_newton_error"), help="folder for the figure")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    runs = train_all(options.quick)
    at, errors = at_equal(runs, "loss")
    print("Relative error of the top GGN eigenvalue at equal losses, mean over seeds (lowest to highest)")
    print("  loss  " + "".join(f"{name:>26}" for name in errors))
    for i in reversed(range(len(at))):
        cells = [f"{e[:, i].mean():.3f} ({e[:, i].min():.3f} to {e[:, i].max():.3f})" for e in errors.values()]
        print(f"{at[i]:6.3f}  " + "".join(f"{cell:>26}" for cell in cells))
    for by in ("loss", "residual", "step"):
        print(f"At equal {by}: the Transformer's error is larger at {share_larger(runs, by):.0%} of the values")
    figure = options.out / "gauss_newton_error.png"
    plot(runs, figure)
    print(f"Figure: {figure}")


if __name__ == "__main__":
    main()

"""Experiment 3: the GN-Gap of five activations, without LayerNorm and with it (tables 4, 5 and N.5, figure 5).

    python -m examples.paper.exp3_activations [--quick] [--data CIFAR10.npz] [--figure activations.png]

MLPs of six blocks of width 64 on the first 16 CIFAR-10 test images, dense blocks. Two minutes on one core.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

import curvmon
from examples.paper.data import Images, images
from examples.paper.metrics import pooled_gap
from examples.paper.networks import PlainMLP, seeded
from examples.paper.report import BLACK, BLUE, ORANGE, Options, Table, canvas, finish, options, save
from examples.paper.training import Batch, cross_entropy, train_on_images

ACTIVATIONS = {"ReLU": nn.ReLU, "LeakyReLU": nn.LeakyReLU, "Softplus": nn.Softplus, "SiLU": nn.SiLU, "GELU": nn.GELU}
# gap at initialisation and after training, each with its spread, and the mean square of the second derivative
TABLE_5 = {
    "ReLU": ("<1e-7", "", "<1e-7", "", "0"),
    "LeakyReLU": ("<1e-7", "", "<1e-7", "", "0"),
    "Softplus": ("0.122", "0.020", "0.111", "0.003", "0.058"),
    "SiLU": ("0.225", "0.005", "0.217", "0.008", "0.246"),
    "GELU": ("0.358", "0.008", "0.345", "0.012", "0.618"),
}
TABLE_4 = {
    "ReLU": ("0.618", "0.160", "0.199", "0.030", "0"),
    "LeakyReLU": ("0.626", "0.161", "0.212", "0.013", "0"),
    "Softplus": ("0.459", "0.098", "0.272", "0.024", "0.045"),
    "SiLU": ("1.967", "0.317", "0.359", "0.051", "0.142"),
    "GELU": ("2.296", "0.415", "0.516", "0.117", "0.271"),
}
# the gap of pairs d apart, d = 0, 2, 4
TABLE_N5 = {
    "Softplus": ("0.123", "0.119", "0.089"),
    "SiLU": ("0.227", "0.224", "0.168"),
    "GELU": ("0.361", "0.357", "0.269"),
}


class Seen(NamedTuple):
    found: curvmon.Measurement
    bend: float
    """mean square of the activation's second derivative"""

    @property
    def gap(self) -> float:
        return pooled_gap(self.found)


def look(model: PlainMLP, batch: Batch) -> Seen:
    found = curvmon.exact(model, batch, loss=cross_entropy, nodes=["blocks.*"])
    return Seen(found, mean_square_second_derivative(model, batch[0]))


def mean_square_second_derivative(model: PlainMLP, x: Tensor) -> float:
    """E[σ''(z)²] over what enters the activations of the projection and of all blocks."""
    entering: list[Tensor] = []
    parts = [model.projection, *model.blocks]
    hooks = [p.activation.register_forward_pre_hook(lambda _, given: entering.append(given[0].detach())) for p in parts]
    with torch.no_grad():
        model(x)
    for hook in hooks:
        hook.remove()
    z = torch.cat([tensor.flatten() for tensor in entering]).requires_grad_()
    (first,) = torch.autograd.grad(parts[0].activation(z).sum(), z, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), z) if first.requires_grad else (torch.zeros_like(z),)
    return second.square().mean().item()


Found = dict[str, list[Seen]]


def before_and_after(given: Options, data: Images, layer_norm: bool) -> tuple[Found, Found]:
    batch = data.first_test(16)
    before: Found = {}
    after: Found = {}
    for name, activation in ACTIVATIONS.items():
        for seed in given.seeds:
            model = seeded(PlainMLP, seed, widths=[64] * 6, activation=activation, layer_norm=layer_norm)
            before.setdefault(name, []).append(look(model, batch))
            if given.epochs:
                train_on_images(model, data, given.epochs, seed)
                after.setdefault(name, []).append(look(model, batch))
    return before, after


def compare(table: Table, title: str, paper: Mapping[str, tuple[str, ...]], before: Found, after: Found) -> None:
    for name, (gap, spread, gap_after, spread_after, bend) in paper.items():
        table.compare(f"{title}, {name}: gap", gap, [s.gap for s in before[name]], spread=spread)
        table.compare(f"{title}, {name}: E[σ''²]", bend, [s.bend for s in before[name]])
        if after:
            gaps, other = [s.gap for s in after[name]], "" if gap_after.startswith("<") else "other training data"
            table.compare(f"{title}, {name}, trained: gap", gap_after, gaps, spread=spread_after, other=other)


def compare_isolated(table: Table, before: Found) -> None:
    gaps = {name: statistics.fmean(s.gap for s in seen) for name, seen in before.items()}
    rising = gaps["ReLU"] == gaps["LeakyReLU"] < gaps["Softplus"] < gaps["SiLU"] < gaps["GELU"]
    seen = " < ".join(f"{name} {gaps[name]:.3g}" for name in ("ReLU", "Softplus", "SiLU", "GELU"))
    table.claim("ranking of the gaps", "ReLU = LeakyReLU < Softplus < SiLU < GELU", seen, rising)
    bends = [statistics.fmean(s.bend for s in before[name]) for name in gaps]
    fit = statistics.correlation(bends, list(gaps.values())) ** 2
    table.compare("gap against E[σ''²]: R² of a straight line", "0.908", [fit])
    last = len(before["ReLU"][0].found.nodes) - 1
    for name, paper in TABLE_N5.items():
        for d, value in zip((0, 2, 4), paper):
            if d < last:
                table.compare(f"{name}: gap({d})", value, [pooled_gap(s.found, d) for s in before[name]])
        table.compare(
            f"{name}: gap({last}), before a linear head", "<1e-7", [pooled_gap(s.found, last) for s in before[name]]
        )
        mean = statistics.fmean(s.found.gn_gap.triu()[s.found.gn_gap.triu() > 0].mean().item() for s in before[name])
        table.notes.append(
            f"{name}: the gap is Σ‖T‖/Σ‖GN‖ over all pairs; the mean of the nonzero pairs' gaps is {mean:.3g}"
        )


def plot(before: Found, path: str) -> None:
    figure, axes = canvas(1, width=6)
    axis = axes[0, 0]
    for name, seen in before.items():
        bend, gaps = statistics.fmean(s.bend for s in seen), [s.gap for s in seen]
        axis.errorbar(bend, statistics.fmean(gaps), statistics.pstdev(gaps), color=BLUE, marker="o", capsize=3)
        below = name == "LeakyReLU"
        axis.annotate(name, (bend, statistics.fmean(gaps)), (9, -12 if below else 5), textcoords="offset points")
        if name in TABLE_5 and not TABLE_5[name][0].startswith("<"):
            axis.plot(float(TABLE_5[name][4]), float(TABLE_5[name][0]), "x", color=BLACK, ms=9, mew=1.5, zorder=3)
    bends = [statistics.fmean(s.bend for s in seen) for seen in before.values()]
    slope, start = statistics.linear_regression(
        bends, [statistics.fmean(s.gap for s in seen) for seen in before.values()]
    )
    axis.plot([0, 0.65], [start, start + 0.65 * slope], color=ORANGE, ls="--", label="straight line")
    axis.plot([], [], "x", color=BLACK, ms=9, mew=1.5, label="paper, table 5")
    axis.set(xlabel="E[σ''(z)²]", ylabel="GN-Gap at initialisation", xlim=(-0.03, 0.72), ylim=(-0.04, 0.43))
    axis.legend(loc="upper left")
    save(figure, path)


def main(argv: Sequence[str] | None = None) -> Table:
    given = options(__doc__, argv, epochs=20)
    data = images(given.data)
    table = Table("Experiment 3: GN-Gap by activation (tables 4, 5 and N.5)", data.source)
    before, after = before_and_after(given, data, layer_norm=False)
    compare(table, "without LayerNorm", TABLE_5, before, after)
    compare_isolated(table, before)
    compare(table, "with LayerNorm", TABLE_4, *before_and_after(given, data, layer_norm=True))
    if given.figure:
        plot(before, given.figure)
    return finish(table, given)


if __name__ == "__main__":
    main()

"""Experiment 4: two branches that meet, by sum or by concatenation, ReLU or SiLU (tables 6 and N.4, figures 6 and N.2).

    python -m examples.paper.exp4_diamond [--quick] [--data CIFAR10.npz] [--figure diamond.png]

Branches of one to three blocks of width 32 on the first 32 CIFAR-10 test images, dense blocks. The gap is that of the
two branches' ends. Three minutes on one core, most of it training.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from torch import nn

import curvmon
from examples.paper.data import Images, images
from examples.paper.networks import DiamondMLP, seeded
from examples.paper.report import BLACK, BLUE, GREEN, ORANGE, PINK, Options, Table, canvas, finish, options, save
from examples.paper.training import Batch, cross_entropy, train_on_images

MERGES = {
    "sum+ReLU": ("sum", nn.ReLU),
    "sum+SiLU": ("sum", nn.SiLU),
    "cat+ReLU": ("cat", nn.ReLU),
    "cat+SiLU": ("cat", nn.SiLU),
}
# gap of cat+SiLU before and after training, and ‖T‖_F before, for branches of 1, 2, 3 blocks; the others are rounding
CAT_SILU = {
    1: ("1.35", "", "0.078", "6.6e-3"),
    2: ("1.33", "0.17", "0.082", "6.8e-3"),
    3: ("1.32", "", "0.090", "7.0e-3"),
}
ROUNDING = "<1e-6"
"""what the paper means by machine precision: it finds 7e-8 to 1.4e-7 in float32"""
Key = tuple[int, str]
Found = dict[Key, list[curvmon.Measurement]]


def before_and_after(given: Options, data: Images) -> tuple[Found, Found]:
    batch = data.first_test(32)
    before: Found = {}
    after: Found = {}
    for depth in (2,) if given.quick else (1, 2, 3):
        for name, (merge, activation) in MERGES.items():
            for seed in given.seeds:
                size = {"width": 8 if given.tiny else 32, "depth": depth}
                model = seeded(DiamondMLP, seed, merge=merge, activation=activation, **size)
                before.setdefault((depth, name), []).append(look(model, batch))
                if given.epochs:
                    train_on_images(model, data, given.epochs, seed)
                    after.setdefault((depth, name), []).append(look(model, batch))
    return before, after


def look(model: DiamondMLP, batch: Batch) -> curvmon.Measurement:
    return curvmon.exact(model, batch, loss=cross_entropy, nodes=["a.*", "b.*"])


def at_the_ends(found: curvmon.Measurement) -> tuple[float, float]:
    """Gap and ‖T‖_F of the last blocks of the two branches."""
    depth = len(found.nodes) // 2
    gap, norm = found.gn_gap[depth - 1, -1].item(), found.gn_norm[depth - 1, -1].item()
    return gap, gap * norm


def between_branches(found: Sequence[curvmon.Measurement]) -> dict[int, float]:
    """Mean resonance of a block of one branch and one of the other, by the length of the way through the merge."""
    depth = len(found[0].nodes) // 2
    by_length: dict[int, list[float]] = {}
    for one in found:
        for i in range(depth):
            for j in range(depth):
                by_length.setdefault(2 * depth - i - j, []).append(one.resonance[i, depth + j].item())
    return {length: statistics.fmean(values) for length, values in sorted(by_length.items())}


def compare(table: Table, before: Found, after: Found) -> None:
    for (depth, name), found in before.items():
        gaps, tensors = zip(*(at_the_ends(one) for one in found))
        title = f"{name}, k = {depth}"
        if name == "cat+SiLU":
            gap, spread, gap_after, tensor = CAT_SILU[depth]
            table.compare(f"{title}: gap", gap, gaps, spread=spread)
            table.compare(f"{title}: ‖T‖_F", tensor, tensors)
            if after:
                values = [at_the_ends(one)[0] for one in after[depth, name]]
                table.compare(f"{title}, trained: gap", gap_after, values, other="other training data")
        else:
            table.compare(f"{title}: gap", ROUNDING, gaps)
            if after:
                table.compare(f"{title}, trained: gap", ROUNDING, [at_the_ends(one)[0] for one in after[depth, name]])
    for depth in sorted({depth for depth, _ in before}):
        means = {name: statistics.fmean(at_the_ends(one)[0] for one in before[depth, name]) for name in MERGES}
        most = max(value for name, value in means.items() if name != "cat+SiLU")
        orders = math.log10(means["cat+SiLU"] / most) if most else math.inf
        said = f"{orders:.0f}" if most else "the rest are exactly 0"
        table.claim(f"k = {depth}: orders of magnitude between cat+SiLU and the rest", "7", said, orders >= 7)


def compare_between(table: Table, before: Found, after: Found) -> None:
    for (depth, name), found in before.items():
        if depth == 1:
            continue
        at_first = between_branches(found)
        ratios = [at_first[length + 2] / at_first[length] for length in at_first if length + 2 in at_first]
        holds = all(0.28 <= ratio <= 0.39 for ratio in ratios)
        said = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        table.claim(f"{name}, k = {depth}: R_AB(d + 2) / R_AB(d)", "0.28 to 0.39", said, holds)
        if after and depth == 2:
            later = between_branches(after[depth, name])
            growth = later[4] / later[2]
            table.claim(
                f"{name}, k = 2, trained: R_AB grows, d = 2 to 4", "3.5 to 5.7 fold", f"{growth:.2f} fold", growth > 1
            )


def plot(before: Found, after: Found, path: str) -> None:
    figure, axes = canvas(2, width=5.5)
    styles = dict(zip(MERGES, ((BLUE, "o"), (GREEN, "s"), (PINK, "^"), (ORANGE, "D"))))
    for place, (name, (colour, _)) in enumerate(styles.items()):
        gaps = [at_the_ends(one)[0] for one in before[2, name]]
        # zero cannot be drawn on a logarithmic scale: the bar ends at the rounding of float64
        axes[0, 0].bar(place, max(statistics.fmean(gaps), 1e-16), color=colour)
        axes[0, 0].annotate(
            f"{statistics.fmean(gaps):.3g}",
            (place, max(statistics.fmean(gaps), 1e-16)),
            (0, 8),
            ha="center",
            textcoords="offset points",
        )
    paper = (6.7e-8, 7.0e-8, 8.4e-8, 1.33)
    axes[0, 0].plot(range(4), paper, "x", color=BLACK, ms=9, mew=1.5, label="paper, table 6 (float32)")
    axes[0, 0].set(
        yscale="log",
        ylim=(1e-17, 1e3),
        xticks=range(4),
        xticklabels=list(MERGES),
        ylabel="gap of the branches' ends, k = 2",
    )
    axes[0, 0].legend(loc="upper left")
    for name, (colour, marker) in styles.items():
        for found, line, when in ((before, "-", "init"), (after, "--", "trained")):
            if (2, name) in found:
                values = between_branches(found[2, name])
                axes[0, 1].plot(
                    list(values), list(values.values()), color=colour, marker=marker, ls=line, label=f"{name}, {when}"
                )
    axes[0, 1].set(
        yscale="log", xticks=(2, 3, 4), xlabel="way through the merge", ylabel="mean resonance between branches, k = 2"
    )
    figure.legend(*axes[0, 1].get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    save(figure, path)


def main(argv: Sequence[str] | None = None) -> Table:
    given = options(__doc__, argv, epochs=50)
    data = images(given.data)
    before, after = before_and_after(given, data)
    table = Table("Experiment 4: diamond MLP (tables 6 and N.4)", data.source)
    compare(table, before, after)
    compare_between(table, before, after)
    if given.figure:
        plot(before, after, given.figure)
    return finish(table, given)


if __name__ == "__main__":
    main()

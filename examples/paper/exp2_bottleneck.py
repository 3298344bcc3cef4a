"""Experiment 2: stable rank and coupling across a narrow layer (tables 3 and N.1, figure 4).

    python -m examples.paper.exp2_bottleneck [--quick] [--data CIFAR10.npz] [--figure bottleneck.png]

ReLU MLPs with LayerNorm for 100 classes at initialisation; means over the pairs of blocks on both sides of the narrow
one. A minute on one core.

The paper's images are CIFAR-100's. Here they are CIFAR-10's, with labels drawn from 100 classes. Its text has two
settings: width 256 on 32 images for the sweep, width 512 on 64 images for the control. Both are shown.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

import curvmon
from examples.paper.data import images
from examples.paper.networks import PlainMLP, seeded
from examples.paper.report import BLACK, BLUE, COUPLING, ORANGE, SKY, Options, Table, canvas, finish, options, save
from examples.paper.training import Batch, cross_entropy

CLASSES = 100
SETTINGS = {"base 512, 64 images": (512, 64), "base 256, 32 images": (256, 32)}
# stable rank with its spread and coupling, for every width of the narrow block
PAPER = {
    6: {
        4: ("1.65", "0.23", "0.21"),
        8: ("2.58", "0.11", "0.35"),
        16: ("4.04", "0.65", "0.43"),
        32: ("5.67", "0.99", "0.52"),
        64: ("6.95", "0.52", "0.61"),
        128: ("9.16", "0.91", "0.66"),
        256: ("10.73", "0.84", "0.73"),
        512: ("11.17", "0.77", "0.77"),
    },
    8: {
        4: ("1.58", "0.43", "0.20"),
        8: ("2.43", "0.30", "0.34"),
        16: ("4.27", "0.57", "0.43"),
        32: ("6.36", "0.69", "0.51"),
        64: ("6.40", "0.60", "0.58"),
        128: ("7.90", "0.28", "0.65"),
        256: ("8.60", "0.51", "0.69"),
        512: ("9.21", "0.65", "0.70"),
    },
}
Found = dict[int, list[tuple[float, float]]]
"""stable rank and coupling of every seed, by the width of the narrow block"""


def across(depth: int, base: int, narrow: int, seed: int, batch: Batch) -> tuple[float, float]:
    """Mean stable rank and coupling of the pairs of blocks that the narrow one separates."""
    widths, middle = [base] * depth, depth // 2
    widths[middle] = narrow
    model = seeded(PlainMLP, seed, widths=widths, classes=CLASSES)
    found = curvmon.measure(model, batch, loss=cross_entropy, nodes=["blocks.*"])
    far = slice(0, middle), slice(middle + 1, depth)
    return found.stable_rank[far].mean().item(), found.coupling[far].mean().item()


def sweep(given: Options, depth: int, base: int, batch: Batch) -> Found:
    tiny = given.tiny
    widths = (4, 16, 64) if tiny else (4, 16, 64, 256) if given.quick else [w for w in PAPER[depth] if w <= base]
    return {w: [across(depth, 64 if tiny else base, w, seed, batch) for seed in given.seeds] for w in widths}


def compare(table: Table, title: str, depth: int, found: Found) -> None:
    for narrow, seen in found.items():
        rank, spread, coupling = PAPER[depth][narrow]
        ranks, couplings = zip(*seen)
        table.compare(f"{title}, width {narrow}: D", rank, ranks, spread=spread)
        table.compare(f"{title}, width {narrow}: C", coupling, couplings, tolerance=COUPLING)
    means = [sum(rank for rank, _ in seen) / len(seen) for seen in found.values()]
    said = " < ".join(f"{mean:.2f}" for mean in means)
    table.claim(f"{title}: D grows with the width", "monotone", said, means == sorted(means))
    bounded = all(rank <= min(narrow, CLASSES - 1) for narrow, seen in found.items() for rank, _ in seen)
    table.claim(f"{title}: D <= min(width, 99)", "always", f"{sum(map(len, found.values()))} networks", bounded)


def plot(found: dict[tuple[int, str], Found], path: str) -> None:
    figure, axes = canvas(1, width=7, height=5.2)
    axis = axes[0, 0]
    styles = iter(((BLUE, "o", "-"), (SKY, "o", "--"), (ORANGE, "^", "-"), (BLACK, "^", "--")))
    for (depth, setting), by_width in found.items():
        colour, marker, line = next(styles)
        ranks = torch.tensor([[rank for rank, _ in seen] for seen in by_width.values()])
        spread = ranks.std(1, unbiased=False)
        label = f"{depth} blocks, {setting}"
        axis.errorbar(
            list(by_width), ranks.mean(1), spread, color=colour, marker=marker, ls=line, capsize=3, label=label
        )
    widths = list(PAPER[6])
    axis.plot(
        widths,
        [float(PAPER[6][w][0]) for w in widths],
        "x",
        color=BLACK,
        ms=9,
        mew=1.5,
        zorder=3,
        label="paper, table 3 (6 blocks)",
    )
    axis.plot(widths, [min(w, CLASSES - 1) for w in widths], color="0.5", ls=":", label="min(width, 99)")
    axis.set(
        xscale="log",
        xticks=widths,
        xticklabels=widths,
        ylim=(0, 20),
        xlabel="width of the narrow block",
        ylabel="stable rank across it",
    )
    axis.minorticks_off()
    figure.legend(loc="outside lower center", ncols=2, fontsize=9)
    save(figure, path)


def main(argv: Sequence[str] | None = None) -> Table:
    given = options(__doc__, argv)
    data = images(given.data)
    x, _ = data.first_test(64)
    y = torch.randint(CLASSES, (64,), generator=torch.Generator().manual_seed(0))
    table = Table(
        "Experiment 2: across a bottleneck (tables 3 and N.1)", f"{data.source}; random labels of 100 classes"
    )
    found = {}
    for depth in (6,) if given.quick else (6, 8):
        for setting, (base, count) in SETTINGS.items():
            found[depth, setting] = sweep(given, depth, base, (x[:count], y[:count]))
            compare(table, f"L = {depth}, {setting}", depth, found[depth, setting])
            if given.tiny:
                break
    if given.figure:
        plot(found, given.figure)
    return finish(table, given)


if __name__ == "__main__":
    main()

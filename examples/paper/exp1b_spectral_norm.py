"""Experiment 1b: resonance of plain MLPs whose layers all have spectral norm one (table N.2, figure N.1).

    python -m examples.paper.exp1b_spectral_norm [--quick] [--data CIFAR10.npz] [--figure spectral_norm.png]

ReLU MLPs without LayerNorm, 8, 12 and 16 blocks of width 64 on the first 32 CIFAR-10 test images. Dense blocks in
float64: what is measured spans five orders of magnitude. Four minutes on one core, most of it training.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

import curvmon
from examples.paper.data import Images, images
from examples.paper.metrics import (
    block_jacobians,
    largest_norm,
    lyapunov_exponent,
    lyapunov_exponent_by_qr,
    mean_by_distance,
    straight_line,
)
from examples.paper.networks import PlainMLP, seeded
from examples.paper.report import BLUE, GREEN, ORANGE, Options, Table, canvas, finish, options, save
from examples.paper.training import cross_entropy, train_on_images

# spectral norm and Lyapunov exponent at initialisation and after training, accuracy
TABLE_N2 = {
    8: ("0.91", "-1.01", "1.00", "-0.24", "36.3"),
    12: ("0.91", "-1.01", "0.89", "-1.03", "10.0"),
    16: ("0.91", "-1.01", "0.90", "-1.03", "10.0"),
}


class Seen(NamedTuple):
    found: curvmon.Measurement
    norm: float
    exponent: float
    exponent_by_qr: float
    accuracy: float


Found = dict[int, list[Seen]]


def look(model: PlainMLP, data: Images, accuracy: float = 0.0) -> Seen:
    batch = data.first_test(32)
    found = curvmon.exact(model, batch, loss=cross_entropy, nodes=["blocks.*"])
    jacobians = block_jacobians(model.blocks, model.projection(batch[0].flatten(1)))
    norms = largest_norm(jacobians), lyapunov_exponent(jacobians), lyapunov_exponent_by_qr(jacobians)
    return Seen(found, *norms, accuracy)


def before_and_after(given: Options, data: Images) -> tuple[Found, Found]:
    before: Found = {}
    after: Found = {}
    for depth in (8, 16) if given.quick else TABLE_N2:
        for seed in given.seeds:
            widths = [16 if given.tiny else 64] * depth
            model = seeded(PlainMLP, seed, widths=widths, layer_norm=False, spectral=True)
            before.setdefault(depth, []).append(look(model, data))
            if given.epochs:
                accuracy = train_on_images(model, data, given.epochs, seed)
                after.setdefault(depth, []).append(look(model, data, accuracy))
    return before, after


def resonance(seen: Sequence[Seen]) -> torch.Tensor:
    return mean_by_distance([one.found for one in seen], "resonance")


def compare(table: Table, before: Found, after: Found) -> None:
    for depth, seen in before.items():
        norm, exponent, norm_after, exponent_after, accuracy = TABLE_N2[depth]
        name = f"L = {depth}"
        table.compare(f"{name}: ρ", norm, [s.norm for s in seen])
        table.compare(f"{name}: λ_1 as the paper computes it", exponent, [s.exponent_by_qr for s in seen])
        table.compare(f"{name}: λ_1 as the paper defines it", exponent, [s.exponent for s in seen])
        values = resonance(seen)
        slope, explained = straight_line(values.mean(0).tolist())
        falling = bool((values.mean(0).diff() < 0).all())
        table.claim(
            f"{name}: R(d) falls exponentially",
            "yes",
            f"b = {slope:.2f}, R² = {explained:.3f}",
            falling and explained > 0.9,
        )
        if depth == 16:
            table.compare(
                f"{name}: orders of magnitude from R(0) to R(15)",
                "5.5",
                (values[:, 0] / values[:, -1]).log10().tolist(),
            )
        gaps = [s.found.gn_gap.max().item() for s in seen]
        table.compare(f"{name}: gap", "<1e-7", gaps)
        if depth in after:
            later, other = after[depth], "other training data"
            table.compare(f"{name}, trained: ρ", norm_after, [s.norm for s in later], other=other)
            table.compare(
                f"{name}, trained: λ_1 as computed", exponent_after, [s.exponent_by_qr for s in later], other=other
            )
            table.compare(f"{name}, trained: accuracy, %", accuracy, [100 * s.accuracy for s in later], other=other)


def plot(before: Found, after: Found, path: str) -> None:
    figure, axes = canvas(1, width=6.5)
    axis = axes[0, 0]
    for (depth, seen), (colour, marker) in zip(before.items(), ((BLUE, "o"), (ORANGE, "s"), (GREEN, "^"))):
        for found, line, when in ((seen, "-", "init"), (after.get(depth), "--", "trained")):
            if found:
                values = resonance(found)
                spread = values.log().std(0, unbiased=False).exp()
                axis.plot(
                    range(depth), values.mean(0), color=colour, marker=marker, ls=line, label=f"{depth} blocks, {when}"
                )
                axis.fill_between(
                    range(depth), values.mean(0) / spread, values.mean(0) * spread, color=colour, alpha=0.15, lw=0
                )
    axis.set(yscale="log", xlabel="distance d", ylabel="mean resonance R(d)", title="Spectral normalisation")
    axis.legend(loc="lower left", fontsize=8)
    save(figure, path)


def main(argv: Sequence[str] | None = None) -> Table:
    given = options(__doc__, argv, epochs=50)
    data = images(given.data)
    before, after = before_and_after(given, data)
    table = Table("Experiment 1b: plain MLPs under spectral normalisation (table N.2, figure N.1)", data.source)
    compare(table, before, after)
    if given.figure:
        plot(before, after, given.figure)
    return finish(table, given)


if __name__ == "__main__":
    main()

"""Experiment 1: how resonance and coupling decay with distance, plain against residual MLPs (figures 2 and 3, tables 2
and N.3).

    python -m examples.paper.exp1_depth [--quick] [--data CIFAR10.npz] [--figure depth.png]

ReLU MLPs of width 64 and 8, 10, 12 blocks on the first 32 CIFAR-10 test images, dense blocks; then 16 and 32 blocks of
width 128 on 64 images, by products. Four minutes on one core, most of it training.
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
from examples.paper.networks import PlainMLP, ResidualMLP, seeded
from examples.paper.report import BLUE, COUPLING, ORANGE, Options, Table, canvas, finish, options, save
from examples.paper.training import Batch, cross_entropy, train_on_images

# (depth, kind): spectral norm and Lyapunov exponent at initialisation and after training, accuracy
TABLE_2 = {
    (8, "plain"): ("2.59", "-0.02", "2.78", "0.08", "49.8"),
    (8, "residual"): ("1.25", "0.02", "1.33", "0.04", "51.3"),
    (10, "plain"): ("2.69", "-0.03", "2.59", "0.04", "49.7"),
    (10, "residual"): ("1.22", "0.02", "1.29", "0.04", "51.3"),
    (12, "plain"): ("2.69", "-0.03", "2.55", "0.04", "49.7"),
    (12, "residual"): ("1.20", "0.01", "1.25", "0.03", "51.3"),
}
# R(0), R(L-1), each with its spread, and C(L-1), at initialisation
TABLE_N3 = {
    (16, "plain"): ("0.072", "0.018", "0.021", "0.001", "0.263"),
    (16, "residual"): ("0.121", "0.005", "0.12", "0.00", "0.983"),
    (32, "plain"): ("0.067", "0.018", "0.011", "0.003", "0.145"),
    (32, "residual"): ("0.120", "0.004", "0.12", "0.00", "0.986"),
}
Key = tuple[int, str]
SHOWN: tuple[curvmon.records.measurement.Metric, ...] = ("resonance", "coupling")


class Seen(NamedTuple):
    found: curvmon.Measurement
    norm: float
    exponent: float
    exponent_by_qr: float
    accuracy: float


def network(kind: str, depth: int, width: int, seed: int, projection: bool = True) -> PlainMLP | ResidualMLP:
    if kind == "residual":
        return seeded(ResidualMLP, seed, width=width, depth=depth)
    return seeded(PlainMLP, seed, widths=[width] * depth, projection=projection)


def look(model: PlainMLP | ResidualMLP, batch: Batch, accuracy: float = 0.0, dense: bool = True) -> Seen:
    how = curvmon.exact if dense else curvmon.measure
    found = how(model, batch, loss=cross_entropy, nodes=["blocks.*"])
    jacobians = block_jacobians(model.blocks, model.projection(batch[0].flatten(1)))
    norms = largest_norm(jacobians), lyapunov_exponent(jacobians), lyapunov_exponent_by_qr(jacobians)
    return Seen(found, *norms, accuracy)


def before_and_after(given: Options, data: Images) -> tuple[dict[Key, list[Seen]], dict[Key, list[Seen]]]:
    batch = data.first_test(32)
    before: dict[Key, list[Seen]] = {}
    after: dict[Key, list[Seen]] = {}
    for depth in (12,) if given.tiny else (8, 12) if given.quick else (8, 10, 12):
        for kind in ("plain", "residual"):
            for seed in given.seeds:
                model = network(kind, depth, 64, seed)
                before.setdefault((depth, kind), []).append(look(model, batch))
                if given.epochs:
                    accuracy = train_on_images(model, data, given.epochs, seed)
                    after.setdefault((depth, kind), []).append(look(model, batch, accuracy))
    return before, after


def curve(seen: Sequence[Seen], metric: curvmon.records.measurement.Metric) -> torch.Tensor:
    return mean_by_distance([one.found for one in seen], metric)


def compare_decay(table: Table, before: dict[Key, list[Seen]]) -> None:
    for (depth, kind), seen in before.items():
        resonance, coupling = curve(seen, "resonance"), curve(seen, "coupling")
        name = f"L = {depth} {kind}"
        if (depth, kind) == (12, "plain"):
            table.compare(f"{name}: C(11)", "0.24", coupling[:, -1].tolist(), tolerance=COUPLING)
            orders = (resonance[:, 0] / resonance[:, -1]).log10().mean().item()
            table.claim(f"{name}: orders of magnitude from R(0) to R(11)", "3 to 4", f"{orders:.2f}", 3 <= orders <= 4)
        slope, explained = straight_line(resonance.mean(0).tolist())
        if kind == "plain":
            falls = bool((resonance.mean(0).diff() < 0).all() and (coupling.mean(0).diff() < 0).all())
            table.claim(f"{name}: R(d) and C(d) fall", "yes", f"C({depth - 1}) = {coupling[:, -1].mean():.2f}", falls)
            table.claim(f"{name}: straight line, R²", "> 0.91", f"{explained:.3f} (b = {slope:.3f})", explained > 0.91)
        else:
            low = coupling.min().item()
            table.claim(f"{name}: smallest C(d)", "> 0.93", f"{low:.3f}", low > 0.93)
            table.compare(f"{name}: slope b", "0.02", [straight_line(r)[0] for r in resonance.tolist()])


def compare_jacobians(table: Table, before: dict[Key, list[Seen]], after: dict[Key, list[Seen]]) -> None:
    other = "other training data"
    for key, (norm, exponent, norm_after, exponent_after, accuracy) in TABLE_2.items():
        name = f"L = {key[0]} {key[1]}"
        if key in before:
            table.compare(f"{name}: ρ", norm, [s.norm for s in before[key]])
            table.compare(f"{name}: λ_1 as the paper computes it", exponent, [s.exponent_by_qr for s in before[key]])
            table.compare(f"{name}: λ_1 as the paper defines it", exponent, [s.exponent for s in before[key]])
        if key in after:
            table.compare(f"{name}, trained: ρ", norm_after, [s.norm for s in after[key]], other=other)
            found = [s.exponent_by_qr for s in after[key]]
            table.compare(f"{name}, trained: λ_1 as computed", exponent_after, found, other=other)
            table.compare(
                f"{name}, trained: accuracy, %", accuracy, [100 * s.accuracy for s in after[key]], other=other
            )
            ends = [curve(seen[key], "coupling")[:, -1].mean().item() for seen in (before, after)]
            table.claim(
                f"{name}: C({key[0] - 1}) grows in training",
                "upward",
                "{:.3f} → {:.3f}".format(*ends),
                ends[1] > ends[0],
            )


def compare_deep(table: Table, given: Options, data: Images) -> None:
    batch = data.first_test(64)
    for (depth, kind), (first, first_spread, last, last_spread, coupling) in TABLE_N3.items():
        seen = [look(network(kind, depth, 128, seed), batch, dense=False) for seed in given.seeds]
        resonance, name = curve(seen, "resonance"), f"L = {depth} {kind}, width 128"
        table.compare(f"{name}: R(0)", first, resonance[:, 0].tolist(), spread=first_spread)
        table.compare(f"{name}: R({depth - 1})", last, resonance[:, -1].tolist(), spread=last_spread)
        far = curve(seen, "coupling")[:, -1].tolist()
        table.compare(f"{name}: C({depth - 1})", coupling, far, tolerance=COUPLING)


def plot(before: dict[Key, list[Seen]], after: dict[Key, list[Seen]], path: str) -> None:
    depths = sorted({depth for depth, _ in before if depth != 10})
    figure, axes = canvas(2 * len(depths), width=4.2)
    for column, (depth, metric) in enumerate([(d, m) for m in SHOWN for d in depths]):
        axis = axes[0, column]
        for kind, colour, marker in (("plain", ORANGE, "^"), ("residual", BLUE, "o")):
            for seen, style, when in ((before, "-", "init"), (after, "--", "trained")):
                if (depth, kind) in seen:
                    values = curve(seen[depth, kind], metric)
                    spread = values.std(0, unbiased=False)
                    label = f"{kind}, {when}"
                    axis.errorbar(
                        range(depth), values.mean(0), spread, color=colour, marker=marker, ls=style, label=label
                    )
        axis.set(title=f"{depth} blocks", xlabel="distance d", ylabel=f"{metric} ({'R' if metric[0] == 'r' else 'C'})")
        if metric == "resonance":
            axis.set_yscale("log")
        else:
            axis.set_ylim(0, 1.05)
    axes[0, -1].legend(loc="lower left", fontsize=8)
    save(figure, path)


def main(argv: Sequence[str] | None = None) -> Table:
    given = options(__doc__, argv, epochs=50)
    data = images(given.data)
    before, after = before_and_after(given, data)
    table = Table("Experiment 1: decay with distance (figures 2 and 3, tables 2 and N.3)", data.source)
    compare_decay(table, before)
    compare_jacobians(table, before, after)
    if not given.quick:
        compare_deep(table, given, data)
        models = [network("plain", 12, 64, seed, projection=False) for seed in given.seeds]
        batch = data.first_test(32)
        found = [curvmon.exact(model, batch, loss=cross_entropy, nodes=["blocks.*"]) for model in models]
        far = mean_by_distance(found, "coupling")[:, -1].tolist()
        table.compare("L = 12 plain, first block on the image: C(11)", "0.24", far, tolerance=COUPLING)
    if given.figure:
        plot(before, after, given.figure)
    return finish(table, given)


if __name__ == "__main__":
    main()

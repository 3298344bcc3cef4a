"""Experiment 6: ResNet-18 at initialisation, with and without shortcuts, ReLU and SiLU (tables 9 and N.8, figure 7).

    python -m examples.paper.exp6_resnet18 [--quick] [--data CIFAR10.npz] [--figure resnet18.png]

The first 32 CIFAR-10 test images; nodes are the stem behind the max-pool and the four stages. Half a minute on one
core. The paper also trains the networks, 100 epochs on a GPU; that is not repeated here.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

import curvmon
from examples.paper.data import images
from examples.paper.metrics import mean_by_distance, pooled_gap
from examples.paper.networks import ResNet18, seeded
from examples.paper.report import BLUE, COUPLING, ORANGE, Options, Table, canvas, finish, options, save
from examples.paper.training import cross_entropy

NODES = ["maxpool", "layer1", "layer2", "layer3", "layer4"]
KINDS: dict[str, tuple[type[nn.Module], bool]] = {
    "ReLU ResNet": (nn.ReLU, True),
    "ReLU plain": (nn.ReLU, False),
    "SiLU ResNet": (nn.SiLU, True),
    "SiLU plain": (nn.SiLU, False),
}
RESONANCE = {
    "ReLU ResNet": ("4.5e-2", "3.5e-2", "3.3e-2", "3.6e-2", "4.8e-2"),
    "ReLU plain": ("2.1e-2", "3.5e-4", "6.0e-5", "2.9e-5", "3.3e-5"),
    "SiLU ResNet": ("3.0e-2", "1.0e-2", "4.2e-3", "2.1e-3", "1.2e-3"),
    "SiLU plain": ("2.1e-2", "1.1e-4", "6.9e-6", "1.2e-6", "4.4e-7"),
}
COUPLINGS = {
    "ReLU ResNet": ("1.00", "0.95", "0.92", "0.89", "0.82"),
    "ReLU plain": ("1.00", "0.93", "0.83", "0.71", "0.58"),
    "SiLU ResNet": ("1.00", "0.56", "0.31", "0.17", "0.08"),
    "SiLU plain": ("1.00", "0.24", "0.06", "0.01", "<0.01"),
}
GAPS = {"SiLU ResNet": ("0.426", "0.526", "0.619", "0.642"), "SiLU plain": ("0.003", "0.028", "0.080", "0.132")}
DECAY = {"ReLU ResNet": "1", "ReLU plain": "627", "SiLU ResNet": "25", "SiLU plain": "4.7e4"}
Found = dict[str, list[curvmon.Measurement]]


def measured(given: Options) -> tuple[Found, str]:
    data = images(given.data)
    batch = data.first_test(8 if given.tiny else 32, channels=True)
    width = 8 if given.tiny else 64
    found = {
        name: [
            curvmon.measure(
                seeded(ResNet18, seed, activation=activation, skip=skip, width=width),
                batch,
                loss=cross_entropy,
                nodes=NODES,
            )
            for seed in given.seeds
        ]
        for name, (activation, skip) in KINDS.items()
    }
    return found, data.source


def compared(found: Found, source: str) -> Table:
    table = Table("Experiment 6: ResNet-18 at initialisation, mean over pairs d apart (tables 9 and N.8)", source)
    for name, measurements in found.items():
        resonance, coupling = (mean_by_distance(measurements, m).T.tolist() for m in ("resonance", "coupling"))
        for d in range(5):
            table.compare(f"{name}: R({d})", RESONANCE[name][d], resonance[d])
        for d in range(1, 5):
            table.compare(f"{name}: C({d})", COUPLINGS[name][d], coupling[d], tolerance=COUPLING)
        ratios = [first / last for first, last in zip(resonance[0], resonance[4])]
        table.compare(f"{name}: R(0) / R(4)", DECAY[name], ratios)
        for d in range(5):
            gaps = [pooled_gap(m, d) for m in measurements]
            table.compare(f"{name}: gap({d})", GAPS[name][d] if name in GAPS and d < 4 else "<1e-5", gaps)
        if name in GAPS:
            means = mean_by_distance(measurements, "gn_gap").mean(0).tolist()
            said = ", ".join(f"{value:.3g}" for value in means)
            table.notes.append(f"{name}: the gap is Σ‖T‖/Σ‖GN‖ over pairs; the mean of the pairs' gaps is {said}")
    return table


def plot(found: Found, path: str) -> None:
    figure, axes = canvas(2, sharey=True)
    for axis, activation in zip(axes[0], ("ReLU", "SiLU")):
        for kind, colour, marker in (("ResNet", BLUE, "o"), ("plain", ORANGE, "^")):
            name = f"{activation} {kind}"
            values = mean_by_distance(found[name], "resonance")
            axis.errorbar(
                range(5), values.mean(0), values.std(0, unbiased=False), color=colour, marker=marker, label=kind
            )
            axis.plot(
                range(5), [float(value) for value in RESONANCE[name]], "x", color="black", ms=9, mew=1.5, zorder=3
            )
        axis.plot([], [], "x", color="black", ms=9, mew=1.5, label="paper, table 9")
        axis.set(title=activation, xlabel="distance d", yscale="log", xticks=range(5))
    axes[0, 0].set(ylabel="mean resonance R(d), initialisation")
    axes[0, 0].legend(loc="lower left")
    save(figure, path)


def main(argv: Sequence[str] | None = None) -> Table:
    given = options(__doc__, argv)
    found, source = measured(given)
    if given.figure:
        plot(found, given.figure)
    return finish(compared(found, source), given)


if __name__ == "__main__":
    main()

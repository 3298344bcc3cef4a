"""The figures of docs/accuracy.md: errors and coverage against exact truth.

    python -m benchmarks.accuracy                                  prints them
    python -m benchmarks.accuracy --write docs/accuracy.md         writes them between the markers of the page
    python -m benchmarks.accuracy --data cifar10_subset.npz        the paper's images for the ResNet-18

About a minute on one core.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path

import torch

import curvmon
from benchmarks.header import measured_on
from benchmarks.resnet18 import mean_metrics
from tests import test_papers
from tests.helpers import cases
from tests.helpers.cases import truth_of
from tests.helpers.dense_blocks import METRICS, coverage, deviations, network_deviations, problem

Lines = list[str]
DENSE_SEEDS, NETWORK_SEEDS = 150, 60
LOSSES = {"cross_entropy": "cross-entropy", "mse": "MSE"}


def dense_truth() -> Lines:
    """`exact`, and `measure` with its defaults, compared with the oracle on every architecture and loss."""
    worst, hvps = 0.0, []
    found: dict[str, list[float]] = {metric: [] for metric in METRICS}
    relative: dict[str, list[float]] = {metric: [] for metric in METRICS}
    for case in cases.CASES:
        for kind in cases.LOSSES:
            (module, batch), truth = cases.make(case), truth_of(case.name, kind)
            options = {"loss": cases.user_loss(kind), "nodes": case.nodes}
            exact = curvmon.exact(module, batch, **options)
            measured = curvmon.measure(module, batch, **options)
            hvps.append(measured.hvps / len(measured.nodes))
            for v, row in enumerate(exact.nodes):
                for w, col in enumerate(exact.nodes):
                    size = torch.linalg.norm(truth.hessian[v, w])
                    for ours, theirs in ((exact.blocks, truth.hessian), (exact.gauss_newton, truth.gauss_newton)):
                        worst = max(worst, (torch.linalg.norm(ours[row, col] - theirs[v, w]) / size).item())
                    for metric, value in truth.metrics(v, w).items():
                        if w < v or (metric == "coupling" and v == w) or (metric == "gn_gap" and value < 1e-9):
                            continue
                        error = abs(getattr(measured, metric)[v, w].item() - value)
                        found[metric].append(error / measured.stderr[metric][v, w].item())
                        relative[metric].append(error / value)
    errors = ", ".join(f"{100 * statistics.mean(values):.1f} %" for values in relative.values())
    shares, far = coverage(found), sum(z >= 4 for values in found.values() for z in values)
    return [
        "| | result |",
        "|---|---|",
        f"| `exact`: largest relative error of any block of H or GN | {worst:.1e} |",
        f"| `measure` with its defaults: HVPs with H and GN per node | {statistics.mean(hvps):.0f} |",
        f"| mean relative error of R, C, D, gap | {errors} |",
        "| 95 % intervals that contain the truth: R, C, D, gap | "
        f"{', '.join(f'{shares[metric]:.3f}' for metric in METRICS)} |",
        f"| values more than 4 standard errors from the truth | {far} of {sum(map(len, found.values()))} |",
    ]


def coverage_row(title: str, seeds: int, found: dict[str, list[float]]) -> str:
    shares, far = coverage(found), sum(z >= 4 for values in found.values() for z in values)
    cells = " | ".join(f"{shares[metric]:.3f}" for metric in METRICS)
    return f"| {title} | {seeds} | {cells} | {far} of {sum(map(len, found.values()))} |"


def coverage_by_seeds() -> Lines:
    lines = ["| problem | seeds | R | C | D | gap | beyond 4 errors |", "|---|---|---|---|---|---|---|"]
    for decay in (0.5, 1.0, 2.0):
        found = deviations(problem(decay), range(DENSE_SEEDS))
        lines.append(coverage_row(f"eigenvalues i^-{decay:g}", DENSE_SEEDS, found))
    for kind, name in LOSSES.items():
        found = network_deviations(kind, range(NETWORK_SEEDS))
        lines.append(coverage_row(f"residual MLP, {name}", NETWORK_SEEDS, found))
    return lines


def toy_attention() -> Lines:
    batch, seeds = test_papers.validation_batch(), test_papers.SEEDS
    options = {"loss": test_papers.loss}
    attention = [
        curvmon.exact(test_papers.seeded(test_papers.ToyAttention, seed), batch, nodes=["query", "key"], **options)
        for seed in seeds
    ]
    mlp = [
        curvmon.measure(
            test_papers.seeded(test_papers.ToyReluMLP, seed), batch, nodes=["blocks.0", "blocks.1"], **options
        )
        for seed in seeds
    ]
    gaps = [m.gn_gap[0, 1].item() for m in attention]
    norms = [statistics.mean(getattr(m, name)[0, 1].item() for m in attention) for name in ("resonance", "gn_norm")]
    return [
        "| toy network | seeds | gap | ‖H‖_F | ‖GN‖_F |",
        "|---|---|---|---|---|",
        f"| attention, (Q, K) | 42 to 46 | {statistics.mean(gaps):.1f} ± {statistics.stdev(gaps):.1f} | "
        f"{norms[0]:.1e} | {norms[1]:.1e} |",
        f"| ReLU MLP, largest gap | 42 to 46 | {max(m.gn_gap.max().item() for m in mlp):.1e} | | |",
    ]


def resnet18(data: Path | None) -> Lines:
    lines = [
        "| ResNet-18, d = | metric | 0 | 1 | 2 | 3 | 4 |",
        "|---|---|---|---|---|---|---|",
    ]
    for activation in ("ReLU", "SiLU"):
        means = mean_metrics(activation, data, seeds=3)
        for symbol, metric in (("R", "resonance"), ("C", "coupling"), ("gap", "gn_gap")):
            cells = " | ".join(f"{value:.2g}" for value in means[metric].tolist())
            lines.append(f"| {activation} | {symbol} | {cells} |")
    return lines


def between_markers(page: str, marker: str, lines: Lines) -> str:
    """`page` with the lines between `<!-- marker -->` and `<!-- /marker -->`."""
    start, end = f"<!-- {marker} -->", f"<!-- /{marker} -->"
    before, opening, rest = page.partition(start)
    _, closing, after = rest.partition(end)
    assert opening and closing, f"the page has no {start} ... {end}"
    return "\n".join([f"{before}{start}", *lines, f"{end}{after}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="npz file with x_test and y_test")
    parser.add_argument("--write", type=Path, help="a page with a marker for every part")
    parts: dict[str, Callable[[], Lines]] = {
        "run": lambda: [measured_on("accuracy")],
        "dense truth": dense_truth,
        "coverage": coverage_by_seeds,
        "attention": toy_attention,
        "resnet18": lambda: resnet18(arguments.data),
    }
    parser.add_argument("--only", default=",".join(parts), help=f"of {', '.join(parts)}")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # small tensors: two threads would only wait for each other
    for part in arguments.only.split(","):
        lines = parts[part]()
        print("\n".join([*lines, ""]), flush=True)
        if arguments.write:
            arguments.write.write_text(between_markers(arguments.write.read_text(), part, lines))


if __name__ == "__main__":
    main()

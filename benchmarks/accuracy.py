"""The figures of docs/accuracy.md: errors and coverage against exact truth.

    python -m benchmarks.accuracy

About three minutes on two cores.
"""

from __future__ import annotations

import statistics

import torch

import curvmon
from tests import test_papers
from tests.helpers import cases
from tests.helpers.cases import truth_of
from tests.helpers.dense_blocks import METRICS, coverage, deviations, network_deviations, problem


def all_cases() -> None:
    """`exact`, and `measure` with its defaults, against the oracle on every architecture and loss."""
    worst, products = 0.0, []
    found: dict[str, list[float]] = {metric: [] for metric in METRICS}
    relative: dict[str, list[float]] = {metric: [] for metric in METRICS}
    for case in cases.CASES:
        for kind in cases.LOSSES:
            (module, batch), truth = cases.make(case), truth_of(case.name, kind)
            options = {"loss": cases.user_loss(kind), "nodes": case.nodes}
            exact = curvmon.exact(module, batch, **options)
            measured = curvmon.measure(module, batch, **options)
            products.append(measured.hvps / len(measured.nodes))
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
    print(f"exact against the oracle: largest relative error of a block {worst:.1e}")
    print(f"measure with its defaults: {statistics.mean(products):.0f} products per node")
    show_coverage("", found)
    for metric, values in relative.items():
        print(f"  {metric:12} mean relative error {statistics.mean(values):.4f}")


def show_coverage(title: str, found: dict[str, list[float]]) -> None:
    near, far = coverage(found), coverage(found, 4)
    cells = "  ".join(f"{m} {near[m]:.3f} ({sum(z >= 4 for z in found[m])} of {len(found[m])})" for m in far)
    print(f"  {title}95 % intervals that cover (beyond 4 errors): {cells}")


def toy_attention() -> None:
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
    print(f"attention (Q, K): gap {statistics.mean(gaps):.1f} ± {statistics.stdev(gaps):.1f}, H, GN {norms}")
    print(f"ReLU MLP: largest gap {max(m.gn_gap.max().item() for m in mlp):.1e}")


def main() -> None:
    torch.set_num_threads(1)  # small tensors: two threads would only wait for each other
    all_cases()
    for decay in (0.5, 1.0, 2.0):
        show_coverage(f"eigenvalues i^-{decay}: ", deviations(problem(decay), range(150)))
    for kind in ("cross_entropy", "mse"):
        show_coverage(f"residual MLP, {kind}: ", network_deviations(kind, range(60)))
    toy_attention()


if __name__ == "__main__":
    main()

"""`exact` and `measure` against the independent oracle: every architecture with every loss."""

from __future__ import annotations

import pytest
import torch

import curvmon
from tests.helpers import cases
from tests.helpers.cases import CASES, LOSSES, Case, truth_of

METRICS = ("resonance", "coupling", "stable_rank", "gn_gap")
every_case = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
every_loss = pytest.mark.parametrize("kind", list(LOSSES))


@every_loss
@every_case
def test_exact_equals_the_oracle(case: Case, kind: str) -> None:
    module, batch = cases.make(case)
    found = curvmon.exact(module, batch, loss=cases.user_loss(kind), nodes=case.nodes)
    truth = truth_of(case.name, kind)
    assert found.nodes == tuple(case.labels)
    scale = {key: torch.linalg.norm(block) for key, block in truth.hessian.items()}
    for v, row in enumerate(found.nodes):
        for w, col in enumerate(found.nodes):
            tolerance = 1e-8 * scale[v, w] + 1e-15 * scale[v, v]
            assert torch.linalg.norm(found.blocks[row, col] - truth.hessian[v, w]) <= tolerance
            assert torch.linalg.norm(found.gauss_newton[row, col] - truth.gauss_newton[v, w]) <= tolerance
            for metric, value in truth.metrics(v, w).items():
                # T = 0 blocks have a gap of rounding size: compare it with 1, the size of GN
                assert getattr(found, metric)[v, w].item() == pytest.approx(value, rel=1e-8, abs=1e-12)


@every_loss
@every_case
def test_measure_is_within_four_standard_errors(case: Case, kind: str) -> None:
    module, batch = cases.make(case)
    budget = 50 * len(case.labels)  # 25 products with H per node; most of these nodes have 24 to 64 entries
    options = {"loss": cases.user_loss(kind), "nodes": case.nodes, "max_hvps": budget, "seed": 0}
    found = curvmon.measure(module, batch, **options, rtol=1e-3)  # spend all of the budget
    truth = truth_of(case.name, kind)
    assert found.nodes == tuple(case.labels)
    assert found.hvps <= budget
    for v in range(len(found.nodes)):
        for w in range(v, len(found.nodes)):
            for metric, value in truth.metrics(v, w).items():
                estimate, error = getattr(found, metric)[v, w].item(), found.stderr[metric][v, w].item()
                if metric == "resonance":
                    assert error <= 0.1 * estimate
                assert abs(estimate - value) <= 4 * error, f"{metric} of {found.nodes[v]}--{found.nodes[w]}"

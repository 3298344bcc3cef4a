"""What a measurement spends, against dense truth: the figures of docs/cost.md that do not depend on a clock."""

from __future__ import annotations

import statistics

import pytest
import torch
import torch.nn.functional as F

import curvmon
from benchmarks.networks import Decoder, classification_loss, next_token_loss, residual_gelu
from curvmon.records import METRICS
from tests.helpers.resnet import resnet18

pytestmark = pytest.mark.slow


def test_six_residual_gelu_blocks_take_72_products() -> None:
    """Mean errors over the pairs with T != 0, and coverage; the papers' protocol spends 2,751 products."""
    torch.manual_seed(0)
    model, batch = residual_gelu(), (torch.randn(32, 32), torch.randint(10, (32,)))
    options = {"loss": classification_loss, "nodes": ["blocks.*"]}
    truth = curvmon.exact(model, batch, **options)
    errors: dict[str, list[float]] = {metric: [] for metric in METRICS}
    inside: dict[str, list[bool]] = {metric: [] for metric in METRICS}
    for seed in range(30):
        found = curvmon.measure(model, batch, **options, seed=seed, max_hvps=72)
        assert found.hvps <= 72
        for metric in METRICS:
            for v in range(5):
                for w in range(v + (metric == "coupling"), 5):
                    true = getattr(truth, metric)[v, w].item()
                    error = abs(getattr(found, metric)[v, w].item() - true)
                    errors[metric].append(error / true)
                    inside[metric].append(error <= 1.96 * found.stderr[metric][v, w].item())
    assert statistics.mean(errors["resonance"]) < 0.02
    assert statistics.mean(errors["gn_gap"]) < 0.04
    assert statistics.mean(errors["stable_rank"]) < 0.05
    for metric in METRICS:
        assert 0.90 <= statistics.mean(inside[metric]) <= 0.99, metric


def test_a_relu_resnet_takes_one_joint_product() -> None:
    model = resnet18().eval()
    batch = torch.randn(8, 3, 32, 32), torch.randint(10, (8,))
    nodes = ["maxpool", "layer1", "layer2", "layer3", "layer4"]
    found = curvmon.measure(model, batch, loss=classification_loss, nodes=nodes)
    assert found.hvps == 2 and (found.gn_gap == 0).all()
    assert "Gauss-Newton exactly, from 9 backward passes" in found.notes


def test_the_number_of_nodes_does_not_change_the_backward_passes_for_gauss_newton() -> None:
    """Counted, not timed: 24 nodes take as many as 3."""
    model = resnet18().eval()
    batch = torch.randn(4, 3, 32, 32), torch.randint(10, (4,))
    blocks = [f"layer{stage}.{i}" for stage in range(1, 5) for i in range(2)]
    every = [node for block in blocks for node in (f"{block}.conv1", f"{block}.conv2", block)]
    counts = []
    for nodes in ([every[0], every[11], every[23]], every):
        counter = Counter()
        with counter:
            curvmon.measure(model, batch, loss=classification_loss, nodes=nodes)
        counts.append(counter.convolutions)
    assert counts[1] == counts[0] > 100


class Counter(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the convolutions of backward passes."""

    convolutions = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.convolutions += func is torch.ops.aten.convolution_backward.default
        return func(*args, **(kwargs or {}))


def test_a_language_model_takes_no_sketch_where_t_is_larger_than_gauss_newton() -> None:
    torch.manual_seed(0)
    model, ids = Decoder(layers=3, width=16, heads=2, tokens=12, vocabulary=200), torch.randint(200, (6, 13))
    options = {"loss": next_token_loss, "nodes": ["layers.*"]}
    found = curvmon.measure(model, ids, **options)
    truth = curvmon.exact(model, ids, **options)
    assert any("T is larger than GN" in note for note in found.notes)
    for metric in METRICS:
        z = (getattr(found, metric) - getattr(truth, metric)).abs() / found.stderr[metric].clamp_min(1e-12)
        assert (z.triu(1) if metric == "coupling" else z).max() < 4, metric


def test_a_silu_resnet_stays_within_75_products() -> None:
    """Four of five nodes have T != 0; at flat spectra they take 12 directions and 5 probes or a few more."""
    torch.manual_seed(0)
    model = resnet18(activation=F.silu).eval()
    batch = torch.randn(4, 3, 32, 32), torch.randint(10, (4,))
    nodes = ["maxpool", "layer1", "layer2", "layer3", "layer4"]
    found = curvmon.measure(model, batch, loss=classification_loss, nodes=nodes)
    assert found.hvps <= 75
    # in front of a linear head: exact
    assert (found.stderr["resonance"][4] < 1e-4 * found.resonance[4]).all()

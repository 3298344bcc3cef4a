"""What must hold for every network, from the theory of inter-layer curvature."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import curvmon
from tests.helpers.networks import Attention, ConvNet, relu_mlp
from tests.helpers.resnet import resnet18

BATCH = 12
Batch = tuple[Tensor, Tensor]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def classification(*shape: int, classes: int = 5) -> Batch:
    g = generator()
    return torch.randn(BATCH, *shape, generator=g), torch.randint(classes, (BATCH,), generator=g)


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


class LargestTensor(TorchDispatchMode):
    """Watches all operations, those of backward passes too, for the largest result."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return result


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(7)


class Branches(nn.Module):
    """Two branches, each ending in an activation; merged by a sum or by cat + Linear + activation; a linear head."""

    def __init__(self, merge: str, activation: Callable[[], nn.Module], width: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(7, width), activation())
        self.left = nn.Sequential(nn.Linear(width, width), activation())
        self.right = nn.Sequential(nn.Linear(width, width), activation())
        self.merge = None if merge == "sum" else nn.Sequential(nn.Linear(2 * width, width), activation())
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        left, right = self.left(h), self.right(h)
        return self.head(left + right if self.merge is None else self.merge(torch.cat([left, right], -1)))


@pytest.mark.parametrize("activation", [nn.ReLU, nn.LeakyReLU])
def test_piecewise_linear_networks_have_no_gap(activation: Callable[[], nn.Module]) -> None:
    layers = itertools.chain.from_iterable((nn.Linear(7, 7), activation()) for _ in range(4))
    model = nn.Sequential(*layers, nn.Linear(7, 5))
    found = curvmon.exact(model, classification(7), loss=cross_entropy)
    assert found.gn_gap.max() < 1e-13


def test_convolution_batchnorm_pooling_have_no_gap() -> None:
    found = curvmon.exact(ConvNet(), classification(2, 4, 4), loss=cross_entropy)
    assert found.gn_gap.max() < 1e-12


def test_layernorm_is_smooth() -> None:
    model = nn.Sequential(nn.Linear(7, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 5))
    assert curvmon.exact(model, classification(7), loss=cross_entropy, nodes=["0"]).gn_gap[0, 0] > 0.01


def test_resnet18_has_no_gap_in_float32_and_needs_no_dense_block() -> None:
    """11 million parameters, five nodes, 32 CIFAR-sized samples, in float32, on a CPU."""
    model = resnet18()
    assert sum(p.numel() for p in model.parameters()) > 11_000_000
    g = generator()
    batch = torch.randn(32, 3, 32, 32, generator=g), torch.randint(10, (32,), generator=g)
    nodes = ["maxpool", "layer1", "layer2", "layer3", "layer4"]
    with LargestTensor() as largest:
        found = curvmon.measure(model, batch, loss=cross_entropy, nodes=nodes, max_hvps=60)
    assert found.nodes == tuple(nodes)
    # maxpool and layer1 have 64 x 8 x 8 entries each; the largest weight has 2,359,296
    assert 2_359_296 <= largest.numel < 4096 * 4096
    assert found.gn_gap.max() < 1e-5
    assert torch.isfinite(torch.stack([found.resonance, found.coupling, found.stable_rank])).all()
    assert found.stable_rank.min() >= 1


def test_no_remainder_in_front_of_a_linear_head() -> None:
    model = nn.Sequential(nn.Linear(7, 8), nn.SiLU(), nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 8), nn.Linear(8, 5))
    found = curvmon.exact(model, classification(7), loss=cross_entropy, nodes=["0", "2", "4"])
    assert found.gn_gap[:, 2].max() < 1e-13
    assert found.gn_gap[:2, :2].min() > 1e-3


@pytest.mark.parametrize(
    ("merge", "activation", "vanishes"),
    [("sum", nn.ReLU, True), ("sum", nn.SiLU, True), ("cat", nn.ReLU, True), ("cat", nn.SiLU, False)],
)
def test_branches_couple_only_through_a_smooth_merge(
    merge: str, activation: Callable[[], nn.Module], vanishes: bool
) -> None:
    model = Branches(merge, activation)
    found = curvmon.exact(model, classification(7), loss=cross_entropy, nodes=["left", "right"])
    assert (found.gn_gap[0, 1] < 1e-13) == vanishes


def test_an_elementwise_activation_alone_does_not_mix_concatenated_branches() -> None:
    """cat + SiLU with no layer in between: every entry sees one branch, so T[left, right] = 0."""
    model = Branches("cat", nn.SiLU)
    model.merge = nn.Sequential(nn.SiLU(), nn.Linear(20, 10))
    found = curvmon.exact(model, classification(7), loss=cross_entropy, nodes=["left", "right"])
    assert found.gn_gap[0, 1] < 1e-13
    assert found.gn_gap[0, 0] > 1e-3


def test_query_and_key_couple_outside_gauss_newton() -> None:
    found = curvmon.exact(Attention(1), classification(4, 6), loss=cross_entropy, nodes=["q", "k"])
    assert found.gn_gap[0, 1] > 1


def psd_losses() -> list[Callable[[nn.Module, Batch], Tensor]]:
    target = torch.rand(BATCH, 5, generator=generator(1), dtype=torch.float64)
    return [
        cross_entropy,
        lambda model, batch: F.mse_loss(model(batch[0]), target),
        lambda model, batch: F.binary_cross_entropy_with_logits(model(batch[0]), target),
    ]


@pytest.mark.parametrize("loss", psd_losses(), ids=["cross-entropy", "mse", "bce"])
def test_gauss_newton_coupling_is_at_most_one(loss: Callable[[nn.Module, Batch], Tensor]) -> None:
    """S >= 0, so [GN[v, w]] is positive semi-definite and ‖GN[v,w]‖² <= ‖GN[v,v]‖ ‖GN[w,w]‖."""
    model = nn.Sequential(nn.Linear(7, 8), nn.Tanh(), nn.Linear(8, 6), nn.GELU(), nn.Linear(6, 5))
    found = curvmon.exact(model, classification(7), loss=loss, nodes=["0", "2", "3"])
    norms = found.gn_norm
    assert (norms**2 <= torch.outer(norms.diagonal(), norms.diagonal()) * (1 + 1e-12)).all()
    whole = torch.cat([torch.cat([found.gauss_newton[v, w] for w in found.nodes], 1) for v in found.nodes])
    assert torch.linalg.eigvalsh(whole).min() > -1e-12 * torch.linalg.norm(whole)


def test_coupling_above_one_is_reported_as_it_is() -> None:
    """Only T can do that: the two factors of a product are coupled more strongly than each is curved."""
    model = Attention(1)
    with torch.no_grad():
        model.k.weight.mul_(0.05)
        model.q.weight.mul_(0.05)
    nodes = ["q", "k"]
    assert curvmon.exact(model, classification(4, 6), loss=cross_entropy, nodes=nodes).coupling[0, 1] > 1
    found = curvmon.measure(model, classification(4, 6), loss=cross_entropy, nodes=nodes)
    assert found.coupling[0, 1] > 1 + 4 * found.stderr["coupling"][0, 1]


@pytest.mark.parametrize("width", [1, 2, 3])
def test_rank_is_bounded_by_a_bottleneck(width: int) -> None:
    model = nn.Sequential(
        nn.Linear(7, 9), nn.ReLU(), nn.Linear(9, width), nn.Linear(width, 9), nn.ReLU(), nn.Linear(9, 5)
    )
    found = curvmon.exact(model, classification(7), loss=cross_entropy, nodes=["0", "3"])
    # The bound is per sample; the positive ReLU units differ between samples, so use one sample for the rank.
    one = curvmon.exact(model, tuple(t[:1] for t in classification(7)), loss=cross_entropy, nodes=["0", "3"])
    assert torch.linalg.matrix_rank(one.gauss_newton["0", "3"], rtol=1e-10) <= width
    linear = nn.Sequential(nn.Linear(7, 9), nn.Linear(9, width), nn.Linear(width, 9), nn.Linear(9, 5))
    across = curvmon.exact(linear, classification(7), loss=cross_entropy, nodes=["0", "2"])
    assert torch.linalg.matrix_rank(across.gauss_newton["0", "2"], rtol=1e-10) <= width
    assert across.stable_rank[0, 1] <= width
    assert (found.stable_rank >= 1).all()


def test_softmax_curvature_has_rank_below_the_number_of_classes() -> None:
    one = tuple(t[:1] for t in classification(7, classes=4))
    model = nn.Sequential(nn.Linear(7, 9), nn.ReLU(), nn.Linear(9, 4))
    found = curvmon.exact(model, one, loss=cross_entropy, nodes=["0"])
    assert torch.linalg.matrix_rank(found.gauss_newton["0", "0"], rtol=1e-10) <= 3


def test_blocks_are_transposes_and_oriented() -> None:
    model = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 6), nn.Tanh(), nn.Linear(6, 5))
    found = curvmon.exact(model, classification(7), loss=cross_entropy, nodes=["0", "2"])
    assert found.blocks["0", "2"].shape == (9, 6)
    for blocks in (found.blocks, found.gauss_newton):
        torch.testing.assert_close(blocks["2", "0"], blocks["0", "2"].T, rtol=1e-12, atol=1e-16)
    pair = curvmon.Pair("0", "2")
    assert found.blocks[pair].shape == (9, 6) and found.blocks[pair.T].shape == (6, 9)
    for metric in ("resonance", "coupling", "stable_rank", "gn_gap"):
        torch.testing.assert_close(getattr(found, metric), getattr(found, metric).T, rtol=0, atol=0)


def test_coupling_is_invariant_under_rescaling_of_the_weights() -> None:
    """W_v -> a W_v, W_w -> W_w / a around a ReLU: the same function, the same C."""
    model = nn.Sequential(nn.Linear(7, 9), nn.ReLU(), nn.Linear(9, 6), nn.ReLU(), nn.Linear(6, 5))
    before = curvmon.exact(model, classification(7), loss=cross_entropy, nodes=["0", "2"])
    with torch.no_grad():
        model[0].weight.mul_(8), model[0].bias.mul_(8), model[2].weight.div_(8)
    after = curvmon.exact(model, classification(7), loss=cross_entropy, nodes=["0", "2"])
    assert after.resonance[0, 1] == pytest.approx(before.resonance[0, 1].item() / 8)
    torch.testing.assert_close(after.coupling, before.coupling, rtol=1e-10, atol=0)


@pytest.mark.parametrize("factor", [1e-9, 1e9])
@pytest.mark.parametrize("run", [curvmon.exact, curvmon.measure])
def test_scaling_the_loss_changes_resonance_alone(run: Callable[..., curvmon.Measurement], factor: float) -> None:
    model = nn.Sequential(nn.Linear(7, 20), nn.GELU(), nn.Linear(20, 20), nn.GELU(), nn.Linear(20, 5))
    one = run(model, classification(7), loss=cross_entropy, nodes=["0", "2"])
    two = run(model, classification(7), loss=lambda m, b: factor * cross_entropy(m, b), nodes=["0", "2"])
    torch.testing.assert_close(two.resonance, factor * one.resonance, rtol=1e-4, atol=0)
    for metric in ("coupling", "stable_rank", "gn_gap"):
        torch.testing.assert_close(getattr(two, metric), getattr(one, metric), rtol=1e-4, atol=1e-6)
    assert two.notes == one.notes


def test_a_single_node_is_the_ordinary_hessian() -> None:
    """One sample, one node: d²L/df² at that layer's activation, computed here by torch alone."""
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x, y = torch.randn(1, 6, dtype=torch.float64), torch.randn(1, 2, dtype=torch.float64)
    found = curvmon.exact(model, (x, y), loss=lambda m, b: F.mse_loss(m(b[0]), b[1]), nodes=["0"])
    behind = model[1:]
    hessian = torch.autograd.functional.hessian(lambda f: F.mse_loss(behind(f), y[0]), model[0](x)[0].detach())
    torch.testing.assert_close(found.blocks["0", "0"], hessian, rtol=1e-12, atol=1e-16)
    assert found.coupling.item() == 1.0


def test_a_sample_independent_loss_averages_the_blocks_of_its_samples() -> None:
    model = nn.Sequential(nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 5))
    x, y = classification(7)
    whole = curvmon.exact(model, (x, y), loss=cross_entropy, nodes=["0"])
    parts = [curvmon.exact(model, (x[i : i + 1], y[i : i + 1]), loss=cross_entropy, nodes=["0"]) for i in range(BATCH)]
    mean = torch.stack([part.blocks["0", "0"] for part in parts]).mean(0)
    torch.testing.assert_close(whole.blocks["0", "0"], mean, rtol=1e-10, atol=1e-16)


def test_relu_mlp_in_float32_has_no_gap_either() -> None:
    assert curvmon.measure(relu_mlp(), classification(7), loss=cross_entropy).gn_gap.max() < 1e-5

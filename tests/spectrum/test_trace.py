"""The trace from its Gauss-Newton and tensor part: exact where that is claimed, calibrated errors elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune

import curvmon
from curvmon.operators.parameter_hessian import open_parameters
from curvmon.spectrum.trace import gauss_newton_trace, layerwise_trace, remainder_trace, trace_of_parts
from tests.helpers.spectrum_cases import Attention, Loss, Recurrent, Through, Tied, dense_hessian, frozen

SAMPLES = 6


def relu_convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1, stride=2), nn.BatchNorm2d(3), nn.ReLU(inplace=True),
        nn.Conv2d(3, 4, 2, dilation=2, bias=False), nn.MaxPool2d(2, 1), nn.LeakyReLU(), nn.Flatten(), nn.LazyLinear(3),
    )  # fmt: skip


def odd_convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, groups=2, padding="same"), nn.ReLU(),
        nn.Conv2d(4, 2, 3, padding=1, padding_mode="circular"), nn.ReLU(), nn.ConvTranspose2d(2, 1, 2),
        nn.Flatten(2), nn.Conv1d(1, 2, 5, stride=3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(3),
    )  # fmt: skip


def normalised() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.SiLU(), nn.InstanceNorm2d(4, affine=True), nn.Tanh(),
        nn.LayerNorm([4, 5, 5]), nn.Flatten(), nn.LazyLinear(3),
    )  # fmt: skip


def batch_statistics() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.ReLU(), nn.Linear(4, 3))


def minus_the_mean(m: Any, x: Tensor) -> Tensor:
    h = F.relu(m.a(x))
    return m.b(h - h.mean(0))


def samples_second(m: Any, x: Tensor) -> Tensor:
    """As many time steps as samples: the first dimension has the size of the batch, but holds the steps."""
    return m.b(F.relu(m.a(x.transpose(0, 1)))).mean(0)


def tokens_folded(m: Any, x: Tensor) -> Tensor:
    return m.b(F.gelu(m.a(x.flatten(0, 1)))).unflatten(0, (SAMPLES, -1)).mean(1)


def weights_used_again(m: Any, x: Tensor) -> Tensor:
    return m.b(F.relu(m.a(x))) + F.linear(F.linear(x, m.a.weight), m.b.weight)


def never_called(m: Any, x: Tensor) -> Tensor:
    return F.linear(torch.tanh(F.linear(x, m.a.weight, m.a.bias)), m.b.weight)


def called_for_a_target_too(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        target = m.a(x)
    return m.b(F.relu(m.a(x)) + target.sigmoid())


def gated(m: Any, x: Tensor) -> Tensor:
    return m.b(m.a(x) * m.c(x))


def pair(forward: Callable[[Any, Tensor], Tensor]) -> Callable[[], nn.Module]:
    return lambda: Through(forward, a=nn.Linear(5, 4), b=nn.Linear(4, 3))


def disguised(disguise: Callable[[nn.Linear], Any]) -> Callable[[], nn.Module]:
    """Between two plain layers, one that does not compute what its class says."""

    def build() -> nn.Module:
        odd = nn.Linear(4, 4)
        disguise(odd)
        return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), odd, nn.Tanh(), nn.Linear(4, 3))

    return build


def squared(layer: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(x, layer.weight.square(), layer.bias)


def forward_squared(layer: nn.Linear) -> None:
    layer.forward = partial(squared, layer)  # type: ignore[method-assign]


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "relu convolutions": (relu_convolutions, (2, 7, 7)),
    "odd convolutions": (odd_convolutions, (2, 5, 5)),
    "normalised": (normalised, (2, 7, 7)),
    "batch statistics": (batch_statistics, (5,)),
    "samples interact": (pair(minus_the_mean), (5,)),
    "samples second": (pair(samples_second), (SAMPLES, 5)),
    "tokens folded": (pair(tokens_folded), (4, 5)),
    "weights used again": (pair(weights_used_again), (5,)),
    "never called": (pair(never_called), (5,)),
    "called twice, once without gradients": (pair(called_for_a_target_too), (5,)),
    "gated": (lambda: Through(gated, a=nn.Linear(5, 4), b=nn.Linear(4, 3), c=nn.Linear(5, 4)), (5,)),
    "old weight norm": (disguised(lambda layer: nn.utils.weight_norm(layer)), (5,)),
    "pruned": (disguised(lambda layer: prune.random_unstructured(layer, "weight", 0.4)), (5,)),
    "another forward": (disguised(forward_squared), (5,)),
    "a pre-hook": (disguised(lambda layer: layer.register_forward_pre_hook(lambda m, args: (2 * args[0],))), (5,)),
    "a hook": (disguised(lambda layer: layer.register_forward_hook(lambda m, args, y: 2 * y)), (5,)),
    "many outputs": (lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 40)), (5,)),
    "attention": (Attention, (4, 6)),
    "lstm": (Recurrent, (5, 3)),
    "shared weights": (Tied, (5,)),
    "frozen parameters": (frozen, (5,)),
}
LOSSES: dict[str, Loss] = {
    "cross-entropy": lambda model, b: F.cross_entropy(model(b[0]), b[1]),
    "mse, summed": lambda model, b: F.mse_loss(model(b[0]), b[2], reduction="sum"),
    "saturating": lambda model, b: F.huber_loss(model(b[0]).tanh(), b[2], delta=0.5),
}
EXACT = ("relu convolutions", "odd convolutions")


def make(name: str) -> tuple[nn.Module, list[Tensor]]:
    torch.manual_seed(0)
    build, shape = NETWORKS[name]
    model, x = build(), torch.randn(SAMPLES, *shape)
    with torch.no_grad():
        outputs = model.train()(x)  # also running statistics, and the widths of lazy layers
    width = outputs.shape[1]
    return model.eval(), [x, torch.randint(width, (SAMPLES,)), torch.randn(SAMPLES, width)]


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("name", NETWORKS)
def test_agrees_with_dense_hessian(name: str, kind: str) -> None:
    """The mean of twelve seeds, in units of its standard error."""
    model, batch = make(name)
    true = dense_hessian(model, batch, LOSSES[kind]).trace().item()
    with open_parameters(model, [batch], loss=LOSSES[kind]) as operator:
        graphs = list(operator.layered())
        estimates = [trace_of_parts(graphs, torch.Generator().manual_seed(seed)) for seed in range(12)]
    rows = [(estimate.value, estimate.stderr) for estimate in estimates if estimate is not None]
    assert len(rows) == 12
    values, errors = torch.tensor(rows, dtype=torch.float64).T
    rounding = 1e-5 * (abs(true) + values.abs().mean().item())
    assert abs(values.mean().item() - true) < 4 * errors.mean().item() / 12**0.5 + rounding
    if name in EXACT and kind != "saturating":
        assert (errors < 1e-4 * abs(true)).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["normalised", "gated", "many outputs", "attention", "samples interact"])
def test_stderr_is_calibrated(name: str) -> None:
    """± 1.96 standard errors cover the truth in about 95 % of 80 repetitions."""
    model, batch = make(name)
    loss = LOSSES["cross-entropy"]
    true = dense_hessian(model, batch, loss).trace().item()
    inside = 0
    with open_parameters(model, [batch], loss=loss) as operator:
        graphs = list(operator.layered())
        for seed in range(80):
            estimate = trace_of_parts(graphs, torch.Generator().manual_seed(seed))
            assert estimate is not None
            inside += abs(estimate.value - true) <= 1.96 * estimate.stderr
    assert inside >= 70  # 3 σ of a binomial


def test_ggn_and_relu_remainder_are_exact() -> None:
    """ReLU: one probe shows that the remainder is zero. Tanh: the Gauss-Newton part is still exact."""
    for activation, curved in ((nn.ReLU(), False), (nn.Tanh(), True)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 8), activation, nn.Linear(8, 3))
        batch = [torch.randn(SAMPLES, 5), torch.randint(3, (SAMPLES,))]
        with open_parameters(model, [batch], loss=LOSSES["cross-entropy"]) as operator:
            ((_, layered),) = operator.layered()
            generator = torch.Generator().manual_seed(0)
            ggn, remainder = gauss_newton_trace(layered, generator), remainder_trace(layered, generator)
        assert ggn is not None and ggn.stderr < 1e-5 * ggn.value
        assert (remainder.value, remainder.stderr, remainder.products) == (0, 0, 1) or curved
        assert (remainder.stderr > 0 and remainder.products == 10) == curved


def test_trace_and_starting_vector_are_one_result() -> None:
    """The value does not depend on the starting vector, which costs one product more."""
    model, batch = make("relu convolutions")
    results, products = {}, {}
    for k in (0, 2):
        with open_parameters(model, [batch], loss=LOSSES["cross-entropy"]) as operator:
            result = layerwise_trace(operator, torch.Generator().manual_seed(0), k)
            assert result is not None
            results[k], products[k] = result, operator.products
            size = operator.size
    assert results[0].start is None
    assert results[2].start is not None and results[2].start.shape == (size,) and results[2].start.isfinite().all()
    assert results[2].value == results[0].value and products[2] == products[0] + 1


def test_several_batches_leave_model_unchanged() -> None:
    model, batch = make("relu convolutions")
    parts = [[t[:2] for t in batch], [t[2:] for t in batch]]
    result = curvmon.spectrum(model, parts[0], loss=LOSSES["cross-entropy"], more_batches=parts[1:], k=1, ggn=False)
    true = dense_hessian(model, batch, LOSSES["cross-entropy"]).trace().item()
    assert result.trace == pytest.approx(true, rel=1e-4) and result.trace_stderr < 1e-4 * true
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


def test_deflated_trace_if_output_is_not_known() -> None:
    model, batch = make("gated")

    def by_hand(m: Any, b: Any) -> Tensor:
        return (m(b[0]) - b[2]).square().mean()

    true = dense_hessian(model, batch, by_hand).trace().item()
    result = curvmon.spectrum(model, batch, loss=by_hand, k=2, ggn=False, verify=False, smallest=False, rtol=0.1)
    assert result.trace_stderr > 0 and abs(result.trace - true) < 4 * result.trace_stderr


def test_note_if_layers_cannot_be_run_one_by_one() -> None:
    """A loss that computes gradients itself fails in the layered graph, where parameters are constant."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    batch = torch.randn(SAMPLES, 4).double(), torch.randint(3, (SAMPLES,))

    def plain(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    def differentiating(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = plain(model, batch)
        gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        assert all(gradient.isfinite().all() for gradient in gradients)
        return loss

    result = curvmon.spectrum(model, batch, loss=differentiating, k=1, ggn=False)
    assert any("trace by probes of the whole Hessian" in note for note in result.notes)
    true = dense_hessian(model, batch, plain).trace().item()
    assert result.trace_stderr > 0 and abs(result.trace - true) < 4 * result.trace_stderr
    without = curvmon.spectrum(model, batch, loss=plain, k=1, ggn=False)
    assert not any("trace" in note for note in without.notes)

"""Products between nodes, several columns at several nodes in one launch, against one by one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvmon
from benchmarks.networks import Decoder, next_token_loss
from curvmon.errors import InputError
from curvmon.operators import node_blocks
from curvmon.operators.batching import Batched
from curvmon.operators.launches import Launches
from curvmon.operators.node_blocks import GraphOperator, Products
from curvmon.operators.session import open_session
from tests.helpers.kernel_counts import KernelCounts


class BatchStatistics(nn.Module):
    """Samples interact, as in batch norm in train mode."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) / (x.var(0) + 1e-2).sqrt()


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return _CubeGradient.apply(g, x)  # type: ignore[no-untyped-call,no-any-return]


class _CubeGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, g: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(g, x)
        return 3 * g * x**2

    @staticmethod
    def backward(ctx: Any, u: Tensor) -> tuple[Tensor, Tensor]:
        g, x = ctx.saved_tensors
        return 3 * u * x**2, 6 * u * g * x


class Cube(nn.Module):
    """x³ / 10 by functions that cannot run under vmap."""

    def forward(self, x: Tensor) -> Tensor:
        return _Cube.apply(x) / 10  # type: ignore[no-untyped-call,no-any-return]


LIBRARY = torch.library.Library("curvmon_test", "DEF")
LIBRARY.define("scaled(Tensor x) -> Tensor")
LIBRARY.impl("scaled", lambda x: 2 * x, "CompositeExplicitAutograd")


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return _double(g) if g.requires_grad else torch.ops.curvmon_test.scaled(g)


def _double(x: Tensor) -> Tensor:
    return _Double.apply(x)  # type: ignore[no-untyped-call,no-any-return]


class Double(nn.Module):
    """2 tanh(x); the gradient is computed by an operation without a batching rule."""

    def forward(self, x: Tensor) -> Tensor:
        return _double(torch.tanh(x))


class HostCopy(nn.Module):
    """x scaled by a hook on its gradient that reads the gradient on the host."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x)
        y.register_hook(lambda g: g * (1.0 if g.detach().sum().item() > -1e9 else 0.0))
        return y


def mlp(middle: Callable[[], nn.Module] = nn.GELU) -> nn.Module:
    return nn.Sequential(
        nn.Linear(5, 9), middle(), nn.Linear(9, 8), nn.GELU(), nn.Linear(8, 7), nn.GELU(), nn.Linear(7, 3)
    )


def conv_net() -> nn.Module:
    layers = [
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.SiLU(),
        nn.Conv2d(4, 6, 3, stride=2),
        nn.BatchNorm2d(6),
    ]
    return nn.Sequential(*layers, nn.SiLU(), nn.Conv2d(6, 4, 1), nn.SiLU(), nn.Flatten(), nn.Linear(16, 3))


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def with_penalty(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """A small term that bypasses the output."""
    hidden = model[0](batch[0])  # type: ignore[index]
    return F.cross_entropy(model[1:](hidden), batch[1]) + 1e-3 * hidden.tanh().square().mean()  # type: ignore[index]


def by_hand(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The output is unknown, so there is no GN."""
    return (model(batch[0]).softmax(-1)[:, 0] - 0.3).square().mean()


def rows(*shape: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(6, *shape, generator=generator).double(), torch.randint(3, (6,), generator=generator)


MLP_NODES, CONV_NODES = ["0", "2", "4"], ["0", "3", "6"]
NETWORKS: dict[str, tuple[Callable[[], nn.Module], Any, Any, list[str]]] = {
    "GELU MLP": (mlp, rows(5), cross_entropy, MLP_NODES),
    "convolutions and batch norm": (conv_net, rows(2, 5, 5), cross_entropy, CONV_NODES),
    "decoder": (
        lambda: Decoder(layers=3, width=8, heads=2, tokens=5, vocabulary=11),
        torch.randint(11, (4, 6), generator=torch.Generator().manual_seed(1)),
        next_token_loss,
        ["embed", "layers.*"],
    ),
    "samples interact": (lambda: mlp(BatchStatistics), rows(5), cross_entropy, MLP_NODES),
    "bypassed output": (mlp, rows(5), with_penalty, MLP_NODES),
    "unknown output": (mlp, rows(5), by_hand, MLP_NODES),
}


def seeded(function: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return function().double()


def session_of(name: str, batched: Batched) -> Any:
    network, batch, loss, nodes = NETWORKS[name]
    options: dict[str, Any] = {"nodes": nodes, "output": None, "batch_dim": 0, "dtype": None}
    return open_session(seeded(network), batch, loss=loss, batched=batched, **options)


def columns(operator: GraphOperator, *widths: int) -> dict[int, Tensor]:
    """Random columns at every node; their numbers repeat."""
    generator = torch.Generator().manual_seed(2)
    return {
        w: torch.randn(template.numel(), widths[w % len(widths)], generator=generator, dtype=torch.float64)
        for w, template in enumerate(operator.templates)
    }


def assert_equal(one: Mapping[int, Products], other: Mapping[int, Products]) -> None:
    assert list(one) == list(other)
    for w, products in one.items():
        assert products.spent == other[w].spent
        assert (products.gauss_newton is None) == (other[w].gauss_newton is None)
        found = [*products.remainder, *(products.gauss_newton or [])]
        expected = [*other[w].remainder, *(other[w].gauss_newton or [])]
        for x, y in zip(found, expected):
            torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("name", NETWORKS)
def test_batched_products_equal_single_ones(name: str) -> None:
    with session_of(name, False) as session:
        requests = columns(session.operator, 1, 3, 2)
        expected = session.operator.columns_of(requests)
        splits = session.operator.splits
        remainders = session.operator.remainders_of(requests) if splits else {}
        block = session.operator.block("hessian", 0, 1, requests[1])
    with session_of(name, True) as session:
        assert_equal(session.operator.columns_of(requests), expected)
        if splits:
            assert_equal(session.operator.remainders_of(requests), remainders)
        torch.testing.assert_close(session.operator.block("hessian", 0, 1, requests[1]), block)


@pytest.mark.parametrize("name", NETWORKS)
def test_five_columns_at_every_node_take_as_many_kernels_as_one(name: str) -> None:
    kernels = []
    with session_of(name, True) as session:
        for width in (1, 5):
            requests = columns(session.operator, width)
            with KernelCounts() as counts:
                session.operator.columns_of(requests)
            assert not counts.synchronisations
            kernels.append(counts.kernels.total())
    with session_of(name, False) as session, KernelCounts() as counts:
        session.operator.columns_of(requests)
    assert kernels[0] == kernels[1] < counts.kernels.total() / 5


@pytest.mark.parametrize("middle", [Cube, HostCopy])
def test_operations_that_vmap_cannot_run_are_computed_one_by_one(
    middle: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(NETWORKS, "custom", (lambda: mlp(middle), rows(5), cross_entropy, MLP_NODES))
    with session_of("custom", False) as session:
        requests = columns(session.operator, 2)
        with KernelCounts() as counts:
            expected = session.operator.columns_of(requests)
    with session_of("custom", True) as session:
        assert_equal(session.operator.columns_of(requests), expected)
        with KernelCounts() as again:  # it is not tried again
            session.operator.columns_of(requests)
    assert again.kernels == counts.kernels


def test_operation_without_batching_rule_runs_in_a_loop_alone(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setitem(NETWORKS, "custom", (lambda: mlp(Double), rows(5), cross_entropy, MLP_NODES))
    images, kernels = [], []
    for batched in (False, True):
        with session_of("custom", batched) as session, KernelCounts() as counts:
            images.append(session.operator.columns_of(columns(session.operator, 4)))
        kernels.append(counts.kernels)
    assert_equal(*images)
    assert kernels[1]["scaled"] >= 12  # the columns of three nodes
    assert kernels[1].total() < kernels[0].total() / 3
    assert not recwarn.list


def test_columns_are_checked_and_those_of_several_nodes_are_not() -> None:
    with session_of("GELU MLP", True) as session:
        requests = {1: torch.full((8, 2), torch.inf, dtype=torch.float64)}
        assert not session.operator.columns_of(requests)[1].hessian(0).isfinite().all()
        with pytest.raises(curvmon.CurvmonError, match="not finite"):
            session.operator.columns(1, requests[1])


@pytest.mark.parametrize("name", ["GELU MLP", "convolutions and batch norm"])
def test_products_are_batched_on_a_cpu_where_that_is_faster(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def kernels(batched: Batched) -> int:
        with session_of(name, batched) as session, KernelCounts() as counts:
            session.operator.columns_of(columns(session.operator, 4))
        return counts.kernels.total()

    assert kernels("auto") == kernels(name == "GELU MLP")
    monkeypatch.setattr(node_blocks, "CACHED_BYTES", 0)
    assert kernels("auto") == kernels(False)


def test_batched_is_checked() -> None:
    with pytest.raises(InputError, match="batched must be True, False"), session_of("GELU MLP", "yes"):  # type: ignore[arg-type]
        pass


MATRICES = {w: torch.randn(7, 4, generator=torch.Generator().manual_seed(w)) for w in range(3)}


class Recorder:
    """Products with `MATRICES`; remembers the columns of every launch, and fails above a given width."""

    def __init__(self, most: int, error: type[Exception] = torch.OutOfMemoryError) -> None:
        self.launches: list[tuple[int, ...]] = []
        self._most, self._error = most, error

    def __call__(self, vectors: Mapping[int, Tensor], batched: bool) -> list[Tensor]:
        width = len(next(iter(vectors.values()))) if batched else 1
        if width > self._most:
            raise self._error("too many")
        self.launches.append((width, *vectors))
        return [sum((z @ MATRICES[w].T for w, z in vectors.items()), torch.zeros(7))]


@pytest.mark.parametrize(
    ("capacity", "most", "launches"),
    [
        (0, 9, [(1, 2), (1, 2), (1, 1), (1, 1), (1, 0), (1, 0)]),  # one by one
        (8, 9, [(4, 2, 1), (2, 0)]),  # a product at node 0 holds four
        (100, 9, [(6, 2, 1, 0)]),
        (100, 3, [(2, 2), (2, 1), (1, 0), (1, 0)]),  # six columns fail, then four: 100, 12, 4
        (100, 0, None),
    ],
)
def test_launches_hold_no_more_than_their_capacity(
    capacity: int, most: int, launches: list[tuple[int, ...]] | None
) -> None:
    requests = {w: torch.randn(4, 2, generator=torch.Generator().manual_seed(w)) for w in MATRICES}
    image = Recorder(most)
    if launches is None:
        with pytest.raises(torch.OutOfMemoryError):
            Launches([4, 2, 1], capacity).images(requests, image)
        return
    images = Launches([4, 2, 1], capacity).images(requests, image)
    assert image.launches == launches
    for w, z in requests.items():
        torch.testing.assert_close(images[w][0], MATRICES[w] @ z)


def test_error_of_a_single_product_is_raised() -> None:
    with pytest.raises(ValueError, match="too many"):
        Launches([1, 1, 1], 10).images({0: torch.ones(4, 2)}, Recorder(0, ValueError))

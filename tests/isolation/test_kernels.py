"""Models whose second derivatives need another kernel or mode: attention, checkpoints, compilation, weight norm, …"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.functional import hessian
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import curvmon
from tests.helpers import oracle

Batch = tuple[Tensor, Tensor]
both = pytest.mark.parametrize("run", [curvmon.measure, curvmon.exact])


@pytest.fixture
def batch() -> Batch:
    g = torch.Generator().manual_seed(0)
    return torch.randn(10, 6, generator=g), torch.randint(3, (10,), generator=g)


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.stem, self.block, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.stem(x))
        inner = lambda h: torch.tanh(self.block(h))  # noqa: E731
        h = inner(h) if self.reentrant is None else checkpoint(inner, h, use_reentrant=self.reentrant)
        return self.head(h)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_are_bypassed(reentrant: bool, batch: Batch) -> None:
    plain, model = Checkpointed(None), Checkpointed(reentrant)
    model.load_state_dict(plain.state_dict())
    truth = curvmon.exact(plain, batch, loss=cross_entropy, nodes=["stem", "block"])
    result = curvmon.exact(model, batch, loss=cross_entropy, nodes=["stem", "block"])
    torch.testing.assert_close(result.resonance, truth.resonance)
    torch.testing.assert_close(result.gn_gap, truth.gn_gap)


@pytest.mark.parametrize("how", ["wrapper", "in place", "submodule"])
def test_compiled_modules_run_eagerly(how: str, batch: Batch) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    truth = curvmon.exact(plain, batch, loss=cross_entropy, nodes=["0"])
    model: Any = plain
    if how == "wrapper":
        model = torch.compile(plain, backend="aot_eager")
    elif how == "in place":
        plain.compile(backend="aot_eager")
    else:
        plain[1] = torch.compile(plain[1], backend="aot_eager")  # type: ignore[assignment]
    cross_entropy(model, batch).backward()
    result = curvmon.exact(model, batch, loss=cross_entropy, nodes=["0"])
    assert result.nodes == ("0",)
    torch.testing.assert_close(result.resonance, truth.resonance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_are_measured_in_float32(dtype: torch.dtype, batch: Batch) -> None:
    torch.manual_seed(0)
    half = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)
    full = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    full.load_state_dict(half.state_dict())
    x, y = batch[0].to(dtype), batch[1]
    result = curvmon.measure(half, (x, y), loss=cross_entropy, nodes=["0"])
    truth = curvmon.measure(full, (x.float(), y), loss=cross_entropy, nodes=["0"])
    assert result.resonance.item() == pytest.approx(truth.resonance.item(), rel=1e-6)
    assert half[0].weight.dtype == dtype


def test_dropout_and_batchnorm_are_in_eval_mode(batch: Batch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.9), nn.Tanh(), nn.Linear(8, 3))
    training = curvmon.exact(model.train(), batch, loss=cross_entropy, nodes=["0"])
    evaluating = curvmon.exact(model.eval(), batch, loss=cross_entropy, nodes=["0"])
    assert torch.equal(training.resonance, evaluating.resonance)


def test_scripted_submodules_are_unchanged(batch: Batch) -> None:
    scripted = torch.jit.script(nn.Sequential(nn.BatchNorm1d(8), nn.Tanh()))
    model = nn.Sequential(nn.Linear(6, 8), scripted, nn.Linear(8, 3)).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    result = curvmon.measure(model, batch, loss=cross_entropy, nodes=["0"])
    assert result.resonance.item() > 0
    assert scripted.training and all(torch.equal(before[n], v) for n, v in model.state_dict().items())


def test_model_created_in_inference_mode(batch: Batch) -> None:
    with torch.inference_mode():
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    before = [(p.data_ptr(), p.requires_grad) for p in model.parameters()]
    assert curvmon.measure(model, batch, loss=cross_entropy, nodes=["0"]).resonance.item() > 0
    assert before == [(p.data_ptr(), p.requires_grad) for p in model.parameters()]


@both
def test_data_parallel_hooks_are_kept(run: Callable[..., Any], batch: Batch, tmp_path: Any) -> None:
    """Assigning parameters in another dtype would silently end gradient synchronisation."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
        synchronised: list[int] = []

        def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP insists on its own annotations or none
            synchronised.append(1)
            future: torch.futures.Future[Tensor] = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        model.register_comm_hook(None, hook)
        for count in (1, 2):
            cross_entropy(model, batch).backward()
            assert len(synchronised) == count
            run(model, batch, loss=cross_entropy, nodes=["module.0"])
            assert len(synchronised) == count
    finally:
        torch.distributed.destroy_process_group()


def test_loss_with_gradients_wrt_parameters(batch: Batch) -> None:
    """A gradient penalty needs parameters that require gradients; the copies get them, the originals see nothing."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    def penalised(m: nn.Module, b: Batch) -> Tensor:
        plain = cross_entropy(m, b)
        grads = torch.autograd.grad(plain, list(m.parameters()), create_graph=True)
        return plain + 0.1 * sum((g.pow(2).sum() for g in grads), torch.zeros(()))

    assert curvmon.measure(model, batch, loss=penalised, nodes=["0"]).resonance.item() > 0
    assert all(p.grad is None for p in model.parameters())


def normalised(v: Tensor, g: Tensor, dim: int | None) -> Tensor:
    """Weight norm by hand."""
    over = [d for d in range(v.ndim) if d != dim]
    return g * v / v.square().sum(over, keepdim=True).sqrt()


class WeightNormed:
    """Two layers with weight norm of torch's, and the same function by hand, in float64."""

    def __init__(self, kind: str, how: str, dims: tuple[int | None, int | None]) -> None:
        torch.manual_seed(1)
        self.kind, self.dims = kind, dims
        norm: Any = torch.nn.utils.weight_norm if how == "old" else parametrizations.weight_norm
        first, width = (nn.Linear(6, 8), 8) if kind == "linear" else (nn.Conv2d(2, 3, 3), 12)
        head = nn.Linear(width, 3)
        self.model = nn.Sequential(norm(first, dim=dims[0]), nn.Tanh(), nn.Flatten(), norm(head, dim=dims[1]))
        with torch.no_grad():
            for p in self.model.parameters():
                p.mul_(1 + torch.rand_like(p))  # g is no longer the norm of v
        x = torch.randn(10, 6) if kind == "linear" else torch.randn(10, 2, 4, 4)
        self.batch = x, torch.randint(3, (10,))
        self.parameters = [p.detach().double() for p in self.model.parameters()]
        assert [p.shape for p in self.parameters[2::3]] == [first.weight.shape, head.weight.shape]  # bias, g, v

    def by_hand(self, parameters: Sequence[Tensor], shift: Tensor | float = 0.0) -> Tensor:
        b, g, v, head_b, head_g, head_v = parameters
        layer: Any = F.linear if self.kind == "linear" else F.conv2d
        h = layer(self.batch[0].double(), normalised(v, g, self.dims[0]), b) + shift
        return F.linear(torch.tanh(h).flatten(1), normalised(head_v, head_g, self.dims[1]), head_b)

    def loss(self, out: Tensor) -> Tensor:
        return F.cross_entropy(out, self.batch[1])


weight_normed = pytest.mark.parametrize(
    "case",
    [
        pytest.param((kind, how, dims), id=f"{kind}-{how}-{name}")
        for kind, last in (("linear", 1), ("conv", 3))
        for how in ("old", "new")
        # torch's own double backward is right for dim=None, and wrong where `dim` is the first or the last
        for name, dims in {"first": (0, 0), "last": (last, 1), "all": (None, None)}.items()
    ],
)


@weight_normed
def test_spectrum_with_weight_norm(case: tuple[Any, ...]) -> None:
    twin = WeightNormed(*case)
    sizes = [p.numel() for p in twin.parameters]

    def value(flat: Tensor) -> Tensor:
        parts = [part.reshape(p.shape) for part, p in zip(flat.split(sizes), twin.parameters)]
        return twin.loss(twin.by_hand(parts))

    H = hessian(value, torch.cat([p.reshape(-1) for p in twin.parameters]))
    truth = torch.linalg.eigvalsh(H).flip(0)
    result = curvmon.spectrum(twin.model, twin.batch, loss=cross_entropy, k=3, smallest=True, rtol=1e-3)
    assert result.converged.all() and result.smallest_converged
    torch.testing.assert_close(result.eigenvalues.double(), truth[:3], rtol=1e-4, atol=0)
    assert result.smallest == pytest.approx(truth[-1].item(), rel=1e-3)
    vectors = result.eigenvectors.double()
    assert torch.linalg.norm(H @ vectors - vectors * truth[:3]) <= 1e-2 * truth[0]


@weight_normed
def test_nodes_with_weight_norm(case: tuple[Any, ...]) -> None:
    twin = WeightNormed(*case)
    shape = twin.model[0](twin.batch[0]).shape
    truth = oracle.truth(
        lambda e: [twin.by_hand(twin.parameters, e[0])], lambda outputs: twin.loss(outputs[0]), [tuple(shape[1:])]
    )
    assert_nodes(twin.model, twin.batch, "0", truth)


def assert_nodes(model: nn.Module, batch: Batch, node: str, truth: oracle.Truth) -> None:
    exact = curvmon.exact(model, batch, loss=cross_entropy, nodes=[node])
    torch.testing.assert_close(exact.blocks[node, node], truth.hessian[0, 0], rtol=1e-8, atol=1e-12)
    result = curvmon.measure(model, batch, loss=cross_entropy, nodes=[node], max_hvps=50, rtol=1e-3)
    for metric, value in truth.metrics(0, 0).items():
        estimate, error = getattr(result, metric).item(), result.stderr[metric].item()
        assert abs(estimate - value) <= 4 * error + 1e-5 * value, metric


class NormedFeatures(nn.Module):
    """Uses the operation on its activations: what is differentiated twice depends on a node."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head, self.g = nn.Linear(6, 8), nn.Linear(8, 3), nn.Parameter(1 + torch.rand(10, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch._weight_norm(self.stem(x), self.g, 0))


def test_nodes_with_normalised_outputs(batch: Batch) -> None:
    torch.manual_seed(0)
    model = NormedFeatures()
    g, W, b, head_W, head_b = (p.detach().double() for p in model.parameters())

    def forward(e: Sequence[Tensor]) -> list[Tensor]:
        return [F.linear(normalised(F.linear(batch[0].double(), W, b) + e[0], g, 0), head_W, head_b)]

    truth = oracle.truth(forward, lambda outputs: F.cross_entropy(outputs[0], batch[1]), [(8,)])
    assert_nodes(model, batch, "stem", truth)

"""What can be differentiated twice only after a change of kernel or mode is measured all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import curvmon

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
    found = curvmon.exact(model, batch, loss=cross_entropy, nodes=["stem", "block"])
    torch.testing.assert_close(found.resonance, truth.resonance)
    torch.testing.assert_close(found.gn_gap, truth.gn_gap)


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
    found = curvmon.exact(model, batch, loss=cross_entropy, nodes=["0"])
    assert found.nodes == ("0",)
    torch.testing.assert_close(found.resonance, truth.resonance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_are_measured_in_float32(dtype: torch.dtype, batch: Batch) -> None:
    torch.manual_seed(0)
    half = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)
    full = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    full.load_state_dict(half.state_dict())
    x, y = batch[0].to(dtype), batch[1]
    found = curvmon.measure(half, (x, y), loss=cross_entropy, nodes=["0"])
    truth = curvmon.measure(full, (x.float(), y), loss=cross_entropy, nodes=["0"])
    assert found.resonance.item() == pytest.approx(truth.resonance.item(), rel=1e-6)
    assert half[0].weight.dtype == dtype


def test_dropout_and_batchnorm_are_in_eval_mode(batch: Batch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.9), nn.Tanh(), nn.Linear(8, 3))
    training = curvmon.exact(model.train(), batch, loss=cross_entropy, nodes=["0"])
    evaluating = curvmon.exact(model.eval(), batch, loss=cross_entropy, nodes=["0"])
    assert torch.equal(training.resonance, evaluating.resonance)


def test_scripted_submodules_are_left_alone(batch: Batch) -> None:
    scripted = torch.jit.script(nn.Sequential(nn.BatchNorm1d(8), nn.Tanh()))
    model = nn.Sequential(nn.Linear(6, 8), scripted, nn.Linear(8, 3)).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = curvmon.measure(model, batch, loss=cross_entropy, nodes=["0"])
    assert found.resonance.item() > 0
    assert scripted.training and all(torch.equal(before[n], v) for n, v in model.state_dict().items())


def test_a_model_made_in_inference_mode(batch: Batch) -> None:
    with torch.inference_mode():
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    before = [(p.data_ptr(), p.requires_grad) for p in model.parameters()]
    assert curvmon.measure(model, batch, loss=cross_entropy, nodes=["0"]).resonance.item() > 0
    assert before == [(p.data_ptr(), p.requires_grad) for p in model.parameters()]


@both
def test_data_parallel_hooks_survive(run: Callable[..., Any], batch: Batch, tmp_path: Any) -> None:
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


def test_a_loss_that_differentiates_by_the_parameters(batch: Batch) -> None:
    """A gradient penalty needs parameters that require gradients; the copies get them, the originals see nothing."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    def penalised(m: nn.Module, b: Batch) -> Tensor:
        plain = cross_entropy(m, b)
        grads = torch.autograd.grad(plain, list(m.parameters()), create_graph=True)
        return plain + 0.1 * sum((g.pow(2).sum() for g in grads), torch.zeros(()))

    assert curvmon.measure(model, batch, loss=penalised, nodes=["0"]).resonance.item() > 0
    assert all(p.grad is None for p in model.parameters())

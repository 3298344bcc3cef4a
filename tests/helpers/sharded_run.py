"""What the processes of test_sharding.py run: `python -m tests.helpers.sharded_run FOLDER`. Not a test itself.

Two gloo processes train the same network sharded in several ways, with and without calls of curvmon between the steps.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

import curvmon

PROCESSES = 2


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(16, 6, generator=generator), torch.randint(3, (16,), generator=generator)


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def by_fully_shard(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (PROCESSES,))
    for layer in model.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def by_wrapper(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


def by_tensor_parallelism(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (PROCESSES,))
    for layer in model.children():
        for name, parameter in layer.named_parameters():
            placement = Shard(0) if layer.in_features == 6 else Replicate()
            layer.register_parameter(name, nn.Parameter(distribute_tensor(parameter.data, mesh, [placement])))
    return model


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "fully_shard": by_fully_shard,
    "FullyShardedDataParallel": by_wrapper,
    "tensor_parallel": by_tensor_parallelism,
}
CALLS: dict[str, Callable[[nn.Module], Any]] = {
    "measure": lambda model: curvmon.measure(model, batch(0), loss=loss),
    "exact": lambda model: curvmon.exact(model, batch(0), loss=loss),
    "spectrum": lambda model: curvmon.spectrum(model, batch(0), loss=loss, k=1),
    "pulse": lambda model: curvmon.pulse(model, batch(0), loss=loss, step=[p.detach() for p in model.parameters()]),
    "hessian": lambda model: curvmon.operators.hessian(model, batch(0), loss=loss).__enter__(),
    "loss holds it": lambda model: curvmon.measure(network(), batch(0), loss=lambda _, b: loss(model, b)),
}


def outcome(call: Callable[[nn.Module], Any], model: nn.Module) -> str:
    try:
        call(model)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def errors(model: nn.Module) -> dict[str, str]:
    return {name: outcome(call, model) for name, call in CALLS.items()}


def trained(way: str, called: bool) -> dict[str, Any]:
    """Five steps; curvmon is called before the first one, between the others, and where all shards are gathered."""
    model = WAYS[way](network())
    before = [shard(p) for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen = [errors(model)] if called else []
    for step in range(5):
        mesh = init_device_mesh("cpu", (PROCESSES,))
        inputs, targets = batch(10 * step + (0 if way == "tensor_parallel" else dist.get_rank()))
        if way == "tensor_parallel":
            inputs, targets = (distribute_tensor(x, mesh, [Replicate()]) for x in (inputs, targets))
        loss(model, (inputs, targets)).backward()
        if called:
            seen.append(errors(model))
        optimizer.step()
        optimizer.zero_grad()
    if called and way == "fully_shard":
        model.unshard()
        seen.append(errors(model))
        model.reshard()
    full: dict[str, Any] = {}
    if way == "fully_shard":  # what the errors advise
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return {"errors": seen, "shards": [shard(p) for p in model.parameters()], "before": before, "state": full}


def shard(parameter: Tensor) -> Tensor:
    """What this process has of a parameter."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return local.detach().clone()


def run(rank: int, folder: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=PROCESSES)
    found = {way: {called: trained(way, called) for called in (False, True)} for way in WAYS}
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(run, args=(sys.argv[1],), nprocs=PROCESSES)
    assert all((Path(sys.argv[1]) / f"{rank}.pt").exists() for rank in range(PROCESSES))

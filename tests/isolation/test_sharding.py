"""Sharded models are refused before anything is touched: training goes on as if nobody had asked."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import curvmon
from curvmon.isolation.sharding import refuse_sharded
from tests.helpers.sharded_run import CALLS, PROCESSES, WAYS, batch, loss, network
from tests.helpers.time_limits import PATIENCE

EXPECTED = {
    "fully_shard": "sharded (FSDP2, fully_shard)",
    "FullyShardedDataParallel": "sharded (FSDP1, FullyShardedDataParallel)",
    "tensor_parallel": "sharded ('weight' of a Linear is a DTensor)",
}


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("sharded")
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.sharded_run", str(folder)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(PROCESSES)]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_sharded_models_are_refused(processes: list[Any], way: str) -> None:
    for found in processes:
        for errors in found[way][True]["errors"]:
            assert errors.keys() == CALLS.keys()
            for call, message in errors.items():
                assert message.startswith("InputError"), f"{call}: {message}"
                assert EXPECTED[way] in message and "get_model_state_dict" in message, call


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_refusing_leaves_training_bit_identical(processes: list[Any], way: str) -> None:
    for found in processes:
        without, called, before = found[way][False]["shards"], found[way][True]["shards"], found[way][True]["before"]
        assert all(map(torch.equal, without, called))
        assert not all(map(torch.equal, called, before)), "nothing was trained"


@pytest.mark.slow
def test_the_advice_works(processes: list[Any]) -> None:
    """The full state dict goes into a model without shards, which is measured."""
    model = network()
    model.load_state_dict(processes[0]["fully_shard"][True]["state"])
    assert torch.isfinite(curvmon.measure(model, batch(0), loss=loss).resonance).all()


def test_partitioned_by_deepspeed() -> None:
    """As `deepspeed.zero.Init` leaves a parameter: empty, and with marks of its own."""
    model = nn.Linear(3, 2)
    model.weight.data = torch.empty(0)
    model.weight.ds_id, model.weight.ds_shape = 0, torch.Size([2, 3])
    with pytest.raises(curvmon.InputError, match=r"DeepSpeed ZeRO-3.*zero_to_fp32"):
        curvmon.measure(model, torch.randn(4, 3), loss=lambda model, x: model(x).sum())


def test_others_are_not_refused() -> None:
    refuse_sharded([*network().modules(), nn.DataParallel(network())])

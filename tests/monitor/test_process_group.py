"""Ranks without a process group; several ranks are in tests/integrations/lightning/test_ddp.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from curvmon.monitor.process_group import Ranks, RemoteError, same_buffers


@pytest.mark.parametrize("world_size", [1, 4])
def test_without_a_process_group_one_rank_measures_everything(world_size: int) -> None:
    ranks = Ranks(world_size)
    assert (ranks.world_size, ranks.rank) == (1, 0) and ranks.measures_pairs and ranks.measures_spectrum
    value = object()
    assert ranks.gather(value) == [value] and ranks.broadcast(value) is value


def test_an_error_of_any_rank_is_an_error_of_all() -> None:
    Ranks(1).all_or_none(None)
    with pytest.raises(RemoteError, match="process 0: ValueError: no"):
        Ranks(1).all_or_none(ValueError("no"))


def test_buffers_stay_the_same_objects() -> None:
    module = nn.BatchNorm1d(3)
    before = dict(module._buffers)
    with same_buffers(Ranks(1), module):
        assert all(value is before[name] for name, value in module._buffers.items())
    assert all(value is before[name] for name, value in module._buffers.items())
    assert torch.equal(module.running_mean, torch.zeros(3))  # type: ignore[arg-type]

"""`Measurement.operations`: those of the model alone, by node."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvmon
from curvmon.records import AFTER_LAST_NODE


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.linear(x))


def operations(model: nn.Module, nodes: list[str]) -> dict[str, Any]:
    batch = torch.ones(3, 4), torch.zeros(3, dtype=torch.long)
    return dict(curvmon.measure(model, batch, loss=lambda m, b: F.cross_entropy(m(b[0]), b[1]), nodes=nodes).operations)


def test_taps_are_no_operations_of_the_model() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Residual(), nn.Linear(4, 2))
    counted = operations(model, ["0", "1"])
    assert counted["0"] == {} and counted["1"] == {"Addmm": 1, "Relu": 1, "Add": 1}
    assert counted[AFTER_LAST_NODE].keys() >= {"Addmm", "LogSoftmax", "NllLoss"}
    assert not counted[AFTER_LAST_NODE].keys() & {"Add", "AccumulateGrad"}


def test_a_node_named_loss_keeps_its_operations() -> None:
    model = nn.Sequential()
    model.add_module("first", nn.Linear(4, 4))
    model.add_module("loss", Residual())
    model.add_module("last", nn.Linear(4, 2))
    counted = operations(model, ["first", "loss"])
    assert counted["loss"]["Relu"] == 1 and counted[AFTER_LAST_NODE]["NllLoss"] == 1

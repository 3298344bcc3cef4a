"""Every setting that a user may change has a name and a value of its own."""

from __future__ import annotations

import torch
from torch import nn

from curvmon.monitor.run_settings import run_settings


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.1), nn.Linear(4, 2))


def changes(model: nn.Sequential, optimizer: torch.optim.Optimizer, before: dict[str, str]) -> dict[str, str]:
    now = run_settings(model, [optimizer])
    return {name: now.get(name, "") for name in now.keys() | before.keys() if now.get(name) != before.get(name)}


def test_what_changes_is_named() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    before = run_settings(model, [optimizer])
    assert before["3.p"] == "0.1" and before["2.class"] == "ReLU" and before["1.momentum"] == "0.1"
    model[3].p = 0.9
    assert changes(model, optimizer, before) == {"3.p": "0.9"}
    before = run_settings(model, [optimizer])
    model[0].weight.requires_grad_(False)
    assert changes(model, optimizer, before) == {"0.weight.requires_grad": "False"}
    before = run_settings(model, [optimizer])
    optimizer.param_groups[0]["weight_decay"] = -0.1
    assert changes(model, optimizer, before) == {"optimizer 0, group 0, weight_decay": "-0.1"}
    before = run_settings(model, [optimizer])
    model[2] = nn.Tanh()
    assert changes(model, optimizer, before)["2.class"] == "Tanh"


def test_what_changes_by_itself_is_no_setting() -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    before = run_settings(model, [optimizer])
    model.eval()
    model[1](torch.randn(5, 4))
    optimizer.param_groups[0]["lr"] = 0.5
    assert changes(model, optimizer, before) == {}

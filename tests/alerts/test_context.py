"""What may explain a change: values of the context that jumped, and a network that computes something else."""

from __future__ import annotations

import json
import math
import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvmon
from curvmon.alerts.context import Cause, Context, ContextTracker, Source, context_values
from curvmon.records import AFTER_LAST_NODE


def causes_of(contexts: list[Context]) -> list[list[Cause]]:
    """Of every point; the state goes through JSON in between, as through a checkpoint."""
    tracker, causes = ContextTracker(), []
    for point in contexts:
        causes.append(tracker.update(point))
        state = json.loads(json.dumps(tracker.state_dict()))
        tracker = ContextTracker()
        tracker.load_state_dict(state)
    return causes


def values(source: Source, sequence: list[float]) -> list[Context]:
    return [Context({source: value}) for value in sequence]


def test_values_that_follow_their_forecast_are_no_cause() -> None:
    rng = random.Random(0)
    cosine = [0.1 * (1 + math.cos(math.pi * t / 40)) for t in range(38)]
    losses = [2.0 * math.exp(-t / 8) * (1 + 0.05 * rng.gauss(0, 1)) + 0.1 for t in range(38)]
    norms = [10 + 0.05 * t + 0.02 * rng.gauss(0, 1) for t in range(38)]
    sources: list[tuple[Source, list[float]]] = [
        (("learning rate", ""), cosine),
        (("training loss", ""), losses),
        (("weights", "a.weight"), norms),
    ]
    for source, sequence in sources:
        assert not any(causes_of(values(source, sequence))), source


@pytest.mark.parametrize(
    ("source", "name", "factor"),
    [
        (("learning rate", ""), "learning rate", 20.0),
        (("learning rate", ""), "learning rate", 0.1),  # a schedule
        (("training loss", ""), "training loss", 5.0),
        (("training loss", ""), "training loss", 0.2),
        (("weights", "a.weight"), "norm of a.weight", 0.7),
        (("weights", "a.weight"), "norm of a.weight", 1.4),
        (("statistics", "a.running_var"), "norm of a.running_var", 0.3),
    ],
)
def test_a_jump_is_reported_once(source: Source, name: str, factor: float) -> None:
    causes = causes_of(values(source, [1.0] * 8 + [factor] * 8))
    assert [bool(now) for now in causes] == [t == 8 for t in range(16)]
    ((cause,),) = (now for now in causes if now)
    assert cause.text == f"{name} 1 → {factor:.3g} (x {factor:.3g})"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.activation, self.skip = nn.Linear(4, 4), nn.SiLU(), True

    def forward(self, x: Tensor) -> Tensor:
        y = self.activation(self.linear(x))
        return x + y if self.skip else y


def measured(net: nn.Module) -> curvmon.Measurement:
    batch = torch.ones(3, 4), torch.zeros(3, dtype=torch.long)
    return curvmon.measure(net, batch, loss=lambda n, b: F.cross_entropy(n(b[0]), b[1]), nodes=["0", "1", "2"])


def test_operations_are_counted_where_they_are() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(Block(), Block(), Block(), nn.Linear(4, 2))
    before = measured(net).operations
    assert list(before) == ["0", "1", "2", AFTER_LAST_NODE]
    assert before["1"] == before["2"] and before["1"]["Silu"] == 1
    rest = before[AFTER_LAST_NODE]
    assert rest["NllLoss"] == 1 and rest["LogSoftmax"] == 1
    net[1].skip = False
    cut = measured(net).operations
    assert {node: cut[node] == before[node] for node in before} == {
        "0": True,
        "1": False,
        "2": True,
        AFTER_LAST_NODE: True,
    }
    net[1].skip, net[2].activation = True, nn.Tanh()
    contexts = [Context({}, before)] * 5 + [Context({}, measured(net).operations)] * 2
    causes = causes_of(contexts)
    assert [cause.text for now in causes for cause in now] == ["operations of 2: 1 fewer Silu, 1 more Tanh"]


def test_a_network_that_changes_at_every_measurement_is_no_cause() -> None:
    assert not any(causes_of([Context({}, {"a": {"Relu": t % 2 + 1}}) for t in range(12)]))


def test_a_new_choice_of_nodes_is_no_cause() -> None:
    assert not any(causes_of([Context({}, {"a": {"Relu": 1}})] * 6 + [Context({}, {"b": {"Relu": 2}})] * 6))


def test_context_values() -> None:
    norms = {("weights", "w"): 2.0, ("update", "w"): 0.1, ("statistics", "mean"): 3.0, ("zeros", "w"): 0.0}
    current = context_values(norms, 0.3, 1.5)
    assert current == {
        ("learning rate", ""): 0.3,
        ("training loss", ""): 1.5,
        ("weights", "w"): 2.0,
        ("statistics", "mean"): 3.0,
    }
    assert ("training loss", "") not in context_values(norms, 0.3)

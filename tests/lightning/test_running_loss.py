"""The mean training loss, as the monitor sees it."""

from __future__ import annotations

import math

import torch

from curvmon.lightning.running_loss import RunningLoss


def test_the_mean_since_it_was_last_taken() -> None:
    held = RunningLoss()
    assert math.isnan(held.take())
    for loss in (1.0, 2.0, 6.0):
        held.see({"loss": torch.tensor(loss, requires_grad=True)})
    assert held.take() == 3.0
    held.see(torch.tensor([5.0], dtype=torch.bfloat16))
    assert held.take() == 5.0 and math.isnan(held.take())


def test_steps_without_a_loss_are_passed_over() -> None:
    held = RunningLoss()
    for outputs in (None, {}, {"loss": None}, {"loss": 1.0}, torch.ones(3), torch.tensor(1), "loss"):
        held.see(outputs)
    assert math.isnan(held.take())

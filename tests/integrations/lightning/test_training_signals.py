"""Learning rate and training loss, as the monitor sees them."""

from __future__ import annotations

import math

import torch

from curvmon.integrations.lightning.training_signals import Pace


def optimizer(rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=rate)


def test_the_mean_loss_since_it_was_last_taken() -> None:
    held = Pace()
    assert math.isnan(held.take([])[1])
    for loss in (1.0, 2.0, 6.0):
        held.see({"loss": torch.tensor(loss, requires_grad=True)}, [])
    assert held.take([])[1] == 3.0
    held.see(torch.tensor([5.0], dtype=torch.bfloat16), [])
    assert held.take([])[1] == 5.0 and math.isnan(held.take([])[1])


def test_accumulated_gradients_do_not_make_the_loss_smaller() -> None:
    held = Pace()
    held.see({"loss": torch.tensor(0.5)}, [], accumulated=4)
    held.see({"loss": torch.tensor(2.0)}, [], accumulated=1)
    assert held.take([])[1] == 2.0


def test_steps_without_a_loss_are_passed_over() -> None:
    held = Pace()
    for outputs in (None, {}, {"loss": None}, {"loss": 1.0}, torch.ones(3), torch.tensor(1), "loss"):
        held.see(outputs, [])
    assert math.isnan(held.take([])[1])


def test_the_largest_rate_since_it_was_last_taken() -> None:
    held = Pace()
    assert not math.isfinite(held.take([])[0])
    for rate in (0.1, 2.0, 0.1):
        held.see(None, [optimizer(rate), optimizer(0.01)])
    assert held.take([optimizer(0.1)])[0] == 2.0
    assert held.take([optimizer(0.1)])[0] == 0.1
    for odd in (None, "auto", (0.1, 0.2), torch.ones(2), lambda step: 0.1):
        strange = optimizer(0.1)
        strange.param_groups[0]["lr"] = odd
        held.see(None, [strange])
        assert not math.isfinite(held.take([strange])[0])
    scheduled = optimizer(0.1)
    scheduled.param_groups[0]["lr"] = torch.tensor(0.5)
    held.see(None, [scheduled])
    assert held.take([])[0] == 0.5

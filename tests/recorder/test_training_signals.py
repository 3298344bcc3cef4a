"""Learning rate and training loss, as the monitor sees them."""

from __future__ import annotations

import math

import torch

from curvmon.recorder.alerting import TrainingSignals


def optimizer(rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=rate)


def test_mean_loss_since_the_last_collection() -> None:
    signals = TrainingSignals()
    assert math.isnan(signals.collect([])[1])
    for loss in (1.0, 2.0, 6.0):
        signals.observe({"loss": torch.tensor(loss, requires_grad=True)}, [])
    assert signals.collect([])[1] == 3.0
    signals.observe(torch.tensor([5.0], dtype=torch.bfloat16), [])
    assert signals.collect([])[1] == 5.0 and math.isnan(signals.collect([])[1])


def test_accumulated_gradients_do_not_make_the_loss_smaller() -> None:
    signals = TrainingSignals()
    signals.observe({"loss": torch.tensor(0.5)}, [], accumulated=4)
    signals.observe({"loss": torch.tensor(2.0)}, [], accumulated=1)
    assert signals.collect([])[1] == 2.0


def test_steps_without_a_loss_are_skipped() -> None:
    signals = TrainingSignals()
    for outputs in (None, {}, {"loss": None}, {"loss": 1.0}, torch.ones(3), torch.tensor(1), "loss"):
        signals.observe(outputs, [])
    assert math.isnan(signals.collect([])[1])


def test_largest_rate_since_the_last_collection() -> None:
    signals = TrainingSignals()
    assert not math.isfinite(signals.collect([])[0])
    for rate in (0.1, 2.0, 0.1):
        signals.observe(None, [optimizer(rate), optimizer(0.01)])
    assert signals.collect([optimizer(0.1)])[0] == 2.0
    assert signals.collect([optimizer(0.1)])[0] == 0.1
    for odd in (None, "auto", (0.1, 0.2), torch.ones(2), lambda step: 0.1):
        strange = optimizer(0.1)
        strange.param_groups[0]["lr"] = odd
        signals.observe(None, [strange])
        assert not math.isfinite(signals.collect([strange])[0])
    scheduled = optimizer(0.1)
    scheduled.param_groups[0]["lr"] = torch.tensor(0.5)
    signals.observe(None, [scheduled])
    assert signals.collect([])[0] == 0.5

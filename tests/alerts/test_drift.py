"""Slow growth is reported once, early; schedules, noise and what settles are not drifts."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from curvmon.alerts.drift import Drift, DriftDetector
from curvmon.alerts.features import Feature

Series = Callable[[int], float]


def drifts(family: str, series: Series, where: str = "", points: int = 30, others: int = 4) -> list[tuple[int, Drift]]:
    detector, found = DriftDetector(), []
    for i in range(points):
        features = [Feature(family, where, math.log(series(i)), 0.0)]
        if family == "weights":
            features += [Feature(family, f"{k}.weight", 0.001 * i, 0.0) for k in range(others)]
        found += [(i, drift) for drift in detector.update(features)]
    return found


@pytest.mark.parametrize("growth", [1.1, 1.3])
def test_a_learning_rate_that_grows_without_end(growth: float) -> None:
    ((at, drift),) = drifts("rate", lambda i: 0.1 * growth ** max(0, i - 12))
    assert 14 <= at <= 16 and drift.family == "rate" and math.exp(drift.per_interval) == pytest.approx(growth)


@pytest.mark.parametrize(
    "schedule",
    [
        lambda i: min(1.0, (i + 1) / 8),  # warmup
        lambda i: 0.04 + 0.96 * math.sin(math.pi * i / 30) ** 2,  # one cycle
        lambda i: 0.1 + 0.9 * abs(((i / 6) % 2) - 1),  # triangles
        lambda i: 0.51 + 0.49 * math.cos(math.pi * (i % 10) / 10),  # warm restarts
    ],
    ids=["warmup", "one cycle", "triangles", "warm restarts"],
)
def test_schedules_are_no_drifts(schedule: Series) -> None:
    assert drifts("rate", schedule) == []


def test_a_layer_that_grows_apart_from_the_others() -> None:
    ((at, drift),) = drifts("weights", lambda i: 1.06 ** max(0, i - 12), where="head.weight")
    assert at <= 17 and drift.where == "head.weight"
    assert drifts("weights", lambda i: 1.0 + 0.001 * i, where="head.weight") == []
    assert drifts("weights", lambda i: 1.06 ** max(0, i - 12), where="head.bias") == []


@pytest.mark.parametrize("seed", range(8))
def test_a_training_loss_that_rises(seed: int) -> None:
    rng = random.Random(seed)
    falling = [math.exp(-0.03 * i + rng.gauss(0, 0.02)) for i in range(30)]
    assert drifts("training loss", lambda i: falling[i]) == []
    rising = [value * 1.25 ** max(0, i - 15) for i, value in enumerate(falling)]
    ((at, _),) = drifts("training loss", lambda i: rising[i])
    assert at <= 19


def test_abrupt_changes_are_no_drifts() -> None:
    detector = DriftDetector()
    for i in range(20):
        values = 0.0 if i < 15 else 1.0 + 0.1 * (i - 15)
        found = detector.update([Feature("training loss", "", values, 0.0)])
        assert not found
        if i == 15:
            detector.restart()


def test_the_state() -> None:
    first, second = DriftDetector(), DriftDetector()
    for i in range(25):
        if i == 14:
            second.load_state_dict(first.state_dict())
        features = [Feature("rate", "", math.log(0.1 * 1.2 ** max(0, i - 12)), 0.0)]
        found = first.update(features)
        if i >= 14:
            assert second.update(features) == found

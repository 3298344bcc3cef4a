"""Forecasts of the next value, and how far a value deviates from them."""

from __future__ import annotations

import json
import math
import random

import pytest

from curvmon.alerts.forecast import WINDOW, Forecast


def after(values: list[float], min_spread: float = 0.02) -> Forecast:
    forecast = Forecast(min_spread)
    for value in values:
        forecast.append(value)
    return forecast


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([3.0] * 10, 3.0),
        ([0.5 * t for t in range(10)], 5.0),  # a trend
        ([2.0 * 0.5**t for t in range(12)], 2.0 * 0.5**12),  # a decay
    ],
)
def test_regular_sequences_are_forecast(values: list[float], expected: float) -> None:
    assert after(values).deviation(expected).score < 1
    assert after(values).deviation(expected + 1.0).score > 6


def test_the_score_is_in_standard_deviations() -> None:
    rng = random.Random(0)
    forecast = after([rng.gauss(0, 0.1) for _ in range(200)])
    size, score, expected = forecast.deviation(1.0)
    assert size == 1.0 - expected
    assert 0.03 < size / score < 0.3
    assert forecast.deviation(1.0, stderr=10.0).score < 0.2


def test_few_values_have_no_score() -> None:
    assert Forecast(0.02).deviation(5.0).score == 0.0
    assert after([1.0, 1.0]).deviation(5.0).score == 0.0


def test_a_restart_drops_the_values_and_keeps_the_spread() -> None:
    forecast = after([0.1 * (-1) ** t for t in range(20)])
    assert len(forecast) == WINDOW
    forecast.restart(7.0)
    assert len(forecast) == 1 and forecast.first == forecast.last == 7.0
    assert 0 < forecast.deviation(8.0).score < math.inf


def test_a_forecast_survives_a_checkpoint() -> None:
    rng = random.Random(1)
    values = [rng.gauss(0, 0.1) for _ in range(20)]
    first, second = after(values), Forecast(0.02)
    first.restart(1.0)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for value in values:
        assert first.deviation(value, 0.01) == second.deviation(value, 0.01)
        first.append(value), second.append(value)

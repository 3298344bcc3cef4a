"""A single quantity: no alert on what is usual, one at once on what is not."""

from __future__ import annotations

import io
import math
import random
from dataclasses import fields
from typing import Any

import pytest
import torch

from curvmon import ChangeDetector, Sensitivity

KINDS = ("stationary", "trend", "decay", "wider and wider", "autoregressive", "walk")


def series(kind: str, points: int, noise: float, rng: random.Random) -> list[float]:
    """Logarithms of values."""
    level, slope, state, values = rng.uniform(-5, 5), rng.uniform(-0.15, 0.15), 0.0, []
    for t in range(points):
        z = noise * rng.gauss(0, 1)
        if kind == "trend":
            values.append(level + slope * t + z)
        elif kind == "decay":
            values.append(level + 3 * math.exp(-t / 6) + z)
        elif kind == "wider and wider":
            values.append(level + z * (0.5 + 1.5 * t / points))
        elif kind in ("autoregressive", "walk"):
            state = (0.8 if kind == "autoregressive" else 1.0) * state + z
            values.append(level + state)
        else:
            values.append(level + z)
    return values


def alarms(values: list[float], stderr: float) -> list[int]:
    detector = ChangeDetector()
    return [i for i, y in enumerate(values) if detector.update(math.exp(y), stderr * math.exp(y)) is not None]


@pytest.mark.parametrize("kind", KINDS)
def test_quiet_series_raise_no_more_than_one_false_alarm_in_a_thousand(kind: str) -> None:
    rng = random.Random(kind)
    points = false = 0
    for _ in range(60):
        length, noise = rng.choice([10, 20, 40, 80, 200]), rng.choice([0.02, 0.05, 0.1, 0.2])
        false += len(alarms(series(kind, length, noise, rng), noise / 3))
        points += length
    assert false <= points / 1000


@pytest.mark.parametrize("kind", ["stationary", "autoregressive", "walk"])
def test_a_jump_of_ten_deviations_is_detected_at_once(kind: str) -> None:
    rng = random.Random(kind)
    detected = 0
    for _ in range(60):
        noise = rng.choice([0.02, 0.05, 0.1])
        values = series(kind, 40, noise, rng)
        at = rng.randrange(10, 39)
        jump = rng.choice([-1, 1]) * max(10 * noise, 0.7) * rng.uniform(1, 3)
        detected += at in alarms([y + (jump if i >= at else 0.0) for i, y in enumerate(values)], noise / 3)
    assert detected >= 57


def test_an_alert_has_values_before_and_after() -> None:
    detector = ChangeDetector()
    alert = [detector.update(value) for value in [1.0] * 20 + [4.0]][-1]
    assert alert is not None and alert.headline == "The value jumped from 1 to 4"
    assert alert.evidence[0] == "value: expected 1 → 4" and "standard deviations" in alert.evidence[1]
    assert alert.suggestion == "Check what changed just before this value."


def test_one_jump_is_one_alert_and_the_next_is_another() -> None:
    rng = random.Random(0)
    values = [rng.gauss(0, 0.05) + (1.5 if i >= 20 else 0) + (1.5 if i >= 40 else 0) for i in range(60)]
    assert alarms(values, 0.02) == [20, 40]


def test_a_large_error_bar_excuses_a_point() -> None:
    detector = ChangeDetector()
    for i in range(15):
        detector.update(1.0 + 0.02 * (-1) ** i, 0.01)
    assert detector.update(3.0, stderr=3.0) is None


def test_values_that_are_not_finite_or_positive_are_skipped() -> None:
    detector = ChangeDetector()
    for i in range(12):
        detector.update(1.0 + 0.02 * (-1) ** i, 0.01)
    before = detector.state_dict()
    for value in (math.nan, math.inf, 0.0, -1.0):
        assert detector.update(value, 0.1) is None
    assert detector.state_dict() == before


def test_scaling_the_values_changes_nothing() -> None:
    rng = random.Random(1)
    values = [math.exp(rng.gauss(0, 0.05) + (1.0 if i >= 25 else 0)) for i in range(40)]
    jumps = []
    for scale in (1.0, 1e-9, 1e9):
        detector = ChangeDetector()
        jumps.append([i for i, v in enumerate(values) if detector.update(scale * v, 0.02 * scale * v)])
    assert jumps[0] == jumps[1] == jumps[2] == [25]


def test_a_resumed_detector_decides_as_if_never_stopped() -> None:
    rng = random.Random(2)
    values = [math.exp(rng.gauss(0, 0.05) + (1.0 if i >= 30 else 0)) for i in range(40)]
    whole, first, second = ChangeDetector(), ChangeDetector(), ChangeDetector()
    expected = [whole.update(v, 0.02 * v) for v in values]
    resumed = [first.update(v, 0.02 * v) for v in values[:20]]
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True))
    resumed += [second.update(v, 0.02 * v) for v in values[20:]]
    assert resumed == expected and resumed[30] is not None


def test_unknown_scales_and_options_are_refused() -> None:
    with pytest.raises(ValueError, match="scale must be"):
        ChangeDetector(scale="cubic")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        ChangeDetector(no_such_option=1)


@pytest.mark.parametrize("value", [True, math.nan, "1"])
@pytest.mark.parametrize("name", [field.name for field in fields(Sensitivity)])
def test_sensitivity_takes_numbers_only(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a number"):
        ChangeDetector(**{name: value})


def test_warm_up_is_an_integer() -> None:
    with pytest.raises(ValueError, match="warm_up must be an integer"):
        ChangeDetector(warm_up=6.5)

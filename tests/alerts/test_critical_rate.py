"""The critical learning rate over many pulses, of losses whose crossing is known."""

from __future__ import annotations

import json
import math
import random

import pytest

from curvmon.alerts.critical_rate import MOST, SMOOTHED, CriticalRate


def after(
    pulses: int, *, correction: float = 1.0, every: int = 3, noise: float = 0.0, rate: float = 0.1, seed: int = 0
) -> CriticalRate:
    """The quadratic critical rate is 1 and the true one `correction`; every so many pulses it is measured."""
    rng, critical = random.Random(seed), CriticalRate()
    for i in range(pulses):
        quadratic = math.exp(rng.gauss(0, noise)) / rate
        crossing = quadratic * correction if i % every == 0 else math.nan
        critical.update(rate, 1.0, 2 / quadratic, crossing)
    return critical


@pytest.mark.parametrize("rate", [1e-6, 0.1, 10.0])
def test_of_quadratic_losses_it_is_exact(rate: float) -> None:
    assert after(20, rate=rate).value == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize("correction", [0.4, 1.0, 2.5])
def test_pulses_between_measurements_are_corrected(correction: float) -> None:
    assert after(30, correction=correction).value == pytest.approx(correction, rel=1e-6)
    assert after(30, correction=correction, every=10**9).value == pytest.approx(correction, rel=1e-6)  # the first one


def test_without_a_measurement_it_is_that_of_a_quadratic() -> None:
    critical = CriticalRate()
    for _ in range(5):
        critical.update(0.1, 1.0, 4.0, math.nan)
    assert critical.value == pytest.approx(0.05)


def test_noise_is_smoothed() -> None:
    values = [after(60, correction=1.5, noise=0.5, seed=seed).value for seed in range(200)]
    logs = [math.log(value / 1.5) for value in values]
    spread = math.sqrt(sum(log**2 for log in logs) / len(logs))
    assert abs(sum(logs) / len(logs)) < 4 * spread / math.sqrt(len(logs))
    assert spread == pytest.approx(0.5 / math.sqrt(2 * SMOOTHED - 1), rel=0.2)  # of a mean with these weights


def test_a_change_is_followed_within_some_pulses() -> None:
    critical = after(30)
    for _ in range(2 * SMOOTHED):
        critical.update(0.1, 1.0, 2 / 30, math.nan)
    assert critical.value == pytest.approx(3, rel=0.15)


@pytest.mark.parametrize("outlier", [1e-9, 1e9])
def test_a_single_outlier_is_limited(outlier: float) -> None:
    critical = after(30)
    critical.update(0.1, 1.0, 2.0 / (10 * outlier), math.nan)
    assert abs(math.log(critical.value)) == pytest.approx(MOST / SMOOTHED)


def test_what_says_nothing_changes_nothing() -> None:
    """Uphill; along negative curvature without a crossing that was found."""
    critical = after(30, correction=1.5)
    before = critical.state_dict()
    for gain, curvature, crossing in (
        (0.0, 1.0, math.nan),
        (-1.0, 1.0, math.nan),
        (1.0, -1.0, math.nan),
        (1.0, 0.0, math.nan),
        (1.0, -1.0, math.inf),
    ):
        critical.update(0.1, gain, curvature, crossing)
    assert critical.state_dict() == before
    empty = CriticalRate()
    empty.update(0.1, 1.0, -1.0, math.inf)
    assert empty.value == math.inf


def test_a_crossing_along_negative_curvature_counts() -> None:
    critical = CriticalRate()
    for _ in range(5):
        critical.update(0.1, 1.0, -1.0, 20.0)
    assert critical.value == pytest.approx(2.0)


def test_no_crossing_in_range_is_a_far_one() -> None:
    critical = after(30)
    critical.update(0.1, 1.0, 0.2, math.inf)
    assert critical.value == pytest.approx(math.exp(MOST / SMOOTHED))


def test_the_correction_outlives_the_rate() -> None:
    critical = after(30, correction=2.0)
    critical.forget()
    assert critical.value == math.inf
    critical.update(0.1, 1.0, 2.0, math.nan)
    assert critical.value == pytest.approx(0.2)


def test_a_restored_one_goes_on_as_if_nothing_had_happened() -> None:
    critical, restored = after(7, correction=1.5, noise=0.5), CriticalRate()
    restored.load_state_dict(json.loads(json.dumps(critical.state_dict())))
    for one in (critical, restored):
        one.update(0.1, 1.0, 0.3, 12.0)
        one.update(0.1, 1.0, 0.2, math.nan)
    assert restored.value == critical.value and restored.state_dict() == critical.state_dict()

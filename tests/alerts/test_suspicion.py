"""Which pulses make the next one come sooner."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace

import pytest

from curvmon.alerts.instability import InstabilityDetector
from curvmon.alerts.suspicion import GAIN, MOST, RATIO, Suspicion
from curvmon.records import PulseRecord

USUAL = PulseRecord(0, 0, gain=1.0, curvature=0.2, learning_rate=0.5, loss=1.0)
"""step ratio 0.1"""


def record(ratio: float = 1.0, gain: float = 1.0) -> PulseRecord:
    """Times the usual ones."""
    return replace(USUAL, gain=USUAL.gain * gain, curvature=USUAL.curvature * ratio * gain)


def settled(pulses: int = 40) -> InstabilityDetector:
    detector = InstabilityDetector()
    for step in range(pulses):
        detector.update(replace(USUAL, step=step))
    return detector


@pytest.mark.parametrize(
    ("pulse", "suspicious"),
    [
        (record(), False),
        (record(ratio=0.9 * RATIO), False),
        (record(ratio=1.1 * RATIO), True),
        (record(gain=0.9 * GAIN), False),
        (record(gain=1.1 * GAIN), True),
        (replace(USUAL, gain=-1.0), True),  # uphill
        (replace(USUAL, gain=-1.0, curvature=-1.0), False),
        (replace(USUAL, gain=math.nan), False),
        (replace(USUAL, curvature=math.inf), False),
        (replace(USUAL, learning_rate=0.0), False),
    ],
)
def test_a_single_pulse(pulse: PulseRecord, suspicious: bool) -> None:
    assert Suspicion().update(pulse, settled()) is suspicious


def test_nothing_is_suspicious_before_anything_is_usual() -> None:
    assert not Suspicion().update(record(ratio=100, gain=100), settled(pulses=8))


def test_learning_rates_are_taken_into_account() -> None:
    """At twice the rate the step is twice as long: g^T u doubles, u^T H u quadruples, the ratio doubles."""
    twice = replace(USUAL, learning_rate=1.0, gain=2.0, curvature=0.8)
    assert not Suspicion().update(twice, settled())
    assert Suspicion().update(replace(twice, curvature=1.3 * 0.8), settled())


def test_suspicion_lasts_as_long_as_the_mean_of_what_follows_is_unusual() -> None:
    """The first one does not count: it was selected for being unusual."""
    suspicion, detector = Suspicion(), settled()
    high, low = record(ratio=2 * RATIO), record()
    assert [suspicion.update(pulse, detector) for pulse in (record(ratio=100), low, low)] == [True, False, False]
    # means: 2, 2, then (2 + 2 + 0.4) / 3, ... and at last (2 + 2 + 4 * 0.4) / 6 times RATIO
    lasted = [suspicion.update(pulse, detector) for pulse in (high, high, high, low, low, low, low)]
    assert lasted == [True] * 6 + [False]


def test_suspicion_ends() -> None:
    suspicion, detector = Suspicion(), settled()
    lasted = [suspicion.update(record(ratio=2 * RATIO), detector) for _ in range(MOST + 1)]
    assert lasted == [True] * MOST + [False]


def test_few_pulses_of_a_quiet_run_are_suspicious() -> None:
    """Single ratios that vary by a factor of 1.6: less than one pulse in ten is taken for nothing."""
    rng = random.Random(0)
    suspicion, detector, suspicious = Suspicion(), settled(), 0
    for step in range(1000):
        pulse = replace(record(ratio=math.exp(rng.gauss(0, 0.5))), step=40 + step)
        detector.update(pulse)
        suspicious += suspicion.update(pulse, detector)
    assert 0 < suspicious < 100


def test_state() -> None:
    first, second, detector = Suspicion(), Suspicion(), settled()
    for ratio in (10.0, 10.0, 2.0):
        first.update(record(ratio), detector)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    following = [record(ratio) for ratio in (2.0, 2.0, 1.0, 1.0, 1.0, 0.5)]
    lasted = [[suspicion.update(pulse, detector) for pulse in following] for suspicion in (first, second)]
    assert lasted[0] == lasted[1] and len(set(lasted[0])) == 2

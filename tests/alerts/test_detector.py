"""The engine of `ChangeDetector`: jumps, candidates that wait for the next value, drifts."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest

from curvmon.alerts.detector import Cusum, Detector, Sensitivity
from curvmon.alerts.forecast import Deviation


def values(count: int, shift: float = 0.0, at: int = 15, seed: int = 0) -> list[float]:
    """Noise 0.05 around 0."""
    rng = random.Random(seed)
    return [rng.gauss(0, 0.05) + shift * (i >= at) for i in range(count)]


def changes(sequence: list[float], **options: Any) -> list[tuple[int, str]]:
    detector = Detector(Sensitivity(**options))
    updates = [detector.update(value, 0.01) for value in sequence]
    return [(i, change.kind) for i, change in enumerate(updates) if change is not None]


@pytest.mark.parametrize("seed", range(5))
def test_one_jump_is_one_change(seed: int) -> None:
    assert changes(values(30, seed=seed)) == []
    assert changes(values(30, shift=2.0, seed=seed)) == [(15, "jump")]


def test_changes_that_do_not_matter_are_none() -> None:
    """A shift of 0.3 is clear without noise, but below `matters`."""
    shifted = [0.3 * (i >= 15) for i in range(30)]
    assert changes(shifted, matters=0.4) == [] and changes(shifted, matters=0.2) == [(15, "jump")]


def test_no_decision_during_warm_up() -> None:
    assert changes(values(30, shift=2.0, at=5)) == []
    assert changes(values(30, shift=2.0, at=6)) == [(6, "jump")]


@pytest.mark.parametrize(("later", "count"), [(0.6, 1), (0.0, 0), (-0.6, 0)])
def test_a_candidate_is_confirmed_by_a_value_that_deviates_to_the_same_side(later: float, count: int) -> None:
    detector = Detector(Sensitivity(threshold=60.0, confirmed=3.0, matters=0.3))
    for value in values(15, seed=1):
        detector.update(value, 0.01)
    assert detector.update(0.6, 0.01) is None
    assert detector.state_dict()["candidate"] == [0.6, 0.01]
    assert (detector.update(later, 0.01) is not None) == bool(count)


def test_a_detector_survives_a_checkpoint_at_any_value() -> None:
    options = {"threshold": 8.0, "confirmed": 6.0, "matters": 0.3, "drift_threshold": 3.0, "drift_slack": 0.2}
    rng = random.Random(6)
    sequence = [rng.gauss(0, 0.05) + 1.5 * (i >= 15) + 0.06 * max(0, i - 30) for i in range(65)]
    whole = Detector(Sensitivity(**options))  # type: ignore[arg-type]
    expected = [whole.update(value, 0.01) for value in sequence]
    assert {change.kind for change in expected if change is not None} == {"jump", "drift"}
    for stop in range(0, 65, 2):
        detector, resumed = Detector(Sensitivity(**options)), []  # type: ignore[arg-type]
        for i, value in enumerate(sequence):
            if i == stop:
                state = json.loads(json.dumps(detector.state_dict()))
                detector = Detector(Sensitivity(**options))  # type: ignore[arg-type]
                detector.load_state_dict(state)
            resumed.append(detector.update(value, 0.01))
        assert resumed == expected


def test_cumulative_sums_find_drifts() -> None:
    cusum = Cusum(slack=1.0)
    for _ in range(3):
        cusum.append(Deviation(0.3, 3.0, 0.0))
    assert cusum.sums == [6.0, 0.0]
    assert cusum.after(Deviation(-9.0, 100.0, 0.0)) == [1.0, 3.0]  # a single error counts as at most 4
    assert cusum.sums == [6.0, 0.0]


def test_a_drift_is_detected_only_if_asked_for() -> None:
    rng = random.Random(7)
    sequence = [0.06 * max(0, i - 19) + rng.gauss(0, 0.05) for i in range(60)]
    options = {"threshold": 60.0, "confirmed": 60.0, "matters": 0.3, "drift_slack": 0.2}
    assert changes(sequence, **options, drift_threshold=math.inf) == []
    assert {kind for _, kind in changes(sequence, **options, drift_threshold=3.0)} == {"drift"}

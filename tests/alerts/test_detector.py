"""The engine of change detection: several features, candidates, causes, drifts; and one feature as a special case."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping

import pytest

from curvmon import ChangeDetector
from curvmon.alerts.detector import Cusum, Detector, DetectorSettings, Thresholds
from curvmon.alerts.features import Feature
from curvmon.alerts.forecast import Deviation

THRESHOLDS: Mapping[str, Thresholds] = {"a": Thresholds(6.0, 3.0, 0.3), "b": Thresholds(6.0, 3.0, 0.3)}
PLAIN = DetectorSettings(threshold_factor=1.0, settled=6, rejected_factor=0.0)
"""thresholds as stated"""


def detector(settings: DetectorSettings = PLAIN) -> Detector:
    return Detector(settings, THRESHOLDS.__getitem__)


def features(rng: random.Random, shift: Mapping[str, float] | None = None, members: int = 4) -> list[Feature]:
    """Two families of features with noise 0.05 around 0; `shift` moves single ones."""
    names = [(family, f"{family}{i}") for family in THRESHOLDS for i in range(members)]
    return [Feature(family, name, (shift or {}).get(name, 0.0) + rng.gauss(0, 0.05), 0.01) for family, name in names]


def changes(shift: Mapping[str, float], at: int = 15, points: int = 30, engine: Detector | None = None) -> list[int]:
    engine, rng = engine or detector(), random.Random(0)
    updates = [engine.update(features(rng, shift if i >= at else None)) for i in range(points)]
    return [i for i, change in enumerate(updates) if change is not None]


def test_one_event_is_one_change() -> None:
    assert changes({}) == []
    assert changes({"a0": 2.0}) == [15]
    assert changes({"a0": 2.0, "a1": -2.0, "b3": 1.0}) == [15]


def test_changes_that_do_not_matter_are_none() -> None:
    """A shift of 0.2 is clear with this noise, but below `min_change`."""
    quiet = [[Feature("a", "", 0.2 * (i >= 15), 0.0)] for i in range(30)]
    engine = detector()
    assert not any(engine.update(now) for now in quiet)


def test_no_decision_during_warm_up() -> None:
    assert changes({"a0": 2.0}, at=5) == []
    assert changes({"a0": 2.0}, at=6) == [6]


def test_a_candidate_is_confirmed_by_a_measurement_that_deviates_alike() -> None:
    for later, count in ((0.5, 1), (0.0, 0), (-0.5, 0)):
        rng, engine = (
            random.Random(1),
            Detector(
                DetectorSettings(threshold_factor=1.0, settled=6, rejected_factor=0.0, confirmed=0.3),
                lambda family: Thresholds(60.0, 9.0, 0.3),
            ),
        )
        for _ in range(15):
            engine.update(features(rng, members=1))
        assert engine.update(features(rng, {"a0": 0.5}, members=1)) is None
        assert engine.state_dict()["candidate"] is not None
        change = engine.update(features(rng, {"a0": later}, members=1))
        assert (change is not None) == bool(count)
        assert change is None or (change.kind, change.age) == ("jump", 2)


def test_a_cause_lowers_the_threshold() -> None:
    for has_cause in (False, True):
        rng, engine = random.Random(2), Detector(PLAIN, lambda family: Thresholds(50.0, 50.0, 0.3))
        for _ in range(15):
            engine.update(features(rng))
        assert (engine.update(features(rng, {"a0": 1.5}), has_cause=has_cause) is not None) == has_cause


@pytest.mark.parametrize(("size", "gap", "detected"), [(0.6, 1, True), (0.6, 8, False), (4.0, 8, True)])
def test_a_change_after_a_gap_needs_more_evidence(size: float, gap: int, detected: bool) -> None:
    """The uncertainty of a forecast grows with the distance from the last measurement."""
    rng, engine = random.Random(3), detector()
    for i in range(15):
        engine.update(features(rng), at=10.0 * i)
    change = engine.update(features(rng, {"a0": size}), at=140.0 + 10.0 * gap)
    assert (change is not None) == detected


def test_measurements_that_are_always_far_apart_have_no_gap() -> None:
    rng, engine = random.Random(3), detector()
    for i in range(15):
        engine.update(features(rng), at=80.0 * i)
    assert engine.update(features(rng, {"a0": 0.6}), at=80.0 * 15) is not None


@pytest.mark.parametrize("now", [True, False])
def test_an_event_that_another_detector_has_seen_is_not_detected_again(now: bool) -> None:
    rng, engine = random.Random(3), detector()
    for _ in range(15):
        engine.update(features(rng))
    shift = {"a0": 4.0}
    engine.restart(features(rng, shift) if now else None)
    assert not any(engine.update(features(rng, shift)) for _ in range(10))


def test_rejected_candidates_raise_the_threshold() -> None:
    """A feature that often seems to jump needs more evidence than one that never did."""
    rng = random.Random(4)
    bursts = [[Feature("a", "", rng.gauss(0, 0.05) + 0.9 * (i in (14, 18)), 0.0)] for i in range(22)]
    jump = [Feature("a", "", 1.0, 0.0)]
    thresholds = Thresholds(25.0, 25.0, 0.3)
    engines = [
        Detector(DetectorSettings(threshold_factor=1.0, settled=6, rejected_factor=factor), lambda family: thresholds)
        for factor in (0.0, 10.0)
    ]
    significances = []
    for engine in engines:
        for now in bursts:
            engine.update(now)
        significances.append(engine.significance(engine._deviations(jump)))
    assert significances[1] < significances[0]


def test_the_past_can_be_cleared() -> None:
    engine, rng = detector(), random.Random(5)
    for _ in range(15):
        engine.update(features(rng))
    engine.clear()
    state = engine.state_dict()
    assert state["forecasts"] == [] and state["count"] == 0


def test_a_detector_survives_a_checkpoint_at_any_measurement() -> None:
    settings = DetectorSettings(threshold_factor=1.0, settled=8, drift_threshold=5.0, drift_slack=0.5)
    shift = {"a0": 0.45, "b1": 0.4}
    whole = detector(settings)
    rng = random.Random(6)
    stream = [features(rng, shift if i >= 15 else None) for i in range(40)]
    expected = [whole.update(now, at=7.0 * i) for i, now in enumerate(stream)]
    assert any(expected)
    for stop in range(0, 40, 3):
        engine, resumed = detector(settings), []
        for i, now in enumerate(stream):
            if i == stop:
                state = json.loads(json.dumps(engine.state_dict()))
                engine = detector(settings)
                engine.load_state_dict(state)
            resumed.append(engine.update(now, at=7.0 * i))
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
    values, level = [], 0.0
    for i in range(60):
        level += 0.06 * (i >= 20)
        values.append([Feature("a", "", level + rng.gauss(0, 0.05), 0.0)])
    kinds = []
    for threshold in (math.inf, 3.0):
        settings = DetectorSettings(threshold_factor=10.0, drift_threshold=threshold, drift_slack=0.2)
        engine = detector(settings)
        kinds.append({change.kind for now in values if (change := engine.update(now)) is not None})
    assert kinds == [set(), {"drift"}]


@pytest.mark.parametrize("seed", range(5))
def test_change_detector_is_the_detector_on_one_feature(seed: int) -> None:
    rng = random.Random(seed)
    values = [rng.gauss(0, 0.1) + 1.0 * (i >= 20) + 0.7 * (i >= 35) for i in range(50)]
    public = ChangeDetector("linear")
    s = public.sensitivity
    engine = Detector(
        DetectorSettings(
            threshold_factor=1.0,
            confirmed=s.confirmed / s.threshold,
            settled=6,
            rejected_factor=0.0,
            drift_threshold=s.drift_threshold,
            drift_slack=s.drift_slack,
        ),
        lambda family: Thresholds(s.threshold, s.threshold, s.matters),
    )
    alerts = [public.update(value, 0.03) for value in values]
    detected = [engine.update([Feature("value", "", value, 0.03)]) for value in values]
    assert [alert and (alert.kind, alert.score) for alert in alerts] == [
        change and (change.kind, change.deviations[0].deviation.score) for change in detected
    ]
    assert any(alerts)

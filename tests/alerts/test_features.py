"""From a snapshot to features."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import torch

from curvmon.alerts.features import Feature, features_of
from curvmon.metrics.registry import pair_metrics
from curvmon.records import Snapshot
from tests.helpers.synthetic_snapshots import NODES, snapshot


def members(features: list[Feature], family: str) -> dict[str, float]:
    return {f.where: f.value for f in features if f.family == family}


def test_the_resonances_are_level_profile_and_contrast() -> None:
    now = snapshot(0, random.Random(0))
    assert now.measurement is not None
    logs = now.measurement.resonance.diagonal().log().tolist()
    features = features_of(now)
    (level,) = members(features, "level").values()
    profile, contrast = members(features, "profile"), members(features, "contrast")
    assert math.isclose(level, sum(logs) / len(logs))
    assert all(math.isclose(profile[name] + level, value) for name, value in zip(NODES, logs))
    assert list(contrast) == list(NODES[1:-1])
    assert math.isclose(contrast["a"], logs[1] - (logs[0] + logs[2]) / 2)


def test_the_level_does_not_move_the_profile() -> None:
    now = snapshot(0, random.Random(0))
    assert now.measurement is not None
    errors = {**now.measurement.stderr, "resonance": 9 * now.measurement.stderr["resonance"]}
    scaled = replace(now.measurement, resonance=9 * now.measurement.resonance, stderr=errors)
    before, after = features_of(now), features_of(replace(now, measurement=scaled))
    for a, b in zip(before, after, strict=True):
        assert math.isclose(b.value - a.value, math.log(9) if a.family == "level" else 0.0, abs_tol=1e-12)
        assert math.isclose(a.stderr, b.stderr)


def test_pair_metrics_follow_their_table() -> None:
    now = snapshot(0, random.Random(0))
    assert now.measurement is not None
    n, features = len(NODES), features_of(now)
    for spec in pair_metrics():
        if spec.alert is None or not spec.alert.per_pair:
            continue
        metric, offset, diagonal = spec.name, spec.alert.offset, not spec.unit_diagonal
        values = members(features, metric)
        assert len(values) == n * (n - 1) // 2 + (n if diagonal else 0)
        assert math.isclose(values["stem--b"], math.log(getattr(now.measurement, metric)[0, 2].item() + offset))


def test_undefined_values_and_zeros_are_missing() -> None:
    now = snapshot(0, random.Random(0))
    assert now.measurement is not None
    resonance, coupling = now.measurement.resonance.clone(), now.measurement.coupling.clone()
    resonance[1, 1], coupling[0, 2], coupling[0, 3] = 0.0, math.nan, 0.0
    features = features_of(replace(now, measurement=replace(now.measurement, resonance=resonance, coupling=coupling)))
    # the level of the other nodes is a feature of its own
    assert list(members(features, "level")) == ["stem,b,c,d"] and "a" not in members(features, "profile")
    assert not {"stem--b", "stem--c"} & members(features, "coupling").keys()
    assert features_of(Snapshot(step=0, epoch=0)) == []
    assert all(math.isfinite(f.value) and math.isfinite(f.stderr) for f in features)


def test_an_infinite_standard_error_counts_as_the_value_itself() -> None:
    now = snapshot(0, random.Random(0))
    assert now.measurement is not None
    errors = {**now.measurement.stderr, "coupling": torch.full_like(now.measurement.coupling, math.inf)}
    features = features_of(replace(now, measurement=replace(now.measurement, stderr=errors)))
    assert {f.stderr for f in features if f.family == "coupling"} == {1.0}

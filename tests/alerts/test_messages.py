"""What an alert says."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch

from curvmon import Alert
from curvmon.alerts.context import Cause
from curvmon.alerts.detector import Change
from curvmon.alerts.features import FeatureDeviation
from curvmon.alerts.forecast import Deviation
from curvmon.alerts.messages import ReportedChange, _mean, alert_of_change
from tests.helpers.synthetic_snapshots import snapshot

RATE = Cause("learning rate", "", "x 20", 9.0, True)
WEIGHT = Cause("weights", "b.weight", "x 0.5", 9.0, True)
LOSS = Cause("training loss", "", "x 3", 9.0, True)
VARIANCE = Cause("statistics", "b.running_var", "x 2", 8.0, True)
MEAN = Cause("statistics", "b.running_mean", "x 2", 7.0, True)


def alert(*causes: Cause) -> Alert:
    """The resonance of b tripled."""
    rng = random.Random(0)
    before, now = snapshot(0, rng), snapshot(1, rng, {"b": 3.0})
    deviations = [
        FeatureDeviation("profile", name, Deviation(size, 10 * size, 0.0))
        for name, size in [("stem", 0.1), ("a", 0.1), ("b", 1.0), ("c", 0.1), ("d", 0.1)]
    ]
    return alert_of_change(Change("jump", deviations, 1), {"profile": 2.0}, causes, before, now)


def test_the_message_says_what_where_why_and_what_to_check() -> None:
    raised = alert(WEIGHT)
    assert raised.headline.startswith("Resonance ") and raised.headline.endswith(", step 1")
    assert "at the same time: norm of b.weight x 0.5" in raised.evidence
    assert raised.suggestion == "Check what changed the weights of b before step 1."
    assert raised.message.splitlines() == [
        raised.headline,
        *(f"  - {point}" for point in raised.evidence),
        f"  {raised.suggestion}",
    ]


@pytest.mark.parametrize(
    ("causes", "suggestion"),
    [
        ((), "Check what changed in b"),
        ((RATE,), "Check the learning rate"),
        ((LOSS,), "Check the data and the labels"),
        ((VARIANCE,), "Check the running statistics (batch norm)"),
        (
            (Cause("operations", "b", "1 fewer Add", math.inf, True),),
            "Check what changed in the forward pass before step 1",
        ),
        ((Cause("learning rate", "", "x 0.1", 9.0, False),), "Check what changed in b"),
    ],
)
def test_the_suggestion_follows_the_cause(causes: tuple[Cause, ...], suggestion: str) -> None:
    assert suggestion in alert(*causes).message


def test_three_causes_are_listed_and_the_others_counted() -> None:
    assert "at the same time: learning rate x 20, training loss x 3, norm of b.weight x 0.5 and 2 more" in (
        alert(VARIANCE, MEAN, WEIGHT, LOSS, RATE).message
    )


def test_a_learning_rate_acts_throughout_the_network() -> None:
    assert "throughout the network" in alert(RATE).message and alert(RATE).where == "all pairs"


def test_visible_changes() -> None:
    change = ReportedChange("coupling", "a--b", 1.0, 1.1)
    assert not change.is_visible
    assert change._replace(after=1.3).is_visible and change._replace(after=0.5).is_visible
    assert change._replace(before=math.nan).is_visible


def test_a_value_that_was_not_measured_before_is_replaced_by_its_forecast() -> None:
    rng = random.Random(0)
    now = snapshot(1, rng)
    deviations = [FeatureDeviation("loss", "", Deviation(math.log(2), 12.0, 0.0))]
    raised = alert_of_change(Change("drift", deviations, 1), {"loss": 2.0}, (), None, replace(now))
    assert raised.kind == "drift"
    assert raised.after == now.loss and raised.before == pytest.approx(now.loss / 2)


def test_mean_over_all_pairs_is_geometric_on_a_logarithmic_scale() -> None:
    """Zeros do not count, unless there is nothing else."""
    now = snapshot(0, random.Random(0))
    assert now.measurement is not None
    gap = torch.tensor([1.0, 100.0, 1.0, 100.0, 0.0]).double().expand(5, 5)
    for metric, expected in (("gn_gap", 10.0), ("stable_rank", 40.4)):
        changed = replace(now, measurement=replace(now.measurement, **{metric: gap}))
        assert _mean(changed, metric) == pytest.approx(expected)
    assert _mean(replace(now, measurement=replace(now.measurement, gn_gap=0 * gap)), "gn_gap") == 0

"""What an alert says."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from curvmon import Alert
from curvmon.alerts.context import Cause
from curvmon.alerts.features import FeatureDeviation
from curvmon.alerts.forecast import Deviation
from curvmon.alerts.messages import ReportedChange, alert_of_change
from tests.helpers.synthetic_snapshots import snapshot

RATE = Cause("learning rate x 20", "learning rate", 9.0, True)
WEIGHT = Cause("norm of b.weight x 0.5", "norm of b.weight", 9.0, True)
LOSS = Cause("training loss x 3", "training loss", 9.0, True)
VARIANCE = Cause("statistics in b.running_var x 2", "statistics in b.running_var", 8.0, True)
MEAN = Cause("statistics in b.running_mean x 2", "statistics in b.running_mean", 7.0, True)


def alert(*causes: Cause) -> Alert:
    """The resonance of b tripled."""
    rng = random.Random(0)
    before, now = snapshot(0, rng), snapshot(1, rng, {"b": 3.0})
    deviations = [
        FeatureDeviation("profile", name, Deviation(size, 10 * size, 0.0))
        for name, size in [("stem", 0.1), ("a", 0.1), ("b", 1.0), ("c", 0.1), ("d", 0.1)]
    ]
    return alert_of_change(deviations, {"profile": 2.0}, causes, before, now)


def test_the_message_says_what_where_why_and_what_to_check() -> None:
    message = alert(WEIGHT).message
    assert message.startswith("resonance ") and " rose from " in message
    assert "at b (also " in message
    assert "at the same time: norm of b.weight x 0.5" in message
    assert message.endswith("check what happened to the weights of b before step 1")


@pytest.mark.parametrize(
    ("causes", "suggestion"),
    [
        ((), "check what changed in b"),
        ((RATE,), "check the learning rate"),
        ((LOSS,), "check the data and their labels"),
        ((VARIANCE,), "check running statistics (batch norm)"),
        (
            (Cause("operations of b: 1 fewer Add", "operations of b", math.inf, True),),
            "check what the network computes",
        ),
        ((Cause("learning rate x 0.1", "learning rate", 9.0, False),), "check what changed in b"),
    ],
)
def test_the_suggestion_follows_the_cause(causes: tuple[Cause, ...], suggestion: str) -> None:
    assert suggestion in alert(*causes).message


def test_three_causes_are_listed_and_the_others_counted() -> None:
    assert f"at the same time: {RATE.text}, {LOSS.text}, {WEIGHT.text} and 2 more" in (
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
    raised = alert_of_change(deviations, {"loss": 2.0}, (), None, replace(now))
    assert raised.after == now.loss and raised.before == pytest.approx(now.loss / 2)

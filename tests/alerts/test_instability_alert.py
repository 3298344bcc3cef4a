"""What alerts of pulses say, and which of them are raised."""

from __future__ import annotations

import math

import pytest

from curvmon.alerts.instability import Instability
from curvmon.alerts.instability_alert import alert_of_instability
from curvmon.alerts.manager import AlertManager
from curvmon.alerts.rules import AlertRules
from curvmon.alerts.wording import MAX_HEADLINE
from curvmon.records import Alert, Snapshot, VitalSigns

WARNING = Instability("approaching_instability", 1.5, 0.3, 0.02, 0.004, "step_ratio", 5.0)
NOTICE = Instability("rate_headroom", 0.004, 0.004, 0.001, 0.004)


@pytest.mark.parametrize(
    ("event", "headline", "evidence"),
    [
        (WARNING, "step ratio 5 times its usual value, step 120", "step ratio: 0.3 → 1.5"),
        (WARNING._replace(cause="learning_rate"), "learning rate 5 times its usual value", "0.004 → 0.02"),
        (WARNING._replace(cause="gain"), "gain of a step 5 times its usual value", "at no smaller loss"),
        (WARNING._replace(usual=math.nan, factor=math.nan), "step ratio 1.5, step 120", "step ratio: 1.5"),
        (WARNING._replace(step_ratio=math.inf, factor=math.inf), "step ratio inf", "steps go uphill on their own"),
        (WARNING._replace(step_ratio=-0.1, cause="gain"), "gain of a step", "is not positive"),
    ],
)
def test_warnings(event: Instability, headline: str, evidence: str) -> None:
    alert = alert_of_instability(event, 120, 3)
    assert alert.headline.startswith("Approaching instability: ") and headline in alert.headline
    assert any(evidence in line for line in alert.evidence) and len(alert.headline) <= MAX_HEADLINE
    assert alert.suggestion == "Lower the learning rate to about 0.004, or use a longer warm-up."
    assert (alert.level, alert.step, alert.epoch, alert.kind) == ("warning", 120, 3, "approaching_instability")
    assert Alert.from_dict(alert.to_dict()).headline == alert.headline


def test_the_critical_learning_rate_is_evidence() -> None:
    alert = alert_of_instability(WARNING, 120, 3)
    assert alert.evidence[-1].endswith("learning rate 0.02, critical learning rate 0.0133")


@pytest.mark.parametrize(("measured", "shown"), [(0.005, "0.005"), (0.5, "0.0133"), (math.nan, "0.0133")])
def test_the_smaller_critical_learning_rate_is_evidence(measured: float, shown: str) -> None:
    """Learning rate / step ratio, or the measured one."""
    alert = alert_of_instability(WARNING._replace(critical_lr=measured), 120, 3)
    assert alert.evidence[-1].endswith(f"critical learning rate {shown}")


def test_headroom_is_a_notice() -> None:
    notice = alert_of_instability(NOTICE, 500, 9)
    assert notice.level == "info" and notice.headline == "The learning rate could be larger: step ratio 0.004, step 500"
    assert "0.004" in notice.suggestion


def snapshot(step: int, loss: float) -> Snapshot:
    return Snapshot(step, 0, vitals=VitalSigns(loss=loss))


def test_an_event_is_reported_once() -> None:
    """What the last validation has raised is not raised again by a pulse until the next validation."""
    manager = AlertManager()
    for step in range(5):
        assert manager.update(snapshot(100 * step, 1.0)) == []
    (exploded,) = manager.update(snapshot(500, 50.0))
    assert manager.unstable(WARNING, 520, 5) == []
    (notice,) = manager.unstable(NOTICE, 530, 5)
    manager.update(snapshot(600, 50.0))
    (alert,) = manager.unstable(WARNING, 620, 6)
    assert manager.unstable(WARNING, 640, 6) == []
    assert manager.alerts == [exploded, alert] and manager.notices == [notice]


@pytest.mark.parametrize("rules", [False, AlertRules(instability=False)])
def test_they_can_be_switched_off(rules: bool | AlertRules) -> None:
    assert AlertManager(rules).unstable(WARNING, 1, 0) == []


def test_state() -> None:
    manager, other = AlertManager(), AlertManager()
    for step in range(5):
        manager.update(snapshot(100 * step, 1.0))
    manager.update(snapshot(500, 50.0))
    other.load_state_dict(manager.state_dict())
    assert other.unstable(WARNING, 520, 5) == [] and len(other.alerts) == 1

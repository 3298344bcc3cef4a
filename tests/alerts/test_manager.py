"""The owner of alerts, on synthetic measurements with changes of known size."""

from __future__ import annotations

import copy
import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from curvmon import AlertRules
from curvmon.alerts.context import Context, Source
from curvmon.alerts.detector import DetectorSettings
from curvmon.alerts.instability import Instability
from curvmon.alerts.manager import AlertManager
from curvmon.records import Alert, Snapshot, VitalSigns
from tests.helpers.synthetic_snapshots import NODES, snapshot


def run(seed: int, points: int, **event: object) -> list[tuple[int, object]]:
    rng, manager, past, raised = random.Random(seed), AlertManager(), [], []
    for i in range(points):
        now = snapshot(i, rng, **(event if i >= 15 else {}))  # type: ignore[arg-type]
        raised += [(i, alert) for alert in manager.update(now, past) if alert.level != "info"]
        past.append(now)
    return raised


def test_quiet_runs_raise_nothing() -> None:
    assert sum(len(run(seed, 40)) for seed in range(20)) == 0


def test_one_layer_that_changes_is_named_once() -> None:
    for seed in range(8):
        ((at, alert),) = run(seed, 30, factors={"b": 3.0})
        assert at == 15
        assert alert.metric == "resonance" and "b" in alert.where.split("--")  # type: ignore[attr-defined]
        assert alert.headline == "Curvature (resonance) rose at a → b, step 15"  # type: ignore[attr-defined]


def test_an_unclear_change_waits_for_the_next_and_is_compared_with_what_was_before() -> None:
    for seed in (2, 3, 4):
        rng = random.Random(seed)
        values = [snapshot(i, rng, {"b": 1.35} if i >= 15 else None) for i in range(17)]
        ((at, alert),) = run(seed, 30, factors={"b": 1.35})
        assert at == 16 and alert.where == "a--b"  # type: ignore[attr-defined]
        before, after = (values[i].measurement.resonance[1, 2].item() for i in (14, 16))  # type: ignore[union-attr]
        assert (alert.before, alert.after) == (before, after)  # type: ignore[attr-defined]


def test_pairs_across_a_cut_are_one_alert() -> None:
    for seed in range(8):
        ((at, alert),) = run(seed, 30, cut="c")
        assert at == 15 and alert.metric == "coupling"  # type: ignore[attr-defined]
        assert alert.before > 0.6 > alert.after  # type: ignore[attr-defined]


def test_a_manager_survives_a_checkpoint() -> None:
    """Wherever a run is interrupted, the rest of it raises the same."""
    whole = [i for i, _ in run(3, 30, factors={"b": 3.0})]
    for stop in (5, 14, 15, 16, 20):
        rng, manager, past, raised = random.Random(3), AlertManager(), [], []
        for i in range(30):
            if i == stop:
                state = manager.state_dict()
                manager = AlertManager()
                manager.load_state_dict(state)
            now = snapshot(i, rng, {"b": 3.0} if i >= 15 else None)
            raised += [i for alert in manager.update(now, past) if alert.level != "info"]
            past.append(now)
        assert raised == whole


def test_causes_are_named() -> None:
    rng, manager, past, messages = random.Random(0), AlertManager(), [], []
    for i in range(20):
        now = snapshot(i, rng, {"b": 3.0} if i >= 15 else None)
        values: dict[Source, float] = {
            ("learning rate", ""): 0.1 if i < 15 else 2.0,
            ("weights", "a.weight"): 1.0 + 0.001 * i,
        }
        messages += [alert.message for alert in manager.update(now, past, Context(values))]
        past.append(now)
    (message,) = messages
    assert message.startswith("Learning rate x 20: curvature (resonance) rose throughout the network, step 15")
    assert "learning rate 0.1 → 2 (x 20)" in message and "norm of" not in message


def test_features_of_other_nodes_restart() -> None:
    rng, manager = random.Random(0), AlertManager()
    for i in range(40):
        now = snapshot(i, rng, dict.fromkeys(NODES, 50.0 if i >= 20 else 1.0))
        assert now.measurement is not None
        names = tuple(f"{name}{i >= 20}" for name in NODES)
        alerts = manager.update(replace(now, measurement=replace(now.measurement, nodes=names)))
        assert not [alert for alert in alerts if alert.level != "info"]


def test_a_missing_value_before_is_replaced_by_the_forecast() -> None:
    """The snapshot before has other nodes, so no value for the pair: the direction is right all the same."""
    rng, manager, raised = random.Random(1), AlertManager(), []
    for i in range(20):
        now = snapshot(i, rng, {"b": 3.0} if i >= 15 else None)
        raised += [alert for alert in manager.update(now, [Snapshot(step=i, epoch=i)]) if alert.level != "info"]
    (alert,) = raised
    assert 0 < alert.before < alert.after and "expected " in alert.evidence[0]


def test_a_drift_is_reported_as_a_drift() -> None:
    manager, past, raised = AlertManager(settings=DetectorSettings(drift_threshold=8.0, threshold_factor=50.0)), [], []
    rng = random.Random(0)
    for i in range(40):
        now = snapshot(i, rng, {"b": math.exp(0.12 * max(0, i - 15))})
        raised += [alert for alert in manager.update(now, past) if alert.level != "info"]
        past.append(now)
    assert raised and {alert.kind for alert in raised} == {"drift"}


def test_sensitivity_is_a_factor() -> None:
    def count(sensitivity: float) -> int:
        rng, manager, raised = random.Random(2), AlertManager(AlertRules(sensitivity=sensitivity)), 0
        for i in range(20):
            alerts = manager.update(snapshot(i, rng, {"b": 1.4} if i >= 15 else None))
            raised += sum(alert.level != "info" for alert in alerts)
        return raised

    assert count(0.4) == 0 and count(2.0) == 1


@pytest.mark.parametrize(("factor", "gap", "expected"), [(3.0, 0, 1), (3.0, 30, 0), (1000.0, 5, 1)])
def test_a_change_after_a_gap_has_to_be_larger(factor: float, gap: int, expected: int) -> None:
    """Measurements were skipped before the level rose: it may have risen gradually."""
    rng, manager, past, raised = random.Random(0), AlertManager(), [], 0
    for i in range(20):
        now = replace(snapshot(i, rng, {"b": factor} if i >= 15 else None), step=i + (gap if i >= 15 else 0))
        raised += sum(alert.level != "info" for alert in manager.update(now, past))
        past.append(now)
    assert raised == expected


@pytest.mark.parametrize("loss", [1.0, 9.0])
def test_a_dead_network_and_its_loss_are_one_alert(loss: float) -> None:
    rng, manager, past, raised = random.Random(3), AlertManager(), [], []
    for i in range(24):
        now = snapshot(i, rng)
        assert now.measurement is not None
        if i >= 15:
            dead = torch.full_like(now.measurement.coupling, math.nan)
            zero = torch.zeros_like(dead)
            now = replace(now, measurement=replace(now.measurement, coupling=dead, resonance=zero, loss=loss))
        raised += [(i, alert) for alert in manager.update(now, past) if alert.level != "info"]
        past.append(now)
    ((step, alert),) = raised
    assert (step, alert.kind) == (15, "dead_network" if loss == 1.0 else "loss_explosion")
    couplings = [point.startswith("couplings between layers: none is defined") for point in alert.evidence]
    assert couplings.index(True) == (0 if loss == 1.0 else 1)


def test_a_loss_that_exploded_leads_where_the_network_is_dead_too() -> None:
    """At the third validation, when no detector has enough past: the learning rate was multiplied by 100."""
    rng, manager, past = random.Random(3), AlertManager(), []
    for i, (loss, rate) in enumerate([(2.3, 0.02), (1.9, 0.02), (50072.0, 2.0)]):
        now = replace(snapshot(20 * i, rng), vitals=VitalSigns(learning_rate=rate))
        assert now.measurement is not None
        coupling = torch.full_like(now.measurement.coupling, math.nan) if i == 2 else now.measurement.coupling
        now = replace(now, measurement=replace(now.measurement, coupling=coupling, loss=loss))
        alerts = manager.update(now, past)
        past.append(now)
    (alert,) = alerts
    assert alert.headline == "The loss jumped from 1.9 to 50072, step 40"
    assert (alert.kind, alert.level, alert.metric) == ("loss_explosion", "error", "loss")
    assert alert.evidence == (
        "loss of the probe batch: 1.9 → 50072 (what the network had learned is lost)",
        "couplings between layers: none is defined any more, as where all ReLUs are off or all outputs saturate",
        "learning rate: 0.02 → 2",
    )
    assert alert.suggestion.endswith("with a lower learning rate.")


def test_a_learning_rate_that_grows_slowly_is_checked_first() -> None:
    """It never jumps, and the norm of a weight does, as a consequence."""
    rng, manager, past, raised = random.Random(0), AlertManager(), [], []
    for i in range(20):
        rate = 0.02 * 1.3 ** max(0, i - 10)
        now = replace(snapshot(i, rng, {"b": 3.0} if i >= 15 else None), vitals=VitalSigns(learning_rate=rate))
        values: dict[Source, float] = {("learning rate", ""): rate, ("weights", "a.weight"): 1.0 if i < 15 else 3.0}
        raised += manager.update(now, past, Context(values))
        past.append(now)
    (alert,) = raised
    assert alert.step == 15 and "a.weight" not in alert.headline
    assert "learning rate: 0.02 → 0.0743 within 5 validations" in alert.evidence
    assert "at the same time: norm of a.weight 1 → 3 (x 3)" in alert.evidence
    assert alert.suggestion == "Check the learning rate."


def test_the_manager_keeps_what_it_raised() -> None:
    rng, manager, raised = random.Random(3), AlertManager(), []
    for i in range(20):
        raised += manager.update(snapshot(i, rng, {"b": 3.0} if i >= 15 else None))
    raised += manager.diverged("the loss is nan", Snapshot(20, 20))
    notice = replace(raised[0], level="info")
    manager.record([notice])
    assert manager.alerts == raised and [alert.kind for alert in raised] == ["jump", "not_finite"]
    assert manager.notices == [notice] and manager.raised == [*raised, notice]
    resumed = AlertManager()
    resumed.load_state_dict(manager.state_dict())
    assert resumed.raised == manager.raised
    assert resumed.diverged("the loss is nan", Snapshot(21, 21)) == []  # already reported


@pytest.mark.parametrize("part", ["raised", "network", "layers", "rules", "context"])
def test_a_state_is_loaded_completely_or_not_at_all(part: str) -> None:
    rng, manager, fresh = random.Random(3), AlertManager(), AlertManager()
    for i in range(18):
        manager.update(snapshot(i, rng, {"b": 3.0} if i >= 15 else None))
    state: dict[str, Any] = {**manager.state_dict(), part: [3]}
    before = copy.deepcopy(fresh.state_dict())
    with pytest.raises(Exception):  # noqa: B017 - whatever an unreadable state raises
        fresh.load_state_dict(state)
    assert fresh.state_dict() == before


def test_a_disabled_manager_raises_nothing_and_keeps_what_a_checkpoint_holds() -> None:
    rng, manager, disabled = random.Random(3), AlertManager(), AlertManager(False)
    for i in range(18):
        manager.update(snapshot(i, rng, {"b": 3.0} if i >= 15 else None))
    disabled.load_state_dict(manager.state_dict())
    assert disabled.alerts == manager.alerts != []
    assert disabled.diverged("the loss is nan", Snapshot(18, 18)) == disabled.update(snapshot(18, rng)) == []
    # what the detector had seen is out of date by the time alerts are enabled again
    assert list(disabled.state_dict()) == ["raised"]


@pytest.mark.parametrize(("kind", "raises"), [("saddle", True), ("jump", False), ("loss_explosion", False)])
def test_a_warning_of_pulses_is_left_out_only_after_an_alert_of_the_same_event(kind: str, raises: bool) -> None:
    rng, manager = random.Random(0), AlertManager()
    manager.update(snapshot(0, rng))
    manager.record([Alert(kind, "loss", "loss", 1.0, 2.0, 9.0, 0, 0, "what happened")])
    event = Instability("approaching_instability", 0.8, 0.2, 0.1, 0.05, "step_ratio", 4.0)
    assert bool(manager.unstable(event, 7, 0)) is raises

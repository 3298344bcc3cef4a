"""The owner of alerts, on synthetic measurements with changes of known size."""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from curvmon import AlertRules
from curvmon.alerts.context import Context, Source
from curvmon.alerts.instability import Instability
from curvmon.alerts.manager import AlertManager
from curvmon.records import Alert, Snapshot, VitalSigns
from tests.helpers.observed_runs import alerts, context, raised_in
from tests.helpers.synthetic_snapshots import NODES, snapshot

TRAINING, VALIDATION, RATE = ("training loss", ""), ("metric", "val_loss"), ("learning rate", "")
ZEROED: Mapping[Source, float] = {
    ("zeros", "b.weight"): 0.5,
    ("weights", "b.weight"): 0.7,
    ("update", "b.weight"): 12.0,
    VALIDATION: 2.5,
}
TANH = {"a": {"Tanh": 1}}


def run(
    seed: int,
    points: int,
    manager: AlertManager | None = None,
    gap: int = 0,
    **event: Any,
) -> list[tuple[int, Alert]]:
    """Everything that is raised with no context; an event from the 15th point on, `gap` steps later than usual."""
    rng, manager, past, raised = random.Random(seed), manager or AlertManager(), list[Snapshot](), []
    for i in range(points):
        happened = i >= 15
        now = replace(snapshot(i, rng, **(event if happened else {})), step=i + gap * happened)
        raised += [(i, alert) for alert in manager.update(now, past)]
        past.append(now)
    return raised


def test_quiet_runs_without_a_context_raise_nothing() -> None:
    assert [raised for seed in range(20) for raised in run(seed, 40)] == []


@pytest.mark.parametrize("seed", range(8))
def test_one_layer_that_changes_is_one_alert(seed: int) -> None:
    ((at, alert),) = run(seed, 30, factors={"b": 4.0})
    assert (at, alert.kind, alert.level, alert.metric, alert.where) == (15, "jump", "warning", "resonance", "b")
    assert 0.7 < alert.before < 1.4 < 2 < alert.after
    assert alert.headline.startswith("Resonance of b relative to ") and alert.headline.endswith(", step 15")


def test_the_values_of_an_alert_are_those_before_and_after() -> None:
    factors = {RATE: 20.0, TRAINING: 3.0}
    ((at, alert),) = alerts(raised_in(0, changed=factors))
    rng = random.Random(0)
    contexts = []
    for i in range(16):
        snapshot(i, rng)  # which takes its share of the random numbers
        contexts.append(context(i, rng, changed=factors if i >= 15 else {}))
    losses = [each.values[TRAINING] for each in contexts[-2:]]
    assert (at, alert.metric) == (15, "training_loss") and [alert.before, alert.after] == pytest.approx(losses)


def test_an_event_of_several_pairs_is_one_alert_that_lists_them() -> None:
    ((at, alert),) = raised_in(0, factors=None, operations=TANH, cut="c")
    assert at == 15 and alert.causes[0][0] == "forward pass" and alert.places == (("a", 1.0),)
    assert "a--c" in alert.others and "stem--a" not in alert.others  # across the cut, and on one side of it
    assert "operations of a: 1 fewer Relu, 1 more Tanh" in alert.evidence


def test_a_manager_without_context_survives_a_checkpoint() -> None:
    """Wherever a run is interrupted, the rest of it raises the same."""
    whole = [(i, alert.headline) for i, alert in run(3, 30, factors={"b": 4.0})]
    for stop in (5, 14, 15, 16, 20):
        rng, manager, past, raised = random.Random(3), AlertManager(), list[Snapshot](), []
        for i in range(30):
            if i == stop:
                state = manager.state_dict()
                manager = AlertManager()
                manager.load_state_dict(state)
            now = snapshot(i, rng, {"b": 4.0} if i >= 15 else None)
            raised += [(i, alert.headline) for alert in manager.update(now, past)]
            past.append(now)
        assert raised == whole != []


def test_features_of_other_nodes_restart() -> None:
    rng, manager = random.Random(0), AlertManager()
    for i in range(40):
        now = snapshot(i, rng, dict.fromkeys(NODES, 50.0 if i >= 20 else 1.0))
        assert now.measurement is not None
        names = tuple(f"{name}{i >= 20}" for name in NODES)
        raised = manager.update(replace(now, measurement=replace(now.measurement, nodes=names)))
        assert not [alert for alert in raised if alert.level != "info"]


def test_other_nodes_do_not_hide_what_the_whole_network_shows() -> None:
    rng, manager, raised = random.Random(0), AlertManager(), []
    for i in range(18):
        now = snapshot(i, rng)
        assert now.measurement is not None
        names = tuple(f"{name}{i >= 15}" for name in NODES)
        now = replace(now, measurement=replace(now.measurement, nodes=names))
        raised += manager.update(now, (), context(i, rng, changed=ZEROED if i >= 15 else {}))
    assert [alert.step for alert in raised] == [15] and raised[0].causes[0][0] == "weights zeroed"


@pytest.mark.parametrize("seed", range(4))
def test_sensitivity_is_a_factor(seed: int) -> None:
    def count(sensitivity: float, factor: float) -> int:
        return len(run(seed, 20, AlertManager(AlertRules(sensitivity=sensitivity)), factors={"b": factor}))

    assert (count(0.1, 4.0), count(1.0, 4.0)) == (0, 1)
    assert (count(0.1, 2.5), count(4.0, 2.5)) == (0, 1)


@pytest.mark.parametrize(("factor", "gap", "expected"), [(4.0, 0, 1), (4.0, 30, 0), (1000.0, 5, 1)])
@pytest.mark.parametrize("seed", range(3))
def test_a_change_after_a_gap_has_to_be_larger(factor: float, gap: int, expected: int, seed: int) -> None:
    """Measurements were skipped before the level rose: it may have risen gradually."""
    assert len(run(seed, 20, gap=gap, factors={"b": factor})) == expected


@pytest.mark.parametrize(("factor", "levels"), [(1.0, []), (0.1, ["info"]), (20.0, ["warning"])])
@pytest.mark.parametrize("seed", range(3))
def test_a_learning_rate_explains_a_level_that_swings_by_itself(factor: float, levels: list[str], seed: int) -> None:
    """It triples, too little to be an event, unless the learning rate jumps. One that falls is a schedule."""
    rng, manager, raised = random.Random(seed), AlertManager(), []
    for i in range(20):
        now = snapshot(i, rng, dict.fromkeys(NODES, 3.0 if i >= 15 else 1.0))
        rate = Context({RATE: factor if i >= 15 else 1.0})
        raised += manager.update(now, (), rate)
    assert [alert.level for alert in raised] == levels
    assert all(alert.headline == f"Learning rate x {factor:g}, step 15" for alert in raised)


def test_a_learning_rate_that_keeps_growing_is_a_drift() -> None:
    rng, manager, past, raised = random.Random(0), AlertManager(), list[Snapshot](), []
    for i in range(30):
        rate = 1.2 ** max(0, i - 12)
        now = snapshot(i, rng)
        raised += manager.update(now, past, context(i, rng, changed={RATE: rate}))
        past.append(now)
    (alert,) = raised
    assert (alert.kind, alert.metric, alert.level) == ("drift", "rate", "warning") and alert.step <= 17
    assert alert.headline.startswith("Learning rate keeps growing: 0.1 → ") and alert.causes == (
        ("learning rate", 1.0),
    )


@pytest.mark.parametrize("loss", [1.0, 9.0])
def test_a_dead_network_and_its_loss_are_one_alert(loss: float) -> None:
    rng, manager, past, raised = random.Random(3), AlertManager(), [], []
    for i in range(24):
        now = snapshot(i, rng)
        assert now.measurement is not None
        if i >= 15:
            dead = torch.full_like(now.measurement.coupling, float("nan"))
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
        coupling = torch.full_like(now.measurement.coupling, float("nan")) if i == 2 else now.measurement.coupling
        now = replace(now, measurement=replace(now.measurement, coupling=coupling, loss=loss))
        raised = manager.update(now, past)
        past.append(now)
    (alert,) = raised
    assert alert.headline == "The loss jumped from 1.9 to 50072, step 40"
    assert (alert.kind, alert.level, alert.metric) == ("loss_explosion", "error", "loss")
    assert alert.evidence == (
        "loss of the probe batch: 1.9 → 50072 (what the network had learned is lost)",
        "couplings between layers: none is defined any more, as where all ReLUs are off or all outputs saturate",
        "learning rate: 0.02 → 2",
    )
    assert alert.suggestion.endswith("with a lower learning rate.")


def test_an_event_and_the_loss_that_it_made_explode_are_one_alert() -> None:
    rng, manager, past, raised = random.Random(0), AlertManager(), list[Snapshot](), []
    for i in range(20):
        now = snapshot(i, rng)
        assert now.measurement is not None
        now = replace(now, measurement=replace(now.measurement, loss=50.0 if i >= 15 else 1.0))
        raised += manager.update(now, past, context(i, rng, changed=ZEROED if i >= 15 else {}))
        past.append(now)
    (alert,) = raised
    assert (alert.step, alert.kind, alert.metric) == (15, "jump", "loss") and alert.causes[0][0] == "weights zeroed"
    assert alert.headline == "Weights of b zeroed: loss of the probe batch 1 → 50, step 15"


@pytest.mark.parametrize(
    ("event", "cause"),
    [
        ({"changed": {RATE: 20.0, ("learning rate over scheduled", ""): 20.0}}, "learning rate"),
        ({"changed": {("inputs rms", "batch[0]"): 50.0}}, "inputs"),
        ({"operations": TANH}, "forward pass"),
    ],
)
def test_what_is_not_finite_is_explained_by_an_exact_cause(event: dict[str, Any], cause: str) -> None:
    rng, manager = random.Random(0), AlertManager()
    for i in range(15):
        manager.update(snapshot(i, rng), (), context(i, rng))
    ruined = Snapshot(15, 15, vitals=VitalSigns(not_finite=("a.weight",)))
    assert manager.update(ruined, (), context(15, rng, **event)) == []
    (alert,) = manager.diverged("parameter 'a.weight' is not finite", ruined)
    assert alert.kind == "not_finite" and alert.causes[0][0] == cause and alert.causes[0][1] > 0.5


def test_what_is_not_finite_for_no_visible_reason_has_no_other_cause() -> None:
    rng, manager = random.Random(0), AlertManager()
    for i in range(15):
        manager.update(snapshot(i, rng), (), context(i, rng))
    ruined = Snapshot(15, 15, vitals=VitalSigns(not_finite=("a.weight",)))
    assert manager.update(ruined, (), context(15, rng)) == []
    assert [alert.causes for alert in manager.diverged("the loss is nan", ruined)] == [(("not finite", 1.0),)]


def test_the_manager_keeps_what_it_raised() -> None:
    manager = AlertManager()
    raised = [alert for _, alert in run(3, 20, manager, factors={"b": 4.0})]
    raised += manager.diverged("the loss is nan", Snapshot(20, 20))
    notice = replace(raised[0], level="info")
    manager.record([notice])
    assert manager.alerts == raised and [alert.kind for alert in raised] == ["jump", "not_finite"]
    assert manager.notices == [notice] and manager.raised == [*raised, notice]
    resumed = AlertManager()
    resumed.load_state_dict(manager.state_dict())
    assert resumed.raised == manager.raised
    assert resumed.diverged("the loss is nan", Snapshot(21, 21)) == []  # already reported


@pytest.mark.parametrize("part", ["raised", "events", "drifts", "settings", "rules", "context", "nodes"])
def test_a_state_is_loaded_completely_or_not_at_all(part: str) -> None:
    manager, fresh = AlertManager(), AlertManager()
    raised_in(3, points=18, manager=manager, factors={"b": 4.0})
    state: dict[str, Any] = {**manager.state_dict(), part: 3 if part == "nodes" else [3]}
    before = copy.deepcopy(fresh.state_dict())
    with pytest.raises(Exception):  # noqa: B017 - whatever an unreadable state raises
        fresh.load_state_dict(state)
    assert fresh.state_dict() == before


def test_a_disabled_manager_raises_nothing_and_keeps_what_a_checkpoint_holds() -> None:
    manager, disabled = AlertManager(), AlertManager(False)
    run(3, 18, manager, factors={"b": 4.0})
    disabled.load_state_dict(manager.state_dict())
    assert disabled.alerts == manager.alerts != []
    now = snapshot(18, random.Random(0))
    assert disabled.diverged("the loss is nan", Snapshot(18, 18)) == disabled.update(now) == []
    # what the detector had seen is out of date by the time alerts are enabled again
    assert list(disabled.state_dict()) == ["raised"]


def test_changes_can_be_switched_off() -> None:
    assert raised_in(0, manager=AlertManager(AlertRules(changes=False)), changed=ZEROED) == []
    assert len(raised_in(0, changed=ZEROED)) == 1


@pytest.mark.parametrize(("kind", "raises"), [("saddle", True), ("jump", False), ("loss_explosion", False)])
def test_a_warning_of_pulses_is_skipped_only_after_an_alert_of_the_same_event(kind: str, raises: bool) -> None:
    rng, manager = random.Random(0), AlertManager()
    manager.update(snapshot(0, rng))
    manager.record([Alert(kind, "loss", "loss", 1.0, 2.0, 9.0, 0, 0, "what happened")])
    event = Instability("approaching_instability", 0.8, 0.2, 0.1, 0.05, "step_ratio", 4.0)
    assert bool(manager.unstable(event, 7, 0)) is raises

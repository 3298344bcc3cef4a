"""Events in synthetic runs: detected at once, with their cause and place; what users do on purpose is a notice."""

from __future__ import annotations

import random
from typing import Any

import pytest

from curvmon.alerts.event_detector import HAND
from curvmon.alerts.manager import AlertManager
from tests.helpers.observed_runs import alerts, context, raised_in
from tests.helpers.synthetic_snapshots import snapshot

TRAINING, VALIDATION, RATE = ("training loss", ""), ("metric", "val_loss"), ("learning rate", "")
OVER, DIFFERENT, SIZE = ("learning rate over scheduled", ""), ("batches different", ""), ("batches size", "")
EVENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "learning rate": ("learning rate", {"changed": {RATE: 20.0, OVER: 20.0, TRAINING: 3.0, VALIDATION: 2.0}}),
    "class missing": ("class missing", {"changed": {("labels missing", "batch[1]"): 1.0}}),
    "repeated data": ("repeated data", {"changed": {DIFFERENT: 0.05, TRAINING: 0.3}}),
    "inputs": ("inputs", {"changed": {("inputs rms", "batch[0]"): 3.0, TRAINING: 2.0}}),
    "dropout": ("dropout", {"settings": {"a.p": "0.9"}, "changed": {TRAINING: 2.0}}),
    "forward pass": ("forward pass", {"operations": {"a": {"Tanh": 1}}}),
    "weights zeroed": (
        "weights zeroed",
        {
            "changed": {
                ("zeros", "b.weight"): 0.5,
                ("weights", "b.weight"): 0.7,
                ("update", "b.weight"): 12.0,
                VALIDATION: 2.5,
            }
        },
    ),
}
ON_PURPOSE: dict[str, tuple[str, dict[str, Any]]] = {
    "restart": ("schedule", {"changed": {RATE: 20.0, VALIDATION: 1.3}}),
    "decay": ("schedule", {"changed": {RATE: 0.1}}),
    "batch size": ("batch size", {"changed": {SIZE: 2.0}}),
    "unfreezing": ("trained parameters", {"settings": {"a.weight.requires_grad": "True"}}),
    "weight decay": ("weight decay setting", {"settings": {"optimizer 0, group 0, weight_decay": "0.1"}}),
}


@pytest.mark.parametrize("seed", range(12))
def test_quiet_runs_raise_nothing(seed: int) -> None:
    assert raised_in(seed, points=40) == []


@pytest.mark.parametrize("name", EVENTS)
@pytest.mark.parametrize("seed", range(3))
def test_events_are_reported_at_once_with_their_cause(name: str, seed: int) -> None:
    cause, event = EVENTS[name]
    ((at, alert),) = alerts(raised_in(seed, **event))
    assert at == 15 and alert.causes[0][0] == cause and alert.causes[0][1] > 0.5
    assert sum(share for _, share in alert.causes) <= 1 and alert.kind == "jump"


@pytest.mark.parametrize("name", ON_PURPOSE)
@pytest.mark.parametrize("seed", range(3))
def test_what_is_done_on_purpose_is_a_notice(name: str, seed: int) -> None:
    cause, event = ON_PURPOSE[name]
    raised = raised_in(seed, **event)
    assert not alerts(raised)
    at, notice = raised[0]
    assert (at, notice.level, notice.kind) == (15, "info", "intervention") and cause in HAND
    assert notice.causes[0][0] == cause and notice.suggestion.startswith("Nothing to do if")


def test_a_restart_that_ruins_the_run_is_an_alert() -> None:
    """The losses are higher than at the start of the run."""
    ((at, alert),) = alerts(raised_in(0, changed={RATE: 20.0, VALIDATION: 4.0, TRAINING: 4.0}))
    assert at == 15 and alert.headline.startswith("Learning rate x 20: ")


def test_the_place_of_an_event() -> None:
    _, zeroed = EVENTS["weights zeroed"]
    ((_, alert),) = alerts(raised_in(0, **zeroed))
    assert alert.places[0][0] == "b" and alert.headline.startswith("Weights of b zeroed: val_loss ")
    ((_, alert),) = alerts(raised_in(0, **EVENTS["forward pass"][1]))
    assert alert.places == (("a", 1.0),)
    ((_, alert),) = alerts(raised_in(0, **EVENTS["inputs"][1]))
    assert alert.places == ()


@pytest.mark.parametrize("seed", range(4))
def test_curvature_alone_is_reported_without_a_cause(seed: int) -> None:
    raised = raised_in(seed, factors={"b": 3.0})
    at, alert = raised[0]
    assert (
        at == 15
        and alert.level == "warning"
        and alert.causes[0][0] == "unclear"
        and alert.places[0][0] in ("a", "b", "c")
    )
    assert alert.suggestion.startswith("The cause is unclear")


def test_a_second_event_soon_after_the_first() -> None:
    """Inputs change at 15; at 18 a class vanishes as well."""

    def event(step: int) -> dict[str, Any]:
        changed = {("inputs rms", "batch[0]"): 3.0, TRAINING: 2.0} if step >= 15 else {}
        return {"changed": {**changed, **({("labels missing", "batch[1]"): 1.0} if step >= 18 else {})}}

    manager, raised = AlertManager(), []
    rng = random.Random(0)
    for i in range(22):
        raised += [(i, alert) for alert in manager.update(snapshot(i, rng), [], context(i, rng, **event(i)))]
    assert [(i, alert.causes[0][0]) for i, alert in alerts(raised)] == [(15, "inputs"), (18, "class missing")]


def test_what_follows_an_event_is_not_another_one() -> None:
    """The training loss shows damaged weights one measurement later."""
    manager, raised = AlertManager(), []
    rng, zeroed = random.Random(0), EVENTS["weights zeroed"][1]["changed"]
    for i in range(22):
        changed = {} if i < 15 else {("zeros", "b.weight"): 0.5, VALIDATION: 1.5} if i > 15 else zeroed
        changed = {**changed, **({TRAINING: 2.0} if i > 15 else {})}
        raised += [(i, alert) for alert in manager.update(snapshot(i, rng), [], context(i, rng, changed=changed))]
    assert [i for i, _ in alerts(raised)] == [15]


@pytest.mark.parametrize("stop", [5, 14, 15, 16, 20])
def test_a_checkpoint_changes_nothing(stop: int) -> None:
    def run(stop: int | None) -> list[tuple[int, str]]:
        rng, manager, raised = random.Random(1), AlertManager(), []
        for i in range(22):
            if i == stop:
                state = manager.state_dict()
                manager = AlertManager()
                manager.load_state_dict(state)
            changed = EVENTS["inputs"][1]["changed"] if i >= 15 else {}
            new = manager.update(
                snapshot(i, rng, {"b": 3.0} if i >= 18 else None), [], context(i, rng, changed=changed)
            )
            raised += [(i, alert.headline) for alert in new]
        return raised

    assert run(stop) == run(None) != []

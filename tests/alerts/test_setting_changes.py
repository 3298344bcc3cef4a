"""Settings that change once are reported with what they are; counters are not."""

from __future__ import annotations

import pytest

from curvmon.alerts.setting_changes import SettingChanges, kind_of

SETTINGS = {"drop.p": "0.1", "drop.class": "Dropout", "norm.class": "BatchNorm1d", "norm.momentum": "0.1"}


def test_a_change_is_reported_once() -> None:
    changes = SettingChanges()
    assert changes.update(SETTINGS) == {} == changes.update(SETTINGS)
    assert changes.update({**SETTINGS, "drop.p": "0.9"}) == {"drop.p": ("0.1", "0.9")}
    assert changes.update({**SETTINGS, "drop.p": "0.9"}) == {}


def test_what_appears_and_disappears() -> None:
    changes = SettingChanges()
    changes.update(SETTINGS)
    assert changes.update({"drop.p": "0.1", "drop.class": "Dropout", "new": "1"}) == {
        "norm.class": ("BatchNorm1d", ""),
        "norm.momentum": ("0.1", ""),
        "new": ("", "1"),
    }


def test_counters_are_no_settings() -> None:
    changes = SettingChanges()
    reported = [bool(changes.update({**SETTINGS, "steps": str(i)})) for i in range(8)]
    assert not any(reported[3:])


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("drop.p", "0.9", "dropout"),
        ("norm.momentum", "0.0", "statistics"),
        ("norm.class", "GroupNorm", "forward pass"),
        ("block.skip", "False", "forward pass"),
        ("stem.weight.requires_grad", "True", "trained parameters"),
        ("optimizer 0, group 1, parameters", "4", "trained parameters"),
        ("optimizer 0, group 0, weight_decay", "0.1", "weight decay setting"),
        ("optimizer 0, group 0, weight_decay", "-0.1", "negative weight decay"),
        ("optimizer 0, group 0, betas", "(0.5, 0.9)", "optimizer settings"),
    ],
)
def test_what_a_setting_is(name: str, value: str, kind: str) -> None:
    assert kind_of(name, {**SETTINGS, name: value}) == kind


def test_the_state() -> None:
    changes, again = SettingChanges(), SettingChanges()
    for i in range(4):
        changes.update({**SETTINGS, "steps": str(i)})
    again.load_state_dict(changes.state_dict())
    assert again.update({**SETTINGS, "steps": "9", "drop.p": "0.5"}) == {"drop.p": ("0.1", "0.5")}

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from curvmon import Alert, AlertRules, Measurement, Spectrum
from curvmon.alerts.rule_checker import RuleChecker
from curvmon.errors import InputError
from curvmon.records import Snapshot
from tests.helpers.synthetic_records import synthetic_spectrum

NODES = ("a", "b", "c")


def measurement(coupling: float = 0.5, rank: float = 3.0, gap: float = 0.1, error: float = 0.01) -> Measurement:
    n = len(NODES)
    full = torch.ones(n, n, dtype=torch.float64)
    c = coupling * full
    c.fill_diagonal_(1.0)
    errors = {name: error * full for name in ("resonance", "coupling", "stable_rank", "gn_gap")}
    return Measurement(NODES, full, c, rank * full, gap * full, errors, full, full, loss=1.0, hvps=1, seconds=0.0)


def spectrum(ratio: float = 0.5, smallest: float = -0.1, loss: float = 1.0) -> Spectrum:
    one = torch.ones(1, dtype=torch.float64)
    return synthetic_spectrum(one, smallest=smallest, stability_limit=1.0, stability_ratio=ratio, loss=loss)


def kinds_raised(rules: AlertRules, *snapshots: Snapshot) -> list[list[str]]:
    checker = RuleChecker(rules)
    return [[alert.kind for alert in checker.update(snapshot)] for snapshot in snapshots]


def at(step: int, **parts: Any) -> Snapshot:
    return Snapshot(step=step, epoch=step, **parts)


BROKEN = {
    "edge_of_stability": dict(spectrum=spectrum(ratio=1.5)),
    "far_beyond_stability": dict(spectrum=spectrum(ratio=30.0)),
    "coupling_above": dict(measurement=measurement(coupling=1.2)),
    "saddle": dict(spectrum=spectrum(smallest=-0.8)),
    "gn_gap_above": dict(measurement=measurement(gap=3.0)),
}
FINE: dict[str, Any] = dict(measurement=measurement(), spectrum=spectrum())


@pytest.mark.parametrize("rule", BROKEN)
def test_a_rule_raises_one_alert_when_its_condition_has_lasted(rule: str) -> None:
    rules = AlertRules(gn_gap_above=2.0)
    raised = kinds_raised(rules, *(at(i, **BROKEN[rule]) for i in range(8)))
    # whether the loss stalls is known after three more measurements
    assert [i for i, kinds in enumerate(raised) if rule in kinds] == [5 if rule == "saddle" else 2]


@pytest.mark.parametrize("rule", BROKEN)
def test_a_rule_that_is_off_raises_nothing(rule: str) -> None:
    rules = AlertRules(**{"gn_gap_above": 2.0, rule: None})  # type: ignore[arg-type]
    assert not any(rule in kinds for kinds in kinds_raised(rules, *(at(i, **BROKEN[rule]) for i in range(8))))


def test_a_healthy_run_raises_nothing() -> None:
    assert not any(kinds_raised(AlertRules(gn_gap_above=2.0), *(at(i, **FINE) for i in range(10))))


def test_a_rule_raises_again_only_after_its_condition_has_ceased() -> None:
    broken, fine = BROKEN["coupling_above"], FINE
    pattern = [broken] * 4 + [fine] * 2 + [broken] * 4 + [fine] * 3 + [broken] * 4
    raised = kinds_raised(AlertRules(), *(at(i, **parts) for i, parts in enumerate(pattern)))
    assert [i for i, kinds in enumerate(raised) if "coupling_above" in kinds] == [2, 15]


@pytest.mark.parametrize(("usual", "later", "raised_at"), [(2.0, 22.0, [7]), (8.0, 22.0, []), (8.0, 26.0, [7])])
def test_far_beyond_stability_is_relative_to_what_is_usual(usual: float, later: float, raised_at: list[int]) -> None:
    """With Adam, good runs may be far beyond their limit all the time: 3 times the median is too much."""
    ratios = [usual] * 5 + [later] * 5
    raised = kinds_raised(AlertRules(), *(at(i, spectrum=spectrum(ratio)) for i, ratio in enumerate(ratios)))
    assert [i for i, kinds in enumerate(raised) if "far_beyond_stability" in kinds] == raised_at


def test_a_coupling_within_its_error_raises_nothing() -> None:
    assert not any(kinds_raised(AlertRules(), *(at(i, measurement=measurement(1.03, error=0.02)) for i in range(5))))


def test_a_saddle_needs_a_loss_that_stalls() -> None:
    falling = [at(i, spectrum=spectrum(smallest=-0.8, loss=0.9**i)) for i in range(8)]
    assert not any("saddle" in kinds for kinds in kinds_raised(AlertRules(), *falling))


def test_rank_collapse_needs_a_larger_rank_before() -> None:
    ones = [at(i, measurement=measurement(rank=1.001)) for i in range(6)]
    assert not any(kinds_raised(AlertRules(), *ones))
    raised = kinds_raised(AlertRules(), at(0, measurement=measurement(rank=5.0)), *ones)
    assert [i for i, kinds in enumerate(raised) if kinds == ["rank_collapse"]] == [3]


def test_values_that_are_not_finite_are_reported_once_until_they_are_finite_again() -> None:
    checker = RuleChecker(AlertRules())
    first = checker.diverged("the loss is nan", at(10))
    assert [alert.level for alert in first] == ["error"] and "the loss is nan" in first[0].message
    assert checker.diverged("the loss is nan", at(20)) == []
    checker.update(at(30, **FINE))
    assert len(checker.diverged("the loss is nan", at(40))) == 1
    assert RuleChecker(AlertRules(not_finite=False)).diverged("the loss is nan", at(10)) == []


def test_notices_have_level_info() -> None:
    checker = RuleChecker(AlertRules())
    raised: list[Alert] = [a for i in range(4) for a in checker.update(at(i, spectrum=spectrum(ratio=30.0)))]
    assert {alert.kind: alert.level for alert in raised} == {
        "edge_of_stability": "info",
        "far_beyond_stability": "warning",
    }
    assert all(math.isfinite(alert.score) for alert in raised)


@pytest.mark.parametrize(("ratios", "kind"), [([30.0] * 4, True), ([8.0] * 4 + [22.0] * 4, False)])
def test_the_checker_survives_a_checkpoint(ratios: list[float], kind: bool) -> None:
    """At any measurement; the ratios that are usual as well."""
    snapshots = [at(i, spectrum=spectrum(ratio)) for i, ratio in enumerate(ratios)]
    whole = kinds_raised(AlertRules(), *snapshots)
    assert any("far_beyond_stability" in kinds for kinds in whole) is kind
    for stop in range(len(snapshots)):
        first, second = RuleChecker(AlertRules()), RuleChecker(AlertRules())
        for snapshot in snapshots[:stop]:
            first.update(snapshot)
        second.load_state_dict(first.state_dict())
        assert [[a.kind for a in second.update(snapshot)] for snapshot in snapshots[stop:]] == whole[stop:]


def test_a_missing_value_does_not_end_a_condition() -> None:
    far = BROKEN["far_beyond_stability"]
    unknown: dict[str, Any] = dict(measurement=measurement())
    sparse = kinds_raised(AlertRules(), *(at(i, **(unknown if i % 3 == 2 else far)) for i in range(9)))
    assert [i for i, kinds in enumerate(sparse) if "far_beyond_stability" in kinds] == [3]
    lost = kinds_raised(AlertRules(), *(at(i, **(unknown if 4 <= i <= 6 else far)) for i in range(12)))
    assert [i for i, kinds in enumerate(lost) if "far_beyond_stability" in kinds] == [2]


def test_a_gap_with_infinite_error_raises_nothing() -> None:
    raised = kinds_raised(
        AlertRules(gn_gap_above=0.5), *(at(i, measurement=measurement(gap=0.9, error=math.inf)) for i in range(4))
    )
    assert not any("gn_gap_above" in kinds for kinds in raised)


@pytest.mark.parametrize("value", [True, math.nan, "1"])
@pytest.mark.parametrize("name", ["sensitivity", "stalled", "lasting", "edge_of_stability", "saddle", "gn_gap_above"])
def test_rules_take_numbers_only(name: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"{name} must be a"):
        AlertRules(**{name: value})

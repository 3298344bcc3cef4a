"""The comparison of causes, on tables that are small enough to compute by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from curvmon.alerts.event_detector import HAND
from curvmon.alerts.event_messages import ADVICE
from curvmon.alerts.evidence import FamilyScore
from curvmon.alerts.signature_table import SIGNATURES
from curvmon.alerts.signatures import QUIET, UNCLEAR, Noise, Shares, Signatures, affected_log_density

TABLE = Signatures(
    noise={"loss": Noise(1.0, 4.0), "update": Noise(1.0, 4.0)},
    shares={"a": {"loss": Shares(0.9, 0.0)}, "b": {"loss": Shares(0.9, 0.0), "update": Shares(0.9, 0.0)}},
    priors={QUIET: 0.98, "a": 0.01, "b": 0.01},
    exact={"b": {"sign": 0.9}},
    temper=1.0,
)


def scores(**values: float) -> dict[str, FamilyScore]:
    return {family: FamilyScore(value, "", 0.0, 0.0) for family, value in values.items()}


def test_noise_is_a_density() -> None:
    step = 0.01
    for noise in (Noise(0.5, 3.0), Noise(2.0, 6.0)):
        total = sum(math.exp(noise.log_density(step * i)) * step for i in range(-100_000, 100_001))
        assert total == pytest.approx(1, abs=1e-4)


def test_scores_of_affected_families_are_a_density() -> None:
    step = 0.01
    total = sum(math.exp(affected_log_density(step * (i + 0.5))) * step for i in range(10_000_000 // 10))
    assert total == pytest.approx(1, abs=2e-3)


def test_small_scores_are_quiet_and_large_ones_are_not() -> None:
    assert TABLE.posterior(scores(loss=0.5, update=0.1), frozenset())[QUIET] > 0.98
    assert TABLE.posterior(scores(loss=30.0, update=0.1), frozenset())[QUIET] < 0.02
    assert TABLE.posterior(scores(loss=-30.0, update=0.1), frozenset())["a"] < 0.2  # no cause lowers it


def test_causes_differ_by_what_they_leave_alone() -> None:
    only_loss, both = (TABLE.posterior(scores(loss=30.0, update=u), frozenset()) for u in (0.1, 30.0))
    assert only_loss["a"] > 5 * only_loss["b"] and both["b"] > 2 * both["a"]


def test_an_exact_sign_decides() -> None:
    with_sign = TABLE.posterior(scores(loss=30.0, update=0.1), frozenset({"sign"}))
    assert with_sign["b"] > 0.99
    assert TABLE.posterior({}, frozenset({"sign"}))["b"] > 0.98


def test_a_sign_that_has_always_come_may_be_missing() -> None:
    always = replace(TABLE, exact={"b": {"sign": 1.0}})
    assert 0 < always.posterior(scores(loss=30.0), frozenset())["b"] < 0.01
    for signs in ({}, {sign: 1.0 for table in SIGNATURES.exact.values() for sign in table}):
        assert math.isfinite(SIGNATURES.log_odds(scores(loss=5.0), frozenset(signs)))


def test_posteriors_sum_to_one_and_give_the_odds() -> None:
    evidence = scores(loss=6.0, update=-1.0)
    posterior = TABLE.posterior(evidence, frozenset())
    assert sum(posterior.values()) == pytest.approx(1)
    odds = math.log((1 - posterior[QUIET]) / posterior[QUIET])
    assert TABLE.log_odds(evidence, frozenset()) == pytest.approx(odds)


def test_families_that_were_not_measured_do_not_count() -> None:
    assert TABLE.log_odds(scores(loss=6.0), frozenset()) == pytest.approx(
        TABLE.log_odds({**scores(loss=6.0), **scores(unheard=50.0)}, frozenset())
    )


def test_the_table_in_the_package_is_complete() -> None:
    causes = SIGNATURES.priors.keys() - {QUIET}
    assert causes == set(SIGNATURES.shares) <= set(ADVICE) and causes >= HAND and UNCLEAR in causes
    assert sum(SIGNATURES.priors.values()) == pytest.approx(1, abs=1e-2)
    for families in SIGNATURES.shares.values():
        assert families.keys() <= SIGNATURES.noise.keys()
        assert all(0 < up + down <= 1.01 for up, down in families.values())

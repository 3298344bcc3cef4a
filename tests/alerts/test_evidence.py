"""Scores of families, exact signs, and forecasts that know gaps and changes of level."""

from __future__ import annotations

import math
import random

import pytest

from curvmon.alerts.evidence import MOST, Forecasts, LossStart, certain_signs, family_scores
from curvmon.alerts.features import Feature


def feature(family: str, value: float, where: str = "") -> Feature:
    return Feature(family, where, value, 0.0)


def forecasts(*families: str, members: int = 1, seed: int = 0) -> Forecasts:
    """Twenty values of noise of 2 percent."""
    rng, made = random.Random(seed), Forecasts()
    for i in range(20):
        made.append([feature(f, rng.gauss(0, 0.02), str(m)) for f in families for m in range(members)], 10.0 * i)
    return made


def score(made: Forecasts, family: str, value: float, at: float = 200.0) -> float:
    return family_scores(made.deviations([feature(family, value, "0")], at))[family].score


def test_scores_have_the_sign_of_the_change_and_a_bound() -> None:
    made = forecasts("training loss")
    assert score(made, "training loss", 1.0) > 10 > 3 > abs(score(made, "training loss", 0.02))
    assert score(made, "training loss", -1.0) < -10
    assert score(made, "training loss", 1e6) == MOST


def test_small_changes_count_in_proportion() -> None:
    """However precise the forecast: a loss that changes by one percent does not matter."""
    made = Forecasts()
    for i in range(20):
        made.append([feature("validation loss", 1.0)], float(i))
    steady = family_scores(made.deviations([feature("validation loss", 1.01)]))["validation loss"].score
    assert 0 < steady < 0.2


def test_the_largest_of_many_counts_less() -> None:
    few, many = forecasts("weights", members=2), forecasts("weights", members=64)
    assert score(few, "weights", 0.5) > 1.3 * _largest(many)


def _largest(made: Forecasts) -> float:
    values = [feature("weights", 0.5 if m == 0 else 0.0, str(m)) for m in range(64)]
    result = family_scores(made.deviations(values, 200.0))["weights"]
    assert result.where == "0" and result.affected == pytest.approx(1 / 64)
    return result.score


def test_a_gap_widens_the_forecast() -> None:
    made = forecasts("loss")
    assert score(made, "loss", 0.5, at=200.0) > 5 * score(made, "loss", 0.5, at=190.0 + 100.0) > 0


def test_a_restart_forgets_the_level_and_keeps_the_spread() -> None:
    made = forecasts("loss")
    made.restart([feature("loss", 3.0, "0")], 200.0)
    assert abs(score(made, "loss", 3.0, 210.0)) < 1 and score(made, "loss", 4.0, 210.0) > 10


def test_features_without_a_past_have_no_score() -> None:
    assert score(Forecasts(), "loss", 5.0) == 0
    made = forecasts("loss")
    made.forget({"loss"})
    assert score(made, "loss", 5.0) == 0


def test_exact_signs() -> None:
    made = forecasts("rate", "unscheduled rate", "zeros", "batches size")
    changed = {"rate": math.log(20), "unscheduled rate": 0.0, "zeros": 0.5, "batches size": -math.log(4)}

    def signs(**other: float) -> set[str]:
        values = [feature(family, other.get(family.replace(" ", "_"), value), "0") for family, value in changed.items()]
        deviations = made.deviations(values, 200.0)
        return set(certain_signs(family_scores(deviations), deviations))

    assert signs() == {"scheduled rate up", "zeros up", "batches size down"}
    assert signs(unscheduled_rate=math.log(20), zeros=0.0, batches_size=0.0) == {"rate up"}
    assert signs(rate=0.0, zeros=-0.5, batches_size=0.0) == set()  # what was zeroed is trained again


def test_signs_of_single_tensors() -> None:
    made = Forecasts()
    names = ["a.weight", "a.bias", "b.weight", "b.bias"]
    rng = random.Random(0)
    for i in range(20):
        made.append([feature("weights", rng.gauss(0, 0.01), name) for name in names], float(i))

    def signs(**grown: float) -> set[str]:
        values = [feature("weights", grown.get(name.replace(".", "_"), 0.0), name) for name in names]
        deviations = made.deviations(values, 20.0)
        return set(certain_signs(family_scores(deviations), deviations))

    assert signs() == set()
    assert signs(a_weight=1.0) == {"a weight jumped"} and signs(b_bias=1.0) == {"a bias jumped"}
    assert signs(a_weight=1.0, b_weight=1.0, a_bias=1.0) == {"many tensors jumped"}
    assert signs(a_weight=0.2) == set()  # by 22 percent only


def test_losses_above_their_start() -> None:
    start = LossStart()
    for value in (0.9, 1.0, 0.8):
        assert not start.update([feature("training loss", value), feature("validation loss", value)])
    assert not start.update([feature("training loss", 0.95)])
    assert start.update([feature("training loss", 2.0), feature("validation loss", 0.5)]) == {
        "training loss above start"
    }


def test_the_state_of_forecasts() -> None:
    made, again = forecasts("loss", "rate"), Forecasts()
    again.load_state_dict(made.state_dict())
    values = [feature("loss", 0.3, "0"), feature("rate", 0.1, "0")]
    assert again.deviations(values, 250.0) == made.deviations(values, 250.0)

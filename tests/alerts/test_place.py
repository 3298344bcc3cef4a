"""Where an event happened: the tensors and layers that stand out, or nowhere in particular."""

from __future__ import annotations

import pytest

from curvmon.alerts.features import FeatureDeviation
from curvmon.alerts.forecast import Deviation
from curvmon.alerts.place import places


def deviation(family: str, where: str, score: float) -> FeatureDeviation:
    return FeatureDeviation(family, where, Deviation(1.0, score, 0.0))


def weights(**scores: float) -> list[FeatureDeviation]:
    return [deviation("weights", f"{module}.weight", score) for module, score in scores.items()]


def test_changed_settings_and_operations_are_the_place_whatever_else_deviates() -> None:
    deviations = weights(a=50.0, b=0.1, c=0.1)
    assert places(deviations, rebuilt=["b"]) == (("b", 1.0),)
    assert places(deviations, rebuilt=["b"], named=["c.drop", "a"]) == (("a", 0.5), ("c.drop", 0.5))


@pytest.mark.parametrize("family", ["weights", "zeros", "update profile"])
def test_a_tensor_that_stands_out_gives_its_module(family: str) -> None:
    deviations = [*weights(a=0.5, b=0.3, c=0.4), deviation(family, "b.bias", 30.0)]
    assert places(deviations) == (("b", 1.0),)


def test_probabilities_are_ordered_and_sum_to_one() -> None:
    where = places(weights(a=30.0, b=15.0, c=0.1, d=0.1, e=0.1))
    assert [name for name, _ in where] == ["a", "b"]
    assert where[0][1] == pytest.approx(8 / 9) and sum(share for _, share in where) == pytest.approx(1)


def test_what_affects_most_tensors_alike_has_no_place() -> None:
    assert places(weights(a=20.0, b=18.0, c=22.0, d=19.0)) == ()
    ((first, share), *_) = places(weights(a=20.0, b=5.0, c=5.0, d=5.0))  # one of them far more than the others
    assert first == "a" and share > 0.9


def test_small_deviations_have_no_place() -> None:
    assert places(weights(a=3.0, b=0.1, c=0.2)) == () == places([])


def test_the_curvature_of_a_layer_counts_less_than_its_tensors() -> None:
    """It follows the neighbours too; alone, it is better than nothing."""
    layers = [deviation("profile", "a", 40.0), deviation("contrast", "b", 20.0)]
    assert places(layers)[0][0] == "a"
    assert places([*layers, *weights(a=0.1, b=0.1, c=20.0)])[0][0] == "c"


def test_other_families_have_no_place() -> None:
    assert places([deviation("coupling", "a--b", 50.0), deviation("training loss", "", 50.0)]) == ()

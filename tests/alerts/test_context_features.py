"""From a context to features: names decide what is good, logarithms where ratios matter."""

from __future__ import annotations

import math

import pytest

from curvmon.alerts.context import Context
from curvmon.alerts.context_features import context_features


def features(context: Context) -> dict[tuple[str, str], float]:
    return {(f.family, f.where): f.value for f in context_features(context)}


@pytest.mark.parametrize(
    ("name", "value", "family"),
    [
        ("val_loss", 2.0, "validation loss"),
        ("valid/nll", 2.0, "validation loss"),
        ("val-perplexity", 2.0, "validation loss"),
        ("val_acc", 0.75, "validation error"),
        ("val/F1", 0.75, "validation error"),
        ("val_acc", 75.0, None),  # in percent: no share
        ("val_loss", -3.0, None),
        ("something", 2.0, None),
        ("val_loss", math.nan, None),
    ],
)
def test_metrics_of_the_user_grow_as_they_get_worse(name: str, value: float, family: str | None) -> None:
    found = features(Context(signs={("metric", name): value}))
    better = features(Context(signs={("metric", name): 0.9 * value if family != "validation error" else 0.9}))
    assert list(found) == ([] if family is None else [(family, name)])
    assert all(better[key] < value for key, value in found.items())


def test_updates_are_a_level_and_a_profile() -> None:
    updates = {("update", name): value for name, value in {"a": 0.01, "b": 0.02, "c": 0.04}.items()}
    found = features(Context(signs={**updates, ("update", "frozen"): 0.0}))
    assert found["update level", ""] == pytest.approx(math.log(0.02))
    assert found["update profile", "c"] == pytest.approx(math.log(2)) and ("update profile", "frozen") not in found
    faster = features(Context(signs={key: 10 * value for key, value in updates.items()}))
    assert faster["update profile", "c"] == pytest.approx(found["update profile", "c"])


def test_values_that_may_be_zero_or_negative_have_no_logarithm() -> None:
    signs = {
        ("inputs mean", "x"): -0.5,
        ("inputs rms", "x"): 2.0,
        ("labels missing", "y"): 0.0,
        ("zeros", "w"): 0.0,
        ("batches different", ""): 0.5,
    }
    assert features(Context(signs=signs)) == {
        ("inputs mean", "x"): -0.5,
        ("inputs rms", "x"): math.log(2),
        ("labels missing", "y"): 0.0,
        ("zeros", "w"): 0.0,
        ("batches different", ""): math.log(0.5),
    }


def test_norms_rates_and_losses() -> None:
    values = {("learning rate", ""): 0.1, ("training loss", ""): 2.0, ("weights", "w"): 3.0, ("statistics", "s"): 0.0}
    assert features(Context(values)) == {
        ("rate", ""): math.log(0.1),
        ("training loss", ""): math.log(2),
        ("weights", "w"): math.log(3),
    }

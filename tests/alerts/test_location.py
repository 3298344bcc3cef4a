"""Where a change is: named where one layer stands out, and never more certain than the numbers are."""

from __future__ import annotations

import random

import pytest

from curvmon.alerts.context import Cause
from curvmon.alerts.features import FeatureDeviation
from curvmon.alerts.forecast import Deviation
from curvmon.alerts.location import Location, locate, suspected_weights
from curvmon.records import Pair
from tests.helpers.synthetic_snapshots import NODES, snapshot

NOW = snapshot(1, random.Random(0))


def deviations(**sizes: float) -> list[FeatureDeviation]:
    return [FeatureDeviation("profile", name, Deviation(sizes.get(name, 0.1), 10.0, 0.0)) for name in NODES]


@pytest.mark.parametrize(
    ("sizes", "node", "is_certain"),
    [
        ({"b": 1.0}, "b", True),
        ({"b": 1.0, "c": 0.6}, "b", True),
        ({"b": 1.0, "c": -0.9}, "b", False),  # the second is close behind
        ({"b": 0.12}, None, False),  # all layers alike
    ],
)
def test_a_layer_has_to_stand_out(sizes: dict[str, float], node: str | None, is_certain: bool) -> None:
    found = locate(deviations(**sizes), (), NOW)
    assert (found.node, found.is_certain) == (node, is_certain)


def test_a_learning_rate_acts_everywhere() -> None:
    rate = Cause("learning rate", "", "x 20", 9.0, True, 0.1, 2.0)
    assert locate(deviations(b=1.0), [rate], NOW).node is None
    assert locate(deviations(b=1.0), [rate._replace(lowers_threshold=False)], NOW).node == "b"


def test_weights_or_operations_that_changed_name_the_layer() -> None:
    weight = Cause("weights", "c.weight", "x 0.5", 9.0, True, 2.0, 1.0)
    operations = Cause("operations", "d", "1 fewer Add", 9.0, True)
    found = locate(deviations(b=1.0), [weight], NOW)
    assert (found.node, found.is_certain) == ("c", True)
    assert locate(deviations(b=1.0), [weight, operations], NOW).node == "d"
    assert locate(deviations(b=1.0), [weight, weight._replace(name="a.weight")], NOW).node == "b"


def test_places_in_a_headline() -> None:
    pairs = [Pair("a", "b")]
    assert Location("b", pairs, True).place("a--b", NODES) == (" at {} → {}", ("a", "b"))
    assert Location("b", pairs, True).place("stem--b", NODES) == (" at {}", ("b",))
    assert Location("stem", pairs, True).place("stem--a", NODES) == (" at {}", ("stem",))
    assert Location("b", pairs).place("a--b", NODES) == (" around {}", ("b",))
    assert Location(None, pairs).place("a--b", NODES) == (" around {} → {}", ("a", "b"))
    assert Location(None, pairs).place("all pairs", NODES) == (" throughout the network", ())


def test_suspected_weights() -> None:
    first, second = (
        Cause("weights", name, "x 2", 9.0, True, 1.0, 2.0) for name in ("b.conv1.weight", "b.conv2.weight")
    )
    head = first._replace(name="head.weight")
    assert suspected_weights([first, second], NODES) == ("weights of {}", "b")
    assert suspected_weights([head], NODES) == ("{}", "head.weight")
    assert suspected_weights([first, head], NODES) is None
    assert suspected_weights([], NODES) is None

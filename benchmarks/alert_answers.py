"""What an alert says about cause and place, and whether that is right."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from benchmarks.alert_recording import Happened, Recorded
from curvmon.records import Alert

TEXTS = (
    (r"^Learning rate x", "learning rate"),
    (r"^Forward pass", "forward pass"),
    (r"^Running statistics", "statistics"),
    (r"^Weights of .* grew|^\S+ grew", "weights grown"),
    (r"^Weights of .* shrank|^\S+ shrank", "weights zeroed"),
    (r"^Weights of .* changed", "weights replaced"),
    (r"not finite|NaN|infinite", "not finite"),
    (r"labels of the training batches", "labels"),
    (r"learning rate", "learning rate"),
)
"""patterns in headline and suggestion of alerts that list no causes; the first that matches counts"""
PLACES = r"^Weights of (\S+)", r"^Forward pass of (\S+)", r"^(\S+) (?:grew|shrank|changed)", r"around (\S+?),"


def causes_of(alert: Alert) -> list[tuple[str, float]]:
    """(label, probability), most probable first; NaN where the alert states none."""
    stated: Sequence[Any] = getattr(alert, "causes", None) or ()
    if stated:
        return sorted(((label, float(p)) for label, p in stated), key=lambda cause: -cause[1])
    text = f"{alert.headline}\n{alert.suggestion}"
    matching = [label for pattern, label in TEXTS if re.search(pattern, text, re.MULTILINE)]
    return [(label, math.nan) for label in matching[:1]]


def places_of(alert: Alert) -> list[str]:
    """Names of modules, most probable first; empty where the alert names no place."""
    places: Sequence[Any] = getattr(alert, "places", None) or ()
    if places or getattr(alert, "causes", None):
        return [place if isinstance(place, str) else place[0] for place in places]
    named = [name for pattern in PLACES for name in re.findall(pattern, alert.headline)]
    # of the pair `stem → layer1`, the step to the second one is meant
    pair = [name for name in reversed(alert.where.split("--")) if "--" in alert.where and name in alert.headline]
    return [*named, *pair]


def is_cause_right(alert: Alert, event: Happened, among: int = 1) -> bool:
    """Is the cause one of the first so many?"""
    return event.cause in [label for label, _ in causes_of(alert)[:among]]


def is_place_right(alert: Alert, run: Recorded) -> bool:
    """Does the first place contain the module of the last event, or the other way round?

    Where no node does, its neighbours in the network count as well: an activation between two nodes is at both.
    """
    place, named = run.happened[-1].place, places_of(alert)
    if place is None or not named:
        return False
    return any(_overlap(named[0], right) for right in [place, *_neighbours(run, place)])


def _overlap(one: str, other: str) -> bool:
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")


def _neighbours(run: Recorded, place: str) -> list[str]:
    """The nodes just before and after a module, in the order in which modules are registered."""
    seen = next((s for s in reversed(run.measured) if s.snapshot.measurement is not None), None)
    if seen is None or seen.snapshot.measurement is None:
        return []
    nodes = seen.snapshot.measurement.nodes
    if any(_overlap(node, place) for node in nodes):
        return []
    keys = list(seen.context.settings)
    position = {name: next((i for i, k in enumerate(keys) if k.startswith(f"{name}.")), -1) for name in (*nodes, place)}
    before = [node for node in nodes if position[node] <= position[place]]
    after = [node for node in nodes if position[node] > position[place]]
    return [*before[-1:], *after[:1]]

"""Observations of a run that trains well: losses, learning rate, weights and their updates, training data."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from curvmon.alerts.context import Context, Source
from curvmon.alerts.manager import AlertManager
from curvmon.records import Alert, Snapshot
from tests.helpers.synthetic_snapshots import snapshot

TENSORS = ("stem.weight", "a.weight", "a.bias", "b.weight", "b.bias", "c.weight", "d.weight")


def context(
    step: int,
    rng: random.Random,
    changed: Mapping[Source, float] | None = None,
    settings: Mapping[str, str] | None = None,
    operations: Mapping[str, Mapping[str, int]] | None = None,
) -> Context:
    """Losses fall by 3 % and swing by 3 %; everything else is steady to one percent. `changed`: factors."""

    def noisy(value: float, spread: float = 0.01) -> float:
        return value * math.exp(rng.gauss(0, spread))

    values: dict[Source, float] = {("learning rate", ""): 0.1, ("training loss", ""): noisy(2 * 0.97**step, 0.03)}
    signs: dict[Source, float] = {
        ("metric", "val_loss"): noisy(2.2 * 0.97**step, 0.03),
        ("metric", "val_acc"): 1 - 0.5 * noisy(0.97**step, 0.03),
        ("learning rate over scheduled", ""): 1.0,
        ("inputs rms", "batch[0]"): noisy(1.0),
        ("inputs mean", "batch[0]"): noisy(0.3),
        ("inputs spread", "batch[0]"): noisy(0.05, 0.1),
        ("labels perplexity", "batch[1]"): noisy(9.9, 0.003),
        ("labels missing", "batch[1]"): 0.0,
        ("labels shift", "batch[1]"): abs(rng.gauss(0.02, 0.005)),
        ("batches different", ""): 1.0,
        ("batches size", ""): 64.0,
    }
    for name in TENSORS:
        values["weights", name] = noisy(1 + 0.01 * step, 0.002)
        signs["update", name] = noisy(0.05, 0.1)
        signs["zeros", name] = 0.0
    for source, factor in (changed or {}).items():
        where = values if source in values else signs
        where[source] = where[source] * factor if where[source] else factor
    fixed = {"a.p": "0.1", "a.class": "Dropout", "b.class": "ReLU", "optimizer 0, group 0, weight_decay": "0.01"}
    return Context(values, operations or {"a": {"Relu": 1}}, signs, {**fixed, **(settings or {})})


def raised_in(
    seed: int,
    points: int = 22,
    at: int = 15,
    factors: Mapping[str, float] | None = None,
    cut: str | None = None,
    manager: AlertManager | None = None,
    **event: Any,
) -> list[tuple[int, Alert]]:
    """Everything that is raised in a run; from `at` on, an event: `factors` and `cut` of `snapshot`, the rest of the
    context."""
    rng, manager, past, raised = random.Random(seed), manager or AlertManager(), list[Snapshot](), []
    for i in range(points):
        now = snapshot(i, rng, dict(factors) if factors and i >= at else None, cut if i >= at else None)
        happened: dict[str, Any] = event if i >= at else {}
        raised += [(i, alert) for alert in manager.update(now, past, context(i, rng, **happened))]
        past.append(now)
    return raised


def alerts(raised: Sequence[tuple[int, Alert]]) -> list[tuple[int, Alert]]:
    return [(i, alert) for i, alert in raised if alert.level != "info"]

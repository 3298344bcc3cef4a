"""Everything that raises alerts in a run: the watch over all series, the rules, and what may have caused a change."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from curvmon.tracking.expectation import Expectation
from curvmon.tracking.history import Snapshot
from curvmon.tracking.readings import change
from curvmon.tracking.rules import AlertRules, RuleBook
from curvmon.tracking.watch import Vigilance, Watch
from curvmon.types import Alert

CAUSE_SCORE, CAUSE_SIZE, CAUSE_SPREAD = 6.0, 0.1, 0.015
"""a circumstance is named as a cause if it moved by so many standard deviations, and by ten percent; never expected
more exactly than to 1.5 percent"""


class Alarms:
    """Takes every snapshot of a run and returns the alerts it gives rise to: at most one for a change."""

    def __init__(self, rules: AlertRules | None = None, vigilance: Vigilance | None = None) -> None:
        self._rules = rules or AlertRules()
        self._watch = Watch(vigilance)
        self._book = RuleBook(self._rules)
        self._circumstances: dict[str, Expectation] = {}

    def update(
        self, snapshot: Snapshot, before: Snapshot | None = None, circumstances: Mapping[str, float] | None = None
    ) -> list[Alert]:
        """`before` is the snapshot before this one, if there is one."""
        found = []
        causes = self._causes(circumstances or {})
        moves = self._watch.update(snapshot) if self._rules.changes else None
        if moves is not None:
            found.append(change(moves, self._watch.strengths(moves), causes, before, snapshot))
        return [*found, *self._book.update(snapshot)]

    def diverged(self, reason: str, step: int, epoch: int) -> list[Alert]:
        return self._book.diverged(reason, step, epoch)

    def _causes(self, circumstances: Mapping[str, float]) -> list[str]:
        """`learning rate x 20`, `size of blocks.1.conv1.weight x 0.71`: what jumped just now, most surprising first."""
        found = []
        for name, value in circumstances.items():
            if not value > 0 or not math.isfinite(value):
                continue
            held = self._circumstances.setdefault(name, Expectation(CAUSE_SPREAD))
            surprise = held.look(math.log(value))
            if len(held) >= 3 and surprise.score > CAUSE_SCORE and abs(surprise.size) > CAUSE_SIZE:
                found.append((surprise.score, f"{name} x {math.exp(surprise.size):.3g}"))
                held.restart(math.log(value))
            else:
                held.accept(math.log(value))
        return [text for _, text in sorted(found, reverse=True)]

    def state_dict(self) -> dict[str, Any]:
        """Lists, dicts, strings and numbers only."""
        return {
            "watch": self._watch.state_dict(),
            "book": self._book.state_dict(),
            "circumstances": {name: held.state_dict() for name, held in self._circumstances.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._watch.load_state_dict(state["watch"])
        self._book.load_state_dict(state["book"])
        self._circumstances = {}
        for name, saved in state["circumstances"].items():
            self._circumstances[name] = Expectation(CAUSE_SPREAD)
            self._circumstances[name].load_state_dict(saved)

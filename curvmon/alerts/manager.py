"""Everything that raises alerts in a run: the watch over all series, the rules, and what may have caused a change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from curvmon.alerts.context import Circumstances, Surroundings
from curvmon.alerts.detector import Vigilance, Watch
from curvmon.alerts.messages import change
from curvmon.alerts.rules import AlertRules, RuleBook
from curvmon.records import Alert, Snapshot


class Alarms:
    """Takes every snapshot of a run and returns the alerts it gives rise to: at most one for a change."""

    def __init__(self, rules: AlertRules | None = None, vigilance: Vigilance | None = None) -> None:
        self._rules = rules or AlertRules()
        vigilance = vigilance or Vigilance()
        self._watch = Watch(replace(vigilance, caution=vigilance.caution / self._rules.sensitivity))
        self._book = RuleBook(self._rules)
        self._surroundings = Surroundings()

    def update(
        self, snapshot: Snapshot, past: Sequence[Snapshot] = (), circumstances: Circumstances | None = None
    ) -> list[Alert]:
        """`past` are the snapshots before this one; the last two are enough."""
        found = []
        causes = self._surroundings.update(circumstances or Circumstances())
        suspicious = any(cause.incriminating for cause in causes)
        gap = len(past) > 0 and snapshot.skipped > past[-1].skipped
        changed = self._watch.update(snapshot, suspicious, gap) if self._rules.changes else None
        if changed is not None:
            before = past[-changed.age] if len(past) >= changed.age else None
            found.append(change(changed.moves, self._watch.strengths(changed.moves), causes, before, snapshot))
        return [*found, *self._book.update(snapshot)]

    def diverged(self, reason: str, step: int, epoch: int) -> list[Alert]:
        return self._book.diverged(reason, step, epoch)

    def state_dict(self) -> dict[str, Any]:
        """Lists, dicts, strings and numbers only."""
        return {
            "watch": self._watch.state_dict(),
            "book": self._book.state_dict(),
            "surroundings": self._surroundings.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._watch.load_state_dict(state["watch"])
        self._book.load_state_dict(state["book"])
        self._surroundings.load_state_dict(state["surroundings"])

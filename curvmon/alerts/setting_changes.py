"""Which settings changed since the last measurement, and what kind of event that is.

Exact: no forecast is needed. Names that change at many measurements are counters, not settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OFTEN = 2
"""changes before, from which on a name is ignored"""
DROPOUT, FORWARD, STATISTICS = "dropout", "forward pass", "statistics"
TRAINED, DECAY, OPTIMIZER = "trained parameters", "weight decay setting", "optimizer settings"
NEGATIVE_DECAY = "negative weight decay"


class SettingChanges:
    """Takes the settings of every measurement (`run_settings`)."""

    def __init__(self) -> None:
        self._before: dict[str, str] = {}
        self._changes: dict[str, int] = {}
        """by name"""

    def update(self, settings: Mapping[str, str]) -> dict[str, tuple[str, str]]:
        """(before, after) by name; an empty text where there is none."""
        before, self._before = self._before, dict(settings)
        if not before or not settings:
            return {}
        names = [name for name in {**before, **settings} if before.get(name) != settings.get(name)]
        changed = {name: (before.get(name, ""), settings.get(name, "")) for name in names}
        usual = {name for name in names if self._changes.get(name, 0) >= OFTEN}
        for name in names:
            self._changes[name] = self._changes.get(name, 0) + 1
        return {name: values for name, values in changed.items() if name not in usual}

    def state_dict(self) -> dict[str, Any]:
        return {"before": dict(self._before), "changes": dict(self._changes)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._before, self._changes = dict(state["before"]), dict(state["changes"])


def kind_of(name: str, settings: Mapping[str, str]) -> str:
    """Of a setting: what its change means."""
    if name.startswith("optimizer "):
        entry = name.rsplit(", ", 1)[-1]
        if entry == "weight_decay" and settings.get(name, "").startswith("-"):
            return NEGATIVE_DECAY
        return {"parameters": TRAINED, "weight_decay": DECAY}.get(entry, OPTIMIZER)
    module, _, attribute = name.rpartition(".")
    if attribute == "requires_grad":
        return TRAINED
    owner = settings.get(f"{module}.class" if module else "class", "")
    if "Dropout" in owner or "dropout" in attribute or "drop_" in attribute:
        return DROPOUT
    if attribute in ("momentum", "track_running_stats") and "Norm" in owner:
        return STATISTICS
    return FORWARD

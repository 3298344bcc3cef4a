"""The names of everything that is logged. The only place that applies `log_key_prefix`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from curvmon.metrics.registry import pair_metric_names, scalar_metrics

Value = TypeVar("Value")
ALERT, ALERTS, SKIPPED = "curvmon/alert", "curvmon/alerts", "curvmon/skipped"
BY_DISTANCE, EIGENVALUES = "by_distance", "spectrum"
"""pictures, apart from the heatmaps"""


@dataclass(frozen=True)
class Keys:
    """The keys of one monitor.

    Attributes:
        prefix: `log_key_prefix` of the monitor, `"fold1/"`; two monitors in one Trainer need different ones.
    """

    prefix: str = ""

    def __call__(self, name: str) -> str:
        return f"{self.prefix}{name}"

    def named(self, values: Mapping[str, Value]) -> dict[str, Value]:
        """The values with the prefix before each key."""
        return {self(name): value for name, value in values.items()}

    def pattern(self, names: str) -> str:
        """Regular expression for the keys whose names match a regular expression; matches to the end of the key."""
        return f"{re.escape(self.prefix)}{names}$"


def heatmap_key(metric: str) -> str:
    return f"heatmap/{metric}"


def picture_keys() -> tuple[str, ...]:
    """All pictures that a monitor can log."""
    return (*(heatmap_key(metric) for metric in pair_metric_names()), BY_DISTANCE, EIGENVALUES)


def groups() -> tuple[str, ...]:
    """Glob patterns that together match every key."""
    scalar_groups = dict.fromkeys(spec.key.split("/")[0] for spec in scalar_metrics())
    return (*(f"{group}/*" for group in (*pair_metric_names(), *scalar_groups, "heatmap")), BY_DISTANCE, EIGENVALUES)

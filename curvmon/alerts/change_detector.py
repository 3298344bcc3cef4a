"""`ChangeDetector`: abrupt changes and drifts of a single quantity, as part of the public interface."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from curvmon.alerts.detector import Change, Detector, Sensitivity
from curvmon.alerts.wording import before_after, verb
from curvmon.records import Alert
from curvmon.records.formatting import short

Scale = Literal["log", "linear"]
METRIC = "value"


class ChangeDetector:
    """Detects abrupt changes of a quantity with few values, each with its standard error.

    `update` takes every new value and returns an `Alert` for a jump or a persistent drift, else None. After a change
    the past is dropped, and detection pauses for `warm_up` values. Values that are not finite are skipped, on a
    logarithmic scale also those that are not positive.

    Args:
        scale: "log" for quantities whose ratios matter (resonance, eigenvalues), "linear" for others; set `matters` and
            `least_spread` then, which are in units of the values.
        sensitivity: what counts as a change.
        options: single fields of `Sensitivity`.

    Raises:
        ValueError: the scale is unknown, or the sensitivity contradicts itself.

    Example:
        >>> from curvmon import ChangeDetector
        >>> detector = ChangeDetector(scale="log")
        >>> quiet = [detector.update(1.0 + 0.05 * (-1) ** i, stderr=0.02) for i in range(20)]
        >>> any(quiet)
        False
        >>> detector.update(4.0, stderr=0.1).kind
        'jump'
    """

    def __init__(self, scale: Scale = "log", sensitivity: Sensitivity | None = None, **options: Any) -> None:
        if scale not in ("log", "linear"):
            raise ValueError(f'scale must be "log" or "linear", not {scale!r}')
        self.scale = scale
        self.sensitivity = replace(sensitivity or Sensitivity(), **options)
        self._detector = Detector(self.sensitivity)
        self._count = 0

    def update(self, value: float, stderr: float = 0.0) -> Alert | None:
        """Take one more value; an `Alert` if it is a change."""
        value, stderr = float(value), float(stderr)  # numpy's numbers would not pass through a checkpoint
        if not math.isfinite(value) or (self.scale == "log" and value <= 0):
            return None
        stderr = stderr if math.isfinite(stderr) else abs(value)
        self._count += 1
        if self.scale == "linear":
            change = self._detector.update(value, stderr)
        else:
            change = self._detector.update(math.log(value), stderr / value)
        return None if change is None else self._alert(change, value)

    def _alert(self, change: Change, value: float) -> Alert:
        deviation = change.deviation
        before = math.exp(deviation.forecast) if self.scale == "log" else deviation.forecast
        word = verb(METRIC, before, value) if change.kind == "jump" else "drifted"
        return Alert(
            kind=change.kind,
            metric=METRIC,
            where="",
            before=before,
            after=value,
            score=deviation.score,
            step=self._count - 1,
            epoch=-1,
            headline=f"The value {word} from {short(before)} to {short(value)}",
            evidence=(
                f"value: expected {before_after(before, value)}",
                f"deviation from the forecast: {short(deviation.score)} standard deviations",
            ),
            suggestion="Check what changed just before this value.",
        )

    def state_dict(self) -> dict[str, Any]:
        """Lists, dicts, strings and numbers only."""
        return {"detector": self._detector.state_dict(), "count": self._count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        detector = Detector(self.sensitivity)
        detector.load_state_dict(state["detector"])
        self._detector, self._count = detector, state["count"]

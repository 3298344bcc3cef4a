"""`ChangeDetector`: the monitor's detector (`detector.py`) on a single quantity, as part of the public interface."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from curvmon.alerts.detector import Change, Detector, DetectorSettings, Thresholds
from curvmon.alerts.features import Feature
from curvmon.alerts.forecast import WINDOW
from curvmon.alerts.rules import is_number
from curvmon.alerts.wording import before_after, verb
from curvmon.records import Alert
from curvmon.records.formatting import short

Scale = Literal["log", "linear"]
FAMILY = "value"


@dataclass(frozen=True)
class Sensitivity:
    """What counts as a change. `matters` and `least_spread` are in units of the scale: 0.4 on a logarithmic one is a
    factor of 1.5."""

    threshold: float = 6.0
    """threshold of a jump, in standard deviations"""
    confirmed: float = 3.8
    """threshold of a jump that two values in a row agree on"""
    matters: float = 0.4
    """smaller changes do not count"""
    warm_up: int = 6
    """values before the first decision, and after a change before the next"""
    drift_threshold: float = 14.0
    """threshold of the cumulative sum of forecast errors, in standard deviations; inf: no detection of drifts"""
    drift_slack: float = 1.0
    """standard deviations that a forecast error may have without adding to the sum"""
    least_spread: float = 0.02
    """lower bound of the standard deviation of a forecast"""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not is_number(value):
                raise ValueError(f"{name} must be a number, not {value!r}")
        if not 0 < self.confirmed <= self.threshold:
            raise ValueError(f"0 < confirmed <= threshold is needed, not {self.confirmed} and {self.threshold}")
        if not isinstance(self.warm_up, int) or not 3 <= self.warm_up <= WINDOW:
            raise ValueError(f"warm_up must be an integer between 3 and {WINDOW}, not {self.warm_up}")
        if self.matters < 0 or not self.least_spread > 0:
            raise ValueError("matters must not be negative, least_spread must be positive")


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
        self._detector = _detector(self.sensitivity)
        self._count = 0

    def update(self, value: float, stderr: float = 0.0) -> Alert | None:
        """Take one more value; an `Alert` if it is a change."""
        feature = self._feature(value, stderr)
        if feature is None:
            return None
        self._count += 1
        change = self._detector.update([feature])
        return None if change is None else self._alert(change, value)

    def _feature(self, value: float, stderr: float) -> Feature | None:
        value, stderr = float(value), float(stderr)  # numpy's numbers would not pass through a checkpoint
        if not math.isfinite(value) or (self.scale == "log" and value <= 0):
            return None
        stderr = stderr if math.isfinite(stderr) else abs(value)
        if self.scale == "linear":
            return Feature(FAMILY, "", value, stderr)
        return Feature(FAMILY, "", math.log(value), stderr / value)

    def _alert(self, change: Change, value: float) -> Alert:
        deviation = change.deviations[0].deviation
        before = math.exp(deviation.forecast) if self.scale == "log" else deviation.forecast
        word = verb(FAMILY, before, value) if change.kind == "jump" else "drifted"
        return Alert(
            kind=change.kind,
            metric=FAMILY,
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
        detector = _detector(self.sensitivity)
        detector.load_state_dict(state["detector"])
        self._detector, self._count = detector, state["count"]


def _detector(sensitivity: Sensitivity) -> Detector:
    """The thresholds as stated: none of what the monitor adds for hundreds of features of noisy runs."""
    settings = DetectorSettings(
        threshold_factor=1.0,
        confirmed=sensitivity.confirmed / sensitivity.threshold,
        warm_up=sensitivity.warm_up,
        settled=sensitivity.warm_up,
        rejected_factor=0.0,
        min_spread=sensitivity.least_spread,
        drift_threshold=sensitivity.drift_threshold,
        drift_slack=sensitivity.drift_slack,
    )
    thresholds = {FAMILY: Thresholds(sensitivity.threshold, sensitivity.threshold, sensitivity.matters)}
    return Detector(settings, thresholds.__getitem__)

"""Change-point detection on many features at once; `ChangeDetector` runs it on one.

A measurement of n nodes has hundreds of features, and one event moves many of them. Every feature has its own forecast.
The evidence of a family of features with deviations z_1, …, z_m from their forecasts is

    max(max_i z_i / t_max, sqrt(mean z_i²) / t_rms)        t_max grows with m

and its largest value over the families, relative to a common threshold, is the significance of the measurement. From 1
on it is a change. A measurement of smaller significance is a candidate: a change if the next one deviates alike. With
a drift threshold, a change is also a `Cusum`, the cumulative sum of a feature's forecast errors, that exceeds it.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from curvmon.alerts.features import Family, Feature, FeatureDeviation
from curvmon.alerts.forecast import Deviation, Forecast
from curvmon.metrics.registry import get


class Thresholds(NamedTuple):
    """Thresholds of one family, in standard deviations."""

    largest: float
    """t_max, threshold of the largest deviation"""
    rms: float
    """t_rms, threshold of the root mean square of all deviations"""
    min_change: float
    """smaller changes of the feature do not matter, however precisely they are measured"""


REJECTED_KEPT, REJECTED_DECAY = 20, 0.95
"""how many rejected candidates are remembered, and the decay of their weight per measurement"""
GAPS_KEPT = 9
"""distances between measurements, whose median is the usual one"""
MAX_SCORE_IN_MEAN, MAX_SCORE_IN_COSINE = 30.0, 10.0
"""a single score counts as at most this in the root mean square, and when two measurements are compared"""
MAX_CUSUM_SCORE = 4.0
"""a single error counts as at most this many standard deviations in a cumulative sum"""
LAYER_THRESHOLDS = Thresholds(4.5, 3.2, 0.25)
"""thresholds of profile and contrast: relative to the other layers, the resonance of one layer varies less between
measurements than the level of all, so that smaller changes of it are significant"""


def thresholds_of(family: Family) -> Thresholds:
    """Thresholds of the metric, lower for the resonance of single layers."""
    if family in ("profile", "contrast"):
        return LAYER_THRESHOLDS
    alert = get("resonance" if family == "level" else family).alert
    assert alert is not None
    return Thresholds(alert.threshold, alert.family_threshold, alert.smallest_change)


@dataclass(frozen=True)
class DetectorSettings:
    """How much evidence a change needs."""

    threshold_factor: float = 1.65
    """multiplies all thresholds"""
    per_doubling: float = 0.06
    """relative growth of `Thresholds.largest` with every doubling of a family's size beyond four"""
    confirmed: float = 0.85
    """significance from which on a measurement is a candidate, and confirms one"""
    min_cosine: float = 0.8
    """between the deviations of a candidate and of the measurement that confirms it"""
    warm_up: int = 6
    """measurements before the first decision, and after a change before the next"""
    settled: int = 12
    """thresholds fall linearly from twice their value after `warm_up` measurements to their value after this many"""
    rejected_factor: float = 1.15
    """a change needs this many times the evidence of the strongest recently rejected candidate"""
    with_cause: float = 0.2
    """share of a threshold that is enough if the context changed at the same time (`context.py`)"""
    warm_up_with_cause: int = 4
    """measurements after a change before the next one, if the context changed again"""
    min_spread: float = 0.02
    """lower bound of the standard deviation of every forecast"""
    drift_threshold: float = math.inf
    """threshold of the cumulative sums of a feature's forecast errors; inf: no detection of drifts"""
    drift_slack: float = 0.0
    """standard deviations that an error may have without adding to its sum"""


class Change(NamedTuple):
    """The deviations of all features, and how many measurements ago they began."""

    kind: Literal["jump", "drift"]
    deviations: list[FeatureDeviation]
    age: int


class Cusum:
    """S± ← max(0, S± ± z - slack), z: signed forecast error in standard deviations (Page 1954)."""

    def __init__(self, slack: float, sums: Sequence[float] = (0.0, 0.0)) -> None:
        self._slack = slack
        self.sums = list(sums)
        """S+ and S-"""

    def after(self, deviation: Deviation) -> list[float]:
        """S+ and S- with one more error, which is not stored."""
        z = math.copysign(min(deviation.score, MAX_CUSUM_SCORE), deviation.size)
        return [max(0.0, self.sums[0] + z - self._slack), max(0.0, self.sums[1] - z - self._slack)]

    def append(self, deviation: Deviation) -> None:
        self.sums = self.after(deviation)


class Detector:
    """Takes the features of every measurement; `update` returns a `Change` where one is detected, else None.

    After a change, the forecasts restart and decisions pause for a warm-up.

    Attributes:
        deviations: of the last measurement.
    """

    def __init__(
        self, settings: DetectorSettings | None = None, thresholds: Callable[[Family], Thresholds] = thresholds_of
    ) -> None:
        self._settings = settings or DetectorSettings()
        self._thresholds = thresholds
        self.deviations: list[FeatureDeviation] = []
        self._forecasts: dict[tuple[Family, str], Forecast] = {}
        self._cusums: dict[tuple[Family, str], Cusum] = {}
        self._candidate: list[Feature] | None = None
        """the previous measurement, if it waits for confirmation"""
        self._count = 0
        """measurements since the last change"""
        self._rejected: list[float] = []
        """evidence of recent measurements that were no change"""
        self._restarts_next = False
        self._at: float | None = None
        self._distances: list[float] = []
        """between recent measurements"""
        self._gap = 1.0
        """distance from the last measurement, in usual ones"""

    def update(self, features: list[Feature], has_cause: bool = False, at: float | None = None) -> Change | None:
        """`has_cause`: the context changed at the same time, so less evidence is needed.

        `at`: the position in the run, a step. Where measurements are further apart than usual, because some were
        skipped, they need more evidence: a gradual change looks like a jump.
        """
        self._move(at)
        if self._restarts_next:
            self._restarts_next = False
            self.deviations = self._deviations(features)
            self._restart(features)
            return None
        return self._detect(features, has_cause)

    def _detect(self, features: list[Feature], has_cause: bool) -> Change | None:
        deviations = self.deviations = self._deviations(features)
        if self._candidate is not None and self._confirms(deviations):
            self._restart(self._candidate, features)
            return Change("jump", deviations, age=2)
        if self._candidate is not None:
            self._reject(self._deviations(self._candidate))
            self._append_candidate()
            deviations = self.deviations = self._deviations(features)
        significance = self.significance(deviations)
        if significance >= 1 or (has_cause and self._exceeds_with_cause(deviations)):
            self._restart(features)
            return Change("jump", deviations, age=1)
        if self._drifts(deviations):
            self._restart(features)
            return Change("drift", deviations, age=1)
        if significance >= self._settings.confirmed:
            self._candidate = features
        else:
            self._reject(deviations)
            self._append(features)
        return None

    def clear(self) -> None:
        """Start again with an empty past."""
        self._forecasts, self._cusums, self._candidate, self._count = {}, {}, None, 0

    def restart(self, features: Sequence[Feature] | None) -> None:
        """A change has been detected elsewhere, and these are the first features after it; None: the next ones are."""
        if features is None:
            self._restarts_next = True
        else:
            self._restart(features)

    def _move(self, at: float | None) -> None:
        self._gap = 1.0
        if at is not None and self._at is not None:
            distance = at - self._at
            if self._distances:
                self._gap = max(1.0, distance / max(statistics.median(self._distances), 1e-9))
            self._distances.append(distance)
            del self._distances[:-GAPS_KEPT]
        self._at = at if at is not None else self._at

    # ---- evidence ----

    def significance(self, deviations: Sequence[FeatureDeviation]) -> float:
        """Evidence relative to the current threshold: from 1 on, a change. Zero during warm-up."""
        s = self._settings
        if self._count < s.warm_up:
            return 0.0
        early = max(0, s.settled - self._count) / max(1, s.settled - s.warm_up)
        n = len(self._rejected)
        usual = max((e * REJECTED_DECAY ** (n - 1 - i) for i, e in enumerate(self._rejected)), default=0.0)
        return self._evidence(deviations) / max(1.0 + early, s.rejected_factor * usual)

    def evidence_by_family(self, deviations: Sequence[FeatureDeviation]) -> dict[Family, float]:
        """In units of the thresholds, regardless of warm-up."""
        families: dict[Family, list[Deviation]] = defaultdict(list)
        for family, _, deviation in deviations:
            families[family].append(deviation)
        return {family: self._evidence_of(family, members) for family, members in families.items()}

    def _evidence(self, deviations: Sequence[FeatureDeviation]) -> float:
        return max(self.evidence_by_family(deviations).values(), default=0.0)

    def _evidence_of(self, family: Family, members: list[Deviation]) -> float:
        threshold = self._thresholds(family)
        scores = [d.score for d in members if abs(d.size) > threshold.min_change]
        if not scores:
            return 0.0
        growth = 1 + self._settings.per_doubling * math.log2(max(1.0, len(members) / 4))
        rms = math.sqrt(sum(min(d.score, MAX_SCORE_IN_MEAN) ** 2 for d in members) / len(members))
        relative = max(max(scores) / (threshold.largest * growth), rms / threshold.rms)
        return relative / self._settings.threshold_factor

    def _exceeds_with_cause(self, deviations: Sequence[FeatureDeviation]) -> bool:
        s = self._settings
        needed = s.with_cause if self._count >= s.warm_up else 1.0
        return self._count >= s.warm_up_with_cause and self._evidence(deviations) >= needed

    def _confirms(self, deviations: Sequence[FeatureDeviation]) -> bool:
        """Does this measurement deviate like the candidate? Both from the forecasts before the candidate."""
        assert self._candidate is not None
        if self.significance(deviations) < self._settings.confirmed:
            return False
        before, now = (
            {(d.family, d.where): _signed_score(d.deviation) for d in side}
            for side in (self._deviations(self._candidate), deviations)
        )
        shared = [key for key in before if key in now]  # in a fixed order: sums of floats depend on it
        inner = sum(before[key] * now[key] for key in shared)
        norms = [math.sqrt(sum(side[key] ** 2 for key in shared)) for side in (before, now)]
        return inner > self._settings.min_cosine * norms[0] * norms[1]

    def _drifts(self, deviations: Sequence[FeatureDeviation]) -> bool:
        """Does a cumulative sum exceed its threshold, and a feature differ from its first value by 2 `min_change`?"""
        if math.isinf(self._settings.drift_threshold) or self._count < self._settings.warm_up:
            return False
        for family, where, deviation in deviations:
            forecast = self._forecasts[family, where]
            if not len(forecast):
                continue
            difference = abs(forecast.last + deviation.size - forecast.first)
            sums = self._cusum(family, where).after(deviation)
            if difference > 2 * self._thresholds(family).min_change and max(sums) > self._settings.drift_threshold:
                return True
        return False

    # ---- the past ----

    def _deviations(self, features: Sequence[Feature]) -> list[FeatureDeviation]:
        return [
            FeatureDeviation(f.family, f.where, self._forecast(f).deviation(f.value, f.stderr, self._gap))
            for f in features
        ]

    def _forecast(self, feature: Feature) -> Forecast:
        key = feature.family, feature.where
        if key not in self._forecasts:
            self._forecasts[key] = Forecast(self._settings.min_spread)
        return self._forecasts[key]

    def _cusum(self, family: Family, where: str) -> Cusum:
        return self._cusums.setdefault((family, where), Cusum(self._settings.drift_slack))

    def _reject(self, deviations: Sequence[FeatureDeviation]) -> None:
        """Remember the evidence of a measurement that was no change."""
        if self._count >= self._settings.warm_up:
            self._rejected.append(self._evidence(deviations))
            del self._rejected[:-REJECTED_KEPT]

    def _append(self, features: Sequence[Feature]) -> None:
        sums_up = math.isfinite(self._settings.drift_threshold) and self._count >= self._settings.warm_up
        for feature in features:
            if sums_up:
                deviation = self._forecast(feature).deviation(feature.value, feature.stderr)
                self._cusum(feature.family, feature.where).append(deviation)
            self._forecast(feature).append(feature.value)
        self._count += 1

    def _append_candidate(self) -> None:
        if self._candidate is not None:
            self._append(self._candidate)
            self._candidate = None

    def _restart(self, first: Sequence[Feature], *rest: Sequence[Feature]) -> None:
        for feature in first:
            self._forecast(feature).restart(feature.value)
        self._cusums = {}
        self._count = 1
        for features in rest:
            self._append(features)
        self._candidate = None

    # ---- checkpoints ----

    def state_dict(self) -> dict[str, Any]:
        """Lists, dicts, strings and numbers only."""
        return {
            "forecasts": [[*key, forecast.state_dict()] for key, forecast in self._forecasts.items()],
            "cusums": [[*key, list(cusum.sums)] for key, cusum in self._cusums.items()],
            "candidate": None if self._candidate is None else [list(feature) for feature in self._candidate],
            "count": self._count,
            "rejected": list(self._rejected),
            "restarts_next": self._restarts_next,
            "at": self._at,
            "distances": list(self._distances),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._forecasts = {}
        for family, where, saved in state["forecasts"]:
            self._forecasts[family, where] = Forecast(self._settings.min_spread)
            self._forecasts[family, where].load_state_dict(saved)
        self._cusums = {(f, where): Cusum(self._settings.drift_slack, sums) for f, where, sums in state["cusums"]}
        candidate = state["candidate"]
        self._candidate = None if candidate is None else [Feature(*feature) for feature in candidate]
        self._count, self._rejected = state["count"], list(state["rejected"])
        self._restarts_next, self._at, self._distances = state["restarts_next"], state["at"], list(state["distances"])


def _signed_score(deviation: Deviation) -> float:
    return math.copysign(min(deviation.score, MAX_SCORE_IN_COSINE), deviation.size)

"""How far a measurement is from its forecasts, family by family: one signed score for each.

The score of a family is that of its member with the largest |z|, z = (value - forecast) / spread, positive where the
value is larger. Changes below `min_change` count in proportion, and the largest of many members counts less:

    score = z · min(1, |size| / min_change) / members^GROWTH
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from typing import Any, NamedTuple

from curvmon.alerts.features import Family, Feature, FeatureDeviation, alert_spec
from curvmon.alerts.forecast import Deviation, Forecast


class Resolution(NamedTuple):
    """Of one family."""

    min_spread: float
    """lower bound of the standard deviation of a forecast"""
    min_change: float
    """smaller changes count in proportion"""


RESOLUTIONS: dict[str, Resolution] = {
    "validation loss": Resolution(0.02, 0.1),
    "validation error": Resolution(0.05, 0.2),
    "training loss": Resolution(0.02, 0.1),
    "loss": Resolution(0.03, 0.2),
    "rate": Resolution(0.05, 0.3),
    "unscheduled rate": Resolution(0.01, 0.05),
    "weights": Resolution(0.005, 0.05),
    "statistics": Resolution(0.02, 0.1),
    "update level": Resolution(0.05, 0.3),
    "update profile": Resolution(0.05, 0.3),
    "zeros": Resolution(0.01, 0.05),
    "inputs rms": Resolution(0.01, 0.05),
    "inputs mean": Resolution(0.01, 0.05),
    "inputs spread": Resolution(0.1, 0.3),
    "labels perplexity": Resolution(0.01, 0.03),
    "labels missing": Resolution(0.1, 0.5),
    "labels shift": Resolution(0.01, 0.05),
    "batches different": Resolution(0.05, 0.3),
    "batches size": Resolution(0.05, 0.3),
    "profile": Resolution(0.02, 0.25),
    "contrast": Resolution(0.02, 0.25),
}
DEFAULT = Resolution(0.02, 0.4)
"""of metrics as well, but for their own `smallest_change`"""
EXACT = frozenset(
    {
        "rate",
        "unscheduled rate",
        "zeros",
        "inputs rms",
        "inputs mean",
        "labels missing",
        "batches different",
        "batches size",
    }
)
"""families that hardly have noise: beyond CERTAIN they are a sign, below they say nothing"""
RECOVERED = frozenset({"zeros down", "labels missing down", "batches different up"})
"""are no signs: what was wrong is over, as when zeroed weights are trained again"""
CERTAIN, RATE_RISE = 6.0, 3.0
"""for a learning rate that rises, RATE_RISE is enough: it has no noise"""
SOFT = ("jumped", "apart", "start")
"""how signs end that are not quite exact"""
JUMPED, MANY = math.log(1.5), 0.5
"""a tensor has jumped if its norm changed by this factor; many have if this share of them did"""
FAR_ABOVE = math.log(1.5)
FIRST_LOSSES = 3
"""of a run, whose largest is its start"""
GROWTH = 0.15
"""the largest of m deviations with heavy tails grows about like m to this power"""
MOST = 60.0
"""a score counts as at most this"""
AFFECTED = 4.0
"""standard deviations"""
SETTLED, EARLY = 12, 1.0
"""spreads are 1 + EARLY times as wide at first, and settle after so many values"""
DISTANCES_KEPT = 9
"""between values of a feature, whose median is the usual one"""


def resolution_of(family: Family) -> Resolution:
    if family in RESOLUTIONS:
        return RESOLUTIONS[family]
    spec = alert_spec(family)
    return DEFAULT if spec is None else DEFAULT._replace(min_change=spec.smallest_change)


class FamilyScore(NamedTuple):
    score: float
    where: str
    """the member with the largest deviation"""
    size: float
    """its value minus the forecast"""
    affected: float
    """share of the members that deviate by more than AFFECTED"""


class _Past:
    """Forecast of one feature, and when its values came."""

    def __init__(self, family: str) -> None:
        self.forecast = Forecast(resolution_of(family).min_spread)
        self.count = 0
        self.at: float | None = None
        self.distances: list[float] = []

    def gap(self, at: float | None) -> float:
        """Distance from the last value, in usual ones; at least 1."""
        if at is None or self.at is None or not self.distances:
            return 1.0
        return max(1.0, (at - self.at) / max(statistics.median(self.distances), 1e-9))

    def move(self, at: float | None) -> None:
        if at is not None and self.at is not None:
            self.distances = [*self.distances, at - self.at][-DISTANCES_KEPT:]
        self.at = at
        self.count += 1


class Forecasts:
    """One forecast for each feature."""

    def __init__(self) -> None:
        self._pasts: dict[tuple[str, str], _Past] = {}

    def deviations(self, features: Sequence[Feature], at: float | None = None) -> list[FeatureDeviation]:
        """`at`: the step of the measurement; forecasts across a gap are less certain."""
        return [FeatureDeviation(f.family, f.where, self._deviation(f, at)) for f in features]

    def _deviation(self, feature: Feature, at: float | None) -> Deviation:
        past = self._pasts.get((feature.family, feature.where))
        if past is None:
            return Deviation(0.0, 0.0, feature.value)
        deviation = past.forecast.deviation(feature.value, feature.stderr, past.gap(at))
        early = EARLY * max(0.0, SETTLED - past.count) / SETTLED
        return deviation._replace(score=deviation.score / (1 + early))

    def append(self, features: Sequence[Feature], at: float | None = None) -> None:
        for feature in features:
            past = self._pasts.setdefault((feature.family, feature.where), _Past(feature.family))
            past.forecast.append(feature.value)
            past.move(at)

    def restart(self, features: Sequence[Feature], at: float | None = None) -> None:
        """Forget the level, not the spread."""
        for feature in features:
            past = self._pasts.setdefault((feature.family, feature.where), _Past(feature.family))
            past.forecast.restart(feature.value)
            past.move(at)

    def last(self) -> dict[tuple[str, str], float]:
        """The last value of every feature."""
        return {key: past.forecast.last for key, past in self._pasts.items()}

    def forget(self, families: Container[str]) -> None:
        """Features of these families start again, without a past."""
        self._pasts = {key: past for key, past in self._pasts.items() if key[0] not in families}

    def state_dict(self) -> list[Any]:
        """Lists, dicts and numbers only."""
        return [
            [*key, past.forecast.state_dict(), past.count, past.at, list(past.distances)]
            for key, past in self._pasts.items()
        ]

    def load_state_dict(self, state: Sequence[Any]) -> None:
        self._pasts = {}
        for family, where, forecast, count, at, distances in state:
            past = self._pasts[family, where] = _Past(family)
            past.forecast.load_state_dict(forecast)
            past.count, past.at, past.distances = count, at, list(distances)


class LossStart:
    """Losses at the start of a run, which a good run stays below.

    Over many samples: that of the probe batch alone may be high by chance.
    """

    def __init__(self) -> None:
        self._first: dict[tuple[str, str], list[float]] = {}
        self.is_far_above = False
        """one of them is, by FAR_ABOVE"""

    def update(self, features: Sequence[Feature]) -> frozenset[str]:
        """Signs `validation loss above start` and `training loss above start`."""
        above = set()
        self.is_far_above = False
        for feature in features:
            if feature.family in ("validation loss", "training loss"):
                first = self._first.setdefault((feature.family, feature.where), [])
                if len(first) < FIRST_LOSSES:
                    first.append(feature.value)
                elif feature.value > max(first):
                    above.add(f"{feature.family} above start")
                    self.is_far_above |= feature.value > max(first) + FAR_ABOVE
        return frozenset(above)

    def state_dict(self) -> list[Any]:
        return [[*key, list(values)] for key, values in self._first.items()]

    def load_state_dict(self, state: Sequence[Any]) -> None:
        self._first = {(family, where): list(values) for family, where, values in state}


def family_scores(deviations: Sequence[FeatureDeviation]) -> dict[str, FamilyScore]:
    families: dict[str, list[FeatureDeviation]] = defaultdict(list)
    for deviation in deviations:
        families[deviation.family].append(deviation)
    return {family: _score(members) for family, members in families.items()}


def certain_signs(scores: Mapping[str, FamilyScore], deviations: Sequence[FeatureDeviation] = ()) -> frozenset[str]:
    """`zeros up`, `batches different down`, …; `rate up` also says whether a scheduler did it.

    With deviations also what happened to single tensors: `a weight jumped`, `a bias jumped`, `a tensor replaced` (its
    update is as large as itself), `many tensors jumped`.
    """
    signs = {
        f"{family} {'up' if scores[family].score > 0 else 'down'}"
        for family in EXACT & scores.keys()
        if abs(scores[family].score) > CERTAIN
    } - RECOVERED
    if "rate" in scores and scores["rate"].score > RATE_RISE and scores["rate"].size > JUMPED:
        signs.add("rate up")
    if "unscheduled rate up" in signs:
        signs = (signs - {"unscheduled rate up"}) | {"rate up"}
    elif "unscheduled rate" in scores and "rate up" in signs:
        signs = (signs - {"rate up"}) | {"scheduled rate up"}
    return frozenset(signs | _of_tensors(deviations))


def _of_tensors(deviations: Sequence[FeatureDeviation]) -> set[str]:
    norms = [d for d in deviations if d.family == "weights"]
    jumped = [d for d in norms if weighted(d) > CERTAIN and abs(d.deviation.size) > JUMPED]
    signs = {f"a {'bias' if d.where.endswith('bias') else 'weight'} jumped" for d in jumped if d.deviation.size > 0}
    if len(norms) > 2 and len(jumped) > MANY * len(norms):
        signs = {"many tensors jumped"}
    updated = [d for d in deviations if d.family == "update profile" and weighted(d) > CERTAIN]
    if 0 < len(updated) <= MANY * len(norms):
        signs.add("a tensor moved apart")
    return signs


def weighted(deviation: FeatureDeviation) -> float:
    """|z|, less for a change that is too small to matter."""
    min_change = resolution_of(deviation.family).min_change
    return deviation.deviation.score * min(1.0, abs(deviation.deviation.size) / min_change)


def _score(members: Sequence[FeatureDeviation]) -> FamilyScore:
    largest = max(members, key=weighted)
    score, size = weighted(largest), largest.deviation.size
    affected = sum(weighted(member) > AFFECTED for member in members) / len(members)
    signed = math.copysign(min(score / len(members) ** GROWTH, MOST), size)
    return FamilyScore(signed, largest.where, size, affected)

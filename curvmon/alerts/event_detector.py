"""One test on all features: is this measurement still explained by noise, and which cause explains it best?

A measurement is an event if its log odds against a quiet one (`Signatures`) exceed THRESHOLD. One that comes close
waits: if the next one, compared with the same forecasts, comes close as well, both together are an event. After an
event the affected features start from their new level at once; for a while, as they settle, their scores count less.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from curvmon.alerts.evidence import SOFT, FamilyScore, Forecasts, LossStart, certain_signs, family_scores, weighted
from curvmon.alerts.features import Feature, FeatureDeviation, alert_spec
from curvmon.alerts.place import places
from curvmon.alerts.setting_changes import TRAINED
from curvmon.alerts.signatures import QUIET, UNCLEAR, Signatures

THRESHOLD = 3.0
"""log odds"""
CLOSE = -1.0
"""from which on a measurement waits for the next one"""
RESTARTED = 3.0
"""features that deviate by more than this start again after an event"""
SETTLING, DAMPED = 6, 0.4
"""for so many measurements after an event, scores of affected families are multiplied by this; it fades"""
RECENT = 4
"""measurements that show together what a slow change is"""
CLEAR, CLEAR_AGAIN = 0.5, 0.7
"""probability from which on a cause is named, and from which on it is another event soon after one"""
HAND = frozenset({"schedule", "batch size", "weight decay setting", "trained parameters"})
"""causes that are what the user does on purpose"""


SCHEDULED = "scheduled rate up"
HAND_SIGNS = frozenset(
    {SCHEDULED, "rate down", "batches size up", "batches size down", "weight decay setting", TRAINED}
)
"""exact signs of them"""


class Event(NamedTuple):
    log_odds: float
    causes: tuple[tuple[str, float], ...]
    """most probable first"""
    places: tuple[tuple[str, float], ...]
    """modules, most probable first"""
    deviations: list[FeatureDeviation]
    scores: dict[str, FamilyScore]
    last: dict[tuple[str, str], float]
    """values of the features at the last measurement"""
    age: int
    """1: it began before this measurement; 2: before the last one"""

    has_hand_sign: bool = False
    suffers: bool = False
    """a loss is far above that at the start of the run"""
    is_own: bool = False
    """a metric that the user registered is beyond its own threshold"""

    @property
    def is_intended(self) -> bool:
        """It is more likely what the user does on purpose than an accident, and does not ruin the run."""
        explained = HAND | {UNCLEAR} if self.has_hand_sign else HAND
        return not self.suffers and sum(share for cause, share in self.causes if cause in explained) > 0.5

    @property
    def cause(self) -> str:
        """The most probable one; UNCLEAR if none is probable. Of what is intended, that of the user."""
        among = [(name, share) for name, share in self.causes if not self.is_intended or name in HAND]
        name, share = among[0]
        return name if share >= CLEAR or self.is_intended else UNCLEAR


class EventDetector:
    """Takes the features of every measurement; an `Event` where there is one."""

    def __init__(self, signatures: Signatures, sensitivity: float = 1.0) -> None:
        self._signatures = signatures
        self._sensitivity = sensitivity
        self._forecasts = Forecasts()
        self._waiting: list[Feature] | None = None
        """the last measurement, if it came close"""
        self._waiting_odds = 0.0
        self._settling: dict[str, int] = {}
        """measurements left, by family"""
        self._recent: list[dict[str, FamilyScore]] = []
        """scores of the last measurements, damped"""
        self._start = LossStart()
        self._last, self._since = QUIET, SETTLING
        """cause of the last event, and measurements since"""

    def update(
        self,
        features: Sequence[Feature],
        signs: frozenset[str] = frozenset(),
        rebuilt: Iterable[str] = (),
        named: Iterable[str] = (),
        at: float | None = None,
    ) -> Event | None:
        """`signs`: exact ones; `rebuilt`: nodes whose operations changed; `named`: modules whose settings did."""
        self._since += 1
        is_high = self._start.update(features)
        deviations = self._forecasts.deviations(features, at)
        scores = self._damped(family_scores(deviations))
        signs = signs | certain_signs(scores, deviations) | is_high
        if self._start.is_far_above and SCHEDULED in signs:  # a schedule that ruins the run is an accident
            signs = (signs - {SCHEDULED}) | {"rate up"}
        self._recent = [*self._recent, scores][-RECENT:]
        odds = self._signatures.log_odds(scores, signs)
        is_own = self._is_own(scores)
        is_exact = is_own or any(not sign.endswith(SOFT) for sign in signs)
        threshold = THRESHOLD / self._sensitivity
        both = odds + self._waiting_odds if self._waiting is not None else odds
        if odds >= threshold or is_exact or (self._waiting is not None and odds >= CLOSE and both >= threshold + CLOSE):
            causes, where = self._causes(scores, signs), places(deviations, rebuilt, named)
            age = 1 if self._waiting is None else 2
            event = Event(
                odds,
                causes,
                where,
                deviations,
                scores,
                self._forecasts.last(),
                age,
                bool(signs & HAND_SIGNS),
                self._start.is_far_above,
                is_own,
            )
            self._restart(features, deviations, scores, at)
            if not is_exact and self._is_echo(event):
                return None
            self._last, self._since = event.cause, 0
            return event
        if self._waiting is not None:
            self._forecasts.append(self._waiting, at)
            self._waiting = None
        if odds >= CLOSE:
            self._waiting, self._waiting_odds = list(features), odds
        else:
            self._forecasts.append(features, at)
        self._settling = {family: left - 1 for family, left in self._settling.items() if left > 1}
        return None

    def certain_causes(self, features: Sequence[Feature], signs: frozenset[str]) -> tuple[tuple[str, float], ...]:
        """From exact signs alone, where a measurement has become impossible; none without an exact sign."""
        deviations = self._forecasts.deviations(features)
        signs = signs | {s for s in certain_signs(family_scores(deviations)) if not s.endswith(SOFT)}
        return self._causes({}, signs) if signs else ()

    def recent_causes(self, count: int = RECENT) -> tuple[tuple[str, float], ...]:
        """Of a slow change: Σ s / sqrt(n), s: the scores of a family in the last n measurements."""
        summed: dict[str, FamilyScore] = {}
        recent = self._recent[-count:]
        for family in sorted({family for scores in recent for family in scores}):
            damped = [scores[family] for scores in recent if family in scores]
            total = sum(score.score for score in damped) / math.sqrt(len(damped))
            summed[family] = damped[-1]._replace(score=total)
        return self._causes(summed, certain_signs(summed))

    def _causes(self, scores: Mapping[str, FamilyScore], signs: frozenset[str]) -> tuple[tuple[str, float], ...]:
        posterior = self._signatures.posterior(scores, signs)
        total = sum(share for cause, share in posterior.items() if cause != QUIET)
        causes = [(cause, share / total) for cause, share in posterior.items() if cause != QUIET]
        return tuple(sorted(causes, key=lambda each: -each[1]))

    def _is_own(self, scores: Mapping[str, FamilyScore]) -> bool:
        """Metrics that the user registered have no signature, but a threshold."""
        for family in scores.keys() - self._signatures.noise.keys():
            spec = alert_spec(family)
            if spec is not None and abs(scores[family].score) >= spec.threshold / self._sensitivity:
                return True
        return False

    def _is_echo(self, event: Event) -> bool:
        """What an event has started goes on: the training loss, for example, shows it one measurement later."""
        share = dict(event.causes).get(event.cause, 0.0)
        if self._since > SETTLING:
            return False
        return event.cause in (self._last, UNCLEAR) or share < CLEAR_AGAIN

    def _damped(self, scores: dict[str, FamilyScore]) -> dict[str, FamilyScore]:
        damped = {}
        for family, score in scores.items():
            left = self._settling.get(family, 0)
            factor = DAMPED + (1 - DAMPED) * (1 - left / SETTLING) if left else 1.0
            damped[family] = score._replace(score=score.score * factor)
        return damped

    def _restart(
        self,
        features: Sequence[Feature],
        deviations: Sequence[FeatureDeviation],
        scores: Mapping[str, FamilyScore],
        at: float | None,
    ) -> None:
        moved = [weighted(deviation) > RESTARTED for deviation in deviations]
        self._forecasts.restart([feature for feature, has_moved in zip(features, moved) if has_moved], at)
        self._forecasts.append([feature for feature, has_moved in zip(features, moved) if not has_moved], at)
        self._settling.update({family: SETTLING for family, score in scores.items() if abs(score.score) > RESTARTED})
        self._waiting = None

    def forget(self, families: Container[str]) -> None:
        """Features of these families start again, without a past."""
        self._forecasts.forget(families)
        self._waiting = None

    def state_dict(self) -> dict[str, Any]:
        """Lists, dicts, strings and numbers only."""
        return {
            "forecasts": self._forecasts.state_dict(),
            "waiting": None if self._waiting is None else [list(feature) for feature in self._waiting],
            "waiting_odds": self._waiting_odds,
            "settling": dict(self._settling),
            "recent": [{family: list(score) for family, score in scores.items()} for scores in self._recent],
            "start": self._start.state_dict(),
            "last": self._last,
            "since": self._since,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._forecasts.load_state_dict(state["forecasts"])
        waiting = state["waiting"]
        self._waiting = None if waiting is None else [Feature(*feature) for feature in waiting]
        self._waiting_odds, self._settling = state["waiting_odds"], dict(state["settling"])
        self._recent = [{family: FamilyScore(*s) for family, s in scores.items()} for scores in state["recent"]]
        self._start.load_state_dict(state["start"])
        self._last, self._since = state["last"], state["since"]

"""What events look like: for every cause, how often it raises or lowers the score of each family.

    log P(cause | scores) = log prior + τ Σ_f log Σ_state P(state | cause, f) p(score_f | state) + const

A family is either as usual (Student's t, its scale and degrees of freedom from quiet runs), raised, or lowered.
Families depend on each other, so their sum counts as τ < 1 of what independent ones would. Cause "" is a quiet
measurement.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from curvmon.alerts.evidence import EXACT, SOFT, FamilyScore

QUIET, UNCLEAR = "", "unclear"
"""no event; a cause that is not in the table"""
SCALE = 6.0
"""of scores of affected families, standard deviations"""
LEAKAGE = 1e-3
"""probability of a score of the other sign in an affected family"""


class Noise(NamedTuple):
    """Scores of a family in quiet runs: Student's t."""

    scale: float
    freedom: float

    def log_density(self, score: float) -> float:
        n, z = self.freedom, score / self.scale
        constant = math.lgamma((n + 1) / 2) - math.lgamma(n / 2) - 0.5 * math.log(n * math.pi) - math.log(self.scale)
        return constant - (n + 1) / 2 * math.log1p(z * z / n)


class Shares(NamedTuple):
    """How often a cause raises and lowers a family."""

    up: float
    down: float


RARE = Shares(0.03, 0.03)
"""of families that a cause has never affected"""
RARE_SIGN, RARE_SOFT = 1e-4, 0.05
"""probability of an exact sign that a cause has never had; of one that is not quite exact"""


def affected_log_density(score: float) -> float:
    """Of a family that is raised: heavy-tailed, and hardly ever of the other sign."""
    if score < 0:
        return math.log(LEAKAGE) + affected_log_density(-score)
    return -math.log(SCALE) - 2 * math.log1p(score / SCALE)


@dataclass(frozen=True)
class Signatures:
    """Tables that `benchmarks.alert_fit` makes from recorded runs."""

    noise: Mapping[str, Noise]
    """by family"""
    shares: Mapping[str, Mapping[str, Shares]]
    """by cause and family; what is missing is rarely affected"""
    priors: Mapping[str, float]
    """by cause, QUIET included"""
    exact: Mapping[str, Mapping[str, float]]
    """by cause: probability of each exact sign (`exact_signs`)"""
    temper: float = 0.5
    """τ"""

    def log_likelihood(self, cause: str, scores: Mapping[str, FamilyScore], signs: frozenset[str]) -> float:
        total = 0.0
        for family, score in scores.items():
            if family not in self.noise or family in EXACT:
                continue
            usual = self.noise[family].log_density(score.score)
            if cause == QUIET:
                total += usual
                continue
            up, down = self.shares[cause].get(family, RARE)
            terms = [
                (up, affected_log_density(score.score)),
                (down, affected_log_density(-score.score)),
                (max(1 - up - down, 1e-3), usual),
            ]
            total += _log_sum([math.log(share) + density for share, density in terms if share > 0])
        total *= self.temper
        for sign in sorted({sign for table in self.exact.values() for sign in table}):  # sums of floats depend on it
            rare = RARE_SOFT if sign.endswith(SOFT) and cause != QUIET else RARE_SIGN
            share = min(self.exact.get(cause, {}).get(sign, rare), 1 - RARE_SIGN)
            total += math.log(share if sign in signs else 1 - share)
        return total

    def posterior(self, scores: Mapping[str, FamilyScore], signs: frozenset[str]) -> dict[str, float]:
        """Probability of every cause, QUIET included."""
        logs = {
            cause: math.log(prior) + self.log_likelihood(cause, scores, signs) for cause, prior in self.priors.items()
        }
        total = _log_sum(list(logs.values()))
        return {cause: math.exp(value - total) for cause, value in logs.items()}

    def log_odds(self, scores: Mapping[str, FamilyScore], signs: frozenset[str]) -> float:
        """Of any event against none; priors included."""
        logs = {
            cause: math.log(prior) + self.log_likelihood(cause, scores, signs) for cause, prior in self.priors.items()
        }
        quiet = logs.pop(QUIET)
        return _log_sum(list(logs.values())) - quiet


def _log_sum(values: list[float]) -> float:
    largest = max(values)
    return largest + math.log(sum(math.exp(value - largest) for value in values))

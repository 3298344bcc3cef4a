"""Checks the conditions of `AlertRules`, snapshot by snapshot.

A rule raises an alert when its condition has held for several measurements in a row, and again only after it has not
held for as many.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from curvmon.alerts.context import Cause
from curvmon.alerts.rate_growth import rate_growth
from curvmon.alerts.rule_messages import Occasion, Violation, alert_of_divergence, alert_of_violation
from curvmon.alerts.rules import AlertRules
from curvmon.records import Alert, Snapshot

MIN_EXCESS = 4.0
"""standard errors by which a value has to exceed its threshold"""
_OPTIMIZER_RULES = {"edge_of_stability", "far_beyond_stability"}
_SPECTRUM_RULES = {*_OPTIMIZER_RULES, "saddle"}
_AT_ONCE = {"not_finite", "loss_explosion", "dead_network"}
"""rules that raise an alert the first time that their condition holds"""
RECENT = 4
"""losses that an exploded one is compared with"""
_PAIR_RULES = {"coupling_above", "rank_collapse", "gn_gap_above", "dead_network"}
RATIOS_KEPT, FEWEST_RATIOS, FAR = 12, 4, 3.0
"""far beyond the stability limit is also this many times farther than usual: with Adam, good runs may be far"""
NEAR_FIRST = 0.7
"""share of the first loss from which on a loss that has grown has exploded: far below, a single sample may do it"""


class RuleChecker:
    """Applies the rules to one snapshot after the other."""

    def __init__(self, rules: AlertRules) -> None:
        self._rules = rules
        self._streaks: dict[str, int] = {}
        """measurements in a row at which a rule's condition has held (positive) or has not (negative)"""
        self._raised: list[str] = []
        """rules that raise no second alert until their condition has ceased"""
        self._losses: list[float] = []
        """of the last measurements"""
        self._first_loss: float | None = None
        self._recent_losses: list[float] = []
        """of the last validations"""
        self._largest_rank = 0.0
        self._ratios: list[float] = []
        """sharpness over the stability limit, lately"""
        self._was_alive = False

    def update(self, snapshot: Snapshot, past: Sequence[Snapshot] = (), causes: Sequence[Cause] = ()) -> list[Alert]:
        """Alerts, and notices of level "info".

        Args:
            snapshot: the one to check.
            past: those before it, for values before and after.
            causes: changes of the context at the same time.
        """
        exploded = self._loss_explosion(snapshot)
        if math.isfinite(snapshot.loss):
            self._first_loss = snapshot.loss if self._first_loss is None else self._first_loss
            self._recent_losses = [*self._recent_losses, snapshot.loss][-RECENT:]
        if snapshot.is_full:
            self._losses.append(snapshot.loss)
            del self._losses[: -self._rules.lasting - 1]
        violations = [
            exploded,
            self._dead_network(snapshot),
            self._edge_of_stability(snapshot),
            self._far_beyond_stability(snapshot),
            self._coupling_above(snapshot),
            self._saddle(snapshot),
            self._rank_collapse(snapshot),
            self._gn_gap_above(snapshot),
        ]
        checked: set[str] = {"loss_explosion"} if math.isfinite(snapshot.loss) else set()
        if snapshot.is_full:
            checked.add("not_finite")
        if snapshot.spectrum is not None:
            checked |= _SPECTRUM_RULES - (_OPTIMIZER_RULES if math.isnan(snapshot.spectrum.stability_ratio) else set())
        if snapshot.measurement is not None:
            checked |= _PAIR_RULES
        new = self._new_violations([v for v in violations if v is not None], checked)
        return [alert_of_violation(v, self._occasion(v, snapshot, past, causes)) for v in new]

    def diverged(self, reason: str, snapshot: Snapshot, past: Sequence[Snapshot] = ()) -> list[Alert]:
        """Nothing could be measured: the loss or its derivatives are not finite."""
        if not self._rules.not_finite or "not_finite" in self._raised:
            return []
        self._raised.append("not_finite")
        before = next((each for each in reversed(past) if math.isfinite(each.loss)), None)
        return [alert_of_divergence(reason, snapshot, before, rate_growth(past, snapshot))]

    def _occasion(
        self, violation: Violation, now: Snapshot, past: Sequence[Snapshot], causes: Sequence[Cause]
    ) -> Occasion:
        streak, rule = self._streaks[violation.rule], violation.rule
        compared = [snapshot for snapshot in past if _has_value(snapshot, rule)]
        before = compared[-streak] if len(compared) >= streak else None
        return Occasion(now, before, causes, streak, rate_growth(past, now))

    def _new_violations(self, violations: list[Violation], checked: set[str]) -> list[Violation]:
        """Rules that could not be checked keep their state: a missing value does not end a condition."""
        violated = {v.rule for v in violations}
        for rule in checked:
            streak = self._streaks.get(rule, 0)
            self._streaks[rule] = max(streak, 0) + 1 if rule in violated else min(streak, 0) - 1
            ended = rule in _AT_ONCE and rule not in violated
            if self._streaks[rule] <= -self._rules.lasting or ended:
                self._raised = [raised for raised in self._raised if raised != rule]
        lasting = {v.rule: 1 if v.rule in _AT_ONCE else self._rules.lasting for v in violations}
        new = [v for v in violations if self._streaks[v.rule] >= lasting[v.rule] and v.rule not in self._raised]
        self._raised += [v.rule for v in new]
        return new

    def _loss_explosion(self, snapshot: Snapshot) -> Violation | None:
        limit, loss = self._rules.loss_explosion, snapshot.loss
        recent, first = self._recent_losses, self._first_loss
        if limit is None or first is None or not math.isfinite(loss) or min(*recent, first) <= 0:
            return None
        largest = max(recent)
        if not (loss > limit * largest and loss > NEAR_FIRST * first):
            return None
        return Violation(
            rule="loss_explosion",
            metric="loss",
            where="loss",
            threshold=limit * largest,
            value=loss,
            level="error",
            before=recent[-1],
        )

    def _dead_network(self, snapshot: Snapshot) -> Violation | None:
        measurement = snapshot.measurement
        if not self._rules.dead_network or measurement is None or len(measurement.nodes) < 2:
            return None
        couplings = measurement.coupling.clone().fill_diagonal_(math.nan)
        if couplings.isfinite().any():
            self._was_alive = True
            return None
        if not self._was_alive:
            return None
        return Violation(
            rule="dead_network",
            metric="coupling",
            where="all pairs",
            threshold=math.nan,
            value=math.nan,
            level="error",
        )

    def _edge_of_stability(self, snapshot: Snapshot) -> Violation | None:
        limit, spectrum = self._rules.edge_of_stability, snapshot.spectrum
        if limit is None or spectrum is None or not spectrum.stability_ratio > limit:
            return None
        ratio = spectrum.stability_ratio
        return Violation(
            rule="edge_of_stability",
            metric="hessian",
            where="lambda_1",
            threshold=limit,
            value=ratio,
            level="info",
        )

    def _far_beyond_stability(self, snapshot: Snapshot) -> Violation | None:
        limit, spectrum = self._rules.far_beyond_stability, snapshot.spectrum
        if limit is None or spectrum is None or not math.isfinite(spectrum.stability_ratio):
            return None
        ratio, usual = spectrum.stability_ratio, self._ratios
        self._ratios = [*usual, ratio][-RATIOS_KEPT:]
        if len(usual) >= FEWEST_RATIOS:
            limit = max(limit, FAR * statistics.median(usual))
        if not ratio > limit:
            return None
        return Violation(
            rule="far_beyond_stability",
            metric="hessian",
            where="lambda_1",
            threshold=limit,
            value=ratio,
        )

    def _coupling_above(self, snapshot: Snapshot) -> Violation | None:
        limit, measurement = self._rules.coupling_above, snapshot.measurement
        if limit is None or measurement is None or len(measurement.nodes) < 2:
            return None
        excess = (measurement.coupling - limit) / measurement.stderr["coupling"].clamp_min(1e-3)
        excess.fill_diagonal_(-math.inf)
        i, j = sorted(divmod(int(excess.nan_to_num(-math.inf).argmax()), len(measurement.nodes)))
        if not excess[i, j].item() > MIN_EXCESS:
            return None
        where, value = f"{measurement.nodes[i]}--{measurement.nodes[j]}", measurement.coupling[i, j].item()
        return Violation(
            rule="coupling_above",
            metric="coupling",
            where=where,
            threshold=limit,
            value=value,
            level="info",
        )

    def _saddle(self, snapshot: Snapshot) -> Violation | None:
        limit, spectrum = self._rules.saddle, snapshot.spectrum
        if limit is None or spectrum is None or not spectrum.sharpness > 0 or len(self._losses) <= self._rules.lasting:
            return None
        ratio, first = spectrum.smallest / spectrum.sharpness, self._losses[0]
        change = abs(self._losses[-1] / first - 1) if first else math.inf
        if not (ratio < limit and change < self._rules.stalled):
            return None
        return Violation(
            rule="saddle",
            metric="hessian",
            where="lambda_min",
            threshold=limit,
            value=ratio,
        )

    def _rank_collapse(self, snapshot: Snapshot) -> Violation | None:
        limit, measurement = self._rules.rank_collapse, snapshot.measurement
        if limit is None or measurement is None or len(measurement.nodes) < 2:
            return None
        value = measurement.by_distance("stable_rank")[1:].nanmean().item()
        if not math.isfinite(value):
            return None
        self._largest_rank = max(self._largest_rank, value)
        if not (value < limit and self._largest_rank > 2 * limit):
            return None
        return Violation(
            rule="rank_collapse",
            metric="stable_rank",
            where="all pairs",
            threshold=limit,
            value=value,
            level="info",
            before=self._largest_rank,
        )

    def _gn_gap_above(self, snapshot: Snapshot) -> Violation | None:
        limit, measurement = self._rules.gn_gap_above, snapshot.measurement
        if limit is None or measurement is None:
            return None
        gap, error = measurement.gn_gap, measurement.stderr["gn_gap"]
        excess = (gap - MIN_EXCESS * error).where(gap.isfinite() & error.isfinite(), -math.inf)
        i, j = sorted(divmod(int(excess.argmax()), len(measurement.nodes)))
        if not excess[i, j].item() > limit:
            return None
        where, value = f"{measurement.nodes[i]}--{measurement.nodes[j]}", gap[i, j].item()
        return Violation(
            rule="gn_gap_above",
            metric="gn_gap",
            where=where,
            threshold=limit,
            value=value,
        )

    def state_dict(self) -> dict[str, Any]:
        """Lists, dicts, strings and numbers only."""
        return {
            "streaks": dict(self._streaks),
            "raised": list(self._raised),
            "losses": list(self._losses),
            "largest_rank": self._largest_rank,
            "first_loss": self._first_loss,
            "recent_losses": list(self._recent_losses),
            "was_alive": self._was_alive,
            "ratios": list(self._ratios),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._streaks, self._raised = dict(state["streaks"]), list(state["raised"])
        self._losses, self._largest_rank = list(state["losses"]), state["largest_rank"]
        self._first_loss, self._recent_losses = state["first_loss"], list(state["recent_losses"])
        self._was_alive, self._ratios = state["was_alive"], list(state["ratios"])


def _has_value(snapshot: Snapshot, rule: str) -> bool:
    """The rule could be checked."""
    if rule in _SPECTRUM_RULES:
        return snapshot.spectrum is not None
    return snapshot.measurement is not None if rule in _PAIR_RULES else math.isfinite(snapshot.loss)

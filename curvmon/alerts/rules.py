"""Fixed rules, in addition to change detection: each has a threshold; None or False switches it off.

A rule raises an alert when its condition has held for several measurements in a row, and again only after it has not
held for as many.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from curvmon.errors import InputError
from curvmon.records import Alert, Level, Snapshot

MIN_EXCESS = 4.0
"""standard errors by which a value has to exceed its threshold"""


def is_number(value: Any) -> bool:
    """An int or a float; neither a bool nor NaN."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)


@dataclass(frozen=True)
class AlertRules:
    """What `CurvatureMonitor` raises alerts for; None or False switches a rule off.

    Raises:
        InputError: a value is of the wrong type or out of range.
    """

    changes: bool = True
    """abrupt changes of resonance, coupling, stable rank, GN-Gap, the top eigenvalue or the probe batch's loss"""
    sensitivity: float = 1.0
    """to changes: 2 halves the evidence that one needs, 0.5 doubles it"""
    edge_of_stability: float | None = 1.0
    """sharpness over the largest stable sharpness of the optimizer; a notice, no alert: most runs get there"""
    far_beyond_stability: float | None = 20.0
    """the same ratio as a warning. A probe batch of 32 is sharper than the whole data, so runs that train well reach
    several times the limit; for training with full batches, 1.5 is far"""
    coupling_above: float | None = 1.05
    """a coupling that exceeds this by more than its error; a notice. Above 1 the tensor part, which Gauss-Newton
    misses, contributes; it need not dominate"""
    saddle: float | None = -0.5
    """smallest eigenvalue over λ_1, while the loss stalls"""
    stalled: float = 0.01
    """the loss stalls if it changes by less than this share over `lasting` measurements"""
    rank_collapse: float | None = 1.02
    """mean stable rank between different layers, after it has been at least twice as large; a notice: small networks
    get there by training well"""
    gn_gap_above: float | None = None
    """threshold of the largest GN-Gap"""
    loss_explosion: float | None = 2.0
    """loss of the probe batch over the largest of the last four, if it is also near that of the first measurement"""
    dead_network: bool = True
    """no coupling is defined any more: the loss does not depend on the layers"""
    not_finite: bool = True
    """loss, parameters or curvature that are NaN or infinite"""
    lasting: int = 3
    """measurements in a row for which a condition has to hold"""

    def __post_init__(self) -> None:
        for name in ("changes", "not_finite", "dead_network"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"{name} must be True or False, not {getattr(self, name)!r}")
        for name in (
            "edge_of_stability",
            "far_beyond_stability",
            "coupling_above",
            "saddle",
            "rank_collapse",
            "gn_gap_above",
            "loss_explosion",
        ):
            value = getattr(self, name)
            if value is not None and not is_number(value):
                raise InputError(f"{name} must be a number, or None to switch it off, not {value!r}")
        for name in ("sensitivity", "stalled"):
            if not is_number(getattr(self, name)) or not 0 < getattr(self, name) < math.inf:
                raise InputError(f"{name} must be a positive number, not {getattr(self, name)!r}")
        if not is_number(self.lasting) or not isinstance(self.lasting, int) or self.lasting < 1:
            raise InputError(f"lasting must be an integer of at least 1, not {self.lasting!r}")


_OPTIMIZER_RULES = {"edge_of_stability", "far_beyond_stability"}
_SPECTRUM_RULES = {*_OPTIMIZER_RULES, "saddle"}
_AT_ONCE = {"not_finite", "loss_explosion", "dead_network"}
"""rules that raise an alert the first time that their condition holds"""
RECENT = 4
"""losses that an exploded one is compared with"""
_PAIR_RULES = {"coupling_above", "rank_collapse", "gn_gap_above", "dead_network"}
NEAR_FIRST = 0.7
"""share of the first loss from which on a loss that has grown has exploded: far below, a single sample may do it"""


class Violation(NamedTuple):
    """A rule's condition that holds at this measurement."""

    rule: str
    metric: str
    where: str
    threshold: float
    value: float
    message: str
    level: Level = "warning"


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
        self._was_alive = False

    def update(self, snapshot: Snapshot) -> list[Alert]:
        """Alerts, and notices of level "info"."""
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
        return self._new_alerts([v for v in violations if v is not None], checked, snapshot.step, snapshot.epoch)

    def diverged(self, reason: str, step: int, epoch: int) -> list[Alert]:
        """Nothing could be measured: the loss or its derivatives are not finite."""
        if not self._rules.not_finite or "not_finite" in self._raised:
            return []
        self._raised.append("not_finite")
        message = f"not finite at step {step}: {reason}. Go back to an earlier checkpoint"
        nan = math.nan
        return [Alert("not_finite", "loss", "loss", nan, nan, math.inf, step, epoch, message, "error")]

    def _new_alerts(self, violations: list[Violation], checked: set[str], step: int, epoch: int) -> list[Alert]:
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
        return [
            Alert(
                kind=v.rule,
                metric=v.metric,
                where=v.where,
                before=v.threshold,
                after=v.value,
                score=abs(v.value / v.threshold) if v.threshold else math.inf,
                step=step,
                epoch=epoch,
                message=f"{v.message} (step {step})",
                level=v.level,
            )
            for v in new
        ]

    def _loss_explosion(self, snapshot: Snapshot) -> Violation | None:
        limit, loss = self._rules.loss_explosion, snapshot.loss
        recent, first = self._recent_losses, self._first_loss
        if limit is None or first is None or not math.isfinite(loss) or min(*recent, first) <= 0:
            return None
        largest = max(recent)
        if not (loss > limit * largest and loss > NEAR_FIRST * first):
            return None
        message = (
            f"the loss of the probe batch rose from {recent[-1]:.3g} to {loss:.3g}: what the network had learned is "
            "lost; go back to an earlier checkpoint, with a lower learning rate"
        )
        return Violation("loss_explosion", "loss", "loss", limit * largest, loss, message, "error")

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
        message = (
            "no coupling is defined any more: the loss does not depend on the layers, as where all ReLUs are off or "
            "all outputs are saturated; go back to an earlier checkpoint, with a lower learning rate"
        )
        return Violation("dead_network", "coupling", "all pairs", math.nan, math.nan, message, "error")

    def _edge_of_stability(self, snapshot: Snapshot) -> Violation | None:
        limit, spectrum = self._rules.edge_of_stability, snapshot.spectrum
        if limit is None or spectrum is None or not spectrum.stability_ratio > limit:
            return None
        ratio = spectrum.stability_ratio
        message = (
            f"sharpness is {ratio:.3g} times the largest stable sharpness of the optimizer, on the probe batch: the "
            "edge of stability, where most runs stay"
        )
        return Violation("edge_of_stability", "hessian", "lambda_1", limit, ratio, message, "info")

    def _far_beyond_stability(self, snapshot: Snapshot) -> Violation | None:
        limit, spectrum = self._rules.far_beyond_stability, snapshot.spectrum
        if limit is None or spectrum is None or not spectrum.stability_ratio > limit:
            return None
        ratio = spectrum.stability_ratio
        message = (
            f"sharpness is {ratio:.3g} times the largest stable sharpness of the optimizer: steps overshoot along the "
            "sharpest direction; lower the learning rate, or warm it up longer"
        )
        return Violation("far_beyond_stability", "hessian", "lambda_1", limit, ratio, message)

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
        message = (
            f"coupling {where} is {value:.3g}, above {limit:g}: the tensor part of the Hessian, which K-FAC and Fisher "
            "miss, contributes between these layers; see the GN-Gap for how much"
        )
        return Violation("coupling_above", "coupling", where, limit, value, message, "info")

    def _saddle(self, snapshot: Snapshot) -> Violation | None:
        limit, spectrum = self._rules.saddle, snapshot.spectrum
        if limit is None or spectrum is None or not spectrum.sharpness > 0 or len(self._losses) <= self._rules.lasting:
            return None
        ratio, first = spectrum.smallest / spectrum.sharpness, self._losses[0]
        change = abs(self._losses[-1] / first - 1) if first else math.inf
        if not (ratio < limit and change < self._rules.stalled):
            return None
        message = (
            f"the smallest eigenvalue is {ratio:.2g} times the largest while the loss stalls: a saddle point; more "
            "gradient noise, momentum or a larger learning rate may help to escape it"
        )
        return Violation("saddle", "hessian", "lambda_min", limit, ratio, message)

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
        message = (
            f"the mean stable rank between layers fell to {value:.3g} (its maximum was {self._largest_rank:.2g}): all "
            "curvature is in a single direction; check for collapsed representations, or a single sample that "
            "dominates the loss"
        )
        return Violation("rank_collapse", "stable_rank", "all pairs", limit, value, message, "info")

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
        message = (
            f"GN-Gap {where} is {value:.3g}, above {limit:g}: Gauss-Newton, K-FAC and Fisher miss that much of the "
            "curvature there, relative to what they include"
        )
        return Violation("gn_gap_above", "gn_gap", where, limit, value, message)

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
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._streaks, self._raised = dict(state["streaks"]), list(state["raised"])
        self._losses, self._largest_rank = list(state["losses"]), state["largest_rank"]
        self._first_loss, self._recent_losses = state["first_loss"], list(state["recent_losses"])
        self._was_alive = state["was_alive"]

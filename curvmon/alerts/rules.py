"""Fixed rules beside the detection of changes: each has its threshold, and is switched off with None or False.

A rule speaks when its condition has held for several measurements, and again only after it has not for as long.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from curvmon.errors import InputError
from curvmon.records import Alert, Level, Snapshot

BEYOND_ERROR = 4.0
"""standard errors by which a value has to exceed its threshold"""


@dataclass(frozen=True)
class AlertRules:
    """What `CurvatureMonitor` tells of; None or False switches a rule off."""

    changes: bool = True
    """abrupt changes of resonance, coupling, stable rank, GN-Gap, the top eigenvalue or the probe batch's loss"""
    sensitivity: float = 1.0
    """to changes: 2 tells them at half the usual proof, 0.5 at twice"""
    edge_of_stability: float | None = 1.0
    """λ_1 over the optimizer's stability limit; a notice, no alert: most runs get there"""
    far_beyond_stability: float | None = 20.0
    """the same ratio as a warning. A probe batch of 32 is sharper than the whole data, so runs that train well reach
    several times the limit; for training with full batches, 1.5 is far"""
    coupling_above: float | None = 1.05
    """a coupling larger than this by more than its error; a notice. Above 1 it takes curvature outside Gauss-Newton,
    a little above 1 little of it"""
    saddle: float | None = -0.5
    """smallest eigenvalue over λ_1, while the loss stalls"""
    stalled: float = 0.01
    """relative change of the loss over `lasting` measurements that counts as stalling"""
    rank_collapse: float | None = 1.02
    """mean stable rank between different layers, after it has been at least twice as large; a notice: small networks
    get there by training well"""
    gn_gap_above: float | None = None
    """a level for the largest GN-Gap"""
    not_finite: bool = True
    """loss, parameters or curvature that are NaN or infinite"""
    lasting: int = 3
    """measurements in a row for which a condition has to hold"""

    def __post_init__(self) -> None:
        for name in ("changes", "not_finite"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"{name} must be True or False, not {getattr(self, name)!r}")
        for name in (
            "edge_of_stability",
            "far_beyond_stability",
            "coupling_above",
            "saddle",
            "rank_collapse",
            "gn_gap_above",
        ):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
                raise InputError(f"{name} must be a number, or None to switch it off, not {value!r}")
        for name in ("sensitivity", "stalled"):
            if not isinstance(getattr(self, name), (int, float)) or not getattr(self, name) > 0:
                raise InputError(f"{name} must be a positive number, not {getattr(self, name)!r}")
        if not isinstance(self.lasting, int) or self.lasting < 1:
            raise InputError(f"lasting must be a whole number of at least 1, not {self.lasting!r}")


_OF_OPTIMIZER = {"edge_of_stability", "far_beyond_stability"}
_OF_SPECTRUM = {*_OF_OPTIMIZER, "saddle"}
_OF_PAIRS = {"coupling_above", "rank_collapse", "gn_gap_above"}


class Finding(NamedTuple):
    """A condition that holds now."""

    rule: str
    metric: str
    where: str
    threshold: float
    value: float
    message: str
    level: Level = "warning"


class RuleBook:
    """Applies the rules to one snapshot after the other."""

    def __init__(self, rules: AlertRules) -> None:
        self._rules = rules
        self._held: dict[str, int] = {}
        """measurements in a row for which a rule's condition has held; negative: for which a told one has not"""
        self._told: list[str] = []
        self._losses: list[float] = []
        self._highest_rank = 0.0

    def update(self, snapshot: Snapshot) -> list[Alert]:
        """Alerts, and notices of level "info"."""
        self._losses.append(snapshot.loss)
        del self._losses[: -self._rules.lasting - 1]
        found = [
            self._edge(snapshot),
            self._far_beyond(snapshot),
            self._coupling(snapshot),
            self._saddle(snapshot),
            self._rank(snapshot),
            self._gap(snapshot),
        ]
        known: set[str] = set()
        if snapshot.spectrum is not None:
            known |= _OF_SPECTRUM - (_OF_OPTIMIZER if math.isnan(snapshot.spectrum.stability_ratio) else set())
        if snapshot.measurement is not None:
            known |= _OF_PAIRS
        return self._spoken([f for f in found if f is not None], known, snapshot.step, snapshot.epoch)

    def diverged(self, reason: str, step: int, epoch: int) -> list[Alert]:
        """There was nothing to measure: the loss or its derivatives are not finite."""
        if not self._rules.not_finite or "not_finite" in self._told:
            return []
        self._told.append("not_finite")
        message = f"not finite at step {step}: {reason}. Go back to a checkpoint from before"
        nan = math.nan
        return [Alert("not_finite", "loss", "loss", nan, nan, math.inf, step, epoch, message, "error")]

    def _spoken(self, found: list[Finding], known: set[str], step: int, epoch: int) -> list[Alert]:
        """A rule that could not be looked at is left as it was: a missing number is no end of a condition."""
        holding = {f.rule for f in found}
        for rule in known | {"not_finite"}:
            before = self._held.get(rule, 0)
            self._held[rule] = max(before, 0) + 1 if rule in holding else min(before, 0) - 1
            if self._held[rule] <= -self._rules.lasting or (rule == "not_finite" and rule not in holding):
                self._told = [told for told in self._told if told != rule]
        fresh = [f for f in found if self._held[f.rule] >= self._rules.lasting and f.rule not in self._told]
        self._told += [f.rule for f in fresh]
        return [
            Alert(
                kind=f.rule,
                metric=f.metric,
                where=f.where,
                before=f.threshold,
                after=f.value,
                score=abs(f.value / f.threshold) if f.threshold else math.inf,
                step=step,
                epoch=epoch,
                message=f"{f.message} (step {step})",
                level=f.level,
            )
            for f in fresh
        ]

    def _edge(self, snapshot: Snapshot) -> Finding | None:
        limit, found = self._rules.edge_of_stability, snapshot.spectrum
        if limit is None or found is None or not found.stability_ratio > limit:
            return None
        message = (
            f"sharpness is {found.stability_ratio:.3g} times the optimizer's stability limit on the probe batch: the "
            "edge of stability, where training usually hovers"
        )
        ratio = found.stability_ratio
        return Finding("edge_of_stability", "hessian", "lambda_1", limit, ratio, message, "info")

    def _far_beyond(self, snapshot: Snapshot) -> Finding | None:
        limit, found = self._rules.far_beyond_stability, snapshot.spectrum
        if limit is None or found is None or not found.stability_ratio > limit:
            return None
        message = (
            f"sharpness is {found.stability_ratio:.3g} times the optimizer's stability limit: steps overshoot along "
            "the sharpest direction; lower the learning rate, or warm it up longer"
        )
        return Finding("far_beyond_stability", "hessian", "lambda_1", limit, found.stability_ratio, message)

    def _coupling(self, snapshot: Snapshot) -> Finding | None:
        limit, found = self._rules.coupling_above, snapshot.measurement
        if limit is None or found is None or len(found.nodes) < 2:
            return None
        excess = (found.coupling - limit) / found.stderr["coupling"].clamp_min(1e-3)
        excess.fill_diagonal_(-math.inf)
        i, j = sorted(divmod(int(excess.nan_to_num(-math.inf).argmax()), len(found.nodes)))
        if not excess[i, j].item() > BEYOND_ERROR:
            return None
        where, value = f"{found.nodes[i]}--{found.nodes[j]}", found.coupling[i, j].item()
        message = (
            f"coupling {where} is {value:.3g}, above {limit:g}: curvature that Gauss-Newton cannot see dominates "
            "between these layers; do not rely on K-FAC or Fisher there"
        )
        return Finding("coupling_above", "coupling", where, limit, value, message, "info")

    def _saddle(self, snapshot: Snapshot) -> Finding | None:
        limit, found = self._rules.saddle, snapshot.spectrum
        if limit is None or found is None or not found.sharpness > 0 or len(self._losses) <= self._rules.lasting:
            return None
        ratio, first = found.smallest / found.sharpness, self._losses[0]
        change = abs(self._losses[-1] / first - 1) if first else math.inf
        if not (ratio < limit and change < self._rules.stalled):
            return None
        message = (
            f"the smallest eigenvalue is {ratio:.2g} times the largest while the loss stalls: a saddle; more noise, "
            "momentum or a larger learning rate may lead out of it"
        )
        return Finding("saddle", "hessian", "lambda_min", limit, ratio, message)

    def _rank(self, snapshot: Snapshot) -> Finding | None:
        limit, found = self._rules.rank_collapse, snapshot.measurement
        if limit is None or found is None or len(found.nodes) < 2:
            return None
        value = found.by_distance("stable_rank")[1:].nanmean().item()
        if not math.isfinite(value):
            return None
        self._highest_rank = max(self._highest_rank, value)
        if not (value < limit and self._highest_rank > 2 * limit):
            return None
        message = (
            f"the stable rank between layers fell to {value:.3g} (it was {self._highest_rank:.2g}): a single direction "
            "carries all curvature; check for collapsed representations, or a single sample that dominates the loss"
        )
        return Finding("rank_collapse", "stable_rank", "all pairs", limit, value, message, "info")

    def _gap(self, snapshot: Snapshot) -> Finding | None:
        limit, found = self._rules.gn_gap_above, snapshot.measurement
        if limit is None or found is None:
            return None
        error = found.stderr["gn_gap"]
        excess = (found.gn_gap - BEYOND_ERROR * error).where(found.gn_gap.isfinite() & error.isfinite(), -math.inf)
        i, j = sorted(divmod(int(excess.argmax()), len(found.nodes)))
        if not excess[i, j].item() > limit:
            return None
        where, value = f"{found.nodes[i]}--{found.nodes[j]}", found.gn_gap[i, j].item()
        message = (
            f"GN-Gap {where} is {value:.3g}, above {limit:g}: Gauss-Newton misses that much of the curvature there"
        )
        return Finding("gn_gap_above", "gn_gap", where, limit, value, message)

    def state_dict(self) -> dict[str, Any]:
        return {
            "held": dict(self._held),
            "told": list(self._told),
            "losses": list(self._losses),
            "highest_rank": self._highest_rank,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._held, self._told = dict(state["held"]), list(state["told"])
        self._losses, self._highest_rank = list(state["losses"]), state["highest_rank"]

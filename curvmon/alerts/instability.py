"""Approaching instability, from pulses: gain g^T u and curvature u^T H u along the optimizer's steps u.

    step ratio = η K,   K = EMA(u^T H u / η²) / (2 EMA(g^T u / η))

A step u is proportional to its learning rate η, so K belongs to the direction: smoothing it does not delay what a
changing learning rate does to the ratio. There are three reasons for a warning, once per episode:

- the learning rate outgrows all values that the run has settled at, and the step ratio follows;
- the step ratio is far above its usual value and above 1, significantly: steps raise the loss of their own batch;
- g^T u / η is far above its usual value, significantly, and the loss does not fall faster: steps fit their own batch.

A high ratio alone is no reason: runs at the edge of stability stay near 1, and warmups and restarts of a schedule
multiply the ratio. Ratios of single steps are noisy, and huge where g^T u is near zero.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from curvmon.alerts.critical_rate import CriticalRate
from curvmon.records import PulseRecord

SMOOTHED = 10
"""pulses that a step ratio is a mean of; a single ratio varies by a factor of 1.4 to 2.7"""
ENOUGH = 4
"""pulses before there is a step ratio"""
JUMP = 2.0
"""where a learning rate that the run has settled at before returns by more than this factor, from one pulse to the
next, the means start again: curvature adapts to the learning rate, and is larger after a small one"""
SHORT = 1e-3
"""steps at less than this share of the largest learning rate are ignored: θ_before - θ_after has rounding errors"""
BLOCK, KEPT = 5, 60
"""every BLOCK-th settled pulse is remembered, and KEPT of them: what was usual during 300 pulses"""
FEWEST, FEWEST_GAINS = 3, 6
"""remembered pulses before a step ratio, or a gain, can be unusual"""
SIMILAR = 2.0
"""pulses at learning rates that differ from the present one by more than this factor say nothing about it"""
SETTLED = 1.02
"""the learning rate has settled where it grew by less than this factor during SMOOTHED pulses"""
GROWN = 2.0
"""a learning rate outgrows the settled ones at this many times the largest of them, ..."""
POWER = 2.5
"""... and if it has grown faster than this power of the number of steps: warmups do not, however long they are"""
GROWING = 3
"""times in a row that a growing learning rate is larger than before; a rate that was set once is not growing"""
FOLLOWS = 1.25
"""the step ratio follows if it is this many times its usual value, or above HALF"""
HALF = 0.5
"""step ratio of the length at which a step lowers the loss most along its direction"""
LIMIT = 1.0
"""step ratio above which steps raise the loss of their own batch"""
UNUSUAL, UNUSUAL_GAIN = 2.0, 1.75
"""times the usual step ratio, and the usual gain: more than quiet runs show"""
FIRST = 2.0
"""largest step ratio of healthy runs before anything is usual"""
FALLS = 0.99
"""the loss falls faster if its mean over SMOOTHED pulses is below this share of the one before"""
SIGNIFICANT = 2.0
"""standard errors"""
REARM = 20
"""pulses without a reason before the next warning"""
HEALTHY, HEADROOM = 0.02, 0.005
"""lowest usual step ratio at good learning rates (0.02 to 1), and one that allows for four times the rate"""
HEADROOM_PULSES = 100
"""settled pulses at the largest learning rate before headroom is reported"""

Cause = Literal["learning_rate", "step_ratio", "gain"]


class Instability(NamedTuple):
    """What the detector reports.

    Attributes:
        kind: "approaching_instability", or "rate_headroom", a notice: the learning rate could be several times larger.
        step_ratio: smoothed; infinite where steps go uphill.
        usual: step ratio of the run so far, at comparable learning rates; NaN if nothing is usual yet.
        learning_rate: of the last step.
        suggested_lr: brings what is unusual back, and is at most half the critical learning rate, and half of learning
            rate / step ratio.
        cause: what is unusual.
        factor: how many times its usual value it is.
        critical_lr: of the detector.
    """

    kind: Literal["approaching_instability", "rate_headroom"]
    step_ratio: float
    usual: float
    learning_rate: float
    suggested_lr: float
    cause: Cause = "step_ratio"
    factor: float = math.nan
    critical_lr: float = math.nan


class InstabilityDetector:
    """Takes every pulse of a run; `update` returns an `Instability` where there is something to report, else None.

    Attributes:
        step_ratio: smoothed; NaN before there are enough pulses, infinite where steps go uphill.
        critical_lr: as `CriticalRate` says; 0 where steps go uphill.
    """

    def __init__(self) -> None:
        self.step_ratio = self.critical_lr = math.nan
        self._quadratic_lr = math.nan
        """learning rate / step ratio; infinite where the curvature along the steps is not positive"""
        self._critical_rate = CriticalRate()
        self._rates: list[float] = []
        self._latest_rates: list[float] = []
        """of the last steps, pulses or not, each once for as long as it stays"""
        self._gains: list[float] = []
        """g^T u / η of the last pulses"""
        self._curvatures: list[float] = []
        """u^T H u / η²"""
        self._losses: list[float] = []
        self._usual_ratios: list[list[float]] = []
        """learning rate and step ratio of settled pulses"""
        self._usual_gains: list[list[float]] = []
        """learning rate, mean gain and mean loss of settled pulses since the last jump"""
        self._settled_pulses = 0
        self._settled_rate = 0.0
        """largest learning rate that the run has settled at"""
        self._step = self._settled_step = 0
        """of the last pulse, and of the last one at that rate"""
        self._largest_rate = 0.0
        self._pulses_at_largest = 0
        self._pulses_without_reason = REARM
        self._headroom_reported = False

    def update(self, record: PulseRecord) -> Instability | None:
        """Take one more pulse; those that are not finite are ignored."""
        rate = record.learning_rate if math.isfinite(record.learning_rate) else 1.0
        self._largest_rate = max(self._largest_rate, rate)
        if is_step_ignored(rate, record.gain, record.curvature, self._largest_rate):
            return None
        gain, curvature, loss = record.gain / rate, record.curvature / rate**2, record.loss
        if self._rates and JUMP * self._rates[-1] < rate <= GROWN * self._settled_rate:
            self._forget()
        self._move(record.step, rate)
        recent = (self._rates, self._gains, self._curvatures, self._losses)
        for values, value in zip(recent, (rate, gain, curvature, loss)):
            values.append(value)
            del values[: -2 * SMOOTHED]
        self._critical_rate.update(rate, record.gain, record.curvature, record.critical)
        if len(self._rates) < ENOUGH:
            return None
        inverse = _inverse_rate(self._gains, self._curvatures)
        self.step_ratio = rate * inverse
        if math.isfinite(record.learning_rate):
            self._quadratic_lr = 1 / inverse if inverse > 0 else math.inf
            self.critical_lr = self._critical_rate.value if self._quadratic_lr else 0.0
        return self._judge(rate)

    def advance(self, step: int, learning_rate: float) -> Instability | None:
        """A step without a pulse: what its learning rate, at the curvature of the last pulses, gives away.

        Costs nothing. Without it, a learning rate that grows is noticed at the next pulses only.
        """
        if not learning_rate > 0 or len(self._rates) < ENOUGH or math.isnan(self._quadratic_lr):
            return None
        self._move(step, learning_rate)
        self.step_ratio = learning_rate / self._quadratic_lr if self._quadratic_lr else math.inf
        usual = self._usual(learning_rate)
        if not self._outgrows(learning_rate, usual):
            return None
        return self._raise(learning_rate, usual, "learning_rate", learning_rate / self._settled_rate)

    @property
    def largest_rate(self) -> float:
        """The largest learning rate so far."""
        return self._largest_rate

    def usual(self, rate: float) -> tuple[float, float]:
        """Step ratio and g^T u / η at comparable learning rates; NaN before there are any."""
        gains = [gain for other, gain, _ in self._usual_gains if rate / SIMILAR < other < rate * SIMILAR]
        return self._usual(rate), statistics.median(gains) if len(gains) >= FEWEST else math.nan

    def usual_range(self) -> tuple[float, float] | None:
        """10 % and 90 % quantiles of the step ratios at comparable learning rates."""
        ratios = sorted(self._comparable(self._rates[-1])) if self._rates else []
        return (ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]) if ratios else None

    def state_dict(self) -> dict[str, Any]:
        """Lists, dictionaries and numbers only."""
        state = {name.lstrip("_"): _copied(value) for name, value in vars(self).items()}
        return {**state, "critical_rate": self._critical_rate.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in vars(self).keys() - {"_critical_rate"}:
            setattr(self, name, _copied(state[name.lstrip("_")]))
        self._critical_rate.load_state_dict(state["critical_rate"])

    def _move(self, step: int, rate: float) -> None:
        self._step = step
        self._largest_rate = max(self._largest_rate, rate)
        if self._latest_rates[-1:] != [rate]:  # a schedule may change it in every few steps
            self._latest_rates = [*self._latest_rates, rate][-GROWING - 1 :]

    def _forget(self) -> None:
        self._rates, self._gains, self._curvatures, self._losses, self._usual_gains = [], [], [], [], []
        self._critical_rate.forget()

    def _judge(self, rate: float) -> Instability | None:
        usual = self._usual(rate)
        reason = self._reason(rate, usual)
        if reason is not None:
            return self._raise(rate, usual, *reason)
        if self._has_settled():
            self._pulses_without_reason += 1
            self._remember(rate)
            return self._headroom(rate, usual)
        if rate <= GROWN * self._settled_rate:  # beyond, an episode goes on
            self._pulses_without_reason += 1
        return None

    def _reason(self, rate: float, usual: float) -> tuple[Cause, float] | None:
        """The cause of a warning, and how many times its usual value it is."""
        if self._is_unstable(rate, usual):
            return "step_ratio", self.step_ratio / usual
        if self._outgrows(rate, usual):
            return "learning_rate", rate / self._settled_rate
        growth = self._growth_of_gain(rate)
        return None if growth is None else ("gain", growth)

    def _is_unstable(self, rate: float, usual: float) -> bool:
        if self.step_ratio == math.inf:
            mean, error = _mean_and_error(self._gains[-SMOOTHED:])
            return mean < -SIGNIFICANT * error
        if math.isnan(usual):
            limit = FIRST
        else:
            limit = max(HALF if rate > GROWN * self._settled_rate else LIMIT, UNUSUAL * usual)
        return self.step_ratio > limit and self._log_error() * SIGNIFICANT < math.log(self.step_ratio / limit)

    def _outgrows(self, rate: float, usual: float) -> bool:
        last = self._latest_rates
        if len(last) <= GROWING or any(a >= b for a, b in pairwise(last)):
            return False
        if math.isnan(usual) or rate <= GROWN * self._settled_rate:  # nothing is usual in a warmup
            return False
        growth_of_steps = math.log(max(self._step, 1) / max(self._settled_step, 1))
        if math.log(rate / self._settled_rate) < POWER * growth_of_steps:
            return False
        return self.step_ratio > min(HALF, FOLLOWS * usual)

    def _growth_of_gain(self, rate: float) -> float | None:
        similar = [entry for entry in self._usual_gains if rate / SIMILAR < entry[0] < rate * SIMILAR]
        if len(similar) < FEWEST_GAINS or len(self._gains) < SMOOTHED:
            return None
        mean, error = _mean_and_error(self._gains[-SMOOTHED:])
        usual = statistics.median(gain for _, gain, _ in similar)
        loss_before = statistics.fmean(loss for _, _, loss in similar[-3:])
        if statistics.fmean(self._losses[-SMOOTHED:]) < FALLS * loss_before:
            return None
        return mean / usual if 0 < UNUSUAL_GAIN * usual < mean - SIGNIFICANT * error else None

    def _has_settled(self) -> bool:
        return self._rates[-1] < SETTLED * self._rates[-min(len(self._rates), SMOOTHED)]

    def _remember(self, rate: float) -> None:
        if rate >= self._settled_rate:
            self._settled_rate, self._settled_step = rate, self._step
        self._settled_pulses += 1
        if self._settled_pulses % BLOCK or not math.isfinite(self.step_ratio):
            return
        means = [statistics.fmean(values[-SMOOTHED:]) for values in (self._gains, self._losses)]
        self._usual_ratios.append([rate, self.step_ratio])
        self._usual_gains.append([rate, *means])
        del self._usual_ratios[:-KEPT], self._usual_gains[:-KEPT]

    def _usual(self, rate: float) -> float:
        comparable = self._comparable(rate)
        return statistics.median(comparable) if comparable else math.nan

    def _comparable(self, rate: float) -> list[float]:
        """Step ratios at similar or larger learning rates, or else at those near the largest remembered one."""
        if len(self._usual_ratios) < FEWEST:
            return []
        similar = [ratio for other, ratio in self._usual_ratios if other > rate / SIMILAR]
        if len(similar) >= FEWEST:
            return similar
        largest = max(other for other, _ in self._usual_ratios)
        return [ratio for other, ratio in self._usual_ratios if other > largest / SIMILAR]

    def _log_error(self) -> float:
        """Standard error of the logarithm of a ratio of means, by the delta method."""
        gains, curvatures = self._gains[-SMOOTHED:], self._curvatures[-SMOOTHED:]
        twice = 2 * self.step_ratio / self._rates[-1]
        _, error = _mean_and_error([c - twice * g for g, c in zip(gains, curvatures)])
        mean = statistics.fmean(gains)
        return error / (twice * mean) if mean > 0 else math.inf

    def _raise(self, rate: float, usual: float, cause: Cause, factor: float) -> Instability | None:
        """A warning, if it is the first one of an episode."""
        is_new = self._pulses_without_reason >= REARM
        self._pulses_without_reason = 0
        if not is_new:
            return None
        back = math.sqrt(factor) if cause == "gain" else factor  # the gain of a gradient step is η |g|²
        # an unknown critical rate, NaN, is not the smaller one
        highest = HALF * min(rate / self.step_ratio, self.critical_lr) if self.step_ratio > 0 else rate
        suggested = min(highest, rate / (back if 1 < back < math.inf else 2))
        seen = usual, rate, suggested, cause, factor, self.critical_lr
        return Instability("approaching_instability", self.step_ratio, *seen)

    def _headroom(self, rate: float, usual: float) -> Instability | None:
        self._pulses_at_largest = self._pulses_at_largest + 1 if rate > 0.9 * self._largest_rate else 0
        if self._headroom_reported or self._pulses_at_largest < HEADROOM_PULSES:
            return None
        if not (0 < usual < HEADROOM and 0 < self.step_ratio < HEADROOM):
            return None
        self._headroom_reported = True
        suggested = rate * HEALTHY / HEADROOM
        return Instability("rate_headroom", self.step_ratio, usual, rate, suggested, critical_lr=self.critical_lr)


def is_step_ignored(rate: float, gain: float, curvature: float, largest_rate: float) -> bool:
    """Nothing can be said about steps that are too short or not finite."""
    if rate <= 0 or rate < SHORT * largest_rate:
        return True
    return not (math.isfinite(gain / rate) and math.isfinite(curvature / rate**2))


def _inverse_rate(gains: Sequence[float], curvatures: Sequence[float]) -> float:
    """K, 1 / critical learning rate; infinite where the mean gain is not positive, but the curvature is."""
    weights = [(1 - 1 / SMOOTHED) ** i for i in reversed(range(len(gains)))]
    gain, curvature = (sum(w * v for w, v in zip(weights, values)) for values in (gains, curvatures))
    if gain > 0:
        return curvature / (2 * gain)
    return math.inf if curvature > 0 else 0.0


def _mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))


def _copied(value: Any) -> Any:
    return [_copied(v) for v in value] if isinstance(value, list) else value

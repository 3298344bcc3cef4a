"""Scores of alerts on recorded runs, and of rules of thumb on what the user logs. Nothing is trained here."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from benchmarks.alert_answers import causes_of, is_cause_right, is_place_right, places_of
from benchmarks.alert_harm import doubled_at, matters
from benchmarks.alert_monitoring import Seen
from benchmarks.alert_recording import Recorded
from curvmon.alerts.manager import AlertManager
from curvmon.alerts.signature_table import SIGNATURES
from curvmon.alerts.signatures import Signatures
from curvmon.records import Alert, Snapshot

MEMORY, FEWEST, SIGMAS = 10, 5, 3.0
"""of the rules of thumb: values that mean and standard deviation are taken of, and how far off is an alarm"""
BINS = (0.0, 0.3, 0.5, 0.7, 0.9, 1.0)
"""of stated probabilities"""


class Raised(NamedTuple):
    at: int
    """index of the measurement"""
    alert: Alert | None
    """None: a rule of thumb, which says nothing but when"""

    @property
    def is_notice(self) -> bool:
        return self.alert is not None and self.alert.level == "info"


Find = Callable[[Recorded], list[Raised]]
"""everything that is raised in a run"""


def alerts_of(run: Recorded, signatures: Mapping[str, Signatures] | None = None) -> list[Raised]:
    """Alerts and notices of an `AlertManager` with default rules; `signatures`: by family, instead of the package's."""
    manager, past = AlertManager(signatures=(signatures or {}).get(run.family, SIGNATURES)), list[Snapshot]()
    raised: list[Raised] = []
    for i, seen in enumerate(run.measured):
        alerts = manager.update(seen.snapshot, past, seen.context)
        if seen.not_finite is not None:
            alerts = [*alerts, *manager.diverged(seen.not_finite, seen.snapshot, past)]
        raised += [Raised(i, alert) for alert in alerts]
        past.append(seen.snapshot)
    return raised


def three_sigma(*metrics: str) -> Find:
    """A metric is more than three standard deviations above the mean of its last ten values, or not finite."""

    def find(run: Recorded) -> list[Raised]:
        seen = run.measured
        return [Raised(i, None) for i in range(len(seen)) if any(_is_high(seen[: i + 1], m) for m in metrics)]

    return find


def _is_high(measured: Sequence[Seen], metric: str) -> bool:
    *past, now = [seen.logged[metric] for seen in measured if metric in seen.logged] or [0.0]
    if not math.isfinite(now):
        return len(past) > 0  # no training loss before the first step
    usual = [value for value in past if math.isfinite(value)][-MEMORY:]
    return len(usual) >= FEWEST and now - statistics.mean(usual) > SIGMAS * statistics.stdev(usual)


class Judged(NamedTuple):
    """A disturbed run and what was raised in it from the last event on."""

    run: Recorded
    raised: list[Raised]
    mattered: bool

    @property
    def name(self) -> str:
        return self.run.happened[-1].name

    @property
    def at(self) -> int:
        return self.run.happened[-1].at

    @property
    def alarms(self) -> list[Raised]:
        return [each for each in self.raised if not each.is_notice and each.at >= self.at]

    @property
    def notices(self) -> list[Raised]:
        return [each for each in self.raised if each.is_notice and each.at >= self.at]

    @property
    def delay(self) -> float:
        """Measurements from the first after the event to the first alert; inf: none."""
        return min((each.at - self.at for each in self.alarms), default=math.inf)

    @property
    def first_alert(self) -> Alert | None:
        return self.alarms[0].alert if self.alarms else None

    @property
    def is_first_reported(self) -> bool:
        """Of two events."""
        first, second = self.run.happened
        return any(first.at <= each.at < second.at and not each.is_notice for each in self.raised)

    @property
    def is_early(self) -> bool:
        """Reported before the smoothed validation loss had doubled."""
        doubled = doubled_at(self.run)
        return self.delay < (math.inf if doubled is None else doubled - self.at)


def judged(find: Find, runs: Iterable[Recorded]) -> list[Judged]:
    return [Judged(run, find(run), matters(run)) for run in runs if run.happened]


class Alarms(NamedTuple):
    """Of quiet runs."""

    measurements: int
    alarms: int
    notices: int

    @property
    def per_thousand(self) -> float:
        return 1000 * self.alarms / max(1, self.measurements)


def false_alarms(find: Find, runs: Iterable[Recorded]) -> Alarms:
    quiet = [run for run in runs if run.role == "quiet"]
    raised = [each for run in quiet for each in find(run)]
    notices = sum(each.is_notice for each in raised)
    return Alarms(sum(len(run.measured) for run in quiet), len(raised) - notices, notices)


class Detection(NamedTuple):
    """Shares of the events that mattered."""

    count: int
    at_once: float
    within_two: float
    never: float
    """in the measurements that were recorded after the event"""


def detection(events: Sequence[Judged]) -> Detection:
    mattered = [each for each in events if each.mattered]
    shares = (_share(each.delay <= limit for each in mattered) for limit in (0, 1))
    return Detection(len(mattered), *shares, _share(math.isinf(each.delay) for each in mattered))


class Answers(NamedTuple):
    """Shares of the reported events."""

    count: int
    first: float
    """the most probable cause is right"""
    second: float
    """one of the first two is"""
    with_place: int
    """reported events that have a place"""
    place: float
    """the place is right"""
    misplaced: float
    """of those that have no place: the alert names one nevertheless"""


def answers(events: Iterable[Judged]) -> Answers:
    """Of events that mattered and were reported within two measurements."""
    reported = [(e.run, alert) for e in events if e.mattered and e.delay <= 1 and (alert := e.first_alert) is not None]
    places = [is_place_right(alert, run) for run, alert in reported if run.happened[-1].place is not None]
    return Answers(
        len(reported),
        *(_share(is_cause_right(alert, run.happened[-1], n) for run, alert in reported) for n in (1, 2)),
        len(places),
        _share(places),
        _share(bool(places_of(alert)) for run, alert in reported if run.happened[-1].place is None),
    )


class Bin(NamedTuple):
    """Of a reliability diagram."""

    low: float
    high: float
    count: int
    stated: float
    """mean probability of the causes in it"""
    right: float


def reliability(events: Iterable[Judged]) -> list[Bin]:
    """All causes of the first alerts after events; empty where alerts state no probabilities."""
    stated = [
        (probability, label == event.run.happened[-1].cause)
        for event in events
        if event.first_alert is not None
        for label, probability in causes_of(event.first_alert)
        if math.isfinite(probability)
    ]
    bins = []
    for low, high in pairwise(BINS):
        inside = [each for each in stated if low <= each[0] < high or each[0] == high == 1.0]
        if inside:
            bins.append(
                Bin(low, high, len(inside), statistics.fmean(p for p, _ in inside), _share(r for _, r in inside))
            )
    return bins


def _share(hits: Iterable[bool]) -> float:
    """NaN of nothing."""
    listed = list(hits)
    return sum(listed) / len(listed) if listed else math.nan

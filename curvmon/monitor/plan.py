"""When a run is measured, and with how many HVPs, if n more full measurements fit into its budget.

    cost(share) = FIXED_COST + (1 - FIXED_COST) · share             in full measurements
    one in every (1 - last) / ⌊n / cost⌋ of the run, and the last one in any case

A smaller share is planned where n is too small for a full one in every quarter of the run. No clock, no seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

QUARTERS = 4
"""parts of a run that get a measurement each"""
MIN_SHARE = 0.25
"""smallest share of the HVPs of a full measurement; with fewer, standard errors would be too large to be useful"""
FIXED_COST = 0.3
"""of the time of a full measurement is not spent on HVPs that a smaller one saves"""
FIRST_FIXED_COST = 0.7
"""the same for the first measurement"""
ROUNDING = 1e-9


@dataclass(frozen=True)
class Plan:
    """`share` of the HVPs of a full measurement; 0 skips it."""

    share: float

    @property
    def skips(self) -> bool:
        return self.share == 0.0

    @property
    def cost(self) -> float:
        """In full measurements."""
        return FIXED_COST + (1 - FIXED_COST) * self.share if self.share else 0.0

    @property
    def first_cost(self) -> float:
        """Of the first measurement, in later full ones: it starts from nothing, and has everything in it."""
        return FIRST_FIXED_COST + (1 - FIRST_FIXED_COST) * self.share

    @classmethod
    def costing(cls, cost: float) -> Plan:
        """The largest measurement that costs no more, in full measurements, or else the smallest."""
        return cls(min(1.0, max(MIN_SHARE, (cost - FIXED_COST) / (1 - FIXED_COST))))


SMALLEST, FULL, SKIP = Plan(MIN_SHARE), Plan(1.0), Plan(0.0)


@dataclass(frozen=True)
class Position:
    """Progress of the run, from 0 to 1."""

    at: float = 0.0
    interval: float = 0.0
    """since the last time that it could be measured"""
    full: float = 0.0
    """where the last measurement succeeded"""
    has_end: bool = False
    """False if the end of the run is not given"""

    @property
    def is_last(self) -> bool:
        """The next validation would come after the end."""
        return self.has_end and self.at + self.interval / 2 >= 1

    @property
    def ends_quarter(self) -> bool:
        """The last chance for a measurement in this quarter of the run, which has none."""
        end = math.ceil(QUARTERS * self.at - ROUNDING) / QUARTERS
        return self.full <= end - 1 / QUARTERS + ROUNDING and self.at + self.interval > end + ROUNDING

    def moved(self, progress: float | None) -> Position:
        """The run has got this far; None: its end is not known."""
        if progress is None:
            return Position(self.at, self.interval, self.full, False)
        if progress == self.at:
            return Position(self.at, self.interval, self.full, True)
        if progress > self.at:
            return Position(progress, progress - self.at, self.full, True)
        # the run has been extended
        interval = self.interval * progress / self.at if self.at else 0.0
        return Position(progress, interval, max(0.0, progress - interval), True)

    def restarted(self, progress: float | None) -> Position:
        """A fit begins here: at 0, or where an earlier one ended, which may have been planned to be shorter."""
        at = progress or 0.0
        full = self.full * at / self.at if self.at else at  # without an earlier one, nothing has been missed
        return Position(at, 0.0, min(at, full), progress is not None)


def first_plan(n: float, position: Position) -> Plan:
    """The first measurement is always made. Others of its cost follow in all quarters, or an unknown number of them."""
    return Plan.costing(n / (QUARTERS + 1 if position.has_end else 2))


def next_plan(n: float, position: Position) -> Plan:
    """After the first one, where n full measurements are left."""
    if not position.has_end or position.at == 0:
        return Plan.costing(n) if n >= SMALLEST.cost else SKIP
    if position.is_last:
        return Plan.costing(n)
    plan, before_last = _evenly(n, position), n - SMALLEST.cost
    is_due = position.at - position.full + position.interval / 2 >= _spacing(n, position)
    if before_last >= SMALLEST.cost and (is_due or position.ends_quarter):
        return Plan.costing(min(plan.cost, before_last))
    return SKIP


def stride(n: float, position: Position) -> int | None:
    """One validation in how many gets a measurement; None where that cannot be known."""
    if not position.has_end or not position.at or not position.interval:
        return None
    return max(1, round(_spacing(n, position) / position.interval))


def _evenly(n: float, position: Position) -> Plan:
    remaining = 1 - position.full
    return Plan.costing(n / (QUARTERS * remaining) if remaining else n)


def _spacing(n: float, position: Position) -> float:
    """Progress from one measurement to the next."""
    count = n / _evenly(n, position).cost
    return (1 - position.full) / max(1, math.floor(count + ROUNDING) if math.isfinite(count) else count)

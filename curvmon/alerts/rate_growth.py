"""A learning rate that grows from validation to validation, never so fast that it jumps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from curvmon.alerts.wording import before_after
from curvmon.records import Snapshot

WITHIN = 10
"""validations that the learning rate is compared with"""
GROWN = 2.0
"""times the smallest of them"""


class RateGrowth(NamedTuple):
    before: float
    after: float
    validations: int
    """since the learning rate was `before`"""

    @property
    def text(self) -> str:
        """`learning rate: 0.02 → 0.31 within 5 validations`; `learning rate: 0.02 → 2` from one to the next."""
        within = f" within {self.validations} validations" if self.validations > 1 else ""
        return f"learning rate: {before_after(self.before, self.after)}{within}"


def rate_growth(past: Sequence[Snapshot], now: Snapshot) -> RateGrowth | None:
    """None if the learning rate is less than twice the smallest of the last ten validations, or is not known."""
    after = learning_rate(now)
    rates = [(learning_rate(snapshot), age) for age, snapshot in enumerate(reversed(past[-WITHIN:]), start=1)]
    # of equal ones the latest: what matters is since when it grows. A rate of 0 is smaller by no factor
    before, age = min((each for each in rates if each[0] > 0), default=(math.nan, 0))
    return RateGrowth(before, after, age) if math.isfinite(after) and after >= GROWN * before else None


def learning_rate(snapshot: Snapshot) -> float:
    return math.nan if snapshot.vitals is None else snapshot.vitals.learning_rate

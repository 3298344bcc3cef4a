from __future__ import annotations

import math

import pytest

from curvmon.alerts.rate_growth import RateGrowth, rate_growth
from curvmon.records import Snapshot, VitalSigns


def growth(*rates: float) -> RateGrowth | None:
    *past, now = [Snapshot(step=i, epoch=0, vitals=VitalSigns(learning_rate=rate)) for i, rate in enumerate(rates)]
    return rate_growth(past, now)


def test_the_smallest_of_the_last_ten_is_compared() -> None:
    assert growth(0.001, *10 * [0.2], 0.399) is None
    assert growth(0.1, *9 * [0.2], 0.399) == RateGrowth(0.1, 0.399, 10)
    assert growth(*(0.02 * 1.2**i for i in range(20))) == RateGrowth(
        pytest.approx(0.02 * 1.2**9), pytest.approx(0.02 * 1.2**19), 10
    )


def test_of_equal_rates_the_latest_counts() -> None:
    grown = growth(0.02, 0.02, 0.02, 0.1, 0.31)
    assert grown is not None and grown.text == "learning rate: 0.02 → 0.31 within 2 validations"
    jumped = growth(0.02, 0.02, 2.0)
    assert jumped is not None and jumped.text == "learning rate: 0.02 → 2"


def test_what_falls_or_is_not_known_has_not_grown() -> None:
    assert growth(0.3) is growth(0.3, 0.2, 0.1) is growth(0.01, 0.3, 0.015) is None
    assert growth(math.nan, 0.1) is growth(0.1, math.nan) is growth(0.1, math.inf) is growth(0.0, 0.1) is None
    assert growth(0.1, math.nan, 0.0, 0.3) == RateGrowth(0.1, 0.3, 3)
    assert rate_growth([Snapshot(0, 0)], Snapshot(1, 0)) is None

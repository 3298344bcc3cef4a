"""A clock that tests set."""

from __future__ import annotations


class FakeClock:
    def __init__(self) -> None:
        self._now = 1000.0

    def __call__(self) -> float:
        return self._now

    def advance(self, seconds: float) -> float:
        """Returns the seconds, rounded to multiples of 2^-20: sums and differences of these are exact."""
        seconds = round(seconds * 2**20) / 2**20
        self._now += seconds
        return seconds

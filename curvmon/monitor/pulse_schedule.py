"""When a pulse is taken: every n optimizer steps, n from what a pulse costs, and sooner after a suspicious one.

    n      = (seconds of a pulse) / (REGULAR · share · seconds of a training step)
    credit = share · seconds of training - seconds of pulses since START + RESERVE · seconds of a pulse

The first START pulses may take all of `max_overhead`: before them nothing is usual, so that nothing can be unusual.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

SHARE = 0.01
"""of the training time, for pulses"""
SHARE_OF_OVERHEAD = 0.2
"""of `max_overhead`, where that is less"""
SHORTEST = 10
"""optimizer steps between two pulses at least; also without a limit, and before the first"""
SOON = 2
"""optimizer steps from a suspicious pulse to the next, as long as there is credit"""
START = 20
"""pulses after which usual values are known (15 are remembered from the fourth on)"""
RESERVE = 10
"""pulses of credit at the start, for suspicious ones soon after it"""
REGULAR = 0.9
"""of the share, for pulses at regular intervals; the rest becomes credit"""
LONGEST = 1e9
WANTED = 50
"""optimizer steps between two pulses at most, if fewer samples make that affordable"""
TIMED = 5
"""latest pulses whose median duration is that of the next: one that was interrupted counts little"""


class PulseSchedule:
    """Counts optimizer steps, and says before which of them to prepare a pulse.

    Args:
        every: optimizer steps between pulses; True: as many as the budget says, False: none.
        max_overhead: measuring time as a share of training time; None: no limit.

    Attributes:
        steps: optimizer steps so far.
        interval: steps from the last pulse to the next.
    """

    def __init__(self, every: bool | int, max_overhead: float | None) -> None:
        self._every = None if isinstance(every, bool) else every
        self._share = None if max_overhead is None else min(SHARE, SHARE_OF_OVERHEAD * max_overhead)
        self._start_share = max_overhead
        self._on = every is not False and (self._every is not None or self._share != 0)
        self.steps = 0
        self.interval = self._every or SHORTEST
        self._last = 0
        """step of the last pulse"""
        self._taken = 0
        """pulses"""
        self._spent = 0.0
        """seconds of pulses since START"""
        self._seconds: list[float] = []

    @property
    def is_due(self) -> bool:
        """The next optimizer step is to have a pulse."""
        return self._on and self.steps + 1 >= self._last + self.interval

    @property
    def is_starting(self) -> bool:
        """The next pulse is one of the first, which are not limited by the share."""
        return self._every is None and self._taken < START

    def wants_cheaper(self, trained: float) -> bool:
        """With it pulses are too far apart. The first one says little: much of its time is taken only once."""
        return self._every is None and len(self._seconds) > 1 and self._regular(trained) > WANTED

    def count(self) -> None:
        """An optimizer step was made."""
        self.steps += 1

    def took(self, seconds: float, trained: float, suspicious: bool = False) -> int:
        """The interval after a pulse that took so long.

        Args:
            seconds: of this pulse.
            trained: seconds of training so far.
            suspicious: what it shows is worth a closer look.
        """
        self._seconds = [*self._seconds, seconds][-TIMED:]
        if self._every is not None:
            return self._every
        if self.is_starting:
            if len(self._seconds) < 2:
                return SHORTEST
            return self._interval(self._start_share, trained)
        self._spent += self._cost
        return SOON if suspicious and self._has_credit(trained) else self._regular(trained)

    @property
    def _cost(self) -> float:
        """Seconds of a pulse."""
        return statistics.median_low(self._seconds)

    def _has_credit(self, trained: float) -> bool:
        """For one more pulse."""
        return self._share is None or self._share * trained + (RESERVE - 1) * self._cost >= self._spent

    def _regular(self, trained: float) -> int:
        return self._interval(None if self._share is None else REGULAR * self._share, trained)

    def _interval(self, share: float | None, trained: float) -> int:
        """At which pulses take this share of the training time."""
        if share is None or trained <= 0 or not self.steps:
            return SHORTEST
        return max(SHORTEST, math.ceil(min(self._cost * self.steps / (share * trained), LONGEST)))

    def follow(self, interval: int) -> None:
        """A pulse was taken, and the next one comes so many steps later; the same on all ranks."""
        self.interval, self._last = interval, self.steps
        self._taken += 1

    def failed(self) -> None:
        """A pulse failed: the next one is not soon; the same on all ranks."""
        self._last = self.steps
        if self._every is None:
            self.interval = max(self.interval, WANTED)

    def became_cheaper(self, factor: float) -> None:
        """Pulses take this share of the time that they took."""
        self._seconds = [factor * seconds for seconds in self._seconds]

    def state_dict(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "interval": self.interval,
            "last": self._last,
            "taken": self._taken,
            "spent": self._spent,
            "seconds": list(self._seconds),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps, self._last, self._seconds = state["steps"], state["last"], list(state["seconds"])
        self._taken, self._spent = state["taken"], state["spent"]
        self.interval = self._every or state["interval"]

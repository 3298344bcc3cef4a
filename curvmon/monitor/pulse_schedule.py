"""When a pulse is taken: every n optimizer steps, n from what a pulse has cost so far.

n = (seconds of a pulse) / (share · seconds of a training step)
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
        self._on = every is not False and (self._every is not None or self._share != 0)
        self.steps = 0
        self.interval = self._every or SHORTEST
        self._last = 0
        """step of the last pulse"""
        self._seconds: list[float] = []

    @property
    def is_due(self) -> bool:
        """The next optimizer step is to have a pulse."""
        return self._on and self.steps + 1 >= self._last + self.interval

    def wants_cheaper(self, interval: int) -> bool:
        """With it pulses are too far apart. The first one says little: much of its time is taken only once."""
        return self._every is None and interval > WANTED and len(self._seconds) > 1

    def count(self) -> None:
        """An optimizer step was made."""
        self.steps += 1

    def took(self, seconds: float, trained: float) -> int:
        """The interval after a pulse that took so long; `trained`: seconds of training so far."""
        self._seconds = [*self._seconds, seconds][-TIMED:]
        if self._every is not None:
            return self._every
        if self._share is None or trained <= 0 or not self.steps:
            return SHORTEST
        return max(SHORTEST, math.ceil(statistics.median_low(self._seconds) * self.steps / (self._share * trained)))

    def follow(self, interval: int) -> None:
        """The next pulse comes so many steps after this one; the same on all ranks."""
        self.interval, self._last = interval, self.steps

    def became_cheaper(self, factor: float) -> None:
        """Pulses take this share of the time that they took."""
        self._seconds = [factor * seconds for seconds in self._seconds]

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "interval": self.interval, "last": self._last, "seconds": list(self._seconds)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps, self._last, self._seconds = state["steps"], state["last"], list(state["seconds"])
        self.interval = self._every or state["interval"]

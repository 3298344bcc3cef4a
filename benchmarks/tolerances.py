"""The loosest tolerance with which a method finds all eigenvalues to one percent."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

WANTED = 1e-2
"""relative error of every eigenvalue"""


class Answer(NamedTuple):
    values: list[float]
    products: int
    """of the search for eigenvalues"""
    started: int = 0
    """with what the start takes besides; 0 where there is nothing besides"""
    counted: int = 0
    """with all that curvmon counts, the trace too; 0 without these"""


class Attempt(NamedTuple):
    """What a method finds from every start at one tolerance; if that does not serve, from some of them.

    Attributes:
        tolerance: or number of steps.
        answers: one for each start.
        seconds: of computing time, for each start, kernels being counted.
        kernels: for each start.
        error: the largest relative error of any eigenvalue; infinite if the method was interrupted.
    """

    tolerance: float
    answers: list[Answer]
    seconds: list[float]
    kernels: list[int]
    error: float

    @property
    def serves(self) -> bool:
        return self.error <= WANTED

    @property
    def interrupted(self) -> bool:
        return math.isinf(self.error)

    @property
    def failure(self) -> str:
        """Why there is no result, if it was interrupted."""
        products = self.answers[-1].products
        return f"interrupted after {products}" if products else "does not run on this network"


def loosest_of(
    ladder: Sequence[float], attempt: Callable[[float], Attempt], begin: float | None = None, scan: bool = False
) -> Attempt:
    """The attempt at the loosest tolerance that serves; the last one if there is none.

    From `begin` (None: the first) in steps of 1, 2, 4, ... to stricter or to looser ones, until one serves and a looser
    one does not; then by bisection: what is returned serves, and the next looser one does not. `scan`: one after the
    other. An interrupted method would take longer still with a stricter tolerance.
    """
    attempts: dict[int, Attempt] = {}
    low, high = -1, len(ladder)  # the strictest known to be too loose; the loosest known to serve, or to be interrupted
    i, step = 0 if begin is None else ladder.index(begin), 1
    while high - low > 1:
        attempts[i] = attempt(ladder[i])
        if attempts[i].serves or attempts[i].interrupted:
            high = i
        else:
            low = i
        if high == len(ladder):
            i = min(low + step, high - 1)
        elif low == -1:
            i = max(high - step, 0)
        else:
            i = (low + high) // 2
        step = 1 if scan else 2 * step
    return attempts[high] if high in attempts else attempts[low]

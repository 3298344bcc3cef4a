"""Learning rates relative to the largest, at a time in epochs of a run of `EPOCHS`; beyond it the last one stays."""

from __future__ import annotations

import math
from collections.abc import Callable

EPOCHS = 30
Schedule = Callable[[float], float]


def constant(epoch: float) -> float:
    return 1.0


def warmup_and_cosine(epoch: float) -> float:
    """Three epochs up, then down to 5 %."""
    if epoch < 3:
        return 0.02 + 0.98 * epoch / 3
    return 0.05 + 0.95 * _cosine((epoch - 3) / (EPOCHS - 3))


def cosine(epoch: float) -> float:
    """Down to 5 %."""
    return 0.05 + 0.95 * _cosine(epoch / EPOCHS)


def one_cycle(epoch: float) -> float:
    """From 1/25 up during 30 % of the run, then down to nearly zero."""
    done = epoch / EPOCHS
    return 1 - 0.96 * _cosine(done / 0.3) if done < 0.3 else 1e-3 + (1 - 1e-3) * _cosine((done - 0.3) / 0.7)


def warm_restarts(epoch: float) -> float:
    """Every ten epochs, from 100 % down to 2 %."""
    return 0.02 + 0.98 * _cosine(epoch % 10 / 10)


def steps(epoch: float) -> float:
    """A fifth after 15 epochs, and again after 23."""
    return 0.2 ** ((epoch >= 15) + (epoch >= 23))


def decay(epoch: float) -> float:
    """5 % per epoch, continuously."""
    return float(0.95**epoch)


def linear(epoch: float) -> float:
    """Down to 5 %."""
    return max(0.05, 1 - epoch / EPOCHS)


def _cosine(done: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))

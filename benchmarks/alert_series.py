"""Synthetic sequences of few values, quiet or with one jump, on a logarithmic scale."""

from __future__ import annotations

import math
import random
from typing import NamedTuple

KINDS = ("stationary", "trend", "decay", "heteroscedastic", "autoregressive", "heavy tails", "bursts")
LENGTHS = (10, 20, 40, 80, 200)
NOISES = (0.02, 0.05, 0.1, 0.2)


class Series(NamedTuple):
    kind: str
    values: list[float]
    stderr: float
    """a third of the noise: the rest is the run's own"""
    at: int | None
    """where it jumps"""


def draw(kind: str, length: int, noise: float, rng: random.Random) -> list[float]:
    level, slope = rng.uniform(-5, 5), rng.uniform(-0.15, 0.15)
    height, constant = rng.choice([-1, 1]) * rng.uniform(1, 4), rng.uniform(2, 8)
    values, state = [], 0.0
    for t in range(length):
        z = noise * rng.gauss(0, 1)
        if kind == "trend":
            z += slope * t
        elif kind == "decay":
            z += height * math.exp(-t / constant)
        elif kind == "heteroscedastic":
            z *= 0.5 + 1.5 * t / length
        elif kind == "autoregressive":
            state = 0.8 * state + 0.6 * z
            z = state
        elif kind == "heavy tails":  # Student's t with three degrees of freedom, of the same variance
            z /= math.sqrt(sum(rng.gauss(0, 1) ** 2 for _ in range(3)))
        elif kind == "bursts":
            z *= rng.choice([0.3, 1, 1, 2])
        values.append(level + z)
    return values


def collection(seed: int, each: int) -> tuple[list[Series], list[Series]]:
    """Quiet sequences, and as many with a jump of 10 to 30 times the noise and at least twofold, not before the ninth
    value."""
    rng = random.Random(seed)
    quiet, jumping = [], []
    for kind in KINDS:
        for _ in range(each):
            length, noise = rng.choice(LENGTHS), rng.choice(NOISES)
            quiet.append(Series(kind, draw(kind, length, noise, rng), noise / 3, None))
            length = max(length, 20)
            at = rng.randrange(8, length - 2)
            jump = rng.choice([-1, 1]) * max(10 * noise, 0.7) * rng.uniform(1, 3)
            values = [v + jump * (t >= at) for t, v in enumerate(draw(kind, length, noise, rng))]
            jumping.append(Series(kind, values, noise / 3, at))
    return quiet, jumping

"""Snapshots of a quiet run of five layers, with an event where a test asks for one."""

from __future__ import annotations

import random

import torch

from curvmon.records import Measurement, Snapshot

NODES = ("stem", "a", "b", "c", "d")


def snapshot(
    step: int, rng: random.Random, factors: dict[str, float] | None = None, cut: str | None = None
) -> Snapshot:
    """A quiet level that swings by 20 percent, a profile that is steady to 3 percent, couplings to 1 percent."""
    n = len(NODES)
    level = 2.0 ** rng.gauss(0, 0.3)
    scale = [4.0**-i * level * (factors or {}).get(name, 1.0) * 2 ** rng.gauss(0, 0.04) for i, name in enumerate(NODES)]
    coupling = torch.ones(n, n, dtype=torch.float64)
    for i in range(n):
        for j in range(i):
            across = cut is not None and j < NODES.index(cut) <= i
            coupling[i, j] = coupling[j, i] = (0.3 if across else 0.8) * (1 + 0.01 * rng.gauss(0, 1))
    root = torch.tensor(scale, dtype=torch.float64).sqrt()
    resonance = coupling * root[:, None] * root[None, :]
    ones = torch.ones(n, n, dtype=torch.float64)
    errors = {name: 0.005 * ones for name in ("coupling", "stable_rank", "gn_gap")} | {"resonance": 0.005 * resonance}
    measurement = Measurement(NODES, resonance, coupling, 2 * ones, 0.1 * ones, errors, ones, ones, 1.0, 1, 0.0)
    return Snapshot(step=step, epoch=step, measurement=measurement)

"""How much of a history goes into a checkpoint: as many bytes as allowed, whatever the length of the run."""

from __future__ import annotations

import pickle
from itertools import accumulate
from typing import Any


def thinned(entries: list[dict[str, Any]], most_bytes: int) -> list[dict[str, Any]]:
    """All entries if they fit; else the latest in half of the bytes, and every n-th of those before in the other half.

    Entries are in order, the latest last; it is kept in any case.
    """
    sizes = [len(pickle.dumps(entry, protocol=2)) for entry in entries]
    if sum(sizes) <= most_bytes:
        return entries
    latest = max(1, sum(total <= most_bytes // 2 for total in accumulate(reversed(sizes))))
    older = list(range(len(entries) - latest))
    left = most_bytes - sum(sizes[-latest:])
    stride = 1
    while sum(sizes[i] for i in older[::stride]) > left and stride < len(older):
        stride += 1
    kept = older[::stride] if sum(sizes[i] for i in older[::stride]) <= left else []
    return [entries[i] for i in kept] + entries[-latest:]

"""The measurements of a run: a bounded list of snapshots that is saved in checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from curvmon.records import Snapshot
from curvmon.records.thinning import thinned

MOST_BYTES = 1_200_000
"""in a checkpoint"""


class History:
    """The latest `size` snapshots, oldest first."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._snapshots: list[Snapshot] = []

    def append(self, snapshot: Snapshot) -> None:
        self._snapshots.append(snapshot)
        del self._snapshots[: -self._size]

    def __iter__(self) -> Iterator[Snapshot]:
        return iter(self._snapshots)

    def __len__(self) -> int:
        return len(self._snapshots)

    @property
    def last(self) -> Snapshot | None:
        return self._snapshots[-1] if self._snapshots else None

    @property
    def last_full(self) -> Snapshot | None:
        """The latest that has more than vital signs."""
        return next((s for s in reversed(self._snapshots) if s.is_full), None)

    @property
    def nodes(self) -> tuple[str, ...] | None:
        """Nodes of the latest measurement of pairs; None if there is none."""
        return next((s.measurement.nodes for s in reversed(self._snapshots) if s.measurement is not None), None)

    def state_dict(self) -> list[dict[str, Any]]:
        """The latest snapshots, and every n-th of those before: at most `MOST_BYTES`."""
        return thinned([snapshot.to_dict() for snapshot in self._snapshots], MOST_BYTES)

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        self._snapshots = [Snapshot.from_dict(entry) for entry in state][-self._size :]

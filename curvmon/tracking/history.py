"""What a run has measured so far: a bounded list of snapshots that goes through a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from curvmon.types import Measurement, Spectrum


@dataclass(frozen=True, eq=False)
class Snapshot:
    """Everything that was measured at one moment of a run."""

    step: int
    """on the axis of Lightning's own validation metrics"""
    epoch: int
    measurement: Measurement | None = None
    spectrum: Spectrum | None = None
    """without its eigenvectors, which would take the memory of many models"""
    seconds: float = 0.0
    overhead: float = 0.0
    """time spent measuring so far, as a share of the training time"""
    skipped: int = 0
    """measurements left out so far to stay within the budget"""
    alerts: int = 0
    """so far in this run, those of this snapshot included"""

    @property
    def loss(self) -> float:
        found = self.measurement or self.spectrum
        return float("nan") if found is None else found.loss

    @property
    def hvps(self) -> int:
        return sum(found.hvps for found in (self.measurement, self.spectrum) if found is not None)

    def to_dict(self) -> dict[str, Any]:
        """Plain Python: what a checkpoint can hold and `weights_only` loading accepts."""
        return {
            "step": self.step,
            "epoch": self.epoch,
            "measurement": None if self.measurement is None else self.measurement.to_dict(),
            "spectrum": None if self.spectrum is None else self.spectrum.to_dict(),
            "seconds": self.seconds,
            "overhead": self.overhead,
            "skipped": self.skipped,
            "alerts": self.alerts,
        }

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Snapshot:
        measurement, spectrum = state["measurement"], state["spectrum"]
        return cls(
            step=state["step"],
            epoch=state["epoch"],
            measurement=None if measurement is None else Measurement.from_dict(measurement),
            spectrum=None if spectrum is None else Spectrum.from_dict(spectrum),
            seconds=state["seconds"],
            overhead=state["overhead"],
            skipped=state["skipped"],
            alerts=state.get("alerts", 0),  # before there were any
        )


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
    def nodes(self) -> tuple[str, ...] | None:
        """Of the latest measurement."""
        return next((s.measurement.nodes for s in reversed(self._snapshots) if s.measurement is not None), None)

    def state_dict(self) -> list[dict[str, Any]]:
        return [snapshot.to_dict() for snapshot in self._snapshots]

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        self._snapshots = [Snapshot.from_dict(entry) for entry in state][-self._size :]

"""What happens in a run: a snapshot of everything that was measured, and the alerts it gives rise to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from curvmon.records.measurement import Measurement
from curvmon.records.spectrum import Spectrum

Level = Literal["info", "warning", "error"]


@dataclass(frozen=True)
class Alert:
    """Something changed abruptly, or a rule was broken."""

    kind: str
    """jump, drift, or the name of a rule"""
    metric: str
    where: str
    """a pair of layers ("stem--layer4") or a quantity ("lambda_1")"""
    before: float
    after: float
    score: float
    """in standard deviations; for a rule, how far beyond its threshold"""
    step: int
    epoch: int
    message: str
    """what happened and what to look at, in plain language"""
    level: Level = "warning"
    others: tuple[str, ...] = ()
    """further pairs or quantities that the same event changed, most affected first"""

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "others": list(self.others)}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Alert:
        return cls(**{**state, "others": tuple(state["others"])})

    def __str__(self) -> str:
        return self.message


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

"""Everything that is known of a run: what was measured, the pulses, and what was raised."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from curvmon.records import presentation
from curvmon.records.events import Alert, Snapshot
from curvmon.records.measurement import Measurement
from curvmon.records.pulses import PulseRecord
from curvmon.records.spectrum import Spectrum


@dataclass(frozen=True, eq=False, repr=False)
class RunHistory:
    """The records of a run, each kind oldest first, as `curvmon.load_history` returns them.

    Attributes:
        snapshots: what was measured at the validations.
        pulses: gain and curvature along single optimizer steps.
        raised: alerts and notices.
        name: what the run is called in pictures and reports.
    """

    snapshots: tuple[Snapshot, ...] = ()
    pulses: tuple[PulseRecord, ...] = ()
    raised: tuple[Alert, ...] = ()
    name: str = ""

    @property
    def history(self) -> list[Measurement]:
        """The measurements of pairs of layers."""
        return [s.measurement for s in self.snapshots if s.measurement is not None]

    @property
    def spectra(self) -> list[Spectrum]:
        """Without eigenvectors."""
        return [s.spectrum for s in self.snapshots if s.spectrum is not None]

    @property
    def alerts(self) -> list[Alert]:
        """Of the levels warning and error."""
        return [alert for alert in self.raised if alert.level != "info"]

    @property
    def notices(self) -> list[Alert]:
        """Informational events."""
        return [alert for alert in self.raised if alert.level == "info"]

    @property
    def steps(self) -> list[int]:
        """Of snapshots, pulses and alerts, in ascending order, each once."""
        records: tuple[Snapshot | PulseRecord | Alert, ...] = (*self.snapshots, *self.pulses, *self.raised)
        return sorted({record.step for record in records})

    def plot(self, keys: Sequence[str] | None = None) -> tuple[Any, Any]:
        """`fig, axes` with a chart over the steps for each number, alerts marked. Needs matplotlib.

        Args:
            keys: columns of `to_pandas`; None: the headline.
        """
        return presentation.plot(self, keys=keys)

    def to_pandas(self) -> Any:
        """A DataFrame, one row per step: epoch, alert, and the numbers under their logger keys. Needs pandas."""
        return presentation.to_pandas(self)

    def report(self, path: str | os.PathLike[str] | None = None) -> str:
        """One HTML page that loads nothing: verdict, curves, heatmaps, spectrum, cost. Written to `path` if given."""
        return presentation.report(self, path)

    def _repr_html_(self) -> str:
        return presentation.to_html(self)

    def __str__(self) -> str:
        steps, alerts = self.steps, self.alerts
        span = f"steps {steps[0]} to {steps[-1]}" if steps else "nothing measured"
        full = sum(snapshot.is_full for snapshot in self.snapshots)
        counted = ((full, "full measurement"), (len(self.pulses), "pulse"), (len(alerts), "alert"))
        counts = ", ".join(f"{count} {what}{'' if count == 1 else 's'}" for count, what in counted)
        title = f"{type(self).__name__} of {self.name}" if self.name else type(self).__name__
        head = f"{title}: {span}, {len(self.snapshots)} validations, {counts}"
        return "\n".join([head, *(f"  step {alert.step}: {alert.headline}" for alert in alerts)])

    __repr__ = __str__

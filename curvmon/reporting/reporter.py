"""A snapshot in the loggers, in `callback_metrics` and in the console: keys and pictures."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

from curvmon.records import Alert, Metric, Snapshot
from curvmon.reporting import figures
from curvmon.reporting.canvas import available
from curvmon.reporting.console import say, summary
from curvmon.reporting.loggers import Draw, Sinks, publish
from curvmon.reporting.scalars import scalars


class Report:
    """What of a snapshot is shown, and under which names."""

    def __init__(
        self,
        metrics: Sequence[Metric],
        log_pairs: bool | Literal["auto"],
        heatmaps: bool,
        log_key_prefix: str,
        verbose: bool,
    ) -> None:
        self._metrics = metrics
        self._log_pairs = log_pairs
        self._heatmaps = heatmaps
        self._prefix = log_key_prefix
        self._verbose = verbose
        self._sinks = Sinks(log_key_prefix)

    @property
    def lacks_pictures(self) -> bool:
        """They are wanted, and matplotlib is missing."""
        return self._heatmaps and not available()

    def write(
        self, trainer: Any, snapshots: Sequence[Snapshot], alerts: Sequence[Alert], fresh: Sequence[Alert]
    ) -> None:
        """The last of the snapshots, with all alerts of the run, and those that are its own."""
        snapshot = snapshots[-1]
        values = scalars(snapshot, metrics=self._metrics, pairs=self._log_pairs)
        values = {f"{self._prefix}{key}": value for key, value in values.items()}
        publish(trainer, values)
        if trainer.is_global_zero:
            values["epoch"] = float(snapshot.epoch)
            self._sinks.write(trainer, values, self._pictures(snapshots, alerts, fresh), snapshot.step)
            if self._verbose:
                say(trainer, summary(snapshot))

    def count(self, trainer: Any, alerts: Sequence[Alert], step: int) -> None:
        """The number of alerts alone, where there is nothing else to report."""
        if trainer.is_global_zero:
            self._sinks.write(trainer, {f"{self._prefix}curvmon/alerts": float(len(alerts))}, {}, step)

    def skipped(self, trainer: Any, count: int, step: int) -> None:
        """How many measurements were left out so far, this one included."""
        values = {f"{self._prefix}curvmon/skipped": float(count)}
        publish(trainer, values)
        if trainer.is_global_zero:
            self._sinks.write(trainer, values, {}, step)

    def _pictures(
        self, snapshots: Sequence[Snapshot], alerts: Sequence[Alert], fresh: Sequence[Alert]
    ) -> dict[str, Draw]:
        if not self._heatmaps or not available():
            return {}
        pictures: dict[str, Draw] = {}
        snapshot = snapshots[-1]
        found, when = snapshot.measurement, f"step {snapshot.step}"
        marked = [pair for alert in fresh if alert.level != "info" for pair in (alert.where, *alert.others)]
        if found is not None:
            for metric in self._metrics:
                title = f"{figures.TITLES[metric]}, {when}"
                pictures[f"{self._prefix}heatmap/{metric}"] = partial(figures.heatmap, found, metric, title, marked)
            pictures[f"{self._prefix}by_distance"] = partial(figures.by_distance, found, when, self._metrics)
        if snapshot.spectrum is not None:
            steps = [alert.step for alert in alerts]
            pictures[f"{self._prefix}spectrum"] = partial(figures.spectrum_over_time, snapshots, "", steps)
        return pictures

"""Reports a snapshot to the loggers, to callbacks such as EarlyStopping, and to the console."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from curvmon.errors import warn
from curvmon.metrics.definitions import PROBE_LOSS_KEY
from curvmon.metrics.registry import pair_metric, pair_metric_names
from curvmon.monitor.history_file import HistoryFile
from curvmon.records import Alert, PulseRecord, RunHistory, Snapshot
from curvmon.reporting import figures
from curvmon.reporting.canvas import KeptFigures, available
from curvmon.reporting.console import print_line, summary
from curvmon.reporting.loggers import Loggers, run_folder
from curvmon.reporting.pictures import Picture, PictureSchedule
from curvmon.reporting.scalars import BY_DISTANCE, EIGENVALUES, Keys, heatmap_key, pulse_scalars, scalars


class Report:
    """Which numbers and pictures of a snapshot are reported, and where.

    What is reported goes to the loggers of a `curvmon.recorder.loop.Loop`.

    Args:
        metrics: names of the pair metrics.
        log_pairs: whether every pair is a scalar.
        heatmaps: whether figures are drawn.
        log_key_prefix: prefix of every key.
        verbose: whether every measurement is printed.

    Attributes:
        schedule: whether pictures of the last snapshot are due, or have not been drawn.
        file: `history.jsonl`, in the folder of the loggers.
    """

    def __init__(
        self,
        metrics: Sequence[str],
        log_pairs: bool,
        heatmaps: bool,
        log_key_prefix: str,
        verbose: bool,
    ) -> None:
        self._metrics = metrics
        self._log_pairs = log_pairs
        self._heatmaps = heatmaps
        self._keys = Keys(log_key_prefix)
        self._verbose = verbose
        self._loggers = Loggers(self._keys)
        self._figures = KeptFigures()
        self._published: set[str] = set()
        self._pulse: dict[str, float] = {}
        """numbers of the last pulse since the last snapshot"""
        self._pulse_step = -math.inf
        """of the last one that the loggers have"""
        self.schedule = PictureSchedule()
        self.file = HistoryFile(log_key_prefix)

    def start(self, earlier: RunHistory) -> None:
        """Before a run, which may count its steps from 0 again; `earlier`: what its history begins with."""
        self.schedule.start()
        self.file.start(earlier)
        self._pulse_step = -math.inf

    @property
    def prefix(self) -> str:
        return self._keys.prefix

    @property
    def lacks_pictures(self) -> bool:
        """Pictures are to be drawn, and matplotlib is missing."""
        return self._heatmaps and not available()

    def write(self, loop: Any, snapshots: Sequence[Snapshot], alerts: Sequence[Alert], fresh: Sequence[Alert]) -> None:
        """Report the last snapshot; its pictures are left to `draw`.

        Args:
            loop: whose loggers are written to.
            snapshots: of the run so far.
            alerts: of the run so far.
            fresh: those of the last snapshot.
        """
        snapshot = snapshots[-1]
        numbers = scalars(snapshot, metrics=self._registered(), pairs=self._log_pairs).named(self._keys)
        values = numbers.for_callbacks()
        if snapshot.vitals is not None and snapshot.vitals.not_finite:
            # measured, and not a number: EarlyStopping would raise without the key
            values = {self._keys(PROBE_LOSS_KEY): math.nan, **values}
        # in the loggers, those of a pulse belong to its own step
        values, self._pulse = {**values, **self._pulse}, {}
        loop.publish(values, self._published - values.keys())
        self._published = set(values)
        if loop.is_global_zero:
            self._loggers.write(loop, numbers, snapshot.epoch, snapshot.step)
            if snapshot.is_full:
                self._plan_pictures(snapshots, alerts, fresh)
            # not before the loggers: one may warn of a folder that is not empty
            self.file.write(run_folder(loop), [snapshot, *fresh])
            if self._verbose:
                print_line(loop, summary(snapshot))

    def write_alerts(self, loop: Any, alerts: Sequence[Alert]) -> None:
        """Add alerts to the history that come with neither a snapshot nor a pulse."""
        if loop.is_global_zero:
            self.file.write(run_folder(loop), alerts)

    def write_pulse(self, loop: Any, record: PulseRecord, alerts: Sequence[Alert]) -> None:
        """Report a pulse: to callbacks, and to the loggers as often as they take numbers of training steps.

        `alerts`: those that it raised; with one, the loggers get it at once.
        """
        numbers = pulse_scalars(record).named(self._keys)
        self._pulse = numbers.for_callbacks()
        loop.publish(self._pulse, ())
        self._published |= self._pulse.keys()
        is_due = bool(alerts) or record.step - self._pulse_step >= loop.log_every_n_steps
        if loop.is_global_zero and self._pulse and is_due:
            self._pulse_step = record.step
            self._loggers.write(loop, numbers, record.epoch, record.step)
        if loop.is_global_zero:
            self.file.write(run_folder(loop), [record, *alerts])

    def _plan_pictures(self, snapshots: Sequence[Snapshot], alerts: Sequence[Alert], fresh: Sequence[Alert]) -> None:
        pictures, snapshot = self._keys.named(self._pictures(snapshots, alerts, fresh)), snapshots[-1]
        serious = any(alert.level != "info" for alert in fresh)
        self.schedule.measured(pictures, snapshot.step, snapshot.seconds, serious)

    def draw(self, loop: Any) -> None:
        """The pictures that have not been drawn, at the step of their measurement."""
        if self.schedule.undrawn is not None:
            pictures, step = self.schedule.undrawn
            self._loggers.draw(loop, {key: picture.draw for key, picture in pictures.items()}, step)

    def _registered(self) -> list[str]:
        """Metrics may have been unregistered, and processes of `ddp_spawn` start with a fresh registry."""
        registered = pair_metric_names()
        for name in self._metrics:
            if name not in registered:
                warn(f"metric {name!r} is not registered in this process and not reported")
        return [name for name in self._metrics if name in registered]

    def _pictures(
        self, snapshots: Sequence[Snapshot], alerts: Sequence[Alert], fresh: Sequence[Alert]
    ) -> dict[str, Picture]:
        if not self._heatmaps or not available():
            return {}
        pictures: dict[str, Picture] = {}
        snapshot = snapshots[-1]
        measurement, when = snapshot.measurement, f"step {snapshot.step}"
        marked = [pair for alert in fresh if alert.level != "info" for pair in (alert.where, *alert.others)]
        if measurement is not None:
            names = self._registered()
            for name in names:
                spec = pair_metric(name)
                title = f"{spec.heading}, {when}"
                draw = partial(figures.heatmap, measurement, name, title, marked, self._figures)
                pictures[heatmap_key(name)] = Picture(draw, spec.values(measurement))
            if names:
                pictures[BY_DISTANCE] = Picture(partial(figures.by_distance, measurement, when, names, self._figures))
        if snapshot.spectrum is not None:
            steps = [alert.step for alert in alerts]
            pictures[EIGENVALUES] = Picture(partial(figures.spectrum_over_time, snapshots, "", steps, self._figures))
        return pictures

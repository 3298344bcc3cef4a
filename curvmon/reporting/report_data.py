"""The numbers of an HTML report: curves, heatmaps and spectra of runs, few and short enough for a page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from curvmon.metrics.registry import ScalarMetric, get, pair_metrics
from curvmon.records import RunHistory, Snapshot
from curvmon.reporting.canvas import short_names
from curvmon.reporting.charts import headline_labels
from curvmon.reporting.scalars import HEADLINE
from curvmon.reporting.tables import Row

MOST_POINTS = 400
"""of a curve"""
MOST_FRAMES = 150
"""of heatmaps"""


def report_data(histories: Sequence[RunHistory], tables: Sequence[Sequence[Row]]) -> dict[str, Any]:
    """Python lists, dicts, strings and finite numbers; None where a number is not defined.

    Args:
        histories: runs.
        tables: `headline_rows` of each.
    """
    labels = headline_labels()
    runs = [_run(history, table, list(labels)) for history, table in zip(histories, tables)]
    measured = [key for key in labels if any(key in run["curves"] for run in runs)]
    return {
        "charts": [{"key": key, "title": labels[key], **_explained(key)} for key in measured],
        "metrics": [
            {"name": spec.name, "title": spec.heading, "log": spec.log_scale, "range": list(spec.color_range)}
            for spec in pair_metrics()
        ],
        "runs": runs,
    }


def _explained(key: str) -> dict[str, Any]:
    name = "loss" if key == _key_of("loss") else key.removeprefix(HEADLINE)
    spec = get(name)
    return {"log": spec.log_scale or name == "loss", "meaning": spec.meaning, "good": spec.good, "bad": spec.bad}


def _key_of(name: str) -> str:
    spec = get(name)
    assert isinstance(spec, ScalarMetric)
    return spec.key


def _run(history: RunHistory, table: Sequence[Row], keys: Sequence[str]) -> dict[str, Any]:
    curves = {}
    for key in keys:
        points = [(row["step"], row[key]) for row in table if key in row]
        if points:
            curves[key] = [[step, _short(value)] for step, value in thinned_curve(points, MOST_POINTS)]
    marks = [
        {"step": alert.step, "headline": alert.headline, "pairs": [alert.where, *alert.others]}
        for alert in history.alerts
    ]
    return {
        "name": history.name,
        "steps": [history.steps[0], history.steps[-1]] if history.steps else [0, 0],
        "curves": curves,
        "alerts": marks,
        "frames": _frames(history),
        "spectra": _spectra(history),
    }


def thinned_curve(points: Sequence[tuple[int, float]], most: int) -> list[tuple[int, float]]:
    """At most `most` points: the smallest and the largest value of every stretch, so that no spike is lost."""
    if len(points) <= most:
        return list(points)
    width = math.ceil(len(points) / (most // 2))
    kept = []
    for start in range(0, len(points), width):
        stretch = points[start : start + width]
        extremes = {min(stretch, key=lambda point: point[1]), max(stretch, key=lambda point: point[1])}
        kept += sorted(extremes)
    return kept


def _frames(history: RunHistory) -> list[dict[str, Any]]:
    """The upper triangles of the matrices at a step; `MOST_FRAMES`, those of alerts, and the last."""
    measured = [snapshot for snapshot in history.snapshots if snapshot.measurement is not None]
    kept = range(0, len(measured), max(1, math.ceil(len(measured) / MOST_FRAMES)))
    # an alert of a pulse comes before the measurement that shows the same
    shown = [next((i for i, s in enumerate(measured) if s.step >= alert.step), None) for alert in history.alerts]
    chosen = sorted({*kept, *(i for i in shown if i is not None), *([len(measured) - 1] if measured else [])})
    return [_frame(measured[i]) for i in chosen]


def _frame(snapshot: Snapshot) -> dict[str, Any]:
    assert snapshot.measurement is not None
    nodes = snapshot.measurement.nodes
    names, shared = short_names(nodes)
    values = {}
    for spec in pair_metrics():
        matrix = spec.values(snapshot.measurement).tolist()
        values[spec.name] = [_short(matrix[i][j]) for i in range(len(nodes)) for j in range(i, len(nodes))]
    return {"step": snapshot.step, "nodes": list(nodes), "names": names, "shared": shared, "values": values}


def _spectra(history: RunHistory) -> list[dict[str, Any]]:
    measured = [(s.step, s.spectrum) for s in history.snapshots if s.spectrum is not None]
    stride = max(1, math.ceil(len(measured) / MOST_POINTS))
    last = len(measured) - 1
    return [
        {
            "step": step,
            "top": [_short(value) for value in spectrum.eigenvalues.tolist()],
            "residuals": [_short(value) for value in spectrum.residuals.tolist()],
            "smallest": _short(spectrum.smallest),
            "ggn": _short(spectrum.ggn_eigenvalue),
            "limit": _short(spectrum.sharpness / spectrum.stability_ratio) if spectrum.stability_ratio > 0 else None,
        }
        for i, (step, spectrum) in enumerate(measured)
        if i % stride == 0 or i == last
    ]


def _short(value: float) -> float | str | None:
    """Five digits; JSON has neither NaN nor infinity."""
    if math.isnan(value):
        return None
    return float(f"{value:.5g}") if math.isfinite(value) else "∞" if value > 0 else "-∞"

"""What `.plot()` of a record returns: a figure that pyplot knows, in the look of the logged pictures, and its axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import singledispatch
from typing import Any

from curvmon.errors import InputError
from curvmon.records import Measurement, RunHistory, Spectrum
from curvmon.reporting import figures
from curvmon.reporting.canvas import (
    KeptFigures,
    available,
    brief,
    few_ticks,
    margins,
    plain,
    pyplot_figure,
)
from curvmon.reporting.charts import headline_labels
from curvmon.reporting.figures import PALETTE
from curvmon.reporting.tables import Row, headline_rows, rows


def plot(record: Any, **options: Any) -> tuple[Any, Any]:
    """The figure and its axes.

    Raises:
        ImportError: matplotlib is not installed.
    """
    if not available():
        raise ImportError("plot needs matplotlib: pip install matplotlib")
    with plain():
        return _draw(record, **options)


@singledispatch
def _draw(record: Any) -> tuple[Any, Any]:
    raise InputError(f"no plot of a {type(record).__name__}")


@_draw.register
def _(record: Measurement, metric: str = "resonance") -> tuple[Any, Any]:
    figure = figures.heatmap(record, metric, kept=KeptFigures(pyplot_figure))
    return figure, figure.axes[0]


@_draw.register
def _(record: Spectrum) -> tuple[Any, Any]:
    figure = pyplot_figure(5.4, 3.6)
    margins(figure, left=0.75, right=0.2, bottom=0.95, top=0.35)
    axis = figure.add_subplot()
    axis.grid(alpha=0.3)
    (_eigenvalues if record.density is None else _density)(axis, record)
    axis.legend(fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.46, -0.2), frameon=False)
    return figure, axis


def _eigenvalues(axis: Any, record: Spectrum) -> None:
    """Every eigenvalue a dot with its residual, the smallest in the last place."""
    table = rows(record)
    names = [_symbol(row["name"]) for row in table]
    for place, row in enumerate(table):
        colour = PALETTE[3] if row["name"] == "lambda_min" else PALETTE[0]
        fill = colour if row["converged"] else "white"
        axis.errorbar(place, row["eigenvalue"], yerr=row["residual"], fmt="o", color=colour, mfc=fill, capsize=3)
    axis.axhline(0, color="0.4", linewidth=0.8)
    _references(axis.axhline, record)
    if not all(row["converged"] for row in table):
        axis.plot([], [], "o", color="0.4", mfc="white", label="not converged")
    axis.set_xticks(range(len(names)), names)
    axis.set_xlim(-0.5, len(names) - 0.5)
    axis.set_ylabel("eigenvalue of the loss Hessian")
    axis.set_title(f"extremal eigenvalues, trace {brief(record.trace)}", fontsize=10)
    axis.plot([], [], "o", color=PALETTE[0], label="eigenvalue ± residual")


def _density(axis: Any, record: Spectrum) -> None:
    assert record.density is not None
    grid, height = record.density.smoothed()
    axis.semilogy(grid, height, color=PALETTE[0], label="density")
    peak = height.max().item()
    axis.set_ylim(1e-6 * peak, 3 * peak)
    axis.plot(
        record.eigenvalues, [3e-6 * peak] * len(record.eigenvalues), "^", color=PALETTE[2], label="top eigenvalues"
    )
    _references(axis.axvline, record)
    axis.set_xlabel("eigenvalue of the loss Hessian")
    axis.set_title("density of the eigenvalues", fontsize=10)


def _references(line: Any, record: Spectrum) -> None:
    limit = record.sharpness / record.stability_ratio if record.stability_ratio > 0 else math.nan
    if math.isfinite(record.ggn_eigenvalue):
        line(record.ggn_eigenvalue, color=PALETTE[2], linestyle=":", label="Gauss–Newton λ₁")
    if math.isfinite(limit):
        line(limit, color="black", linestyle="--", linewidth=1, label="stability limit")


def _symbol(name: str) -> str:
    number = name.removeprefix("lambda_")
    return "smallest" if number == "min" else f"λ{number.translate(str.maketrans('0123456789', '₀₁₂₃₄₅₆₇₈₉'))}"


@_draw.register
def _(record: RunHistory, keys: Sequence[str] | None = None) -> tuple[Any, Any]:
    """A panel for each number, with the steps of the alerts."""
    table = headline_rows(record) if keys is None else rows(record)
    labels = headline_labels()
    measured = list(dict.fromkeys(key for row in table for key in row if "/" in key))
    keys = [key for key in labels if key in measured] if keys is None else list(keys)
    unknown = [key for key in keys if key not in measured]
    if unknown or not keys:
        names = ", ".join(repr(key) for key in unknown) or "anything"
        raise InputError(f"the history has no {names}; it has {', '.join(measured) or 'nothing'}")
    columns = min(2, len(keys))
    count = math.ceil(len(keys) / columns)
    figure = pyplot_figure(3.4 * columns + 0.4, 0.7 + 1.7 * count)
    margins(figure, left=0.65, right=0.15, bottom=0.5, top=0.6, wspace=0.25, hspace=0.42)
    steps = sorted({alert.step for alert in record.alerts})
    span = max(1, record.steps[-1] - record.steps[0])
    for place, key in enumerate(keys):
        axis = figure.add_subplot(count, columns, place + 1)
        _over_steps(axis, table, key, steps)
        axis.set_xlim(record.steps[0] - 0.04 * span, record.steps[-1] + 0.04 * span)
        axis.set_title(labels.get(key, key), fontsize=10)
        if place >= len(keys) - columns:
            axis.set_xlabel("step")
    alerts = f"dotted: {len(steps)} step{'s' * (len(steps) != 1)} with an alert" if steps else "no alerts"
    head = f"{record.name}, {alerts}" if record.name else alerts
    figure.suptitle(head, fontsize=10, y=1 - 0.12 / figure.get_figheight(), va="top")
    return figure, figure.axes[0] if len(keys) == 1 else figure.axes


def _over_steps(axis: Any, table: Sequence[Row], key: str, alerts: Sequence[int]) -> None:
    from matplotlib.ticker import MaxNLocator

    points = [(row["step"], row[key]) for row in table if key in row]
    steps, values = zip(*points)
    axis.plot(steps, values, ".-" if len(steps) <= 50 else "-", color=PALETTE[0], linewidth=1.2)
    for step in alerts:
        axis.axvline(step, color=PALETTE[1], linestyle=":", linewidth=1.5, zorder=1)
    low, high = min(values), max(values)
    if low > 0 and high > 10 * low:
        axis.set_yscale("log")
        few_ticks(axis.yaxis, low, high)
    axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axis.tick_params(labelsize=8)
    axis.grid(alpha=0.3)

"""Figures: a pair metric as a heatmap, metrics by distance with error bars, eigenvalues over the run.

Colours are viridis and the palette of Okabe and Ito (2008), which colour-blind readers can distinguish. Curves are at
most six inches wide: TensorBoard shows pictures at a width of 350 pixels, and their text has to stay readable there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from curvmon.metrics.registry import PairMetric, pair_metric, pair_metric_names
from curvmon.records import Measurement, Snapshot
from curvmon.reporting.canvas import (
    KeptFigures,
    NewFigure,
    brief,
    few_ticks,
    log_ticks,
    margins,
    short_names,
    text_width,
    without_curves,
)

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
UNDEFINED = "0.85"
"""the grey of a cell that has no value"""
MOST_NODES_WITH_NUMBERS = 10
"""in the cells of a heatmap"""
WIDEST_LINEAR = 30.0
"""ratio of the largest eigenvalue in the picture to the smallest λ_1 above which the scale is logarithmic"""


def heatmap(
    measurement: Measurement, metric: str, title: str = "", marked: Sequence[str] = (), kept: KeptFigures | None = None
) -> Any:
    """A pair metric as an n x n matrix of colours with the names of its nodes.

    Undefined entries are grey. On a logarithmic scale a zero has the darkest colour, which no other value has then, and
    infinity the brightest.

    Args:
        measurement: of n nodes.
        metric: name of a registered pair metric.
        title: above the matrix; by default that of the metric.
        marked: pairs to frame, `"stem--layer4"`.
        kept: figures of earlier calls, one of which is drawn on again and returned; None: a new one.
    """
    spec, nodes = pair_metric(metric), measurement.nodes
    matrix = spec.values(measurement)
    figure = (kept or KeptFigures()).get("heatmap", nodes, partial(_square, nodes))
    _fit_square(figure, nodes, title or spec.heading)
    axes, bar = figure.axes
    norm = _norm(matrix, spec)
    (image,) = axes.images
    image.set_data(matrix.where(matrix != 0, norm.vmin).where(matrix != math.inf, norm.vmax).numpy())
    image.set_norm(norm)
    levels = norm(image.get_array()).filled(1.0).ravel().tolist()
    for text, value, level in zip(axes.texts, matrix.flatten().tolist(), levels):
        text.set(text=brief(value), color="white" if level < 0.6 else "black")
    for frame in list(axes.patches):
        frame.remove()
    _frame(axes, nodes, marked)
    _bar_ticks(bar, norm, len(nodes))
    return figure


def _frame(axes: Any, nodes: Sequence[str], marked: Sequence[str]) -> None:
    from matplotlib.patches import Rectangle

    for i, row in enumerate(nodes):
        for j, column in enumerate(nodes):
            if f"{row}--{column}" in marked or f"{column}--{row}" in marked:
                axes.add_patch(
                    Rectangle((j - 0.46, i - 0.46), 0.92, 0.92, fill=False, edgecolor=PALETTE[1], linewidth=2)
                )


def _square(nodes: Sequence[str], new: NewFigure) -> Any:
    """A figure with n x n empty cells and a colour bar; `_fit_square` places them."""
    names, footer = short_names(nodes)
    n, size = len(names), _name_size(len(names))
    figure = new(1, 1)
    axes, bar = figure.add_axes((0, 0, 1, 1)), figure.add_axes((0, 0, 1, 1))
    # colours first: they are computed for n x n numbers, not for every pixel
    style = {"cmap": "viridis", "aspect": "auto", "interpolation": "nearest", "interpolation_stage": "rgba"}
    axes.imshow([[0.0] * n] * n, **style)
    axes.set_facecolor(UNDEFINED)
    if n <= MOST_NODES_WITH_NUMBERS:
        for i, j in product(range(n), repeat=2):
            axes.text(j, i, "", ha="center", va="center", fontsize=9 if n <= 6 else 7)
    axes.set_xticks(range(n), names, rotation=45, ha="right", rotation_mode="anchor", fontsize=size)
    axes.set_yticks(range(n), names, fontsize=size)
    bar.imshow([[i / 255] for i in range(256)], extent=(0, 1, 0, 1), origin="lower", vmin=0, vmax=1, **style)
    bar.set_xticks([])
    bar.yaxis.tick_right()
    bar.tick_params(labelsize=8)
    figure.text(0.5, 1, "", ha="center", va="center", fontsize=10)
    figure.text(0.5, 0, footer, ha="center", va="center", fontsize=8, color="0.3")
    return figure


def _name_size(n: int) -> float:
    return 9 if n <= MOST_NODES_WITH_NUMBERS else 7


def _fit_square(figure: Any, nodes: Sequence[str], title: str) -> None:
    """The size of the figure and the places of its axes, with margins as wide as the names and the title need.

    Placed by hand: matplotlib's layout engine draws everything twice, and cuts off long names next to square cells.
    """
    names, footer = short_names(nodes)
    n = len(names)
    longest = max(text_width(figure, name, _name_size(n)) for name in names)
    left, right, top, slanted = longest + 0.2, 0.9, 0.4, longest * math.sqrt(0.5)
    # the slanted name of the first column reaches to the left of the cells
    left, bottom = max(left, slanted + 0.15), slanted + (0.45 if footer else 0.25)
    side = n * min(0.8, max(0.26, 4.2 / n))
    spare = max(0.0, max(text_width(figure, title, 10), text_width(figure, footer, 8)) + 0.2 - (left + side + right))
    width, height = left + side + right + spare, bottom + side + top
    figure.set_size_inches(width, height)
    axes, bar = figure.axes
    axes.set_position((left / width, bottom / height, side / width, side / height))
    bar.set_position(((left + side + 0.12) / width, bottom / height, 0.16 / width, side / height))
    above, below = figure.texts
    above.set(y=1 - 0.2 / height, text=title)
    below.set_y(0.12 / height)


def _bar_ticks(bar: Any, norm: Any, n: int) -> None:
    """The colour bar goes from 0 to 1, whatever the scale: only the places and labels of its ticks depend on it."""
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import MaxNLocator

    locator: Any = MaxNLocator(min(6, 2 + n), steps=[1, 2, 2.5, 5, 10])
    label: Callable[[float], str] = "{:.4g}".format
    low, high = norm.vmin, norm.vmax
    if isinstance(norm, LogNorm):
        locator, label = log_ticks(low, high)
    ticks = [value for value in locator.tick_values(low, high) if low <= value <= high]
    bar.set_yticks([float(norm(value)) for value in ticks], [label(value) for value in ticks])


def _norm(matrix: Tensor, spec: PairMetric) -> Any:
    """Scale of the colours; linear ones have fixed limits if possible, so that heatmaps of two steps are comparable."""
    from matplotlib.colors import LogNorm, Normalize

    finite = matrix[matrix.isfinite()]
    positive = finite[finite > 0]
    high = finite.max().item() if len(finite) else 0.0
    if spec.log_scale and len(positive):
        low = positive.min().item()
        if len(positive) < len(finite):
            return LogNorm(low / max(2.0, (high / low) ** 0.25), high)
        return LogNorm(low, high) if high > low * 1.01 else LogNorm(low / 1.1, high * 1.1)
    lowest, highest = spec.color_range
    return Normalize(lowest, max(highest, high))


def by_distance(
    measurement: Measurement,
    title: str = "",
    metrics: Sequence[str] | None = None,
    kept: KeptFigures | None = None,
) -> Any:
    """Pair metrics against the distance of two layers: every pair a dot with its standard error, their mean a line.

    Zeros are triangles at the lower edge of a logarithmic scale.

    Args:
        measurement: of n nodes.
        title: above all panels.
        metrics: names of pair metrics, one panel each; None: all that are registered.
        kept: as in `heatmap`.
    """
    every = pair_metric_names()
    metrics = every if metrics is None else metrics
    headings = tuple(pair_metric(metric).heading for metric in metrics)
    figure = (kept or KeptFigures()).get("by distance", headings, partial(_panels, headings))
    zeros = False
    for axis, metric in zip(figure.axes, metrics):
        zeros |= _distances(
            without_curves(axis), measurement, pair_metric(metric), PALETTE[every.index(metric) % len(PALETTE)]
        )
    explained = f"dots: pairs ± standard error, {'triangles: zeros, ' if zeros else ''}line: mean"
    head = f"{title}\n{explained}" if title else explained
    figure.suptitle(head, fontsize=9, y=1 - 0.06 / figure.get_figheight(), va="top")
    return figure


def _panels(headings: Sequence[str], new: NewFigure) -> Any:
    count = len(headings)
    columns, rows = (1, 1) if count == 1 else (2, (count + 1) // 2)
    figure = new(max(3.8, 2.8 * columns), 0.8 + 2.0 * rows)
    margins(figure, left=0.58, right=0.1, bottom=0.5, top=0.75, wspace=0.3, hspace=0.4)
    for place, heading in enumerate(headings):
        axis = figure.add_subplot(rows, columns, place + 1)
        axis.set_title(heading, fontsize=10)
        axis.grid(alpha=0.3)
        if place >= count - columns:
            axis.set_xlabel("distance of the layers")
    return figure


def _distances(axis: Any, measurement: Measurement, spec: PairMetric, colour: str) -> bool:
    """One panel; returns whether it has triangles."""
    from matplotlib.ticker import MaxNLocator

    n = len(measurement.nodes)
    rows, columns = torch.triu_indices(n, n)
    values, errors = spec.values(measurement)[rows, columns], spec.stderr(measurement)[rows, columns]
    means = spec.by_distance(measurement)
    logarithmic = spec.log_scale and bool((values.isfinite() & (values > 0)).any())
    kept, kept_means = values.isfinite(), means.isfinite()
    zeros = (columns - rows)[kept & (values == 0)]
    if logarithmic:
        axis.plot(zeros, [0.03] * len(zeros), "v", color="0.5", markersize=5, transform=axis.get_xaxis_transform())
        kept, kept_means = kept & (values > 0), kept_means & (means > 0)
        axis.set_yscale("log", nonpositive="clip")
    axis.errorbar(
        (columns - rows)[kept], values[kept], yerr=errors[kept].nan_to_num(0, 0, 0),
        fmt=".", color="0.5", ecolor="0.7", markersize=4, zorder=1, label="pairs",
    )  # fmt: skip
    distances, means = torch.arange(n)[kept_means], means[kept_means]
    axis.plot(distances, means, "o-", color=colour, markersize=4, alpha=0.9, zorder=2, label="mean")
    if logarithmic:
        # an error bar that reaches zero must not stretch the axis
        drawn = torch.cat([values[kept], means])
        low, high = drawn.min().item() / 1.3, drawn.max().item() * 1.3
        axis.set_ylim(low, high)
        few_ticks(axis.yaxis, low, high)
    elif spec.axis_max is not None:
        axis.set_ylim(0, 1.1 * max([spec.axis_max, *values[kept].tolist()]))
    elif spec.log_scale:  # nothing but zeros
        axis.set_ylim(-0.05, 1)
    if not kept.any():
        axis.set_yticks([])
        axis.text(0.5, 0.5, "not defined", ha="center", va="center", transform=axis.transAxes, color="0.4")
    axis.set_xlim(-0.5, n - 0.5)
    axis.xaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
    return logarithmic and len(zeros) > 0


def spectrum_over_time(
    snapshots: Sequence[Snapshot], title: str = "", alerts: Sequence[int] = (), kept: KeptFigures | None = None
) -> Any:
    """Extremal eigenvalues, the top one of the Gauss-Newton matrix, and the largest stable sharpness of the optimizer.

    Args:
        snapshots: of a run; at least one has a spectrum.
        title: above the curves.
        alerts: steps to mark.
        kept: as in `heatmap`.
    """
    from matplotlib.ticker import MaxNLocator

    measured = [(s.step, s.spectrum) for s in snapshots if s.spectrum is not None]
    spectra = [spectrum for _, spectrum in measured]
    figure = (kept or KeptFigures()).get("spectrum", (), _curves)
    axis = without_curves(figure.axes[0])
    steps = [step for step, _ in measured]
    mark = "." if len(steps) <= 50 else ""
    count = max(len(spectrum.eigenvalues) for spectrum in spectra)
    tops = [[s.eigenvalues[i].item() if i < len(s.eigenvalues) else math.nan for s in spectra] for i in range(count)]
    for i, values in enumerate(tops):
        label = "λ₁" if i == 0 else _range_label(count) if i == 1 else None
        style = {"color": PALETTE[0], "linewidth": 2, "zorder": 4} if i == 0 else {"color": PALETTE[5], "linewidth": 1}
        axis.plot(steps, values, f"{mark}-", label=label, **style)
    ggn = [spectrum.ggn_eigenvalue for spectrum in spectra]
    if any(math.isfinite(value) for value in ggn):
        axis.plot(steps, ggn, f"{'x' if mark else ''}:", color=PALETTE[2], label="Gauss–Newton λ₁", zorder=5)
    limits = [s.sharpness / s.stability_ratio if s.stability_ratio > 0 else math.nan for s in spectra]
    if any(math.isfinite(value) for value in limits):
        axis.plot(
            steps, limits, f"{'_' if len(steps) == 1 else ''}--", color="black", linewidth=1, label="stability limit"
        )
    smallest = [spectrum.smallest for spectrum in spectra]
    if any(math.isfinite(value) for value in smallest):
        axis.plot(steps, smallest, f"{mark}-", color=PALETTE[3], label="smallest")
    for place, step in enumerate(sorted({step for step in alerts if step >= steps[0]})):
        axis.axvline(step, color=PALETTE[1], linestyle=":", linewidth=1.5, label=None if place else "alert", zorder=1)
    _scale(axis, tops[0], limits)
    if len(steps) == 1:
        axis.set_xlim(steps[0] - 1, steps[0] + 1)
        axis.set_xticks(steps)
    else:
        axis.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axis.legend(fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.46, -0.15), frameon=False)
    axis.set_title(title or "extremal eigenvalues", fontsize=10)
    return figure


def _curves(new: NewFigure) -> Any:
    figure = new(5.4, 4.4)
    margins(figure, left=0.75, right=0.25, bottom=1.0, top=0.35)
    axis = figure.add_subplot()
    axis.set_xlabel("step")
    axis.set_ylabel("eigenvalue of the loss Hessian")
    axis.grid(alpha=0.3)
    return figure


def _range_label(count: int) -> str:
    """λ₂, or λ₂ … λ₅."""
    last = str(count).translate(str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉"))
    return "λ₂" if count == 2 else f"λ₂ … λ{last}"


def _scale(axis: Any, top: Sequence[float], limits: Sequence[float]) -> None:
    """Linear if the largest value is at most `WIDEST_LINEAR` times the smallest λ_1; else symmetric logarithmic."""
    from matplotlib.ticker import FuncFormatter

    positive = [value for value in top if math.isfinite(value) and value > 0]
    highest = max([*positive, *(value for value in limits if math.isfinite(value))], default=0.0)
    if not positive or highest <= WIDEST_LINEAR * min(positive):
        return
    # a power of ten: its ticks would crowd around zero otherwise
    threshold = 10.0 ** (math.floor(math.log10(min(positive))) - 1)
    axis.set_yscale("symlog", linthresh=threshold, linscale=max(0.8, math.log10(highest / threshold) / 12))
    axis.margins(y=0.05)  # again, on this scale
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: brief(value)))

"""Pictures of a measurement: a matrix as a heatmap, means by distance with error bars, eigenvalues over the run.

Colours are viridis and the palette of Okabe and Ito, which colour-blind readers can tell apart. Curves are at most six
inches wide: TensorBoard shows pictures at a width of 350 pixels, and their text has to stay readable there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from curvmon.records import METRICS, Measurement, Metric, Snapshot
from curvmon.reporting.canvas import brief, few_ticks, margins, new_figure, short_names, text_width

TITLES: dict[str, str] = {
    "resonance": "resonance  R = ‖H‖",
    "coupling": "coupling  C",
    "stable_rank": "stable rank  D",
    "gn_gap": "GN-Gap",
}
LOGARITHMIC = ("resonance", "gn_gap")
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
UNDEFINED = "0.85"
"""the grey of a cell that has no value"""
MOST_NODES_WITH_NUMBERS = 10
"""in the cells of a heatmap"""
WIDEST_LINEAR = 30.0
"""ratio of the largest eigenvalue in the picture to the smallest λ_1 above which the scale is logarithmic"""


def heatmap(found: Measurement, metric: Metric, title: str = "", marked: Sequence[str] = ()) -> Any:
    """The n x n matrix with the names of its nodes; resonance and the gap on a logarithmic scale.

    What is not defined is grey; a zero on a logarithmic scale has its darkest colour, which nothing else has then, and
    infinity the brightest. Pairs that an alert names are framed.
    """
    matrix: Tensor = getattr(found, metric)
    n = len(found.nodes)
    names, shared = short_names(found.nodes)
    numbers, size = n <= MOST_NODES_WITH_NUMBERS, 9 if n <= 6 else 7
    axes, bar_axes = _square(n, names, title or TITLES[metric], 9 if numbers else 7, footer=shared)
    norm = _norm(matrix, metric)
    shown = matrix.where(matrix != 0, norm.vmin).where(matrix != math.inf, norm.vmax)
    image = axes.imshow(shown.numpy(), norm=norm, cmap="viridis", aspect="auto")
    axes.set_facecolor(UNDEFINED)
    for i, j in torch.cartesian_prod(torch.arange(n), torch.arange(n)).tolist() if numbers else ():
        value = matrix[i, j].item()
        dark = not math.isnan(value) and norm(shown[i, j].item()) < 0.6
        axes.text(j, i, brief(value), ha="center", va="center", fontsize=size, color="white" if dark else "black")
    _frame(axes, found.nodes, marked)
    axes.figure.colorbar(image, cax=bar_axes)
    if metric in LOGARITHMIC and norm.vmin > 0:
        few_ticks(bar_axes.yaxis, norm.vmin, norm.vmax)
    return axes.figure


def _frame(axes: Any, nodes: Sequence[str], marked: Sequence[str]) -> None:
    from matplotlib.patches import Rectangle

    for i, row in enumerate(nodes):
        for j, column in enumerate(nodes):
            if f"{row}--{column}" in marked or f"{column}--{row}" in marked:
                axes.add_patch(
                    Rectangle((j - 0.46, i - 0.46), 0.92, 0.92, fill=False, edgecolor=PALETTE[1], linewidth=2)
                )


def _square(n: int, names: Sequence[str], title: str, size: float, footer: str) -> tuple[Any, Any]:
    """Axes of n x n cells and of their colour bar, with as much room around them as the names take.

    Placed by hand: matplotlib's layout engine draws everything twice, and cuts long names off where cells are square.
    """
    figure = new_figure(1, 1)
    longest = max(text_width(figure, name, size) for name in names)
    left, right, top, slanted = longest + 0.2, 0.9, 0.4, longest * math.sqrt(0.5)
    # the first name under the cells begins left of them
    left, bottom = max(left, slanted + 0.15), slanted + (0.45 if footer else 0.25)
    side = n * min(0.8, max(0.26, 4.2 / n))
    spare = max(0.0, max(text_width(figure, title, 10), text_width(figure, footer, 8)) + 0.2 - (left + side + right))
    width, height = left + side + right + spare, bottom + side + top
    figure.set_size_inches(width, height)
    axes = figure.add_axes((left / width, bottom / height, side / width, side / height))
    bar = figure.add_axes(((left + side + 0.12) / width, bottom / height, 0.16 / width, side / height))
    axes.set_xticks(range(n), names, rotation=45, ha="right", rotation_mode="anchor", fontsize=size)
    axes.set_yticks(range(n), names, fontsize=size)
    bar.tick_params(labelsize=8)
    figure.text(0.5, 1 - 0.2 / height, title, ha="center", va="center", fontsize=10)
    figure.text(0.5, 0.12 / height, footer, ha="center", va="center", fontsize=8, color="0.3")
    return axes, bar


def _norm(matrix: Tensor, metric: Metric) -> Any:
    """Scale of the colours: C from 0 to 1 or above, D from 1, so that pictures of two moments compare."""
    from matplotlib.colors import LogNorm, Normalize

    finite = matrix[matrix.isfinite()]
    positive = finite[finite > 0]
    high = finite.max().item() if len(finite) else 0.0
    if metric in LOGARITHMIC and len(positive):
        low = positive.min().item()
        if len(positive) < len(finite):
            return LogNorm(low / max(2.0, (high / low) ** 0.25), high)
        return LogNorm(low, high) if high > low * 1.01 else LogNorm(low / 1.1, high * 1.1)
    if metric == "stable_rank":
        return Normalize(1.0, max(2.0, high))
    return Normalize(0.0, max(1.0, high))


def by_distance(found: Measurement, title: str = "", metrics: Sequence[Metric] = METRICS) -> Any:
    """Each metric against the distance of two layers: every pair a dot with its standard error, their mean a line.

    Zeros are triangles at the lower edge of a logarithmic scale.
    """
    columns, rows = (1, 1) if len(metrics) == 1 else (2, (len(metrics) + 1) // 2)
    figure = new_figure(max(3.8, 2.8 * columns), 0.8 + 2.0 * rows)
    margins(figure, left=0.58, right=0.1, bottom=0.5, top=0.75, wspace=0.3, hspace=0.4)
    zeros = False
    for place, metric in enumerate(metrics):
        axis = figure.add_subplot(rows, columns, place + 1)
        zeros |= _distances(axis, found, metric, PALETTE[METRICS.index(metric)])
        if place >= len(metrics) - columns:
            axis.set_xlabel("distance of the layers")
    explained = f"dots: pairs ± standard error, {'triangles: zeros, ' if zeros else ''}line: mean"
    head = f"{title}\n{explained}" if title else explained
    figure.suptitle(head, fontsize=9, y=1 - 0.06 / figure.get_figheight(), va="top")
    return figure


def _distances(axis: Any, found: Measurement, metric: Metric, colour: str) -> bool:
    """Returns whether there are triangles."""
    from matplotlib.ticker import MaxNLocator

    n = len(found.nodes)
    rows, columns = torch.triu_indices(n, n)
    values, errors = getattr(found, metric)[rows, columns], found.stderr[metric][rows, columns]
    means = found.by_distance(metric)
    logarithmic = metric in LOGARITHMIC and bool((values.isfinite() & (values > 0)).any())
    kept, some = values.isfinite(), means.isfinite()
    zeros = (columns - rows)[kept & (values == 0)]
    if logarithmic:
        axis.plot(zeros, [0.03] * len(zeros), "v", color="0.5", markersize=5, transform=axis.get_xaxis_transform())
        kept, some = kept & (values > 0), some & (means > 0)
        axis.set_yscale("log", nonpositive="clip")
    axis.errorbar(
        (columns - rows)[kept], values[kept], yerr=errors[kept].nan_to_num(0, 0, 0),
        fmt=".", color="0.5", ecolor="0.7", markersize=4, zorder=1, label="pairs",
    )  # fmt: skip
    axis.plot(torch.arange(n)[some], means[some], "o-", color=colour, markersize=4, alpha=0.9, zorder=2, label="mean")
    if logarithmic:
        # an error bar that reaches zero must not stretch the axis
        drawn = torch.cat([values[kept], means[some]])
        low, high = drawn.min().item() / 1.3, drawn.max().item() * 1.3
        axis.set_ylim(low, high)
        few_ticks(axis.yaxis, low, high)
    elif metric == "coupling":
        axis.set_ylim(0, 1.1 * max([1.0, *values[kept].tolist()]))
    elif metric == "gn_gap":
        axis.set_ylim(-0.05, 1)
    if not kept.any():
        axis.set_yticks([])
        axis.text(0.5, 0.5, "not defined", ha="center", va="center", transform=axis.transAxes, color="0.4")
    axis.set_xlim(-0.5, n - 0.5)
    axis.xaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
    axis.set_title(TITLES[metric], fontsize=10)
    axis.grid(alpha=0.3)
    return logarithmic and len(zeros) > 0


def spectrum_over_time(snapshots: Sequence[Snapshot], title: str = "", alerts: Sequence[int] = ()) -> Any:
    """Top eigenvalues, the smallest, the Gauss-Newton one, and the λ_1 at which the optimizer would reach its limit."""
    from matplotlib.ticker import MaxNLocator

    known = [(s.step, s.spectrum) for s in snapshots if s.spectrum is not None]
    figure = new_figure(5.4, 4.4)
    margins(figure, left=0.75, right=0.25, bottom=1.0, top=0.35)
    axis = figure.add_subplot()
    steps = [step for step, _ in known]
    mark = "." if len(steps) <= 50 else ""
    count = max(len(found.eigenvalues) for _, found in known)
    tops = [[found.eigenvalues[i].item() if i < len(found.eigenvalues) else math.nan for _, found in known]
            for i in range(count)]  # fmt: skip
    for i, values in enumerate(tops):
        label = "λ₁" if i == 0 else _range_label(count) if i == 1 else None
        style = {"color": PALETTE[0], "linewidth": 2, "zorder": 4} if i == 0 else {"color": "0.6", "linewidth": 1}
        axis.plot(steps, values, f"{mark}-", label=label, **style)
    ggn = [found.ggn_eigenvalue for _, found in known]
    if any(math.isfinite(value) for value in ggn):
        axis.plot(steps, ggn, f"{'x' if mark else ''}:", color=PALETTE[2], label="Gauss–Newton λ₁", zorder=5)
    limits = [found.sharpness / found.stability_ratio if found.stability_ratio > 0 else math.nan for _, found in known]
    if any(math.isfinite(value) for value in limits):
        axis.plot(
            steps, limits, f"{'_' if len(steps) == 1 else ''}--", color="black", linewidth=1, label="stability limit"
        )
    axis.plot(steps, [found.smallest for _, found in known], f"{mark}-", color=PALETTE[3], label="smallest")
    for place, step in enumerate(sorted({step for step in alerts if step >= steps[0]})):
        axis.axvline(step, color=PALETTE[1], linestyle=":", linewidth=1.5, label=None if place else "alert", zorder=1)
    _scale(axis, tops[0], limits)
    if len(steps) == 1:
        axis.set_xlim(steps[0] - 1, steps[0] + 1)
        axis.set_xticks(steps)
    else:
        axis.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axis.set_xlabel("step")
    axis.set_ylabel("eigenvalue of the loss Hessian")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.46, -0.15), frameon=False)
    axis.set_title(title or "ends of the spectrum", fontsize=10)
    return figure


def _range_label(count: int) -> str:
    """λ₂, or λ₂ … λ₅."""
    last = str(count).translate(str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉"))
    return "λ₂" if count == 2 else f"λ₂ … λ{last}"


def _scale(axis: Any, top: Sequence[float], limits: Sequence[float]) -> None:
    """Linear where λ_1 and the limit are within sight of each other; logarithmic on both sides of zero otherwise."""
    from matplotlib.ticker import FuncFormatter

    positive = [value for value in top if math.isfinite(value) and value > 0]
    highest = max([*positive, *(value for value in limits if math.isfinite(value))], default=0.0)
    if not positive or highest <= WIDEST_LINEAR * min(positive):
        return
    # a power of ten: its ticks would crowd around zero otherwise
    threshold = 10.0 ** (math.floor(math.log10(min(positive))) - 1)
    axis.set_yscale("symlog", linthresh=threshold, linscale=max(0.8, math.log10(highest / threshold) / 12))
    axis.margins(y=0.05)  # anew, on this scale
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: brief(value)))

"""Pictures of a measurement: a matrix as a heatmap, means by distance with error bars, eigenvalues over the run.

Made with matplotlib's own objects, without pyplot: nothing global is touched, no window opens, nothing needs closing.
Colours are viridis and the palette of Okabe and Ito, which colour-blind readers can tell apart.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from curvmon.tracking.history import Snapshot
from curvmon.types import METRICS, Measurement, Metric

TITLES: dict[str, str] = {
    "resonance": "resonance  R = ‖H‖",
    "coupling": "coupling  C",
    "stable_rank": "stable rank  D",
    "gn_gap": "GN-Gap",
}
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


def available() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def _figure(width: float, height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def short_names(nodes: Sequence[str], most: int = 18) -> list[str]:
    """Without the prefix that all share ("model."), and cut in the middle where they are long."""
    parts = [name.split(".") for name in nodes]
    while all(len(part) > 1 for part in parts) and len({part[0] for part in parts}) == 1:
        parts = [part[1:] for part in parts]
    names = [".".join(part) for part in parts]
    return [name if len(name) <= most else f"{name[: most // 2 - 1]}…{name[-(most // 2) :]}" for name in names]


def heatmap(found: Measurement, metric: Metric, title: str = "") -> Any:
    """The n x n matrix with the names of its nodes; resonance and the gap on a logarithmic scale."""
    from matplotlib.colors import LogNorm, Normalize

    matrix: Tensor = getattr(found, metric)
    n = len(found.nodes)
    names = short_names(found.nodes)
    figure = _figure(2.6 + 0.62 * n, 1.7 + 0.55 * n)
    axes = figure.add_subplot()
    shown = matrix.where(matrix.isfinite(), math.nan)
    positive = shown[shown > 0]
    logarithmic = metric in ("resonance", "gn_gap") and len(positive) > 0
    if logarithmic:
        low, high = positive.min().item(), positive.max().item()
        norm: Any = LogNorm(low if low < high else low / 1.1, high if low < high else high * 1.1)
        shown = shown.where(shown > 0, math.nan)
    else:
        finite = shown[shown.isfinite()]
        low, high = (finite.min().item(), finite.max().item()) if len(finite) else (0.0, 1.0)
        if metric == "coupling":
            low, high = 0.0, max(1.0, high)
        norm = Normalize(low, high if high > low else low + 1)
    image = axes.imshow(shown.numpy(), norm=norm, cmap="viridis")
    axes.set_facecolor("0.85")  # what is not defined
    axes.set_xticks(range(n), names, rotation=45, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(n), names)
    if n <= 10:
        for i in range(n):
            for j in range(n):
                value = matrix[i, j].item()
                inside = math.isfinite(value) and (not logarithmic or value > 0)
                bright = inside and norm(value) > 0.6
                axes.text(
                    j,
                    i,
                    brief(value),
                    ha="center",
                    va="center",
                    fontsize=7,
                    color="black" if bright or not inside else "white",
                )
    axes.set_title(title or TITLES[metric], fontsize=10)
    figure.colorbar(image, ax=axes, shrink=0.9)
    return figure


def brief(value: float) -> str:
    """Three characters' worth: 0.82, 13, 4.1e-3."""
    if not math.isfinite(value):
        return "–" if math.isnan(value) else "∞"
    if value == 0:
        return "0"
    if 0.01 <= abs(value) < 1000:
        return f"{value:.2g}" if abs(value) < 100 else f"{value:.0f}"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def by_distance(found: Measurement, title: str = "") -> Any:
    """R, C, D and the gap against the distance of two layers, each pair a dot with its error, their mean a line."""
    figure = _figure(8.4, 5.6)
    axes = figure.subplots(2, 2)
    n = len(found.nodes)
    for axis, metric, colour in zip(axes.flat, METRICS, PALETTE):
        matrix, error = getattr(found, metric), found.stderr[metric]
        rows, columns = torch.triu_indices(n, n)
        values, errors = matrix[rows, columns], error[rows, columns]
        kept = values.isfinite() & ((values > 0) if metric in ("resonance", "gn_gap") else True)
        distance = (columns - rows)[kept].double()
        axis.errorbar(
            distance + 0.06, values[kept], yerr=1.96 * errors[kept].nan_to_num(0, 0, 0),
            fmt=".", color="0.55", ecolor="0.75", markersize=4, zorder=1,
        )  # fmt: skip
        means = found.by_distance(metric)
        some = means.isfinite() & ((means > 0) if metric in ("resonance", "gn_gap") else True)
        axis.plot(torch.arange(n)[some], means[some], "o-", color=colour, zorder=2)
        if metric in ("resonance", "gn_gap") and bool(some.any()):
            axis.set_yscale("log")
        if metric == "coupling":
            axis.set_ylim(bottom=0)
        axis.set_title(TITLES[metric], fontsize=10)
        axis.set_xticks(range(n))
        axis.grid(alpha=0.3)
    for axis in axes[1]:
        axis.set_xlabel("distance of the layers")
    if title:
        figure.suptitle(title, fontsize=10)
    return figure


def spectrum_over_time(snapshots: Sequence[Snapshot], title: str = "") -> Any:
    """Top eigenvalues, the smallest, the Gauss-Newton one, and the optimizer's limit where it applies to λ_1 itself."""
    known = [(s.step, s.spectrum) for s in snapshots if s.spectrum is not None]
    figure = _figure(7.2, 4.2)
    axis = figure.add_subplot()
    steps = [step for step, _ in known]
    count = max(len(found.eigenvalues) for _, found in known)
    for i in reversed(range(count)):
        values = [found.eigenvalues[i].item() if i < len(found.eigenvalues) else math.nan for _, found in known]
        first = i == 0
        axis.plot(
            steps, values, ".-", color=PALETTE[0] if first else "0.6", linewidth=2 if first else 1,
            zorder=3 if first else 2, label="λ₁" if first else ("λ₂ …" if i == 1 else None),
        )  # fmt: skip
    axis.plot(steps, [found.smallest for _, found in known], ".-", color=PALETTE[1], label="smallest")
    ggn = [found.ggn_eigenvalue for _, found in known]
    if any(math.isfinite(value) for value in ggn):
        axis.plot(steps, ggn, "x", color=PALETTE[2], label="Gauss–Newton λ₁")
    limits = [found.sharpness / found.stability_ratio if found.stability_ratio > 0 else math.nan for _, found in known]
    if any(math.isfinite(value) for value in limits):
        axis.plot(steps, limits, "--", color="black", linewidth=1, label="stability limit")
    axis.set_yscale("symlog", linthresh=_threshold(known))
    axis.set_xlabel("step")
    axis.set_ylabel("eigenvalue of the loss Hessian")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    axis.set_title(title or "top eigenvalues", fontsize=10)
    return figure


def _threshold(known: Sequence[tuple[int, Any]]) -> float:
    """Below a hundredth of the median λ_1 the scale is linear."""
    tops = sorted(abs(found.sharpness) for _, found in known)
    return max(float(tops[len(tops) // 2]) * 1e-2, 1e-12)

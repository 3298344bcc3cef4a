"""The picture of the demo: loss, top eigenvalue and resonance over the run, and resonances before and at the alert."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from curvmon.integrations.lightning.callback import CurvatureMonitor

# Okabe and Ito's colours: colour-blind readers can tell them apart; markers differ as well
BLUE, GREEN, ORANGE, PINK, RED = "#0072B2", "#009E73", "#E69F00", "#CC79A7", "#D55E00"
MARKERS = "os^Dv*"


def draw(monitor: CurvatureMonitor, path: Path, accident: tuple[int, int]) -> None:
    """`accident`: the first and the last step with a wrong learning rate."""
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(10, 5.6), layout="constrained")
    curves, matrices = figure.subfigures(1, 2, width_ratios=[1.55, 1])
    _curves(curves, monitor, accident)
    _matrices(matrices, monitor)
    figure.savefig(path, dpi=100, facecolor="white")


def _curves(figure: Any, monitor: CurvatureMonitor, accident: tuple[int, int]) -> None:
    steps = [snapshot.step for snapshot in monitor.snapshots]
    top, middle, bottom = figure.subplots(3, 1, sharex=True)
    top.plot(steps, [measurement.loss for measurement in monitor.history], "o-", color=BLUE, markersize=3)
    top.set_title("loss of the probe batch", fontsize=10, loc="left")
    middle.plot(steps, [spectrum.sharpness for spectrum in monitor.spectra], "o-", color=BLUE, markersize=3)
    middle.set_title("top eigenvalue λ₁ of the Hessian", fontsize=10, loc="left")
    means = torch.stack([measurement.by_distance("resonance") for measurement in monitor.history])
    for d, (colour, marker) in enumerate(zip((BLUE, GREEN, ORANGE, PINK), MARKERS)):
        bottom.plot(steps, means[:, d], color=colour, marker=marker, markersize=3, label=f"d = {d}")
    bottom.set_title("resonance of layers that are d apart", fontsize=10, loc="left")
    bottom.set_xlabel("step")
    bottom.legend(fontsize=8, ncols=4, loc="lower right")
    for axis in (top, middle, bottom):
        axis.set_yscale("log")
        axis.grid(alpha=0.3)
        axis.axvspan(*accident, color="0.87", zorder=0)
        for alert in monitor.alerts:
            axis.axvline(alert.step, color=RED, linestyle="--", linewidth=1.5, zorder=1)
    low, high = top.get_ylim()
    top.set_ylim(low, high * (high / low) ** 0.3)  # space for two remarks above the curve
    remark = {"transform": top.get_xaxis_transform(), "fontsize": 9}
    top.text(accident[0] - 4, 0.85, "learning rate × 100", ha="right", **remark)
    if monitor.alerts:
        word = "alert" if len(monitor.alerts) == 1 else "alerts"
        top.text(monitor.alerts[-1].step + 4, 0.85, word, color=RED, weight="bold", **remark)


def _matrices(figure: Any, monitor: CurvatureMonitor) -> None:
    """Two moments in the same colours."""
    from matplotlib.colors import LogNorm

    steps = [snapshot.step for snapshot in monitor.snapshots if snapshot.measurement is not None]
    # an alert of a pulse comes before the validation that shows the same
    since = [i for i, step in enumerate(steps) if monitor.alerts and step >= monitor.alerts[0].step]
    at = since[0] if since else len(steps) - 1
    moments = {"before": max(0, at - 1), "at the alert" if monitor.alerts else "at the end": at}
    matrices = [monitor.history[i].resonance for i in moments.values()]
    norm = LogNorm(min(matrix.min() for matrix in matrices).item(), max(matrix.max() for matrix in matrices).item())
    axes = figure.subplots(2, 1)
    names = [name.rsplit(".", 1)[-1] for name in monitor.history[-1].nodes]
    for axis, (title, i) in zip(axes, moments.items()):
        image = _matrix(axis, monitor.history[i].resonance, names, norm)
        axis.set_title(f"resonance {title} (step {steps[i]})", fontsize=10)
    figure.colorbar(image, ax=axes, shrink=0.8)


def _matrix(axis: Any, matrix: Tensor, names: list[str], norm: Any) -> Any:
    image = axis.imshow(matrix.numpy(), norm=norm, cmap="viridis")
    axis.set_xticks(range(len(names)), names, fontsize=8)
    axis.set_yticks(range(len(names)), names, fontsize=8)
    for i in range(len(names)):
        for j in range(len(names)):
            value = matrix[i, j].item()
            colour = "white" if norm(value) < 0.6 else "black"
            axis.text(j, i, f"{value:.2g}", ha="center", va="center", fontsize=8, color=colour)
    return image

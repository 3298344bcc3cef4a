"""Figure 7 of the paper on closed-form spectra: eigenvalues grow in proportion to the variance of the inputs.

    python -m examples.paper.fig7_data_scale [--quick] [--figure scale.png]

f(x) = <w, v> x of width 10 at initialisation, 100,000 Gaussian samples with random targets; all 20 eigenvalues, by
the closed form and by curvmon.spectrum. Ten seconds on one core.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

import curvmon
from curvmon import closed_form
from examples.paper.report import BLUE, ORANGE, Options, Table, canvas, finish, options, save
from examples.paper.spectra import TwoLayers, half_mean_square, standard

WIDTH = 10


class Point(NamedTuple):
    variance: float
    form: closed_form.ClosedForm
    measured: Tensor


def points(given: Options, seed: int) -> list[Point]:
    generator = torch.Generator().manual_seed(seed)
    count = 2_000 if given.tiny else 100_000
    x, y = torch.randn(2, count, dtype=torch.float64, generator=generator)
    v, w = standard(1, WIDTH, generator).flatten(), standard(WIDTH, 1, generator).flatten()
    found = []
    for variance in torch.linspace(1, 20, 4 if given.quick else 20).tolist():
        scaled = x * variance**0.5
        model = TwoLayers(v.clone(), w.clone())
        seen = curvmon.spectrum(model, (scaled, y), loss=half_mean_square, k=2 * WIDTH, ggn=False, trace=False)
        found.append(Point(variance, closed_form.linear_network(w, v, scaled, y), seen.eigenvalues))
    return found


def proportionality(found: Sequence[Point], values: Sequence[float]) -> float:
    """R² of a straight line through the eigenvalue against the variance."""
    return statistics.correlation([point.variance for point in found], list(values)) ** 2


def plot(found: Sequence[Point], path: str) -> None:
    figure, axes = canvas(1, width=6.5)
    axis = axes[0, 0]
    variances = [point.variance for point in found]
    outliers = axis.plot(variances, torch.stack([p.form.outliers for p in found]), color=ORANGE, lw=3)
    bulk = axis.plot(variances, torch.stack([p.form.bulk for p in found]), color=BLUE, lw=1.5)
    marks = axis.plot(variances, torch.stack([p.measured for p in found]), "o", ms=4, mfc="none", mec="black", mew=0.8)
    axis.set(xlabel="variance of the inputs", ylabel="eigenvalue")
    axis.legend([outliers[0], bulk[0], marks[0]], ["outliers, closed form", "bulk, closed form", "curvmon.spectrum"])
    save(figure, path)


def main(argv: Sequence[str] | None = None) -> Table:
    given = options(__doc__, argv, images=False)
    table = Table("Figure 7: the scale of the data", "synthetic, as in the paper")
    runs = [points(given, seed) for seed in given.seeds]
    off = [max(((p.form.eigenvalues - p.measured).abs().max() / p.measured[0]).item() for p in run) for run in runs]
    table.compare("closed form against curvmon.spectrum, all 20 eigenvalues", "<1e-4", off)
    top = [proportionality(run, [p.form.outliers[0].item() for p in run]) for run in runs]
    bulk = [proportionality(run, [p.form.bulk[0].item() for p in run]) for run in runs]
    table.claim("largest outlier in proportion to the variance, R²", "yes", f"{min(top):.5f}", min(top) > 0.999)
    table.claim("bulk in proportion to the variance, R²", "yes", f"{min(bulk):.5f}", min(bulk) > 0.99)
    if given.figure:
        plot(runs[0], given.figure)
    return finish(table, given)


if __name__ == "__main__":
    main()

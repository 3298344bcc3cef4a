"""Figure 8 of the paper on closed-form spectra: the pair of outliers along training.

    python -m examples.paper.fig8_training_outliers [--quick] [--figure outliers.png]

Gradient descent with learning rate 0.18 and momentum 0.9 on a wedge, width 10, linear and ReLU; for the latter the pair
of the positive cell. The paper does not define its wedge; here y = x for positive x and y = -x / 2 for negative x, plus
noise. A few seconds on one core.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

import curvmon
from curvmon import closed_form
from examples.paper.report import BLACK, BLUE, ORANGE, Options, Table, canvas, finish, options, save
from examples.paper.spectra import Batch, TwoLayers, half_mean_square

WIDTH, RATE, MOMENTUM = 10, 0.18, 0.9


class Point(NamedTuple):
    step: int
    pair: Tensor
    """the two outliers by the closed form, of the positive cell where the network has ReLU"""
    trace: float
    """of that cell's part of the Hessian"""
    off: float
    """how far the closed form is from curvmon.spectrum, all eigenvalues, relative to the largest"""
    loss: float


def wedge(generator: torch.Generator) -> Batch:
    x = torch.randn(100, dtype=torch.float64, generator=generator)
    noise = 0.1 * torch.randn(100, dtype=torch.float64, generator=generator)
    return x, torch.where(x > 0, x, -x / 2) + noise


def pair(model: TwoLayers, batch: Batch) -> tuple[Tensor, float]:
    v, w, (x, y) = model.v.detach(), model.w.detach(), batch
    share = 1.0
    if model.relu:  # the positive cell is a linear network of its own
        inside = x > 0
        v, w, x, y, share = v[model.v > 0], w[model.v > 0], x[inside], y[inside], inside.double().mean().item()
    trace = share * (x.square().mean() * (v.square().sum() + w.square().sum())).item()
    return share * closed_form.linear_network(w, v, x, y).outliers, trace


def points(given: Options, relu: bool, seed: int) -> list[Point]:
    generator = torch.Generator().manual_seed(seed)
    batch = wedge(generator)
    v, w = (0.3 * torch.randn(WIDTH, dtype=torch.float64, generator=generator) for _ in range(2))
    model = TwoLayers(v, w, relu)
    whole = closed_form.relu_network if relu else closed_form.linear_network
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    found = []
    for step in range(121):
        if step % (40 if given.quick else 4) == 0:
            seen = curvmon.spectrum(model, batch, loss=half_mean_square, k=2 * WIDTH, ggn=False, trace=False)
            form = whole(model.w.detach(), model.v.detach(), *batch)
            off = ((form.eigenvalues - seen.eigenvalues).abs().max() / seen.eigenvalues.abs().max()).item()
            found.append(Point(step, *pair(model, batch), off, seen.loss))
        optimizer.zero_grad()
        half_mean_square(model, batch).backward()
        optimizer.step()
    return found


def plot(both: dict[str, list[Point]], path: str) -> None:
    figure, axes = canvas(2)
    for axis, (name, found) in zip(axes[0], both.items()):
        steps = [point.step for point in found]
        for i, (colour, marker, label) in enumerate(((ORANGE, "o", "larger outlier"), (BLUE, "^", "smaller outlier"))):
            axis.plot(steps, [p.pair[i].item() for p in found], color=colour, marker=marker, ms=4, label=label)
        axis.plot(steps, [p.pair.sum().item() for p in found], color="0.5", lw=4, label="their sum")
        axis.plot(steps, [p.trace for p in found], color=BLACK, ls=":", label="trace")
        axis.set(title=name, xlabel="step of gradient descent", ylabel="eigenvalue")
    axes[0, 0].legend()
    save(figure, path)


def main(argv: Sequence[str] | None = None) -> Table:
    given = options(__doc__, argv, images=False)
    table = Table(
        "Figure 8: the pair of outliers along training", "a synthetic wedge; the paper does not define its own"
    )
    first: dict[str, list[Point]] = {}
    for name, relu in (("linear", False), ("ReLU, positive cell", True)):
        runs = [points(given, relu, seed) for seed in given.seeds]
        first[name] = runs[0]
        table.compare(
            f"{name}: closed form against curvmon.spectrum", "<1e-4", [max(p.off for p in run) for run in runs]
        )
        apart = max(abs(p.pair.sum().item() - p.trace) / p.trace for run in runs for p in run)
        table.claim(f"{name}: the pair sums to the trace", "always", f"off by {apart:.0e} of it at most", apart < 1e-10)
        last = [abs(run[-1].pair[1].item()) / run[-1].pair[0].item() for run in runs]
        table.claim(
            f"{name}: rank one at the solution", "yes", f"ratio of the pair {max(last):.2g} at most", max(last) < 0.1
        )
    if given.figure:
        plot(first, given.figure)
    return finish(table, given)


if __name__ == "__main__":
    main()

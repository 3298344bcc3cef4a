"""Figure 27 of the paper on closed-form spectra: a self-attention layer at the edge of stability.

    python -m examples.paper.fig27_edge_of_stability [--quick] [--figure edge.png]

Five parameters, weights N(0, 0.1²), gradient descent with learning rate 2.3 on reversing a sequence of two numbers. The
paper does not say which two; here (1.1, -0.7), for which no exact solution is flatter than 2 / 2.3. Spectra by the
closed form, checked by curvmon.spectrum. Ten seconds on one core.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import torch

import curvmon
from curvmon import closed_form
from examples.paper.report import BLUE, GREEN, ORANGE, PINK, Table, canvas, finish, options, save
from examples.paper.spectra import SelfAttention, half_mean_square

RATE, STEPS, SEQUENCE = 2.3, 300, (1.1, -0.7)
LIMIT = 2 / RATE


class Point(NamedTuple):
    sharpness: float
    trace: float
    loss: float
    norms: tuple[float, float, float]
    """of value, query and key"""
    off: float
    """of the closed form from curvmon.spectrum, relative; NaN where that was not asked"""


def points(seed: int, check_every: int) -> list[Point]:
    generator = torch.Generator().manual_seed(seed)
    value, query, key = (
        0.1 * torch.randn(shape, dtype=torch.float64, generator=generator) for shape in ((), (2,), (2,))
    )
    model = SelfAttention(value, query, key)
    x = torch.tensor(SEQUENCE, dtype=torch.float64)
    batch = x, x.flip(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    found = []
    for step in range(STEPS):
        weights = model.value.detach(), model.query.detach(), model.key.detach()
        form, off = closed_form.self_attention(*weights, *batch), float("nan")
        if step % check_every == 0:
            seen = curvmon.spectrum(model, batch, loss=half_mean_square, k=5, ggn=False, trace=False)
            off = ((form.eigenvalues - seen.eigenvalues).abs().max() / seen.eigenvalues[0]).item()
        optimizer.zero_grad()
        loss = half_mean_square(model, batch)
        norms = weights[0].norm().item(), weights[1].norm().item(), weights[2].norm().item()
        found.append(Point(form.eigenvalues[0].item(), form.trace, loss.item(), norms, off))
        loss.backward()
        optimizer.step()
    return found


def compare(table: Table, runs: list[list[Point]]) -> None:
    checks = [max(p.off for p in run if p.off == p.off) for run in runs]
    table.compare("closed form against curvmon.spectrum, all eigenvalues", "<1e-4", checks)
    late = [run[-STEPS // 3 :] for run in runs]
    starts = [run[0].sharpness / LIMIT for run in runs]
    hover = [statistics.fmean(p.sharpness for p in run) / LIMIT for run in late]
    table.claim("λ_1 relative to 2/lr at the start", "below", f"{max(starts):.2f} at most", max(starts) < 0.8)
    table.compare("λ_1 relative to 2/lr, mean of the last third", "1", hover, tolerance=0.05)
    above = [[p.sharpness > LIMIT for p in run] for run in late]
    crossings = [sum(a != b for a, b in itertools.pairwise(run)) for run in above]
    table.claim(
        "λ_1 oscillates about 2/lr", "yes", f"{min(crossings)} crossings in 100 steps at least", min(crossings) > 20
    )
    falls = [run[-1].loss / run[0].loss for run in runs]
    table.claim("the loss falls in the long run", "yes", f"to {max(falls):.3f} of the first at most", max(falls) < 0.1)
    rises = all(max(p.trace for p in run) > 2 * run[0].trace for run in runs)
    table.claim("the trace grows with the sharpness at first", "yes", "more than twofold" if rises else "no", rises)
    phases = [statistics.correlation([p.sharpness for p in run], [p.trace for p in run]) for run in late]
    table.claim(
        "λ_1 and trace oscillate in opposite phases", "yes", f"correlation {max(phases):+.2f} at most", max(phases) < 0
    )


def plot(run: list[Point], path: str) -> None:
    figure, axes = canvas(4, width=4)
    whole, end, loss, norms = axes[0]
    for axis, first in ((whole, 0), (end, STEPS - 20)):
        steps, seen = range(first, STEPS), run[first:]
        axis.plot(steps, [p.sharpness for p in seen], color=BLUE, label="λ₁")
        axis.plot(steps, [p.trace for p in seen], color=GREEN, ls="--" if first else "-", alpha=0.7, label="trace")
        axis.axhline(LIMIT, color=ORANGE, ls=":", lw=2, label="2 / lr")
    whole.set(ylabel="sharpness and trace", ylim=(0, None))
    whole.legend(loc="lower right")
    end.set(ylabel="the same, last 20 steps")
    loss.semilogy([p.loss for p in run], color="black")
    loss.set(ylabel="loss")
    for i, (label, colour, line) in enumerate((("|w_V|", BLUE, "-"), ("‖w_Q‖", ORANGE, "-"), ("‖w_K‖", PINK, "--"))):
        norms.plot([p.norms[i] for p in run], color=colour, ls=line, label=label)
    norms.set(ylabel="norms of the weights")
    norms.legend(loc="lower right")
    for axis in axes[0]:
        axis.set_xlabel("step of gradient descent")
    save(figure, path)


def main(argv: Sequence[str] | None = None) -> Table:
    given = options(__doc__, argv, images=False)
    table = Table(
        "Figure 27: self-attention at the edge of stability",
        f"the sequence {SEQUENCE}; the paper does not name its own",
    )
    runs = [points(seed, 60 if given.quick else 10) for seed in given.seeds]
    compare(table, runs)
    if given.figure:
        plot(runs[0], given.figure)
    return finish(table, given)


if __name__ == "__main__":
    main()

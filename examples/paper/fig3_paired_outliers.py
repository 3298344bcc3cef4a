"""Figure 3 of the paper on closed-form spectra: two outliers that sum to a share of the trace.

    python -m examples.paper.fig3_paired_outliers [--quick] [--figure paired.png]

f(x) = w^T V x with D inputs and width 10, 102 samples, 100 networks per D; all eigenvalues of the dense Hessian. Is
there a pair that sums to tr(H) / D? (a) orthonormal weights and decorrelated data, (b) the standard parametrisation and
standardised data. Half a minute on one core. The paper's other width, 150, makes Hessians of 22,650 dimensions and is
left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

import curvmon
from examples.paper.report import BLUE, GREEN, ORANGE, Options, Table, canvas, finish, options, save
from examples.paper.spectra import Batch, dense_hessian, half_mean_square, standard

WIDTH, SAMPLES = 10, 102
SETTINGS = {"orthonormal, decorrelated": True, "standard, standardised": False}


class LinearNetwork(nn.Module):
    def __init__(self, v: Tensor, w: Tensor) -> None:
        super().__init__()
        self.v, self.w = nn.Parameter(v), nn.Parameter(w)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.v.T @ self.w


class Closest(NamedTuple):
    """Distances of sums of two eigenvalues from tr(H) / D: the closest and the next; and the mean eigenvalue."""

    first: float
    second: float
    mean: float


def sample(inputs: int, ideal: bool, generator: torch.Generator) -> tuple[LinearNetwork, Batch]:
    data = torch.randn(SAMPLES, inputs + 1, dtype=torch.float64, generator=generator)
    data = data - data.mean(0)
    if ideal:  # orthonormal columns: no correlation between features, nor with the target
        data = torch.linalg.qr(data).Q * SAMPLES**0.5
    data = data / data.square().mean(0).sqrt()
    v, w = standard(inputs, WIDTH, generator), standard(WIDTH, 1, generator).flatten()
    if ideal:
        v, w = torch.linalg.qr(v).Q, w / w.norm()
    return LinearNetwork(v, w), (data[:, :-1], data[:, -1])


def closest(eigenvalues: Tensor, inputs: int) -> Closest:
    i, j = torch.triu_indices(len(eigenvalues), len(eigenvalues), 1)
    off = (eigenvalues[i] + eigenvalues[j] - eigenvalues.sum() / inputs).abs().sort().values
    return Closest(off[0].item(), off[1].item(), eigenvalues.mean().item())


def found(given: Options, ideal: bool) -> dict[int, Tensor]:
    """Networks x 3, by the number of inputs."""
    generator = torch.Generator().manual_seed(42)
    result = {}
    for inputs in (1, 2, 5) if given.quick else range(1, WIDTH + 1):
        rows = []
        for _ in range(5 if given.tiny else 20 if given.quick else 100):
            model, batch = sample(inputs, ideal, generator)
            rows.append(closest(torch.linalg.eigvalsh(dense_hessian(model, batch)), inputs))
        result[inputs] = torch.tensor(rows, dtype=torch.float64)
    return result


def compare(table: Table, name: str, ideal: bool, by_inputs: dict[int, Tensor]) -> None:
    for inputs, values in by_inputs.items():
        first, second, mean = values.median(0).values.tolist()
        relative = f"{first / mean:.1e} and {second / mean:.1e} of the mean eigenvalue"
        clear = first < 1e-2 * second and first < 1e-2 * mean
        if ideal or inputs == 1:  # with one input the theorem needs no assumptions
            said, holds = "a pair, orders of magnitude closer than the next", clear
        else:
            said, holds = "a close pair, and the next as close", not clear and first < mean and second < 10 * first
        table.claim(f"{name}, D = {inputs}", said, relative, holds)


def plot(both: dict[str, dict[int, Tensor]], path: str) -> None:
    figure, axes = canvas(2, sharey=True)
    lines = (("closest pair", BLUE, "o"), ("next pair", ORANGE, "^"), ("mean eigenvalue", GREEN, "s"))
    for axis, (name, by_inputs) in zip(axes[0], both.items()):
        for column, (label, colour, marker) in enumerate(lines):
            values = torch.stack([v[:, column] for v in by_inputs.values()]).clamp_min(1e-17)
            low, high = (values.quantile(q, dim=1) for q in (0.25, 0.75))
            axis.plot(list(by_inputs), values.median(1).values, color=colour, marker=marker, label=label)
            axis.fill_between(list(by_inputs), low, high, color=colour, alpha=0.2, lw=0)
        axis.set(title=name, xlabel="input size D", yscale="log", xticks=list(by_inputs))
    axes[0, 0].set(ylabel="|λ_i + λ_j − tr(H)/D|, median and quartiles")
    axes[0, 0].legend(loc="center right", fontsize=8)
    save(figure, path)


def main(argv: Sequence[str] | None = None) -> Table:
    given = options(__doc__, argv, images=False)
    table = Table("Figure 3: pairs of eigenvalues that sum to tr(H) / D", "synthetic, as in the paper")
    both = {name: found(given, ideal) for name, ideal in SETTINGS.items()}
    for name, ideal in SETTINGS.items():
        compare(table, name, ideal, both[name])
    model, batch = sample(2, True, torch.Generator().manual_seed(42))
    seen = curvmon.spectrum(model, batch, loss=half_mean_square, k=5, ggn=False, trace=False)
    dense = torch.linalg.eigvalsh(dense_hessian(model, batch)).flip(0)[:5]
    off = ((seen.eigenvalues - dense).abs().max() / dense[0]).item()
    table.compare("curvmon.spectrum against the dense Hessian, top five", "<1e-4", [off])
    if given.figure:
        plot(both, given.figure)
    return finish(table, given)


if __name__ == "__main__":
    main()

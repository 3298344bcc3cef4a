"""Figure 4 of the paper on closed-form spectra: which norm of the weights goes with the sharpness?

    python -m examples.paper.fig4_sharpness_norms [--quick] [--figure norms.png]

f(x) = W_2 W_1 x of width 100 with D inputs and outputs, 200 networks in the standard parametrisation (torch's default)
before and after training; correlation over networks of λ_1 with the squared spectral, Frobenius and nuclear norms.
1,024 samples of y = W x + noise. D = 1, 5, 20; the paper goes to 100 and has two more parametrisations. Some minutes on
one core. All networks are trained at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

import curvmon
from examples.paper.report import BLUE, GREEN, ORANGE, Options, Table, canvas, finish, options, save
from examples.paper.spectra import Batch, half_mean_square

WIDTH, SAMPLES = 100, 1024
NORMS = {"spectral": 2, "Frobenius": "fro", "nuclear": "nuc"}


class LinearNetwork(nn.Module):
    def __init__(self, first: Tensor, second: Tensor) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(first), nn.Parameter(second)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.first.mT @ self.second.mT


def data(size: int, generator: torch.Generator) -> Batch:
    x = torch.randn(SAMPLES, size, generator=generator)
    target = torch.randn(size, size, generator=generator) / size**0.5
    return x, x @ target.T + 0.1 * torch.randn(SAMPLES, size, generator=generator)


def trained(networks: LinearNetwork, batch: Batch, most: int) -> None:
    """SGD with batches of 128; the rate begins at 0.01 and is divided by ten when the loss stops improving."""
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.SGD(networks.parameters(), lr=0.01)
    best, waited = float("inf"), 0
    for _ in range(most):
        for chosen in torch.randperm(SAMPLES, generator=generator).split(128):
            optimizer.zero_grad()
            # a sum over networks, so that each has the gradient of its own loss
            ((networks(batch[0][chosen]) - batch[1][chosen]) ** 2).mean((1, 2)).sum().backward()
            optimizer.step()
        with torch.no_grad():
            loss = ((networks(batch[0]) - batch[1]) ** 2).mean().item()
        best, waited = (loss, 0) if loss < 0.999 * best else (best, waited + 1)
        if waited > 5:
            optimizer.param_groups[0]["lr"] /= 10
            waited = 0
            if optimizer.param_groups[0]["lr"] < 0.99e-5:
                return


def correlations(networks: LinearNetwork, batch: Batch) -> dict[tuple[str, int], float]:
    """Of λ_1 with the squared norm of the first or second matrix, over networks."""
    weights = networks.first.detach(), networks.second.detach()
    sharpness = torch.tensor(
        [
            curvmon.spectrum(
                LinearNetwork(first, second), batch, loss=half_mean_square, k=1, ggn=False, trace=False, verify=False,
                smallest=False, rtol=1e-3,
            ).sharpness
            for first, second in zip(*weights)
        ]
    )  # fmt: skip
    return {
        (norm, layer): torch.corrcoef(torch.stack([sharpness, torch.linalg.matrix_norm(weight, kind).square()]))[
            0, 1
        ].item()
        for norm, kind in NORMS.items()
        for layer, weight in enumerate(weights, 1)
    }


def found(given: Options) -> dict[tuple[int, str], dict[tuple[str, int], float]]:
    result = {}
    count, width = (12, 10) if given.tiny else (40, WIDTH) if given.quick else (200, WIDTH)
    for size in (5,) if given.tiny else (1, 5, 20):
        generator = torch.Generator().manual_seed(42)
        batch = data(size, generator)
        first = (2 * torch.rand(count, width, size, generator=generator) - 1) / size**0.5
        second = (2 * torch.rand(count, size, width, generator=generator) - 1) / width**0.5
        networks = LinearNetwork(first, second)
        result[size, "init"] = correlations(networks, batch)
        trained(networks, batch, 40 if given.quick else 400)
        result[size, "trained"] = correlations(networks, batch)
    return result


def compare(table: Table, results: dict[tuple[int, str], dict[tuple[str, int], float]]) -> None:
    for (size, when), values in results.items():
        best = {norm: max(values[norm, 1], values[norm, 2]) for norm in NORMS}
        layer = 1 if values["spectral", 1] > values["spectral", 2] else 2
        said = ", ".join(f"{norm} {value:.2f}" for norm, value in best.items()) + f" (W_{layer})"
        if size == 1:
            alike = max(best.values()) - min(best.values()) < 1e-3
            table.claim(f"D = 1, {when}: the norms are one", "the same", said, alike)
        else:
            wins = best["spectral"] >= max(best.values())
            table.claim(f"D = {size}, {when}: best correlation with λ_1", "spectral norm", said, wins)


def plot(results: dict[tuple[int, str], dict[tuple[str, int], float]], path: str) -> None:
    figure, axes = canvas(2, sharey=True)
    sizes = sorted({size for size, _ in results})
    for axis, when in zip(axes[0], ("init", "trained")):
        for (norm, colour), marker in zip(zip(NORMS, (BLUE, ORANGE, GREEN)), ("o", "^", "s")):
            for layer, line in ((1, "-"), (2, "--")):
                values = [results[size, when][norm, layer] for size in sizes]
                axis.plot(
                    range(len(sizes)), values, color=colour, marker=marker, ls=line, label=f"{norm}, W{'₁₂'[layer - 1]}"
                )
        axis.set(
            title=when,
            xlabel="input and output size D",
            xticks=range(len(sizes)),
            xticklabels=sizes,
            ylim=(-1.05, 1.05),
        )
    axes[0, 0].set(ylabel="correlation of λ₁ with the squared norm")
    axes[0, 0].legend(loc="lower left", fontsize=8, ncols=2)
    save(figure, path)


def main(argv: Sequence[str] | None = None) -> Table:
    given = options(__doc__, argv, images=False)
    table = Table(
        "Figure 4: sharpness against norms of the weights, standard parametrisation", "synthetic, as in the paper"
    )
    results = found(given)
    compare(table, results)
    if given.figure:
        plot(results, given.figure)
    return finish(table, given)


if __name__ == "__main__":
    main()

"""Experiment 5: the gap between queries and keys of an attention layer, beside a ReLU MLP (table 7).

    python -m examples.paper.exp5_attention [--quick]

Synthetic regression on 8 positions of width 16, dense blocks on 64 validation samples, before, halfway through and
after training. A minute on one core.

The paper does not say whether every seed draws its own inputs; both readings are shown. Nor does it say whether the
perturbation of the MLP is one vector per position or one for all positions; again both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

import curvmon
from examples.paper.networks import seeded
from examples.paper.report import Options, Table, finish, options
from examples.paper.training import Batch, mean_squared_error, training

WIDTH, LENGTH, NOISE, BATCH = 16, 8, 0.1, 64
# ‖H‖_F, ‖GN‖_F, gap and its spread
TABLE_7 = {
    ("attention", "init"): ("9.2e-3", "1.7e-4", "57.5", "16.4"),
    ("attention", "mid"): ("5.2e-3", "7.4e-5", "79.9", "23.3"),
    ("attention", "final"): ("5.2e-3", "8.7e-5", "69.3", "20.1"),
    ("MLP", "init"): ("3.5e-2", "3.5e-2", "<1e-6", ""),
    ("MLP", "mid"): ("3.5e-1", "3.5e-1", "<1e-6", ""),
    ("MLP", "final"): ("3.6e-1", "3.6e-1", "<1e-6", ""),
}
LOSSES = {"attention": ("0.99", "0.57"), "MLP": ("0.92", "0.03")}


class ToyAttention(nn.Module):
    """softmax(Q K^T / sqrt d) V, mean over positions, linear head: 785 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(1, 2) / WIDTH**0.5
        return self.head((scores.softmax(2) @ self.value(x)).mean(1)).squeeze(1)


class ToyMLP(nn.Module):
    """Three times Linear and ReLU at every position, mean over positions, linear head: 833 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(3)))
        self.head = nn.Linear(WIDTH, 1)
        self.folded = False
        """count positions as samples, so that they share a perturbation"""

    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks(x.flatten(0, 1)).unflatten(0, x.shape[:2]) if self.folded else self.blocks(x)
        return self.head(h.mean(1)).squeeze(1)


MODELS: dict[str, tuple[type[nn.Module], list[str]]] = {
    "attention": (ToyAttention, ["query", "key"]),
    "MLP": (ToyMLP, ["blocks.0", "blocks.1"]),
}


class Seen(NamedTuple):
    whole: float
    gauss_newton: float
    gap: float
    whole_folded: float
    """the same with one perturbation for all positions; the MLP only"""
    loss: float
    """on all validation samples"""


def teacher(generator: torch.Generator, x: Tensor) -> Tensor:
    """mean_s tanh(x_s W) w"""
    weight = torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5
    readout = torch.randn(WIDTH, generator=generator) / WIDTH**0.5
    return torch.tanh(x @ weight).mean(1) @ readout


def data_of(seed: int) -> tuple[Batch, Batch]:
    """Training and validation samples of the teacher, whose own seed is 0; targets standardised on the former."""
    generator = torch.Generator().manual_seed(seed)
    xs = [torch.randn(count, LENGTH, WIDTH, generator=generator) for count in (2048, 512)]
    noises = [NOISE * torch.randn(len(x), generator=generator) for x in xs]
    ys = [teacher(torch.Generator().manual_seed(0), x) + noise for x, noise in zip(xs, noises)]
    mean, std = ys[0].mean(), ys[0].std()
    return (xs[0], (ys[0] - mean) / std), (xs[1], (ys[1] - mean) / std)


def variance_of_targets() -> float:
    """Before they are standardised."""
    x = torch.randn(20_000, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))
    return teacher(torch.Generator().manual_seed(0), x).var().item() + NOISE**2


def look(model: nn.Module, nodes: list[str], validation: Batch) -> Seen:
    batch = validation[0][:BATCH], validation[1][:BATCH]
    found = curvmon.exact(model, batch, loss=mean_squared_error, nodes=nodes)
    whole, gauss_newton, gap = (matrix[0, 1].item() for matrix in (found.resonance, found.gn_norm, found.gn_gap))
    folded = float("nan")
    if isinstance(model, ToyMLP):
        model.folded = True
        folded = curvmon.exact(model, batch, loss=mean_squared_error, nodes=nodes).resonance[0, 1].item()
        model.folded = False
    with torch.no_grad():
        return Seen(whole, gauss_newton, gap, folded, mean_squared_error(model, validation).item())


def watched(name: str, given: Options, data_seed: int | None) -> dict[str, list[Seen]]:
    """What is seen before, halfway through and after training, for every seed."""
    kind, nodes = MODELS[name]
    found: dict[str, list[Seen]] = {}
    for seed in given.seeds:
        train, validation = data_of(seed if data_seed is None else data_seed)
        model = seeded(kind, seed)
        found.setdefault("init", []).append(look(model, nodes, validation))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-4)
        for epoch in training(model, train, mean_squared_error, optimizer, given.epochs, seed):
            if epoch in (given.epochs // 2, given.epochs):
                when = "final" if epoch == given.epochs else "mid"
                found.setdefault(when, []).append(look(model, nodes, validation))
    return found


def compare(table: Table, title: str, found: dict[str, dict[str, list[Seen]]]) -> None:
    for name, by_time in found.items():
        for when, seen in by_time.items():
            whole, gauss_newton, gap, spread = TABLE_7[name, when]
            row = f"{title}: {name} {when}"
            table.compare(f"{row}, ‖H‖_F", whole, [s.whole for s in seen])
            if name == "MLP":
                table.compare(f"{row}, ‖H‖_F, positions alike", whole, [s.whole_folded for s in seen])
            else:
                table.compare(f"{row}, ‖GN‖_F", gauss_newton, [s.gauss_newton for s in seen])
            table.compare(f"{row}, gap", gap, [s.gap for s in seen], spread=spread)
        for when, loss in zip(("init", "final"), LOSSES[name]):
            if when in by_time:
                table.compare(f"{title}: {name} {when}, loss", loss, [s.loss for s in by_time[when]])


def main(argv: Sequence[str] | None = None) -> Table:
    given = options(__doc__, argv, epochs=30, images=False, figure=False)
    table = Table("Experiment 5: attention against a ReLU MLP (table 7)", "synthetic, as in the paper")
    for title, data_seed in (("inputs of each seed", None), ("the same inputs", 0)):
        compare(table, title, {name: watched(name, given, data_seed) for name in MODELS})
    share = NOISE**2 / variance_of_targets()
    table.notes.append(
        f"the noise is {share:.2f} of the variance of the targets: no model can have a lower loss than that"
    )
    return finish(table, given)


if __name__ == "__main__":
    main()

"""How much of the curvature does Gauss-Newton miss in an attention block, and how much in an MLP, along training?

    python examples/attention_against_mlp.py [--epochs 20] [--out runs/attention_against_mlp]

Three small models of equal size learn the same task, a teacher's answer to sequences of eight vectors. GN-Gap is the
norm of what Gauss-Newton leaves out of the Hessian block of two layers, over the norm of what it keeps; optimizers that
are built on Gauss-Newton, such as K-FAC, see only the latter. Queries and keys meet in a product and a softmax, which
Gauss-Newton takes for linear: most is left out. An MLP with GELU is in between, and one with ReLU, linear wherever it
can be differentiated, has a gap of 0.

The figure needs matplotlib.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from pytorch_lightning.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from curvmon import CurvatureMonitor

WIDTH, LENGTH = 16, 8


class Attention(nn.Module):
    """Nodes: `query` and `key`, the two layers that the softmax couples."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x))
        return self.head(x.mean(1)).squeeze(1)


class MLP(nn.Module):
    """The same three layers applied to every vector by itself. Nodes: the first two."""

    def __init__(self, activation: type[nn.Module]) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.activation, self.head = activation(), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.second, self.third):
            x = self.activation(layer(x))
        return self.head(x.mean(1)).squeeze(1)


class Regression(pl.LightningModule):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.mse_loss(self.model(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", F.mse_loss(self.model(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def teacher(count: int = 2560) -> TensorDataset:
    """y = mean_s tanh(x_s W) w with some noise, standardised."""
    x, w1, w2 = torch.randn(count, LENGTH, WIDTH), torch.randn(WIDTH, WIDTH), torch.randn(WIDTH)
    y = torch.tanh(x @ w1 / WIDTH**0.5).mean(1) @ w2 / WIDTH**0.5 + 0.1 * torch.randn(count)
    return TensorDataset(x, (y - y.mean()) / y.std())


def watched(
    name: str, model: nn.Module, nodes: list[str], data: TensorDataset, epochs: int, out: Path
) -> CurvatureMonitor:
    """Train a model, and return what has seen its gap."""
    train, val = torch.utils.data.random_split(data, [0.8, 0.2])
    # the gap alone: eigenvalues=0 leaves out the spectrum of the Hessian by the parameters
    monitor = CurvatureMonitor(nodes=nodes, metrics=["gn_gap"], eigenvalues=0, probe_size=64, heatmaps=False)
    trainer = pl.Trainer(
        max_epochs=epochs,
        callbacks=[monitor],
        logger=CSVLogger(out, name=name),
        log_every_n_steps=10,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(Regression(model), DataLoader(train, batch_size=128, shuffle=True), DataLoader(val, batch_size=512))
    gaps, errors = series(monitor)
    print(f"{name}, loss {trainer.callback_metrics['val_loss']:.3f}: gap of {' and '.join(nodes)}", end=" ")
    print(f"{gaps[0]:.3g} ±{errors[0]:.1g} before training, {gaps[-1]:.3g} ±{errors[-1]:.1g} after")
    return monitor


def series(monitor: CurvatureMonitor) -> tuple[list[float], list[float]]:
    """The gap between the two nodes at every measurement, and its standard errors."""
    found = monitor.history
    return [m.gn_gap[0, 1].item() for m in found], [m.stderr["gn_gap"][0, 1].item() for m in found]


def plot(monitors: Mapping[str, CurvatureMonitor], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axis = figure.subplots()
    for (name, monitor), colour in zip(monitors.items(), ("#D55E00", "#009E73", "#0072B2")):
        gaps, errors = series(monitor)
        steps = [moment.step for moment in monitor.snapshots]
        axis.errorbar(steps, gaps, errors, color=colour, marker="o", ms=4, label=name)
    axis.set_yscale("symlog", linthresh=0.1)  # zero has a place on this axis
    axis.set(xlabel="step", ylabel="GN-Gap = ‖H - GN‖ / ‖GN‖", ylim=(-0.02, None))
    axis.legend(loc="upper right")
    figure.savefig(path, dpi=110)


def main(argv: Sequence[str] | None = None) -> dict[str, CurvatureMonitor]:
    parser = argparse.ArgumentParser(description="GN-Gap of an attention block against MLPs")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("runs/attention_against_mlp"), help="folder for the results")
    options = parser.parse_args(argv)

    for package in ("pytorch_lightning", "lightning.pytorch"):  # three Trainers need not introduce themselves
        logging.getLogger(package).setLevel(logging.WARNING)
    pl.seed_everything(0, verbose=False)
    data, mlp_nodes = teacher(), ["model.first", "model.second"]
    models = {
        "attention": (Attention(), ["model.query", "model.key"]),
        "gelu_mlp": (MLP(nn.GELU), mlp_nodes),
        "relu_mlp": (MLP(nn.ReLU), mlp_nodes),
    }
    monitors = {
        name: watched(name, model, nodes, data, options.epochs, options.out) for name, (model, nodes) in models.items()
    }
    plot(monitors, options.out / "gn_gap.png")
    print(f"Figure: {options.out}/gn_gap.png")
    print(f"Every number as a table: {options.out}/*/version_*/metrics.csv")
    return monitors


if __name__ == "__main__":
    main()

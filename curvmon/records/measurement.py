"""Curvature between the layers of a network: the four metrics of all pairs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from curvmon.records import presentation
from curvmon.records.formatting import to_matrix, with_error

Metric = Literal["resonance", "coupling", "stable_rank", "gn_gap"]
METRICS: tuple[Metric, ...] = get_args(Metric)
"""the pair metrics that are fields of a `Measurement`; `curvmon.metrics` may have more, derived from them"""
AFTER_LAST_NODE = "<loss>"
"""key of `Measurement.operations` for what is computed after the last node; no module has this name"""


class Pair(NamedTuple):
    """The block H[row, col]; `.T` is the transposed block H[col, row] = H[row, col]^T."""

    row: str
    col: str

    @property
    def T(self) -> Pair:
        return Pair(self.col, self.row)

    def __str__(self) -> str:
        return f"{self.row}--{self.col}"


def mean_by_distance(matrix: Tensor) -> Tensor:
    """Mean of the finite entries (i, i + d) of an (n, n) matrix for d = 0, 1, …, n-1; NaN where there is none."""
    finite = matrix.where(matrix.isfinite(), math.nan)
    return torch.stack([torch.diagonal(finite, d).nanmean() for d in range(len(matrix))])


@dataclass(frozen=True, eq=False, repr=False)
class Measurement:
    """Curvature between the layers of one network on one batch.

    For nodes v, w and H[v, w] = d²L / de_v de_w (one additive perturbation per node, the same for all samples):

        resonance    R = ‖H[v, w]‖_F
        coupling     C = R(v, w) / sqrt(R(v, v) R(w, w))
        stable_rank  D = ‖H[v, w]‖_F² / ‖H[v, w]‖_2²
        gn_gap         = ‖H[v, w] - GN[v, w]‖_F / ‖GN[v, w]‖_F,  GN the Gauss-Newton part

    as defined by Bolshim and Kugaevskikh, "Inter-Layer Hessian Analysis of Neural Networks with DAG Architectures",
    doi:10.5281/zenodo.19545553.

    All matrices are (n, n) float64 CPU tensors in the order of `nodes` (execution order) and symmetric.
    `stderr[metric]` has the standard error of every entry, such that value ± 1.96 stderr is a 95 % interval.
    An entry that is not defined is NaN, a ratio by zero is infinite, and `notes` says why.

    Attributes:
        nodes: names of the submodules whose outputs are perturbed.
        resonance: R.
        coupling: C; 1 on the diagonal.
        stable_rank: D.
        gn_gap: NaN where the output of the network is not identified.
        stderr: standard errors by metric.
        spectral_norm: ‖H[v, w]‖_2.
        gn_norm: ‖GN[v, w]‖_F; NaN where the output of the network is not identified.
        loss: the loss of the batch, in eval mode.
        hvps: products with H or GN that were computed.
        seconds: wall-clock time.
        notes: what a reader of the numbers has to know.
        operations: the operations of the model between the preceding nodes and the output of each node,
            {"blocks.1": {"Relu": 2, "Add": 1}, …}; those after the last node under "<loss>". Not in `to_dict`, to keep
            histories small; empty where not counted.
    """

    nodes: tuple[str, ...]
    resonance: Tensor
    coupling: Tensor
    stable_rank: Tensor
    gn_gap: Tensor
    stderr: Mapping[str, Tensor]
    spectral_norm: Tensor
    gn_norm: Tensor
    loss: float
    hvps: int
    seconds: float
    notes: tuple[str, ...] = ()
    operations: Mapping[str, Mapping[str, int]] = field(default_factory=dict, repr=False)

    def by_distance(self, metric: Metric) -> Tensor:
        """Mean of `metric` over the pairs whose nodes are d = 0, 1, …, n-1 apart; only finite entries count."""
        return mean_by_distance(self._matrix(metric))

    def to_dict(self) -> dict[str, Any]:
        """Python lists, dicts, strings and numbers, including NaN and inf."""
        return {
            "nodes": list(self.nodes),
            **{metric: self._matrix(metric).tolist() for metric in METRICS},
            "stderr": {metric: value.tolist() for metric, value in self.stderr.items()},
            "spectral_norm": self.spectral_norm.tolist(),
            "gn_norm": self.gn_norm.tolist(),
            "loss": self.loss,
            "hvps": self.hvps,
            "seconds": self.seconds,
            "notes": list(self.notes),
        }

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Measurement:
        """The inverse of `to_dict`; what that omits (operations, dense blocks) is empty."""
        matrices = (*METRICS, "spectral_norm", "gn_norm")
        return cls(
            nodes=tuple(state["nodes"]),
            **{name: to_matrix(state[name]) for name in matrices},
            stderr={name: to_matrix(value) for name, value in state["stderr"].items()},
            loss=state["loss"],
            hvps=state["hvps"],
            seconds=state["seconds"],
            notes=tuple(state["notes"]),
            operations={},
        )

    def plot(self, metric: str = "resonance") -> tuple[Any, Any]:
        """`fig, ax` with a heatmap of a pair metric; ax: the cells and the colour bar. Needs matplotlib.

        Args:
            metric: resonance, coupling, stable_rank, gn_gap, or a metric that was registered.
        """
        return presentation.plot(self, metric=metric)

    def to_pandas(self) -> Any:
        """A DataFrame, one row per pair: row, col, distance, every pair metric and its standard error. Needs pandas."""
        return presentation.to_pandas(self)

    def _repr_html_(self) -> str:
        return presentation.to_html(self)

    def pairs(self) -> list[Pair]:
        """The pairs on and above the diagonal, in execution order."""
        return [Pair(v, w) for i, v in enumerate(self.nodes) for w in self.nodes[i:]]

    def _matrix(self, metric: str) -> Tensor:
        if metric not in METRICS:
            raise ValueError(f"no metric {metric!r}; the metrics are {', '.join(METRICS)}")
        matrix: Tensor = getattr(self, metric)
        return matrix

    def __str__(self) -> str:
        index = {name: i for i, name in enumerate(self.nodes)}
        rows = [("row", "col", *METRICS)]
        for pair in self.pairs():
            i, j = index[pair.row], index[pair.col]
            cells = (with_error(self._matrix(m)[i, j].item(), self.stderr[m][i, j].item()) for m in METRICS)
            rows.append((pair.row, pair.col, *cells))
        widths = [max(len(row[c]) for row in rows) for c in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
        lines.insert(1, "  ".join("-" * width for width in widths))
        head = (
            f"{type(self).__name__}: {len(self.nodes)} nodes, loss {self.loss:.4g}, "
            f"{self.hvps} HVPs, {self.seconds:.1f} s"
        )
        return "\n".join([head, *lines, *(f"note: {note}" for note in self.notes)])

    __repr__ = __str__


@dataclass(frozen=True, eq=False, repr=False)
class ExactMeasurement(Measurement):
    """A `Measurement` from dense float64 blocks, with standard errors of zero.

    Attributes:
        blocks: H[v, w], (d_v, d_w), for every ordered pair of node names.
        gauss_newton: GN[v, w], likewise.
    """

    blocks: Mapping[tuple[str, str], Tensor] = field(default_factory=dict)
    gauss_newton: Mapping[tuple[str, str], Tensor] = field(default_factory=dict)

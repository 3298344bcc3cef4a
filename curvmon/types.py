"""The records that curvmon returns. Frozen: a result never changes after it was measured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

Metric = Literal["resonance", "coupling", "stable_rank", "gn_gap"]
METRICS: tuple[Metric, ...] = get_args(Metric)
REST = "loss"
"""in `Measurement.operations`: what is computed behind the last node"""


class Pair(NamedTuple):
    """The block H[row, col]; `.T` is the transposed block H[col, row] = H[row, col]^T."""

    row: str
    col: str

    @property
    def T(self) -> Pair:
        return Pair(self.col, self.row)

    def __str__(self) -> str:
        return f"{self.row}--{self.col}"


@dataclass(frozen=True, eq=False, repr=False)
class Measurement:
    """Curvature between the layers of one network on one batch.

    For nodes v, w and H[v, w] = d²L / de_v de_w (one additive perturbation per node, shared by all samples):

        resonance    R = ‖H[v, w]‖_F
        coupling     C = R(v, w) / sqrt(R(v, v) R(w, w))
        stable_rank  D = ‖H[v, w]‖_F² / ‖H[v, w]‖_2²
        gn_gap         = ‖H[v, w] - GN[v, w]‖_F / ‖GN[v, w]‖_F,  GN the Gauss-Newton part

    All matrices are (n, n) float64 CPU tensors in the order of `nodes` (execution order) and symmetric.
    `stderr[metric]` has the standard error of every entry, such that value ± 1.96 stderr is a 95 % interval.
    An entry that is not defined is NaN, a ratio by zero is infinite, and `notes` says why.
    """

    nodes: tuple[str, ...]
    resonance: Tensor
    coupling: Tensor
    stable_rank: Tensor
    gn_gap: Tensor
    stderr: Mapping[str, Tensor]
    spectral_norm: Tensor
    """‖H[v, w]‖_2"""
    gn_norm: Tensor
    """‖GN[v, w]‖_F, NaN where the output of the network is not known"""
    loss: float
    """the loss of the batch, in eval mode"""
    hvps: int
    """products with H or GN that were spent"""
    seconds: float
    notes: tuple[str, ...] = ()
    operations: Mapping[str, Mapping[str, int]] = field(default_factory=dict, repr=False)
    """by node, what is computed between the nodes before it and its output, {"blocks.1": {"Relu": 2, "Add": 1}, …};
    what follows the last node under "loss". Not in `to_dict`, to keep histories small; empty where not counted"""

    def by_distance(self, metric: Metric) -> Tensor:
        """Mean of `metric` over the pairs whose nodes are d = 0, 1, …, n-1 apart; only finite entries count."""
        values = self._matrix(metric)
        values = values.where(values.isfinite(), math.nan)
        return torch.stack([torch.diagonal(values, d).nanmean() for d in range(len(self.nodes))])

    def to_dict(self) -> dict[str, Any]:
        """Plain Python lists and numbers; NaN and inf where the entry is."""
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
        """What `to_dict` wrote."""
        matrices = (*METRICS, "spectral_norm", "gn_norm")
        return Measurement(
            nodes=tuple(state["nodes"]),
            **{name: _matrix(state[name]) for name in matrices},
            stderr={name: _matrix(value) for name, value in state["stderr"].items()},
            loss=state["loss"],
            hvps=state["hvps"],
            seconds=state["seconds"],
            notes=tuple(state["notes"]),
            operations={},
        )

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
            cells = (_cell(self._matrix(m)[i, j].item(), self.stderr[m][i, j].item()) for m in METRICS)
            rows.append((pair.row, pair.col, *cells))
        widths = [max(len(row[c]) for row in rows) for c in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
        lines.insert(1, "  ".join("-" * width for width in widths))
        head = (
            f"{type(self).__name__}: {len(self.nodes)} nodes, loss {self.loss:.4g}, "
            f"{self.hvps} products, {self.seconds:.1f} s"
        )
        return "\n".join([head, *lines, *(f"note: {note}" for note in self.notes)])

    __repr__ = __str__


@dataclass(frozen=True, eq=False, repr=False)
class ExactMeasurement(Measurement):
    """A `Measurement` from dense float64 blocks: no standard errors, and the blocks themselves.

    `blocks[v, w]` is H[v, w], `gauss_newton[v, w]` is GN[v, w] (d_v x d_w), for every ordered pair of node names.
    """

    blocks: Mapping[tuple[str, str], Tensor] = field(default_factory=dict)
    gauss_newton: Mapping[tuple[str, str], Tensor] = field(default_factory=dict)


Level = Literal["info", "warning", "error"]


@dataclass(frozen=True)
class Alert:
    """Something changed abruptly, or a rule was broken."""

    kind: str
    """jump, drift, or the name of a rule"""
    metric: str
    where: str
    """a pair of layers ("stem--layer4") or a quantity ("lambda_1")"""
    before: float
    after: float
    score: float
    """in standard deviations; for a rule, how far beyond its threshold"""
    step: int
    epoch: int
    message: str
    """what happened and what to look at, in plain language"""
    level: Level = "warning"
    others: tuple[str, ...] = ()
    """further pairs or quantities that the same event changed, most affected first"""

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "others": list(self.others)}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Alert:
        return cls(**{**state, "others": tuple(state["others"])})

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True, eq=False)
class Density:
    """Eigenvalues and their shares, as stochastic Lanczos quadrature finds them: Σ weights = 1, float64 on the CPU."""

    values: Tensor
    weights: Tensor

    def smoothed(self, points: int = 400, width: float = 0.01) -> tuple[Tensor, Tensor]:
        """A grid and the density on it; every value becomes a normal curve, `width` times the range wide."""
        low, high = self.values.min().item(), self.values.max().item()
        sigma = width * ((high - low) or abs(high) or 1.0)
        grid = torch.linspace(low - 4 * sigma, high + 4 * sigma, points, dtype=torch.float64, device="cpu")
        curves = torch.exp(-0.5 * ((grid.unsqueeze(1) - self.values) / sigma) ** 2) / (sigma * math.sqrt(2 * math.pi))
        return grid, curves @ self.weights


@dataclass(frozen=True, eq=False)
class GroupSpectrum:
    """The ends of the spectrum of a diagonal block H[v, v], v a group of parameters; as in `Spectrum`."""

    eigenvalues: Tensor
    smallest: float
    residuals: Tensor
    converged: Tensor
    verified: bool
    """another random start found nothing else"""
    parameters: tuple[str, ...]
    size: int
    """how many numbers these are"""

    def to_dict(self) -> dict[str, Any]:
        return {
            "eigenvalues": self.eigenvalues.tolist(),
            "smallest": self.smallest,
            "residuals": self.residuals.tolist(),
            "converged": self.converged.tolist(),
            "verified": self.verified,
            "parameters": list(self.parameters),
            "size": self.size,
        }

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> GroupSpectrum:
        known = {name: state[name] for name in ("smallest", "verified", "size")}
        return GroupSpectrum(
            **known,
            eigenvalues=_matrix(state["eigenvalues"]),
            residuals=_matrix(state["residuals"]),
            converged=torch.tensor(state["converged"], dtype=torch.bool, device="cpu"),
            parameters=tuple(state["parameters"]),
        )


@dataclass(frozen=True, eq=False, repr=False)
class Spectrum:
    """The ends of the spectrum of H = d²L/dθ², θ the parameters that require gradients, in the order of `parameters`.

    An eigenvalue is converged if its residual ‖Hv - λv‖ is small enough: then one of H lies that close to it.
    """

    eigenvalues: Tensor
    """the largest ones in value, largest first, with multiplicity; float64, on the CPU"""
    smallest: float
    """the smallest eigenvalue: how negative the curvature gets"""
    residuals: Tensor
    converged: Tensor
    smallest_converged: bool
    eigenvectors: Tensor
    """unit columns for `eigenvalues`, on the device of the parameters"""
    ggn_eigenvalue: float
    """the largest one of the Gauss-Newton part J^T S J; NaN where the output of the network is not known"""
    ggn_error: float
    """|λ_1 - ggn_eigenvalue| / λ_1"""
    trace: float
    trace_stderr: float
    density: Density | None
    """how the eigenvalues are distributed, if asked for"""
    stability_limit: float
    """the largest eigenvalue that the optimizer bears, if one was given; NaN where none is known"""
    stability_ratio: float
    """λ_1 over that limit, with the optimizer's preconditioner where it has one: above one, steps overshoot"""
    parameters: tuple[str, ...]
    loss: float
    hvps: int
    """products with H or its Gauss-Newton part that were spent"""
    seconds: float
    notes: tuple[str, ...] = ()
    groups: Mapping[str, GroupSpectrum] = field(default_factory=dict)
    """the diagonal blocks of the groups of parameters that were asked for"""
    phi: float = math.nan
    """Φ = 1 - Σ‖H_vv‖_F² / ‖H‖_F² over those groups: the share of curvature between them"""
    phi_stderr: float = math.nan

    def start_vector(self) -> Tensor:
        """A vector in the span of the eigenvectors, from which a later search begins: all of them alike."""
        return self.eigenvectors.sum(1)

    def without_vectors(self) -> Spectrum:
        """The same without the eigenvectors, which take k times the memory of the parameters."""
        return replace(self, eigenvectors=self.eigenvectors.new_zeros((len(self.eigenvectors), 0), device="cpu"))

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Spectrum:
        """What `to_dict` wrote; the eigenvectors and the density are not part of it."""
        known = {name: value for name, value in state.items() if name not in ("eigenvalues", "residuals", "converged")}
        known["parameters"], known["notes"] = tuple(state["parameters"]), tuple(state["notes"])
        known["groups"] = {name: GroupSpectrum.from_dict(group) for name, group in state["groups"].items()}
        return Spectrum(
            **known,
            eigenvalues=_matrix(state["eigenvalues"]),
            residuals=_matrix(state["residuals"]),
            converged=torch.tensor(state["converged"], dtype=torch.bool, device="cpu"),
            eigenvectors=torch.zeros((0, 0), device="cpu"),
            density=None,
        )

    @property
    def sharpness(self) -> float:
        """λ_1, the largest eigenvalue in value: what the stability limit of gradient descent speaks of."""
        return self.eigenvalues[0].item()

    @property
    def largest_magnitude(self) -> float:
        """‖H‖_2 with its sign: the largest or the smallest eigenvalue, whichever is further from zero."""
        return max(self.sharpness, self.smallest, key=abs)

    def to_dict(self) -> dict[str, Any]:
        """Plain Python lists and numbers, without the eigenvectors."""
        return {
            "eigenvalues": self.eigenvalues.tolist(),
            "residuals": self.residuals.tolist(),
            "converged": self.converged.tolist(),
            "smallest": self.smallest,
            "smallest_converged": self.smallest_converged,
            "ggn_eigenvalue": self.ggn_eigenvalue,
            "ggn_error": self.ggn_error,
            "trace": self.trace,
            "trace_stderr": self.trace_stderr,
            "stability_limit": self.stability_limit,
            "stability_ratio": self.stability_ratio,
            "parameters": list(self.parameters),
            "groups": {name: group.to_dict() for name, group in self.groups.items()},
            "phi": self.phi,
            "phi_stderr": self.phi_stderr,
            "loss": self.loss,
            "hvps": self.hvps,
            "seconds": self.seconds,
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        values = [
            f"  λ_{i + 1:<6} {_cell(value, residual)}{'' if settled else '  not converged'}"
            for i, (value, residual, settled) in enumerate(
                zip(self.eigenvalues.tolist(), self.residuals.tolist(), self.converged.tolist())
            )
        ]
        return "\n".join(
            [
                f"Spectrum: loss {self.loss:.4g}, {self.hvps} products, {self.seconds:.1f} s",
                *values,
                f"  smallest {_cell(self.smallest, 0.0)}{'' if self.smallest_converged else '  not converged'}",
                f"  GGN λ_1  {_cell(self.ggn_eigenvalue, 0.0)}",
                f"  trace    {_cell(self.trace, self.trace_stderr)}",
                *([] if math.isnan(self.stability_ratio) else [f"  of the stability limit {self.stability_ratio:.3g}"]),
                *(f"  group {name}: λ_1 {_cell(g.eigenvalues[0].item(), 0.0)}" for name, g in self.groups.items()),
                *([] if math.isnan(self.phi) else [f"  Φ        {_cell(self.phi, self.phi_stderr)}"]),
                *(f"note: {note}" for note in self.notes),
            ]
        )

    __repr__ = __str__


def _matrix(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device="cpu")


def _cell(value: float, stderr: float) -> str:
    """`0.0312 ±0.0004`: the error with one digit, the value with as many as the error allows, five at most."""
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    magnitude = math.floor(math.log10(abs(value)))
    if stderr < abs(value) * 1e-4:
        return _fixed(value, magnitude, 4)
    if not math.isfinite(stderr):
        return f"{_fixed(value, magnitude, 4)} ±{stderr}"
    stderr = float(f"{stderr:.1g}")  # 0.098 is 0.1: one digit less for the value
    place = math.floor(math.log10(stderr))
    error = f"{stderr:.0f}" if 0 <= place <= 4 else f"{stderr:.1g}"
    return f"{_fixed(value, magnitude, max(0, magnitude - place))} ±{error}"


def _fixed(value: float, magnitude: int, digits: int) -> str:
    if -4 <= magnitude <= 4:
        return f"{value:.{max(0, digits - magnitude)}f}"
    return f"{value:.{digits}e}"

"""The definitions of the four metrics of a pair, from the norms of its block.

    R = ‖H[v,w]‖_F    C = R(v,w) / sqrt(R(v,v) R(w,w))    D = ‖H‖_F² / ‖H‖_2²    gap = ‖T‖_F / ‖GN‖_F

Nothing is clamped. All thresholds are relative: multiplying the loss by 1e-9 changes R only.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from curvmon.records import METRICS, Metric

_ROUNDING = 10
"""A norm below this many times eps, relative to its scale, is rounding."""


class Norms(NamedTuple):
    """Squared Frobenius norms of H, GN and T = H - GN, and the spectral norm of H; NaN where unknown."""

    hessian: float
    gauss_newton: float
    remainder: float
    spectral: float


class PairMetrics(NamedTuple):
    resonance: float
    coupling: float
    stable_rank: float
    gn_gap: float
    reason: str | None
    """why an entry is NaN or infinite: a sentence without the subject"""


def metrics_of_norms(pair: Norms, row: float, col: float, eps: float, *, diagonal: bool) -> PairMetrics:
    """The metrics of H[v, w]; `row` and `col` are ‖H[v, v]‖_F² and ‖H[w, w]‖_F², `eps` is the machine epsilon."""
    nan, tiny = math.nan, (_ROUNDING * eps) ** 2
    resonance = math.sqrt(pair.hessian)
    if pair.hessian == 0:
        what = "the loss has no curvature there" if diagonal else "the loss does not couple them"
        return PairMetrics(0.0, nan, nan, nan, f"zero: {what}, only R = 0 is defined")
    if pair.hessian <= tiny * math.sqrt(row * col):
        return PairMetrics(resonance, nan, nan, nan, "zero to rounding: R is noise, the rest is not defined")
    reason = None
    if diagonal:
        coupling = 1.0
    elif row == 0 or col == 0:
        coupling, reason = math.inf, "coupled although one of them has no curvature of its own: C is infinite"
    else:
        coupling = resonance / (row * col) ** 0.25
    gap = nan
    if pair.gauss_newton <= tiny * pair.hessian:
        gap, reason = math.inf, "without a Gauss-Newton part: the gap is infinite"
    elif not math.isnan(pair.gauss_newton):
        gap = math.sqrt(pair.remainder / pair.gauss_newton)
    rank = pair.hessian / pair.spectral**2 if pair.spectral else nan
    return PairMetrics(resonance, coupling, rank, gap, reason)


class Matrices:
    """Symmetric (n, n) float64 matrices, filled pair by pair."""

    def __init__(self, nodes: tuple[str, ...]) -> None:
        self.nodes = nodes
        self._values: dict[str, Tensor] = {}
        self._reasons: dict[str, list[str]] = {}

    def put(self, name: str, v: int, w: int, value: float) -> None:
        n = len(self.nodes)
        matrix = self._values.setdefault(name, torch.full((n, n), math.nan, dtype=torch.float64, device="cpu"))
        matrix[v, w] = matrix[w, v] = value

    def get(self, name: str, v: int, w: int) -> float:
        return self._values[name][v, w].item()

    def put_metrics(self, v: int, w: int, metrics: PairMetrics, norms: Norms) -> None:
        for metric in METRICS:
            self.put(metric, v, w, getattr(metrics, metric))
        self.put("spectral_norm", v, w, norms.spectral)
        self.put("gn_norm", v, w, math.sqrt(norms.gauss_newton))
        if metrics.reason is not None:
            self._reasons.setdefault(metrics.reason, []).append(f"{self.nodes[v]}--{self.nodes[w]}")

    def put_error(self, metric: Metric, v: int, w: int, error: float) -> None:
        """NaN where the metric itself is not a finite number."""
        self.put(f"stderr/{metric}", v, w, error if math.isfinite(self.get(metric, v, w)) else math.nan)

    def values(self) -> dict[str, Tensor]:
        return {name: matrix for name, matrix in self._values.items() if "/" not in name}

    def errors(self) -> dict[str, Tensor]:
        return {metric: self._values[f"stderr/{metric}"] for metric in METRICS}

    def notes(self) -> list[str]:
        """One sentence per reason, with the pairs it applies to."""
        return [f"{', '.join(pairs)}: {reason}" for reason, pairs in self._reasons.items()]


def undefined(nodes: tuple[str, ...]) -> Matrices:
    """NaN for all pairs."""
    matrices, nan = Matrices(nodes), math.nan
    for v, w in itertools.combinations_with_replacement(range(len(nodes)), 2):
        matrices.put_metrics(v, w, PairMetrics(nan, nan, nan, nan, None), Norms(nan, nan, nan, nan))
        for metric in METRICS:
            matrices.put_error(metric, v, w, nan)
    return matrices

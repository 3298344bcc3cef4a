"""The estimator of pairs on dense matrices, and how often its intervals cover the truth."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate

import torch
from torch import Tensor

import curvmon
from curvmon.operators.node_blocks import Products
from curvmon.pairs.estimator import FOR_ALL_METRICS, Effort, Estimate, PairEstimator
from tests.helpers import cases

METRICS = ("resonance", "coupling", "stable_rank", "gn_gap")
SIZES = (40, 60, 50)
PAIRS = [(v, w) for v in range(3) for w in range(v, 3)]


class DenseBlocks:
    """A `BlockOperator` with given matrices H and GN."""

    hvps_per_column = 2

    def __init__(self, hessian: Tensor, gauss_newton: Tensor, sizes: tuple[int, ...] = SIZES) -> None:
        ends = list(accumulate(sizes))
        self._parts = [slice(end - size, end) for size, end in zip(sizes, ends)]
        self._matrices = hessian, gauss_newton
        self.templates = [hessian.new_zeros(size) for size in sizes]
        self.products = 0

    def block(self, which: int, v: int, w: int) -> Tensor:
        return self._matrices[which][self._parts[v], self._parts[w]]

    def columns(self, w: int, z: Tensor) -> Products:
        self.products += 2 * z.shape[1]
        hessian, gauss_newton = ([self.block(i, v, w) @ z for v in range(len(self.templates))] for i in range(2))
        return Products([h - g for h, g in zip(hessian, gauss_newton)], gauss_newton, 2 * z.shape[1])

    def columns_of(self, requests: Mapping[int, Tensor]) -> dict[int, Products]:
        return {w: self.columns(w, z) for w, z in requests.items()}

    def truth(self, metric: str, v: int, w: int) -> float:
        norm = torch.linalg.norm
        block, gn = self.block(0, v, w), self.block(1, v, w)
        if metric == "resonance":
            return norm(block).item()
        if metric == "coupling":
            return (norm(block) / (norm(self.block(0, v, v)) * norm(self.block(0, w, w))).sqrt()).item()
        if metric == "stable_rank":
            return (norm(block) ** 2 / norm(block, ord=2) ** 2).item()
        return (norm(block - gn) / norm(gn)).item()


def symmetric(decay: float, seed: int, size: int = sum(SIZES)) -> Tensor:
    """Random orientation, eigenvalues ± i^-decay."""
    g = torch.Generator().manual_seed(seed)
    q = torch.linalg.qr(torch.randn(size, size, generator=g, dtype=torch.float64)).Q
    signs = 1 - 2 * torch.randint(2, (size,), generator=g)
    return (q * (signs * torch.arange(1, size + 1) ** -decay)) @ q.T


def problem(decay: float, sizes: tuple[int, ...] = SIZES) -> DenseBlocks:
    gauss_newton = symmetric(decay, 1, sum(sizes))
    gauss_newton = gauss_newton @ gauss_newton
    return DenseBlocks(gauss_newton + 0.3 * symmetric(decay, 2, sum(sizes)), gauss_newton, sizes)


def estimate(
    operator: DenseBlocks,
    seed: int,
    max_hvps: int | None = 150,
    rtol: float = 0.05,
    effort: Effort = FOR_ALL_METRICS,
) -> Estimate:
    names = tuple(f"node{i}" for i in range(len(operator.templates)))
    generator = torch.Generator().manual_seed(seed)
    return PairEstimator(operator, names, rtol=rtol, max_hvps=max_hvps, generator=generator, effort=effort).run()


def deviations(
    operator: DenseBlocks, seeds: range, max_hvps: int | None = 150, effort: Effort = FOR_ALL_METRICS
) -> dict[str, list[float]]:
    """|estimate - truth| in standard errors, per metric, over seeds and pairs."""
    values: dict[str, list[float]] = {metric: [] for metric in METRICS}
    for seed in seeds:
        matrices = estimate(operator, seed, max_hvps, effort=effort).matrices
        for metric in METRICS:
            for v, w in PAIRS:
                if metric == "coupling" and v == w:
                    continue  # C(v, v) = 1 has no error
                error = abs(matrices.get(metric, v, w) - operator.truth(metric, v, w))
                values[metric].append(error / matrices.get(f"stderr/{metric}", v, w))
    return values


def network_deviations(kind: str, seeds: range) -> dict[str, list[float]]:
    """The same for `measure` on a residual MLP with LayerNorm and GELU."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = cases.ResidualMLP(width=40)
    batch = torch.randn(cases.SAMPLES, 7, generator=torch.Generator().manual_seed(2)), cases.targets()
    options = {"loss": cases.user_loss(kind), "nodes": ["stem", "blocks.*"]}
    truth = curvmon.exact(model, batch, **options)
    values: dict[str, list[float]] = {metric: [] for metric in METRICS}
    for seed in seeds:
        measured = curvmon.measure(model, batch, **options, max_hvps=150, seed=seed)
        for metric in METRICS:
            for v, w in PAIRS:
                if (metric == "coupling" and v == w) or (metric == "gn_gap" and w == 2):
                    continue  # C(v, v) = 1; T = 0 in front of the linear head: both without error
                error = abs(getattr(measured, metric) - getattr(truth, metric))[v, w]
                values[metric].append((error / measured.stderr[metric][v, w]).item())
    return values


def coverage(deviations: dict[str, list[float]], width: float = 1.96) -> dict[str, float]:
    """The share of estimates within `width` standard errors of the truth, per metric."""
    return {metric: sum(z < width for z in values) / len(values) for metric, values in deviations.items()}

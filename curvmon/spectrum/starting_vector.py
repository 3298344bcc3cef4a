"""A starting vector for the eigenvalue search: the sum of the leading eigenvectors of Gauss-Newton, from sketches.

    GGN = Σ_ik g_ik g_ik^T,  g_ik = J_i^T a_ik      a_ik: column k of the root of the loss curvature at sample i
    P_ik = Σ_layers R (Σ_t g_t x_t^T) R'            a random sketch of g_ik:  E <P_ik, P_jl> = <g_ik, g_jl>
    P P^T c = e c   =>   u = Σ_ik c_ik g_ik / √e    approximates an eigenvector of GGN with eigenvalue e

The trace computes all g_ik anyway, layer by layer. The sum of k vectors u is J^T times one cotangent per batch: one
backward pass. An inaccurate starting vector costs products, never correctness, so a small sketch is enough.

Memory: WIDTH numbers for every position in a layer, at most MAX_ENTRIES in total, and WIDTH² numbers for each of at
most MAX_SKETCHES gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from curvmon.graph.linear_layers import MAX_ENTRIES, Layer

WIDTH = 64
"""a sketch has WIDTH x WIDTH numbers"""
MAX_SKETCHES = 1024
"""only the largest are kept; their Gram matrix has that size"""


class GradientSketches(NamedTuple):
    """Sketches of the gradients g_ik of one or several batches.

    Attributes:
        rows: one flat sketch per gradient, gradients x WIDTH².
        origins: batch, column k and sample i of every gradient, gradients x 3.
        roots: the columns a_ik of every batch, rank x samples x outputs.
        weights: the weight of every batch in the loss.
    """

    rows: Tensor
    origins: Tensor
    roots: tuple[Tensor, ...]
    weights: tuple[float, ...]


class _ProjectedLayer(NamedTuple):
    """The inputs of a layer, projected to WIDTH numbers, and the matrix that projects its output gradients."""

    number: int
    """index of the layer among all layers"""
    layer: Layer
    inputs: Tensor
    """samples x positions x WIDTH"""
    outputs: Tensor
    """outputs x WIDTH"""


class GradientSketcher:
    """Sketches the per-sample gradients of one batch, one column of the loss curvature at a time."""

    def __init__(self, layers: Sequence[Layer], columns: Tensor, weight: float, size: float, seed: int) -> None:
        samples = columns.shape[1]
        self._columns = columns
        self._weight, self._size = weight, size
        self._rows = columns.new_zeros((0, WIDTH**2))
        self._origins = torch.zeros((0, 3), dtype=torch.long, device="cpu")
        self._layers: list[_ProjectedLayer] = []
        generator = torch.Generator("cpu").manual_seed(seed)
        entries = 0
        for number, layer in reversed(list(enumerate(layers))):  # the last ones have the fewest positions
            positions = layer.positions(samples)
            entries += positions * samples * WIDTH
            if entries > MAX_ENTRIES:
                break
            if positions:
                self._layers.append(_ProjectedLayer(number, layer, *layer.projections(samples, WIDTH, generator)))

    def add(self, column: int, gradients: Sequence[Tensor]) -> None:
        """Sketch the gradients of all samples for one column / `size`, given those w.r.t. the taps of all layers."""
        if not self._layers:
            return
        samples = self._columns.shape[1]
        total = self._columns.new_zeros((samples, WIDTH, WIDTH))
        for number, layer, inputs, outputs in self._layers:
            total.baddbmm_((layer.by_position(gradients[number], samples) @ outputs).mT, inputs)
        origins = torch.tensor([(0, column, i) for i in range(samples)], device="cpu")
        self._rows, self._origins = _largest(
            torch.cat([self._rows, total.flatten(1) * (self._weight**0.5 * self._size)]),
            torch.cat([self._origins, origins]),
        )

    def sketches(self) -> GradientSketches:
        return GradientSketches(self._rows, self._origins, (self._columns,), (self._weight,))


def sketcher_for(
    layers: Sequence[Layer], columns: Tensor, weight: float, size: float, seed: int | None
) -> GradientSketcher | None:
    """A sketcher of the gradients whose cotangents are `columns`, rank x samples x outputs.

    Sketches of different batches are comparable if made with the same seed. None without a seed, or if already one
    column has more gradients than may be kept.
    """
    if seed is None or columns.shape[1] > MAX_SKETCHES:
        return None
    return GradientSketcher(layers, columns, weight, size, seed)


def joined(first: GradientSketches | None, second: GradientSketches | None) -> GradientSketches | None:
    """The largest sketches of two sets of batches; None if one set has no sketches."""
    if first is None or second is None:
        return None
    offset = torch.tensor([len(first.roots), 0, 0], device="cpu")
    rows, origins = _largest(torch.cat([first.rows, second.rows]), torch.cat([first.origins, second.origins + offset]))
    return GradientSketches(rows, origins, first.roots + second.roots, first.weights + second.weights)


def start_cotangents(sketches: GradientSketches, k: int) -> list[Tensor] | None:
    """For every batch c with Σ_b J_b^T c_b = the sum of k eigenvectors, samples x outputs; None without sketches."""
    if not len(sketches.rows):
        return None
    rows = sketches.rows.cpu().double()
    values, vectors = torch.linalg.eigh(rows @ rows.T)
    significant = values[-k:] > 1e-6 * values[-1]
    if not significant.any():
        return None
    coefficients = (vectors[:, -k:] / values[-k:].sqrt())[:, significant].sum(1)
    cotangents = []
    for batch, (columns, weight) in enumerate(zip(sketches.roots, sketches.weights)):
        selected = sketches.origins[:, 0] == batch
        dense = coefficients.new_zeros(columns.shape[:2])
        dense[tuple(sketches.origins[selected, 1:].T)] = coefficients[selected] * weight**0.5
        cotangents.append((columns * dense.to(columns).unsqueeze(2)).sum(0))
    return cotangents


def _largest(rows: Tensor, origins: Tensor) -> tuple[Tensor, Tensor]:
    if len(rows) <= MAX_SKETCHES:
        return rows, origins
    largest = torch.linalg.vector_norm(rows, dim=1).topk(MAX_SKETCHES).indices
    return rows[largest], origins[largest.cpu()]

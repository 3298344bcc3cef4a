"""Where a search begins: the sum of the leading eigenvectors of Gauss-Newton, from what the trace computes anyway.

    GGN = Σ_ik g_ik g_ik^T,   g_ik = J_i^T a_ik       sample i, column k of the root of the loss's curvature (`traces`)
    P_ik = Σ_layers R (Σ_t g_t x_t^T) R'              a sketch of g_ik: <P_ik, P_jl> = <g_ik, g_jl> in expectation

An eigenvector c of P P^T with the eigenvalue e gives one of the GGN, Σ c_ik g_ik / √e, and the sum of k of them is one
backward pass. A start may be poor, but not wrong: so no more is asked of the sketch than to be cheap. In memory: WIDTH
numbers for every position in a layer, as far as MOST_ENTRIES go, and WIDTH² for each of at most MOST_ROWS gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from curvmon.graph.linear_layers import MOST_ENTRIES, Layer

WIDTH = 64
"""of a sketch: WIDTH x WIDTH numbers"""
MOST_ROWS = 1024
"""gradients that are kept, the largest; their inner products are a matrix of that size"""


class _Projected(NamedTuple):
    """A layer's inputs and the projection of its outputs, both to WIDTH numbers."""

    place: int
    """of the layer among all"""
    layer: Layer
    inputs: Tensor
    """samples x positions x WIDTH"""
    onto: Tensor
    """outputs x WIDTH"""


class _Batch(NamedTuple):
    columns: Tensor
    """rank x samples x width"""
    weight: float


class Beginning:
    """Sketches of the gradients g_ik of all batches, one column at a time."""

    def __init__(self, k: int, generator: torch.Generator) -> None:
        self._k = k
        self._seed = int(torch.randint(2**62, (), generator=generator, device="cpu").item())
        self._batches: list[_Batch] = []
        self._projected: list[_Projected] = []
        self._sketches: Tensor | None = None
        self._origins = torch.zeros((0, 3), dtype=torch.long, device="cpu")
        """batch, column and sample of every sketch"""

    def open_batch(self, layers: Sequence[Layer], columns: Tensor, weight: float) -> bool:
        """The layers of the next batch, the root of its curvature, its share of the loss; are its gradients wanted?"""
        samples = columns.shape[1]
        if samples > MOST_ROWS:
            return False
        # the same projections for every batch: gradients of different ones are compared
        generator = torch.Generator("cpu").manual_seed(self._seed)
        self._batches.append(_Batch(columns, weight))
        self._projected, entries = [], 0
        for place, layer in reversed(list(enumerate(layers))):  # the last ones see the fewest positions
            positions = layer.positions(samples)
            entries += positions * samples * WIDTH
            if entries > MOST_ENTRIES:
                break
            if positions:
                self._projected.append(_Projected(place, layer, *layer.projections(samples, WIDTH, generator)))
        return bool(self._projected)

    def add(self, column: int, gradients: Sequence[Tensor]) -> None:
        """The gradients by the taps of all layers for one column of the batch."""
        batch = self._batches[-1]
        samples = batch.columns.shape[1]
        total = batch.columns.new_zeros((samples, WIDTH, WIDTH))
        for place, layer, inputs, onto in self._projected:
            total.baddbmm_((layer.by_position(gradients[place], samples) @ onto).mT, inputs)
        fresh = total.flatten(1) * batch.weight**0.5
        origins = torch.tensor([(len(self._batches) - 1, column, i) for i in range(samples)], device="cpu")
        sketches = fresh if self._sketches is None else torch.cat([self._sketches, fresh])
        self._origins = torch.cat([self._origins, origins])
        if len(sketches) > MOST_ROWS:
            largest = torch.linalg.vector_norm(sketches, dim=1).topk(MOST_ROWS).indices
            sketches, self._origins = sketches[largest], self._origins[largest.cpu()]
        self._sketches = sketches

    def cotangents(self, batches: int) -> list[Tensor] | None:
        """For every batch, samples x outputs: what to pull back to the parameters. None where a batch is missing."""
        self._projected = []  # they hold the activations
        if self._sketches is None or len(self._batches) != batches:
            return None
        sketches = self._sketches.cpu().double()
        values, vectors = torch.linalg.eigh(sketches @ sketches.T)
        chosen = values[-self._k :] > 1e-6 * values[-1]
        if not chosen.any():
            return None
        weights = (vectors[:, -self._k :] / values[-self._k :].sqrt())[:, chosen].sum(1)
        found = []
        for number, batch in enumerate(self._batches):
            mine = self._origins[:, 0] == number
            coefficients = weights.new_zeros(batch.columns.shape[:2])
            coefficients[tuple(self._origins[mine, 1:].T)] = weights[mine] * batch.weight**0.5
            found.append((batch.columns * coefficients.to(batch.columns).unsqueeze(2)).sum(0))
        return found

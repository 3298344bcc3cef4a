"""What the training batches look like between two validations: values, labels, and whether batches repeat.

Only what changes the data can change these: a class that vanishes, inputs that are rescaled, the same batch again and
again. A few small operations per batch, on its device, and one transfer per validation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from curvmon.alerts.context import Source
from curvmon.graph.pytree import named_tensors

MOST_BATCHES = 64
"""looked at between two validations; beyond, every second one, then every fourth, …"""
MOST_ENTRIES = 2**16
"""of a tensor that are looked at: its first rows"""
BINS = 1024
"""integers are counted modulo this"""
MOST_TENSORS = 16
"""of a batch that are looked at"""
EXPECTED = 20.0
"""occurrences of a value that are expected; if there are none, it is missing"""
MEMORY = 0.3
"""weight of the latest share of each value in the usual one"""
FEWEST_BATCHES = 4
"""from which on their spread, and whether they repeat, can be said"""


class TrainingData:
    """Takes training batches; `collect` summarizes those since the last call.

    Nothing raises: batches that cannot be read are not watched.
    """

    def __init__(self) -> None:
        self._moments: dict[str, list[Tensor]] = {}
        """of every tensor and batch: mean, mean square, first dimension"""
        self._counts: dict[str, Tensor] = {}
        """of every integer tensor"""
        self._usual: dict[str, list[float]] = {}
        """share of each value before"""
        self._seen, self._stride, self._is_off = 0, 1, False

    @torch.no_grad()
    def observe(self, batch: Any) -> None:
        """Before or after a training step."""
        self._seen += 1
        if self._is_off or self._seen % self._stride:
            return
        try:
            for i, (path, tensor) in enumerate(named_tensors(batch)):
                if i < MOST_TENSORS and tensor.layout is torch.strided and not tensor.is_nested and tensor.numel():
                    self._look(path, tensor.detach())
        except Exception:  # a class of tensors without these operations
            self._is_off = True
        if self._seen >= MOST_BATCHES * self._stride:
            self._stride *= 2

    def _look(self, path: str, tensor: Tensor) -> None:
        size = tensor.shape[0] if tensor.ndim else 1
        rows = max(1, MOST_ENTRIES * size // tensor.numel())
        values = (tensor[:rows] if tensor.ndim else tensor).reshape(-1)[:MOST_ENTRIES]
        if tensor.is_complex() or tensor.is_quantized:
            return
        if not tensor.is_floating_point():
            indices = values.long() % BINS
            if path not in self._counts:
                self._counts[path] = torch.zeros(BINS, device=tensor.device)
            ones = torch.ones(len(indices), device=tensor.device)
            self._counts[path] = self._counts[path].to(tensor.device).index_add_(0, indices, ones)
        values = values.double() if tensor.device.type == "cpu" else values.float()
        summary = torch.stack([values.mean(), values.square().mean(), values.new_tensor(float(size))])
        self._moments.setdefault(path, []).append(summary)

    def collect(self) -> dict[Source, float]:
        """Summaries by kind ("inputs rms", "labels missing", "batches different", …) and tensor, then starts again."""
        try:
            return self._collected()
        except Exception:
            self._is_off = True
            return {}
        finally:
            self._moments, self._counts, self._seen, self._stride = {}, {}, 0, 1

    def _collected(self) -> dict[Source, float]:
        numbers = iter(_at_once([*(each for rows in self._moments.values() for each in rows), *self._counts.values()]))
        moments = {path: [next(numbers) for _ in rows] for path, rows in self._moments.items()}
        counts = {path: next(numbers) for path in self._counts}
        signs: dict[Source, float] = {}
        for path, rows in moments.items():
            signs.update(self._labels(path, counts[path]) if path in counts else _inputs(path, rows))
        lengths = {len(rows) for rows in moments.values()}
        if len(lengths) == 1:
            fingerprints = list(zip(*moments.values()))
            signs["batches size", ""] = sorted(rows[0][2] for rows in fingerprints)[len(fingerprints) // 2]
            if len(fingerprints) >= FEWEST_BATCHES:
                different = {tuple(tuple(row) for row in rows) for rows in fingerprints}
                signs["batches different", ""] = len(different) / len(fingerprints)
        return signs

    def _labels(self, path: str, counts: Sequence[float]) -> dict[Source, float]:
        """Perplexity of the values; how many are missing; distance from the usual shares.

        exp(-Σ p log p);   values of which EXPECTED are expected, and none are there;   Σ |p - p_usual| / 2
        """
        total = sum(counts)
        shares = [count / total for count in counts]
        usual = self._usual.get(path)
        kept = shares if usual is None else [(1 - MEMORY) * u + MEMORY * s for u, s in zip(usual, shares)]
        self._usual[path] = kept
        signs: dict[Source, float] = {
            ("labels perplexity", path): math.exp(-sum(p * math.log(p) for p in shares if p > 0))
        }
        if usual is not None:
            missing = sum(u * total >= EXPECTED and count == 0 for u, count in zip(usual, counts))
            signs["labels missing", path] = float(missing)
            signs["labels shift", path] = sum(abs(s - u) for s, u in zip(shares, usual)) / 2
        return signs

    def state_dict(self) -> dict[str, Any]:
        """Lists, dicts, strings and numbers only. Without trailing zeros."""
        return {"usual": {path: _without_zeros(shares) for path, shares in self._usual.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._usual = {path: [*shares, *[0.0] * (BINS - len(shares))] for path, shares in state["usual"].items()}


def _at_once(vectors: Sequence[Tensor]) -> list[list[float]]:
    """With one transfer for all of them."""
    if not vectors:
        return []
    flat = torch.cat([vector.to(vectors[0].device) for vector in vectors]).cpu()
    return [vector.tolist() for vector in torch.split(flat, [len(vector) for vector in vectors])]


def _inputs(path: str, rows: Sequence[Sequence[float]]) -> dict[Source, float]:
    """Root mean square; mean relative to it; standard deviation of the batches' means relative to it."""
    count = len(rows)
    mean, square = (sum(row[i] for row in rows) / count for i in (0, 1))
    rms = math.sqrt(square)
    signs: dict[Source, float] = {("inputs rms", path): rms}
    if rms > 0:
        signs["inputs mean", path] = mean / rms
        if count >= FEWEST_BATCHES:
            spread = math.sqrt(sum((row[0] - mean) ** 2 for row in rows) / (count - 1))
            signs["inputs spread", path] = spread / rms
    return signs


def _without_zeros(shares: Sequence[float]) -> list[float]:
    last = max((i for i, share in enumerate(shares) if share), default=-1)
    return list(shares[: last + 1])

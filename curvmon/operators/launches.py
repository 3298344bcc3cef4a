"""Products with several columns at several nodes, computed as many at a time as memory allows."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

Image = Callable[[Mapping[int, Tensor], bool], list[Tensor]]
"""Σ_w A[v, w] z_w for every row v; if the flag is set, for every row of the matrices z_w"""


class Launches:
    """Products with several columns at several nodes, as many per launch as memory allows.

    A launch with K columns has K vectors at every node: a column of Z_w at node w, zeros at the others.
    """

    def __init__(self, held: Sequence[int], capacity: int) -> None:
        """
        Args:
            held: bytes that a product holds, by node, in execution order; decreasing.
            capacity: bytes that a launch may hold; one product may exceed it.
        """
        self._held = held
        self._capacity = capacity

    def images(self, requests: Mapping[int, Tensor], image: Image) -> dict[int, list[Tensor]]:
        """A[v, w] Z_w for every row v, by w; Z_w is d_w x k_w with k_w >= 1."""
        parts: dict[int, list[list[Tensor]]] = {w: [] for w in requests}
        left = {w: requests[w] for w in sorted(requests, reverse=True)}
        while left:
            chunk = self._next(left)
            try:
                images = _launch(chunk, image)
            except Exception as error:
                if _width(chunk) == 1:
                    raise
                short = isinstance(error, torch.OutOfMemoryError)  # else an operation does not run under vmap
                self._capacity = _width(chunk) * self._held[min(chunk)] // 2 if short else 0
                continue
            for w, z in chunk.items():
                parts[w].append(images[w])
                left[w] = left[w][:, z.shape[1] :]
            left = {w: z for w, z in left.items() if z.shape[1]}
        return {w: [x[0] if len(x) == 1 else torch.cat(x, dim=1) for x in zip(*each)] for w, each in parts.items()}

    def _next(self, left: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """The columns of the next launch. The last nodes come first: their products hold least."""
        chunk: dict[int, Tensor] = {}
        for w, z in left.items():
            most = max(self._capacity // self._held[w], 0 if chunk else 1) - _width(chunk)
            if most <= 0:
                break
            chunk[w] = z[:, :most]
        return chunk


def _width(chunk: Mapping[int, Tensor]) -> int:
    return sum(z.shape[1] for z in chunk.values())


def _launch(chunk: Mapping[int, Tensor], image: Image) -> dict[int, list[Tensor]]:
    width, start = _width(chunk), 0
    if width == 1:
        (w,) = chunk
        results = image({w: chunk[w].squeeze(1)}, False)
        # one copy: results in the gaps between the tensors of a backward pass would keep these from being reused
        together = torch.cat([x.reshape(-1, 1) for x in results])
        return {w: list(torch.split(together, [x.numel() for x in results]))}
    rows = {}
    for w, z in chunk.items():
        rows[w] = F.pad(z.T, (0, 0, start, width - start - z.shape[1]))
        start += z.shape[1]
    with warnings.catch_warnings():
        # torch computes an operation without a batching rule in a loop, and warns
        warnings.filterwarnings("ignore", message=".*batching rule.*")
        images = [x.flatten(1).T for x in image(rows, True)]
    parts = [torch.split(x, [z.shape[1] for z in chunk.values()], dim=1) for x in images]
    return {w: list(columns) for w, columns in zip(chunk, zip(*parts))}

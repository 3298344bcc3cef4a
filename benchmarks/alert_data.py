"""Data of the families in `alert_families`, split by seed: what is trained on, and several hundred samples held out."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from sklearn.datasets import make_friedman1
from torch import Tensor

from benchmarks.pulse_networks import images, text

TOKENS = 32
HELD_OUT = 400
WINDOWS = 1280
"""of characters, in training"""


class Data(NamedTuple):
    """Inputs and targets; the held-out ones are for validation."""

    x: Tensor
    y: Tensor
    held_x: Tensor
    held_y: Tensor


Source = Callable[[int, Path | None], Data]
"""of a seed; the path is that of CIFAR-10 as an npz file, without it digits take its place"""


def _split(x: Tensor, y: Tensor, seed: int) -> Data:
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    held, used = order[:HELD_OUT], order[HELD_OUT:]
    return Data(x[used], y[used], x[held], y[held])


def digits(seed: int, data: Path | None) -> Data:
    """8 x 8 pixels between -1 and 1."""
    return _split(*images(8, None), seed)


def transposed_digits(seed: int, data: Path | None) -> Data:
    """Rows and columns exchanged: what a network trained on digits is fine-tuned on."""
    d = digits(seed, data)
    return d._replace(x=d.x.transpose(2, 3), held_x=d.held_x.transpose(2, 3))


def flat_digits(seed: int, data: Path | None) -> Data:
    """64 pixels between 0 and 1."""
    d = digits(seed, data)
    return d._replace(x=(d.x.flatten(1) + 1) / 2, held_x=(d.held_x.flatten(1) + 1) / 2)


def small_photos(seed: int, data: Path | None) -> Data:
    """CIFAR-10 at 16 x 16 pixels, between -2 and 2; digits instead get three equal channels."""
    x, y = images(16, data)
    return _split(x.expand(-1, 3, -1, -1), y, seed)


@cache
def _friedman() -> tuple[Tensor, Tensor]:
    x, y = make_friedman1(n_samples=1700, n_features=10, noise=1.0, random_state=0)
    x, y = torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.float32)
    return (x - 0.5) / 0.29, ((y - y.mean()) / y.std()).unsqueeze(1)


def table(seed: int, data: Path | None) -> Data:
    """Friedman's function of five of ten standardized columns, with noise; the target is standardized, too."""
    return _split(*_friedman(), seed)


def characters(seed: int, data: Path | None) -> Data:
    """Consecutive windows from a part of the text; the target is the next character."""
    code, length = text(), TOKENS + 1
    needed = (WINDOWS + HELD_OUT) * length
    start = int(torch.randint(len(code) - needed, (1,), generator=torch.Generator().manual_seed(seed)))
    windows = code[start : start + needed].view(-1, length)
    x, y = windows[:, :-1], windows[:, 1:]
    return Data(x[:WINDOWS], y[:WINDOWS], x[WINDOWS:], y[WINDOWS:])


def without_class(x: Tensor, y: Tensor, label: int) -> tuple[Tensor, Tensor]:
    """Without the samples of a class; in a text, without a character."""
    if x.dtype != torch.long:
        return x[y != label], y[y != label]
    kept = torch.cat([x, y[:, -1:]], 1).flatten()
    kept = kept[kept != label]
    windows = kept[: len(kept) // (TOKENS + 1) * (TOKENS + 1)].view(-1, TOKENS + 1)
    return windows[:, :-1], windows[:, 1:]

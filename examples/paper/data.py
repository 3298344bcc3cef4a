"""The images that the first paper's networks see, or the nearest thing at hand."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

NEIGHBOUR = Path(__file__).parents[3] / "shared" / "data" / "cifar10_subset.npz"
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


class Images(NamedTuple):
    """Pixels in [0, 1], N x 3 x 32 x 32."""

    source: str
    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    is_cifar10: bool = False

    def first_test(self, count: int, *, channels: bool = False) -> tuple[Tensor, Tensor]:
        """The first test images: what the paper measures on."""
        return normalised(self.x_test[:count], channels), self.y_test[:count]


def normalised(x: Tensor, channels: bool = False) -> Tensor:
    """To [-1, 1] (experiments 1 to 4), or by mean and standard deviation of every channel (experiment 6)."""
    if not channels:
        return 2 * x - 1
    mean, std = (x.new_tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    return (x - mean) / std


def images(path: Path | None = None) -> Images:
    """CIFAR-10 from an .npz with x_train, y_train, x_test, y_test (uint8); else digits; else noise."""
    path = path or (NEIGHBOUR if NEIGHBOUR.exists() else None)
    if path is not None:
        return _cifar10(path)
    try:
        return _digits()
    except ImportError:
        return _noise()


def _cifar10(path: Path) -> Images:
    import numpy as np

    with np.load(path) as file:
        x_train, x_test = (torch.from_numpy(file[name]).float() / 255 for name in ("x_train", "x_test"))
        y_train, y_test = (torch.from_numpy(file[name]).long() for name in ("y_train", "y_test"))
    source = f"CIFAR-10 ({path.name}): the paper's test images in their order, {len(x_train):,} of its training images"
    return Images(source, x_train, y_train, x_test, y_test, is_cifar10=True)


def _digits() -> Images:
    from sklearn.datasets import load_digits

    digits = load_digits()
    x = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1).expand(-1, 3, -1, -1)
    x, y = F.interpolate(x, scale_factor=4), torch.tensor(digits.target).long()
    return Images(
        "scikit-learn's digits, enlarged to 32 x 32: not the paper's data", x[590:], y[590:], x[:590], y[:590]
    )


def _noise() -> Images:
    g = torch.Generator().manual_seed(0)
    x, y = torch.rand(1180, 3, 32, 32, generator=g), torch.randint(10, (1180,), generator=g)
    return Images("uniform noise: not the paper's data", x[590:], y[590:], x[:590], y[:590])

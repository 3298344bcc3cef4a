"""Numbers as text, nested lists of numbers as tensors."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def to_matrix(values: Any) -> Tensor:
    """float64 on the CPU."""
    return torch.tensor(values, dtype=torch.float64, device="cpu")


def with_error(value: float, stderr: float) -> str:
    """`0.0312 ±0.0004`: the error with one digit, the value with matching digits, at most five."""
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    magnitude = math.floor(math.log10(abs(value)))
    if stderr < abs(value) * 1e-4:
        return _fixed(value, magnitude, 4)
    if not math.isfinite(stderr):
        return f"{_fixed(value, magnitude, 4)} ±{stderr}"
    stderr = float(f"{stderr:.1g}")  # 0.098 rounds to 0.1: one digit less for the value
    place = math.floor(math.log10(stderr))
    error = f"{stderr:.0f}" if 0 <= place <= 4 else f"{stderr:.1g}"
    return f"{_fixed(value, magnitude, max(0, magnitude - place))} ±{error}"


def _fixed(value: float, magnitude: int, digits: int) -> str:
    if -4 <= magnitude <= 4:
        return f"{value:.{max(0, digits - magnitude)}f}"
    return f"{value:.{digits}e}"


def short(value: float) -> str:
    """Three digits: `0.0312`, `12.5`, `2412`, `3.1e-07`; `NaN` and `infinity` where there is no number."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "infinity" if value > 0 else "-infinity"
    if 100 <= abs(value) < 1e6:
        return f"{value:.0f}"
    return f"{value:.3g}"

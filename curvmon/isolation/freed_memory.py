"""Give memory that was freed back to the operating system: glibc's allocator keeps it, in pieces."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch


def _find() -> Callable[[int], Any] | None:
    try:
        trim: Callable[[int], Any] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):  # not Linux, or another C library
        return None
    return trim


_malloc_trim = _find()


def return_freed_memory(device: torch.device) -> None:
    """For tensors on a CPU, where the allocator is glibc's; takes a millisecond."""
    if device.type == "cpu" and _malloc_trim is not None:
        _malloc_trim(0)

"""Fused kernels of attention, which cannot be differentiated twice, for passes that are differentiated once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.nn.attention import SDPBackend, sdpa_kernel

_BACKENDS = "MATH", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"


@contextmanager
def fused_attention() -> Iterator[None]:
    """Within a measurement, which allows the composed kernel alone: let torch choose."""
    with sdpa_kernel([getattr(SDPBackend, name) for name in _BACKENDS if hasattr(SDPBackend, name)]):
        yield

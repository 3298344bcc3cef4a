"""Norms, precision, sampling: the arithmetic that every estimator shares."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from curvmon.errors import NonFiniteError

# Student's t at 97.5 % over 1.96, for one to four degrees of freedom; a series takes over from five.
_STUDENT = (6.4829, 2.1953, 1.6237, 1.4166)


def small_sample_factor(freedom: int) -> float:
    """What to multiply a standard error with so that ± 1.96 of it covers 95 % although it comes from few probes."""
    if freedom < 1:
        return math.inf
    if freedom <= len(_STUDENT):
        return _STUDENT[freedom - 1]
    z, n = 1.959964, float(freedom)
    # Cornish-Fisher expansion of the quantile in 1/n
    terms = (
        (z**2 + 1) / (4 * n),
        (5 * z**4 + 16 * z**2 + 3) / (96 * n**2),
        (3 * z**6 + 19 * z**4 + 17 * z**2 - 15) / (384 * n**3),
    )
    return 1 + sum(terms)


def precise_dtype(x: Tensor) -> torch.dtype:
    """Double precision where the device has it."""
    return x.dtype if x.device.type == "mps" else torch.float64


def precise(x: Tensor) -> Tensor:
    return x.to(precise_dtype(x))


def norm(x: Tensor) -> float:
    """‖x‖ by squares in double precision: those of a loss scaled by 1e-20 or 1e20 have no place in float32."""
    return float(torch.linalg.vector_norm(x, dtype=precise_dtype(x)).item())


def norm_squared(x: Tensor) -> float:
    return norm(x) ** 2


def check_finite(images: Sequence[Tensor]) -> None:
    if not all(torch.isfinite(image).all() for image in images):
        raise NonFiniteError(
            "a Hessian-vector product is not finite although the loss is; "
            "look for sqrt, norm or log at zero, or overflow in low precision"
        )


def gaussian(like: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Independent normal entries (d x count). Drawn on the CPU: the same seed means the same probes on every device."""
    return torch.randn(like.numel(), count, generator=generator, device="cpu").to(dtype=like.dtype, device=like.device)


def rademacher(like: Tensor, generator: torch.Generator) -> Tensor:
    """Drawn on the CPU: the same seed means the same vectors on every device."""
    bits = torch.randint(2, like.shape, generator=generator, device="cpu", dtype=torch.int8)
    return bits.mul_(2).sub_(1).to(like.device).to(like.dtype)

"""Whether several Hessian-vector products are computed in one launch, and how.

An accelerator runs small kernels as fast as the host launches them: eight products in one launch take little longer
than one. A CPU takes as long as for eight, and more memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from curvmon.errors import InputError

Batched = bool | Literal["auto"]
"""True: several per launch; False: one by one; "auto": whichever suits the device"""
Images = TypeVar("Images")


def check_batched(batched: Any) -> None:
    if not (isinstance(batched, bool) or batched == "auto"):
        raise InputError(f'batched must be True, False or "auto", not {batched!r}')


def batches_products(batched: Batched, device: torch.device) -> bool:
    """Whether products are batched whatever the network; "auto" on a CPU: False, the operator may know better."""
    return device.type != "cpu" if batched == "auto" else batched


class InBatches:
    """Computes images of vectors, several at a time as long as that works.

    Attributes:
        width: the number of vectors at a time. 1 once an operation had no batching rule, or memory did not suffice.
    """

    def __init__(self, width: int) -> None:
        self.width = width

    def __call__(self, vectors: Tensor, image: Callable[[Tensor, bool], Images]) -> list[Images]:
        """`image(rows, True)` for several rows of `vectors` at a time, or `image(row, False)` for each."""
        if self.width > 1 and len(vectors) > 1:
            try:
                with warnings.catch_warnings():
                    # an operation without a batching rule would run in a slow loop under vmap
                    warnings.filterwarnings("error", message=".*batching rule.*")
                    return [image(rows, True) for rows in torch.split(vectors, self.width)]
            except (RuntimeError, Warning):
                self.width = 1
        return [image(row, False) for row in vectors]

"""Whether several Hessian-vector products are computed in one launch.

An accelerator runs small kernels as fast as the host launches them: eight products in one launch take little longer
than one. A CPU takes as long as for eight, and more memory.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from curvmon.errors import InputError

Batched = bool | Literal["auto"]
"""True: several per launch; False: one by one; "auto": whichever suits the device"""


def check_batched(batched: Any) -> None:
    if not (isinstance(batched, bool) or batched == "auto"):
        raise InputError(f'batched must be True, False or "auto", not {batched!r}')


def batches_products(batched: Batched, device: torch.device) -> bool:
    """Whether products are batched whatever the network; "auto" on a CPU: False, the operator may know better."""
    return device.type != "cpu" if batched == "auto" else batched

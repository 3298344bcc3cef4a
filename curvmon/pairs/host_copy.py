"""Tensors on the host in one transfer: the host waits for every copy, however small it is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from curvmon.numerics import precise


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors on the CPU in double precision: one copy for each device they are on."""
    by_device: dict[torch.device, list[int]] = defaultdict(list)
    for i, tensor in enumerate(tensors):
        by_device[tensor.device].append(i)
    copies = list(tensors)
    for indices in by_device.values():
        here = [tensors[i] for i in indices]
        flat = torch.cat([precise(tensor).reshape(-1) for tensor in here]).cpu().double()
        for i, part in zip(indices, torch.split(flat, [tensor.numel() for tensor in here])):
            copies[i] = part.view(tensors[i].shape)
    return copies

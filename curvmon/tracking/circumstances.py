"""What an alert may be explained by: learning rates, and how large weights and buffers are.

They raise no alert. A change of the curvature that comes with one of them has found its likely cause.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

RATE = "learning rate"
WEIGHTS, BUFFERS = "size of ", "statistics in "
FEWEST = 8
"""entries of a tensor that is looked at"""


@torch.no_grad()
def circumstances(model: nn.Module, optimizers: Iterable[Any] = ()) -> dict[str, float]:
    """`learning rate`, `size of blocks.1.conv1.weight`, `statistics in norm.running_var`, …: norms of tensors."""
    found = {}
    rates = [float(group["lr"]) for optimizer in optimizers for group in optimizer.param_groups if "lr" in group]
    if rates:
        found[RATE] = max(rates)
    named = [
        *((f"{WEIGHTS}{name}", parameter) for name, parameter in model.named_parameters()),
        *((f"{BUFFERS}{name}", buffer) for name, buffer in model.named_buffers()),
    ]
    named = [(name, tensor) for name, tensor in named if _can_be_weighed(tensor) and tensor.numel() >= FEWEST]
    if named:
        norms = [torch.linalg.vector_norm(tensor.detach(), dtype=_exact_enough(tensor)) for _, tensor in named]
        # one transfer for all of them
        found.update(zip((name for name, _ in named), torch.stack([n.to(norms[0]) for n in norms]).tolist()))
    return found


def node_of(cause: str, nodes: Sequence[str]) -> str | None:
    """The innermost node that the tensor lies in which a cause names."""
    name = cause.removeprefix(WEIGHTS)
    return max((node for node in nodes if name.startswith(f"{node}.")), key=len, default=None)


def _can_be_weighed(tensor: Tensor) -> bool:
    """Not one of eight bits, which are promoted to nothing, nor one without data or shape."""
    if not tensor.is_floating_point() or tensor.is_meta or tensor.layout != torch.strided or is_lazy(tensor):
        return False
    return tensor.element_size() > 1


def _exact_enough(tensor: Tensor) -> torch.dtype:
    """Norms of half-precision tensors overflow in their own."""
    return torch.promote_types(tensor.dtype, torch.float32)

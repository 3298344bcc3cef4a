"""What a monitor looks at: a model under a loss, and how to compute that loss without disturbing training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from curvmon.isolation.collectives import collectives_refused
from curvmon.monitor.pairs_and_spectrum import Loss


@dataclass(frozen=True)
class Target:
    """What is measured: a model under a loss."""

    model: nn.Module
    loss: Loss
    device: torch.device
    optimizer: torch.optim.Optimizer | None = None
    """its stability limit is compared with the sharpness"""
    isolation: Callable[[], AbstractContextManager[None]] = nullcontext
    """keeps what belongs to the training loop (loggers, learning rates, …) unchanged while the loss is computed"""


@contextmanager
def undisturbed(target: Target, world_size: int) -> Iterator[None]:
    """Inside the context a rank computes by itself, with its own buffers."""
    with ExitStack() as stack:
        stack.enter_context(target.isolation())
        # Trainer(detect_anomaly=True) would print tracebacks of passes that fail on purpose
        stack.enter_context(torch.autograd.set_detect_anomaly(False))
        stack.enter_context(collectives_refused(world_size))
        yield

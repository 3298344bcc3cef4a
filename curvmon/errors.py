"""Errors by kind; every message says what to do about it. And the one way to warn."""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch


class CurvmonError(Exception):
    """Base class of all errors that curvmon raises on purpose."""


class InputError(CurvmonError, ValueError):
    """An argument cannot be used: an empty batch, a wrong `batch_dim`, a budget below the minimum."""


class NodeError(InputError):
    """A node (or the output) was not found, never ran, or does not return a floating tensor."""


class LossError(CurvmonError, ValueError):
    """The loss is not a finite scalar that depends on the monitored nodes."""


class DivergedError(LossError):
    """The loss is not finite."""


class DoubleBackwardError(CurvmonError, RuntimeError):
    """An operation between the nodes and the loss cannot be differentiated twice."""


class DifferencesError(CurvmonError):
    """Differences of gradients cannot replace second derivatives here; the message says why.

    Attributes:
        lasts: they never will, for this network.
    """

    def __init__(self, message: str, *, lasts: bool = False) -> None:
        super().__init__(message)
        self.lasts = lasts


class NonFiniteError(CurvmonError, ArithmeticError):
    """The loss is finite, but its second derivatives are not."""


def warn(message: str) -> None:
    """A warning in the user's terminal, on rank 0 only."""
    if _rank() == 0:
        warnings.warn(f"curvmon: {message}", category=UserWarning, stacklevel=3)


def _rank() -> int:
    """From the process group if there is one, else from the environment, which launchers set."""
    if torch.distributed.is_available():
        # not the names in torch.distributed, which are replaced during a measurement
        group: Any = torch.distributed.distributed_c10d
        if group.is_initialized():
            return int(group.get_rank())
    ranks = (os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID"))
    return next((int(rank) for rank in ranks if rank is not None), 0)

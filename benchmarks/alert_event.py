"""What an event is: it takes a run as it is, and random numbers of its own."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch

from benchmarks.alert_training import Run

Place = str | None
"""the module where it happened; None where there is no particular one"""
Apply = Callable[[Run, torch.Generator], Place]
Moment = Literal["start", "middle", "end"]


class NotApplicableError(Exception):
    """This event cannot happen in this family: a text has no scale, and a network without batch norm no statistics."""


class Event(NamedTuple):
    apply: Apply
    cause: str
    when: Moment = "start"
    """of the epoch before the measurement; "end" if training would undo it"""
    is_drift: bool = False


def chance(seed: int, name: str) -> torch.Generator:
    """Random numbers of an event: they differ between seeds and names."""
    return torch.Generator().manual_seed(seed * 100_003 + zlib.crc32(name.encode()))

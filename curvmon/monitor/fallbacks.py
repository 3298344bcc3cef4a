"""Why a measurement fails, and what is tried next: one table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from curvmon.errors import DivergedError, DoubleBackwardError, InputError, NonFiniteError
from curvmon.isolation.collectives import CollectiveError

Part = Literal["pairs", "spectrum"]
ErrorKind = Literal["transient", "diverged", "memory", "input", "permanent"]
Fallback = Literal["training batch", "half the samples", "without the failed part"]


@dataclass(frozen=True)
class Failure:
    """Why nothing, or only one part, was measured.

    Attributes:
        kind: key of `RESPONSES`.
        message: class and message of the error.
        part: the part that failed.
    """

    kind: ErrorKind
    message: str
    part: Part = "pairs"


@dataclass(frozen=True)
class Response:
    """What follows an error of some kind."""

    fallbacks: tuple[Fallback, ...]
    """The first that applies is followed by another attempt; where none does, the measurement has failed."""
    retry_later: bool
    """The next validation tries again. If not, the failed part is not measured in this run any more."""


RESPONSES: Mapping[ErrorKind, Response] = {
    "transient": Response(("training batch",), retry_later=True),
    "diverged": Response(("training batch",), retry_later=True),
    "memory": Response(("half the samples",), retry_later=True),
    "input": Response(("training batch", "without the failed part"), retry_later=False),
    "permanent": Response(("without the failed part",), retry_later=False),
}
"""The training batch is tried only if the first measurement of a run fails on the validation batch; half the samples,
if the batch can be split; a measurement without the failed part, if another part remains.

One fallback comes before those of this table, within an attempt: out of memory, the spectrum is computed again on the
same samples in smaller batches (`pairs_and_spectrum.measure_spectrum`), until no batch can be split. The result is the
same, so there is no note. Pairs of layers have no such fallback: their metrics depend on the batch size.
"""

MAX_MESSAGE = 300
"""characters of an error's first line: some messages of torch list all its backends in it"""
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "status_alloc_failed")
"""the last is of cuBLAS and cuDNN, which allocate through the driver themselves"""


def classify(error: Exception) -> ErrorKind:
    if is_out_of_memory(error):
        return "memory"
    if isinstance(error, (DivergedError, NonFiniteError)):
        return "diverged"
    if isinstance(error, InputError):
        return "input"
    if isinstance(error, (DoubleBackwardError, CollectiveError)):
        return "permanent"
    return "transient"


def is_out_of_memory(error: BaseException) -> bool:
    """On a device or on the host."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    message = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in message for words in _OUT_OF_MEMORY)


def describe(error: Exception) -> str:
    """Class and first line of the message."""
    line = (str(error).strip().splitlines() or [""])[0]
    line = line if len(line) <= MAX_MESSAGE else f"{line[:MAX_MESSAGE]}…"
    return f"{type(error).__name__}: {line}".rstrip(": ")

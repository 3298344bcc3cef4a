"""Time in tests: how long they wait, and monitors that measure at every validation however slow the machine is."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

PATIENCE = 1200.0
"""seconds until a wait fails instead of hanging; no result depends on it"""


@contextmanager
def no_overhead_limit() -> Iterator[None]:
    """`CurvatureMonitor(...)` without `max_overhead` has no limit: it skips nothing when the machine is busy.

    The default of the signature is replaced, so that examples and command lines have none either.
    """
    from curvmon import CurvatureMonitor

    optional = [p for p in inspect.signature(CurvatureMonitor.__init__).parameters.values() if p.default is not p.empty]
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in optional) and "max_overhead" in {p.name for p in optional}
    defaults = tuple(None if p.name == "max_overhead" else p.default for p in optional)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CurvatureMonitor.__init__, "__defaults__", defaults)
        yield

"""Time in tests: how long they wait, and monitors that measure at every validation however slow the machine is."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from curvmon.monitor.settings import MonitorSettings

PATIENCE = 1200.0
"""seconds until a wait fails instead of hanging; no result depends on it"""


@contextmanager
def no_overhead_limit() -> Iterator[None]:
    """Monitors without `max_overhead` have no limit: they skip nothing when the machine is busy.

    The default of the signatures is replaced, so that examples and command lines have none either.
    """
    from curvmon import CurvatureMonitor

    with pytest.MonkeyPatch.context() as patch:
        for function in (CurvatureMonitor.__init__, MonitorSettings.__init__):
            optional = [p for p in inspect.signature(function).parameters.values() if p.default is not p.empty]
            assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in optional)
            assert "max_overhead" in {p.name for p in optional}
            defaults = tuple(None if p.name == "max_overhead" else p.default for p in optional)
            patch.setattr(function, "__defaults__", defaults)
        yield

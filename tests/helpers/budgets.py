"""A monitor with a budget, and a way to measure, that its constructor has no arguments for."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from curvmon import CurvatureMonitor
from curvmon.monitor.budget import Budget
from curvmon.monitor.measurement import Attempt, MeasurementRunner, attempt
from curvmon.recorder import monitored_run
from tests.helpers.fake_clock import FakeClock


def monitor_with(
    budget: Budget, attempt: Attempt = attempt, kind: type[CurvatureMonitor] = CurvatureMonitor, **options: Any
) -> CurvatureMonitor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(monitored_run, "Budget", lambda max_overhead: budget)
        patch.setattr(monitored_run, "MeasurementRunner", partial(MeasurementRunner, attempt=attempt))
        return kind(**options)


def monitor_without_time(**options: Any) -> CurvatureMonitor:
    """Its clock stands still: drawing takes no time, and every measurement has pictures."""
    return monitor_with(Budget(0.05, clock=FakeClock()), **options)

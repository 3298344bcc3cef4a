"""A monitor with a budget, and a way to measure, that its constructor has no arguments for."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from curvmon import CurvatureMonitor
from curvmon.integrations.lightning import callback
from curvmon.monitor.budget import Budget
from curvmon.monitor.measurement import Attempt, MeasurementRunner, attempt


def monitor_with(budget: Budget, attempt: Attempt = attempt, **options: Any) -> CurvatureMonitor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(callback, "Budget", lambda max_overhead: budget)
        patch.setattr(callback, "MeasurementRunner", partial(MeasurementRunner, attempt=attempt))
        return CurvatureMonitor(**options)

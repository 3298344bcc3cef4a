"""Whether an event mattered, in what the user logs: compared with the same run without it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise

from benchmarks.alert_monitoring import Seen
from benchmarks.alert_recording import Recorded

HORIZON = 3
"""validations whose mean counts: the first after an event, the last of a drift"""
LEAST_RISE, FLUCTUATIONS = 0.05, 3.0
"""the logarithm of the validation loss has to rise by so much, and by so many times its usual fluctuation"""
LEAST_LOSS_OF_ACCURACY = 0.05
RECENT = 8
"""validations before an event from which the fluctuation is estimated"""
DOUBLED = 2.0


def matters(run: Recorded) -> bool:
    """log(L / L_twin) > max(0.05, 3 s), or accuracy lower by five points; L: means of HORIZON validations.

    s: standard deviation of the differences of log L_twin between validations, over sqrt(2).
    """
    at = run.happened[-1].at
    last = min(len(run.measured), len(run.twin))
    window = slice(last - HORIZON, last) if run.role == "drift" else slice(at, min(at + HORIZON, last))
    ours, twins = run.measured[window], run.twin[window]
    loss, usual = _mean(ours, "val_loss"), _mean(twins, "val_loss")
    if not (math.isfinite(loss) and math.isfinite(usual)):
        return math.isfinite(usual)
    needed = max(LEAST_RISE, FLUCTUATIONS * _fluctuation(run.twin[max(1, at - RECENT) : last]))
    if math.log(loss / usual) > needed:
        return True
    return _mean(twins, "val_accuracy") - _mean(ours, "val_accuracy") >= LEAST_LOSS_OF_ACCURACY


def doubled_at(run: Recorded) -> int | None:
    """The first validation since the last event at which the smoothed loss is twice that of the twin, or not finite."""
    at = run.happened[-1].at
    for i in range(at, min(len(run.measured), len(run.twin))):
        recent = slice(max(at, i + 1 - HORIZON), i + 1)
        if not _mean(run.measured[recent], "val_loss") < DOUBLED * _mean(run.twin[recent], "val_loss"):
            return i
    return None


def _mean(seen: Sequence[Seen], key: str) -> float:
    """NaN where it is not logged."""
    return statistics.fmean(each.logged.get(key, math.nan) for each in seen)


def _fluctuation(seen: Sequence[Seen]) -> float:
    logs = [math.log(each.logged["val_loss"]) for each in seen if 0 < each.logged["val_loss"] < math.inf]
    differences = [b - a for a, b in pairwise(logs)]
    return statistics.stdev(differences) / math.sqrt(2) if len(differences) > 1 else 0.0

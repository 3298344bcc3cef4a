"""What an alert says about the step ratio."""

from __future__ import annotations

import math

from curvmon.alerts.instability import Instability
from curvmon.alerts.wording import headline
from curvmon.records import Alert


def alert_of_instability(event: Instability, step: int, epoch: int) -> Alert:
    """A warning of an approaching instability, or a notice that the learning rate could be larger."""
    ratio, usual, rate = event.step_ratio, event.usual, event.learning_rate
    warns = event.kind == "approaching_instability"
    critical = rate / ratio if ratio > 0 else math.nan
    rates = f"learning rate {rate:.3g}, critical learning rate {critical:.3g}"
    if warns:
        title = headline(f"Approaching instability: step ratio {ratio:.2g}, usually {usual:.2g}", step=step)
        evidence = (
            f"step ratio from {usual:.2g} to {ratio:.2g}: at 1, a step no longer lowers the loss of its own batch",
            rates,
        )
        suggestion = f"Lower the learning rate to about {event.suggested_lr:.2g}, or use a longer warm-up."
    else:
        title = headline(f"The learning rate could be larger: step ratio {ratio:.2g}", step=step)
        evidence = (f"step ratio {ratio:.2g}, where 1 is the limit of stability", rates)
        suggestion = f"A learning rate of about {event.suggested_lr:.2g} would be stable now; raise it in steps."
    return Alert(
        kind=event.kind,
        metric="step_ratio",
        where="step_ratio",
        before=usual,
        after=ratio,
        score=ratio / usual if usual > 0 else math.inf,
        step=step,
        epoch=epoch,
        headline=title,
        evidence=evidence,
        suggestion=suggestion,
        level="warning" if warns else "info",
    )

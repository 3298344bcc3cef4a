"""What an alert says about the step ratio."""

from __future__ import annotations

import math

from curvmon.alerts.instability import Instability
from curvmon.alerts.wording import headline
from curvmon.records import Alert
from curvmon.records.formatting import short


def alert_of_instability(event: Instability, step: int, epoch: int) -> Alert:
    """A warning of an approaching instability, or a notice that the learning rate could be larger."""
    is_warning = event.kind == "approaching_instability"
    if is_warning:
        title = headline(f"Approaching instability: {_subject(event)}", step=step)
        evidence: tuple[str, ...] = (_cause(event), _limit(event))
        suggestion = f"Lower the learning rate to about {short(event.suggested_lr)}, or use a longer warm-up."
    else:
        title = headline(f"The learning rate could be larger: step ratio {short(event.step_ratio)}", step=step)
        evidence = (_limit(event),)
        suggestion = f"Try a learning rate of {short(event.suggested_lr)}, in steps."
    return Alert(
        kind=event.kind,
        metric="step_ratio",
        where="step_ratio",
        before=event.usual,
        after=event.step_ratio,
        score=event.factor if math.isfinite(event.factor) else math.inf,
        step=step,
        epoch=epoch,
        headline=title,
        evidence=evidence,
        suggestion=suggestion,
        level="warning" if is_warning else "info",
    )


def _subject(event: Instability) -> str:
    subjects = {"learning_rate": "learning rate", "step_ratio": "step ratio", "gain": "gain of a step"}
    if not math.isfinite(event.factor):
        return f"{subjects[event.cause]} {short(event.step_ratio)}" if event.cause == "step_ratio" else "unusual steps"
    return f"{subjects[event.cause]} {short(event.factor)} times its usual value"


def _cause(event: Instability) -> str:
    if event.cause == "learning_rate":
        return f"learning rate: {short(event.learning_rate / event.factor)} → {short(event.learning_rate)}"
    if event.cause == "gain":
        return f"gain of a step over its learning rate: {short(event.factor)} times its usual value, at no smaller loss"
    before = f"{short(event.usual)} → " if math.isfinite(event.usual) else ""
    return f"step ratio: {before}{short(event.step_ratio)}"


def _limit(event: Instability) -> str:
    if event.step_ratio == math.inf:
        return "steps go uphill on their own batch"
    if event.step_ratio <= 0:
        return "the curvature along the steps is not positive"
    critical = min(event.learning_rate / event.step_ratio, event.critical_lr)  # NaN is not the smaller one
    return (
        f"step ratio {short(event.step_ratio)}, where 1 is the limit: learning rate {short(event.learning_rate)}, "
        f"critical learning rate {short(critical)}"
    )

"""What a run says about its measurements: what is planned, the first time that one is skipped, and what was done."""

from __future__ import annotations

from collections.abc import Sequence

from curvmon.monitor.budget import Budget


def planned(nodes: Sequence[str], samples: str, stride: int | None, where: str, loggers: Sequence[str]) -> str:
    """What is measured, on which samples, in how many of the validations (`where`), and where it goes."""
    often = "as often as the budget allows" if stride is None else f"in every {where}"
    if stride is not None and stride > 1:
        often = f"in about every {_ordinal(stride)} {where}"
    layers = f"{len(nodes)} layers ({', '.join(nodes)})" if nodes else ""
    parts = [layers, samples, f"full measurements {often}", *(loggers or ["no logger"])]
    return ", ".join(part for part in parts if part)


def skipped(step: int, max_overhead: float | None, free_seconds: float) -> str:
    return (
        f"vital signs only at step {step}: full measurements in every validation would take more than "
        f"max_overhead={max_overhead} of the training time and {free_seconds:g} seconds. max_overhead=None makes them "
        "all the same; fewer eigenvalues, nodes or samples make them cheaper"
    )


def summary(full: int, points: int, alerts: int, notices: int, budget: Budget) -> str:
    parts = [f"measured {full} of {points} in full", f"{points} vital signs", _count(alerts, "alert")]
    parts += [_count(notices, "notice")] if notices else []
    if budget.trained:
        parts.append(f"overhead {100 * budget.overhead:.1f} %{_allowed(budget)}")
    return ", ".join(parts)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _allowed(budget: Budget) -> str:
    """Where the overhead is above the share that was asked for: why."""
    share = budget.max_overhead
    if share is None or budget.overhead <= share:
        return ""
    free = f" plus {budget.free_seconds:g} s" if budget.free_seconds else ""
    limit = f"the limit is {100 * share:g} %{free}; the first and the last measurement are made in any case"
    return f" ({budget.measured:.0f} s; {limit})"


def _ordinal(n: int) -> str:
    ending = "th" if n % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f"{n}{ending}"

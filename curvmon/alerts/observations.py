"""What else two snapshots show: evidence that any alert can have, such as the loss before and after."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from curvmon.alerts.context import Cause, Kind
from curvmon.alerts.rate_growth import RateGrowth, learning_rate
from curvmon.alerts.wording import before_after
from curvmon.records import Snapshot

MAX_EVIDENCE, MAX_CAUSES = 4, 3
VISIBLE = 1.2
"""two values that differ by this factor differ visibly"""


def is_visible(before: float, after: float) -> bool:
    """The two numbers alone show that something happened."""
    small, large = sorted((abs(before), abs(after)))
    return large > VISIBLE * small or not math.isfinite(before)


def evidence(
    first: Sequence[str],
    before: Snapshot | None,
    now: Snapshot,
    causes: Sequence[Cause] = (),
    reported: str = "",
    growth: RateGrowth | None = None,
) -> tuple[str, ...]:
    """At most four points: `first`, the loss if it changed, a learning rate that grew, the causes, then whatever else
    changed; two at least.

    Args:
        first: points of the alert itself.
        before: the snapshot to compare with; None if there is none.
        now: the snapshot of the alert.
        causes: changes of the context at the same time.
        reported: name of the metric that `first` is about.
        growth: of the learning rate.
    """
    loss = _observed("loss of the probe batch", lambda s: s.loss, before, now) if reported != "loss" else None
    points = [*first]
    if loss is not None and loss[1]:
        points.append(loss[0])
    jumped = any(cause.kind == "learning rate" for cause in causes)
    if growth is not None and not (jumped and growth.validations == 1):  # which the causes say
        points.append(growth.text)
    if causes:
        points.append(f"at the same time: {list_causes(causes)}")
    others = [
        None if reported == "lambda_1" else _observed("sharpness λ_1", lambda s: s.sharpness, before, now),
        None if jumped or growth is not None else _observed("learning rate", learning_rate, before, now),
        _observed("norm of all weights", _weight_norm, before, now),
    ]
    points += [text for text, visible in filter(None, others) if visible]
    if len(points) < 2 and loss is not None:
        points.append(f"{loss[0]}, hardly changed")
    return tuple(points[:MAX_EVIDENCE])


def list_causes(causes: Sequence[Cause]) -> str:
    """The most informative kinds first. Of many norms that changed, the one that changed most clearly is named."""
    order: tuple[Kind, ...] = ("operations", "learning rate", "training loss")
    named = [cause.text for kind in order for cause in causes if cause.kind == kind][:MAX_CAUSES]
    norms = [cause for kind in ("weights", "statistics") for cause in causes if cause.kind == kind]
    more = f" and {len(norms) - 1} more" if len(norms) > 1 else ""
    return ", ".join([*named, *(f"{cause.text}{more}" for cause in norms[:1])])


def raised_rate(causes: Sequence[Cause]) -> Cause | None:
    """A learning rate that rose."""
    return next((cause for cause in causes if cause.kind == "learning rate" and cause.after > cause.before), None)


def loss_rose(before: Snapshot | None, now: Snapshot) -> bool:
    return before is not None and now.loss > VISIBLE * before.loss


def since(before: Snapshot | None, now: Snapshot) -> str:
    """When it happened: `between steps 250 and 298`."""
    return f"before step {now.step}" if before is None else f"between steps {before.step} and {now.step}"


def checkpoint(before: Snapshot | None, now: Snapshot) -> str:
    """Where to go back to. Names of checkpoints count steps differently from the x-axis of loggers."""
    if before is None:
        return f"a checkpoint from before step {now.step}"
    return f"a checkpoint of the validation at step {before.step}, or an earlier one"


def _weight_norm(snapshot: Snapshot) -> float:
    return math.nan if snapshot.vitals is None else snapshot.vitals.weight_norm


def _observed(
    title: str, read: Callable[[Snapshot], float], before: Snapshot | None, now: Snapshot
) -> tuple[str, bool] | None:
    """Its values before and after, and whether they differ visibly; None if one of them is not known."""
    if before is None:
        return None
    a, b = read(before), read(now)
    return None if math.isnan(a) or math.isnan(b) else (f"{title}: {before_after(a, b)}", is_visible(a, b))

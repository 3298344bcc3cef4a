"""Words of alerts: headlines in fewer than 80 characters, verbs by direction and size, values before and after."""

from __future__ import annotations

import math

from curvmon.records.formatting import short

MAX_HEADLINE = 79
SHORTEST_NAME = 5
"""characters that are left of a name at least"""
JUMPED = 3.0
"""times the value before"""
COLLAPSED, VANISHED = 0.5, 0.02
"""share of the value before"""
_LOSES_STRUCTURE = ("resonance", "coupling", "stable_rank")
"""metrics that collapse; a loss or an eigenvalue merely falls"""


def headline(text: str, *names: str, step: int | None = None, limit: int = MAX_HEADLINE) -> str:
    """`text` with its `{}` replaced by the names, then `, step 298`, in at most `limit` characters.

    Names are shortened in the middle where they do not fit.

    Example:
        >>> headline("Coupling collapsed at {} → {}", "layer3", "layer4", step=298)
        'Coupling collapsed at layer3 → layer4, step 298'
    """
    if step is not None:
        text = f"{text}, step {step}"
    names = tuple(" ".join(name.split()) for name in names)
    available = limit - len(text.format(*[""] * len(names)))
    return shorten(text.format(*_shortened(names, available)), limit)


def shorten(text: str, limit: int) -> str:
    """Cut out of the middle: `model.encoder.layers.11` in 15 characters is `model.e…yers.11`."""
    if len(text) <= limit:
        return text
    kept = max(limit - 1, 2)
    return f"{text[: kept - kept // 2]}…{text[-(kept // 2) :]}"


def verb(metric: str, before: float, after: float) -> str:
    """rose, jumped; fell, collapsed, vanished."""
    if not after < before:
        return "jumped" if before >= 0 and after >= JUMPED * before else "rose"
    if metric not in _LOSES_STRUCTURE or after > COLLAPSED * before:
        return "fell"
    return "vanished" if after <= VANISHED * before else "collapsed"


def before_after(before: float, after: float) -> str:
    """`0.82 → 0.31`; `0.31` where it is not known what was before."""
    return short(after) if math.isnan(before) else f"{short(before)} → {short(after)}"


def times(before: float, after: float) -> str:
    """`x 300`, `x 0.71`."""
    return f"x {short(float(f'{after / before:.2g}'))}"


def _shortened(names: tuple[str, ...], available: int) -> list[str]:
    """The longest ones are shortened first, to the same length."""
    longest = max(map(len, names), default=0)
    while longest > SHORTEST_NAME and sum(min(len(name), longest) for name in names) > available:
        longest -= 1
    return [shorten(name, longest) for name in names]

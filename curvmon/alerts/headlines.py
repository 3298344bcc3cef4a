"""Headlines: fewer than 80 characters, with names of layers shortened in the middle where they do not fit."""

from __future__ import annotations

MAX_HEADLINE = 79
SHORTEST_NAME = 5
"""characters that are left of a name at least"""


def headline(text: str, *names: str, step: int | None = None, limit: int = MAX_HEADLINE) -> str:
    """`text` with its `{}` replaced by the names, then `, step 298`, in at most `limit` characters.

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


def _shortened(names: tuple[str, ...], available: int) -> list[str]:
    """The longest ones are shortened first, to the same length."""
    longest = max(map(len, names), default=0)
    while longest > SHORTEST_NAME and sum(min(len(name), longest) for name in names) > available:
        longest -= 1
    return [shorten(name, longest) for name in names]

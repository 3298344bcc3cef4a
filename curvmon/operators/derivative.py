"""How second derivatives are computed: by differentiating twice, or by differences of gradients where that fails."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal, TypeVar

from curvmon.errors import DifferencesError, DoubleBackwardError, InputError

Way = Literal["double", "differences"]
Derivative = Way | Literal["auto"]
"""differentiate twice; differences of gradients; the first, and the second where an operation does not allow it"""
Result = TypeVar("Result")


def check_derivative(derivative: Any) -> None:
    if derivative not in ("auto", "double", "differences"):
        raise InputError(f'derivative must be "auto", "double" or "differences", not {derivative!r}')


def with_fallback(
    run: Callable[[Way, list[str]], Result],
    derivative: Derivative,
    suspicion: Callable[[Result], str | None] = lambda result: None,
) -> Result:
    """`run(way, notes)` for the first way that works; the notes say why it is not the first one.

    `suspicion`: what shows that second derivatives are wrong. The result is replaced if differences work: they do not
    for a straight-through estimator, which has no Hessian at all.

    Raises:
        DoubleBackwardError: neither works.
    """
    check_derivative(derivative)
    if derivative != "auto":
        return run(derivative, [])
    try:
        result = run("double", [])
    except DoubleBackwardError as error:
        missing = error
    else:
        reason = suspicion(result)
        if reason is None:
            return result
        with suppress(DifferencesError):
            return run("differences", [f"differences of gradients; without them, {reason.removeprefix('suspect: ')}"])
        return result
    try:
        return run("differences", [f"differences of gradients: {str(missing).split(': ', maxsplit=1)[0]}"])
    except DifferencesError as error:
        raise DoubleBackwardError(f"{missing}; differences of gradients do not replace it: {error}") from error


def note_that_starts_with(words: str) -> Callable[[Any], str | None]:
    """The first such note of a result."""
    return lambda result: next((note for note in result.notes if note.startswith(words)), None)

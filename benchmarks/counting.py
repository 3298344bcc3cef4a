"""Products counted where they are computed, in any package; a search that takes too many is interrupted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from curvmon.operators.gradient_differences import DifferenceOperator
from curvmon.operators.parameter_hessian import ParameterOperator

MOST_PRODUCTS = 200
"""of one search; a method that has not stopped by then is interrupted"""


class InterruptedSearchError(Exception):
    """By a method that took MOST_PRODUCTS."""


@contextmanager
def replaced(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, wrap(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def counted_calls(owner: Any, name: str) -> Iterator[list[int]]:
    count = [0]

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*args: Any) -> Any:
            one_more(count)
            return original(*args)

        return counting

    with replaced(owner, name, wrap):
        yield count


def one_more(count: list[int], limit: int = MOST_PRODUCTS) -> None:
    if count[0] >= limit:
        raise InterruptedSearchError
    count[0] += 1


@contextmanager
def counted_products() -> Iterator[list[int]]:
    """Products with H alone; `Spectrum.hvps` also counts what the trace and the start are worth."""
    count = [0]

    def wrap(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def counting(self: ParameterOperator, rows: Any, columns: Any, vectors: Tensor) -> Tensor:
            count[0] += vectors.shape[1]
            return original(self, rows, columns, vectors)

        return counting

    with replaced(ParameterOperator, "_block", wrap), replaced(DifferenceOperator, "_block", wrap):
        yield count


@contextmanager
def counted_besides() -> Iterator[list[int]]:
    """What else is counted as so many products, in the order in which it was done."""
    spent: list[int] = []

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def noting(self: ParameterOperator, products: int) -> Any:
            spent.append(products)
            return original(self, products)

        return noting

    with replaced(ParameterOperator, "spend", wrap):
        yield spent

"""A progress bar for measurements that take longer than two seconds, beside Lightning's own: Rich's or tqdm's."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

DELAY = 2.0
Tick = Callable[[int], None]
"""takes the number of products that were just made"""


@contextmanager
def progress(trainer: Any, total: int | None) -> Iterator[Tick]:
    """A function to call after products; `total` is how many the last measurement took, if there was one."""
    display = _display(trainer, total)
    if display is None:
        yield lambda products: None
        return
    began, shown, waiting = time.perf_counter(), False, 0

    def tick(products: int) -> None:
        nonlocal shown, waiting
        waiting += products
        if time.perf_counter() - began < DELAY:
            return
        # a terminal that does not take it must not cost a measurement
        with suppress(Exception):
            if not shown:
                shown = True
                display.open()
            display.advance(waiting)
            waiting = 0

    try:
        yield tick
    finally:
        if shown:
            with suppress(Exception):
                display.close()


def _display(trainer: Any, total: int | None) -> _Rich | _Tqdm | None:
    bar = getattr(trainer, "progress_bar_callback", None)
    if bar is None or not trainer.is_global_zero or not getattr(bar, "is_enabled", False):
        return None
    if hasattr(bar, "progress"):  # RichProgressBar: a second live display would tear the first
        return None if bar.progress is None else _Rich(bar.progress, total)
    return _Tqdm(total)


class _Rich:
    def __init__(self, display: Any, total: int | None) -> None:
        self._display, self._total = display, total

    def open(self) -> None:
        self._task = self._display.add_task("curvmon", total=self._total)

    def advance(self, products: int) -> None:
        self._display.update(self._task, advance=products)
        self._display.refresh()

    def close(self) -> None:
        self._display.remove_task(self._task)


class _Tqdm:
    def __init__(self, total: int | None) -> None:
        self._total = total

    def open(self) -> None:
        # by name: the package has no types
        self._bar = importlib.import_module("tqdm.auto").tqdm(
            total=self._total, desc="curvmon", unit=" products", leave=False, position=2
        )

    def advance(self, products: int) -> None:
        self._bar.update(products)

    def close(self) -> None:
        self._bar.close()

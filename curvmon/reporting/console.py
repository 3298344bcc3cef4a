"""The console: a line for every measurement, and a progress bar for long ones."""

from __future__ import annotations

import importlib
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from curvmon.metrics.registry import pair_metrics
from curvmon.records import Snapshot
from curvmon.reporting.canvas import brief

DELAY = 2.0
"""seconds after which the progress bar appears"""
Tick = Callable[[int], None]
"""takes the number of Hessian-vector products that were just computed"""


def print_line(loop: Any, line: str) -> None:
    """A terminal that has no λ shows a question mark; one that is closed shows nothing."""
    bar = loop.progress_bar_callback
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    line = line.encode(encoding, errors="replace").decode(encoding)
    with suppress(Exception):
        if bar is not None and hasattr(bar, "print") and bar.is_enabled:
            bar.print(line)
        else:
            print(line, flush=True)


def summary(snapshot: Snapshot) -> str:
    """One line: the pair metrics of the most distant pair, λ_1, and the cost."""
    parts = [f"curvmon: step {snapshot.step}"]
    if snapshot.measurement is not None:
        first, last = snapshot.measurement.nodes[0], snapshot.measurement.nodes[-1]
        for spec in pair_metrics():
            value = spec.by_distance(snapshot.measurement)[-1].item()
            parts.append(f"{spec.symbol or spec.title}({first}, {last}) {brief(value)}")
    if snapshot.spectrum is not None:
        parts.append(f"λ_1 {brief(snapshot.spectrum.sharpness)}")
    parts.append(f"{snapshot.hvps} HVPs, {snapshot.seconds:.1f} s")
    if math.isfinite(snapshot.overhead):
        parts.append(f"overhead {100 * snapshot.overhead:.1f} %")
    return ", ".join(parts)


@contextmanager
def progress(loop: Any, total: int | None) -> Iterator[Tick]:
    """A progress bar for measurements that take longer than `DELAY`, next to Lightning's own: Rich's or tqdm's.

    Yields a function to call after Hessian-vector products. `total` is how many the last measurement took, if any.
    """
    display = _display(loop, total)
    if display is None:
        yield lambda products: None
        return
    began, shown, pending = time.perf_counter(), False, 0

    def tick(products: int) -> None:
        nonlocal shown, pending
        pending += products
        if time.perf_counter() - began < DELAY:
            return
        # a terminal that raises must not cost a measurement
        with suppress(Exception):
            if not shown:
                shown = True
                display.open()
            display.advance(pending)
            pending = 0

    try:
        yield tick
    finally:
        if shown:
            with suppress(Exception):
                display.close()


def _display(loop: Any, total: int | None) -> _Rich | _Tqdm | None:
    bar = getattr(loop, "progress_bar_callback", None)
    if bar is None or not loop.is_global_zero or not getattr(bar, "is_enabled", False):
        return None
    if hasattr(bar, "progress"):  # RichProgressBar: a second live display would corrupt the first
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
            total=self._total, desc="curvmon", unit=" HVPs", leave=False, position=2
        )

    def advance(self, products: int) -> None:
        self._bar.update(products)

    def close(self) -> None:
        self._bar.close()

"""What every figure needs: a canvas, its pixels, few ticks, short names and numbers.

Uses matplotlib's objects without pyplot: no global state is touched, no window opens, nothing needs closing.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def available() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


@contextmanager
def plain() -> Iterator[None]:
    """matplotlib's default style while figures are drawn: a user's style may need LaTeX, or have white text."""
    from matplotlib import style

    with style.context("default"):
        yield


def new_figure(width: float, height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=110)
    FigureCanvasAgg(figure)
    return figure


def margins(figure: Any, *, left: float, right: float, bottom: float, top: float, **spaces: float) -> None:
    """Margins of a figure, in inches."""
    width, height = figure.get_size_inches()
    figure.subplots_adjust(left / width, bottom / height, 1 - right / width, 1 - top / height, **spaces)


def pixels(figure: Any) -> Tensor:
    """The figure as height x width x RGB bytes."""
    figure.canvas.draw()
    width, height = figure.canvas.get_width_height()
    colours = torch.frombuffer(bytearray(figure.canvas.buffer_rgba()), dtype=torch.uint8)
    return colours.reshape(height, width, 4)[:, :, :3].contiguous()


def short_names(nodes: Sequence[str], most: int = 18) -> tuple[list[str], str]:
    """Names without their common prefix and suffix, long ones shortened in the middle; and the common part.

    "model.layers.0.mlp", "model.layers.1.mlp" are "0" and "1" of "model.layers.*.mlp".
    """
    parts = [name.split(".") for name in nodes]
    prefix: list[str] = []
    suffix: list[str] = []
    if len(nodes) > 1:
        while all(len(part) > 1 for part in parts) and len({part[0] for part in parts}) == 1:
            prefix.append(parts[0][0])
            parts = [part[1:] for part in parts]
        while all(len(part) > 1 for part in parts) and len({part[-1] for part in parts}) == 1:
            suffix.insert(0, parts[0][-1])
            parts = [part[:-1] for part in parts]
    names = [".".join(part) for part in parts]
    while len({_cut(name, most) for name in names}) < len(set(names)):
        most += 2
    return [_cut(name, most) for name in names], ".".join([*prefix, "*", *suffix]) if prefix or suffix else ""


def _cut(name: str, most: int) -> str:
    return name if len(name) <= most else f"{name[: most // 2 - 1]}…{name[-(most // 2) :]}"


def brief(value: float) -> str:
    """Two significant digits: 0.82, 13, 4.1e-3."""
    if not math.isfinite(value):
        return "–" if math.isnan(value) else "∞" if value > 0 else "-∞"
    if value == 0:
        return "0"
    if 0.01 <= abs(value) < 999.5:
        return f"{value:.2g}" if abs(value) < 99.5 else f"{value:.0f}"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"


def few_ticks(axis: Any, low: float, high: float) -> None:
    """A logarithmic axis with few ticks and short labels, also where it spans less than a decade."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    narrow, wide = high < 4 * low, high > 1000 * low
    subs = (1.0,) if wide else (1.0, 2.0, 5.0)
    axis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]) if narrow else LogLocator(subs=subs, numticks=8))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}" if narrow else brief(value)))


def text_width(figure: Any, text: str, size: float) -> float:
    """Width of a text at a font size, in inches."""
    from matplotlib.font_manager import FontProperties

    font = FontProperties(size=size)
    width: float = figure.canvas.get_renderer().get_text_width_height_descent(text, font, False)[0]
    return width / float(figure.dpi)

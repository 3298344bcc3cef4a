"""What every figure needs: a canvas, its pixels, few ticks, short names and numbers.

Uses matplotlib's objects without pyplot: no global state is touched, no window opens, nothing needs closing.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator, Sequence
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


def pyplot_figure(width: float, height: float) -> Any:
    """A figure that pyplot knows: a notebook shows it, `plt.show()` opens a window."""
    from matplotlib import pyplot

    return pyplot.figure(figsize=(width, height), dpi=110)


NewFigure = Callable[[float, float], Any]
"""makes an empty figure, width x height inches"""


class KeptFigures:
    """Figures that are drawn on again: making axes, ticks and the layout of their labels takes half of the time.

    A copy, and what is read from a pickle, is empty.

    Args:
        new: makes the figures: `new_figure`, or `pyplot_figure` for a user who draws on them.
    """

    def __init__(self, new: NewFigure = new_figure) -> None:
        self._new = new
        self._figures: dict[tuple[Any, ...], Any] = {}

    def get(self, kind: str, structure: tuple[Any, ...], make: Callable[[NewFigure], Any]) -> Any:
        """The figure of that kind; made again if something else than its data has changed."""
        figure = self._figures.get((kind, structure))
        if figure is None:
            self._figures = {key: other for key, other in self._figures.items() if key[0] != kind}
            figure = self._figures[kind, structure] = make(self._new)
        return figure

    def __reduce__(self) -> tuple[type[KeptFigures], tuple[()]]:
        return KeptFigures, ()


def without_curves(axis: Any) -> Any:
    """The axis as if nothing had been plotted: linear, with limits that follow the data."""
    for artist in (*axis.lines, *axis.collections, *axis.texts):
        artist.remove()
    axis.containers.clear()
    axis.set_yscale("linear")
    axis.relim()
    axis.set_autoscale_on(True)
    return axis


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
    from matplotlib.ticker import FuncFormatter, NullLocator

    locator, label = log_ticks(low, high)
    axis.set_major_locator(locator)
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: label(value)))


def log_ticks(low: float, high: float) -> tuple[Any, Callable[[float], str]]:
    """A locator for a logarithmic scale from low to high, and the text of a tick."""
    from matplotlib.ticker import LogLocator, MaxNLocator

    if high < 4 * low:
        return MaxNLocator(4, steps=[1, 2, 5, 10]), "{:.3g}".format
    return LogLocator(subs=(1.0,) if high > 1000 * low else (1.0, 2.0, 5.0), numticks=8), brief


def text_width(figure: Any, text: str, size: float) -> float:
    """Width of a text at a font size, in inches."""
    from matplotlib.backends.backend_agg import RendererAgg
    from matplotlib.font_manager import FontProperties

    font, canvas = FontProperties(size=size), figure.canvas
    # a canvas of pyplot's may be one without pixels (svg, pdf)
    make: Any = RendererAgg
    renderer = canvas.get_renderer() if hasattr(canvas, "get_renderer") else make(1, 1, figure.dpi)
    width: float = renderer.get_text_width_height_descent(text, font, False)[0]
    return width / float(figure.dpi)

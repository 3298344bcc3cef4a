"""Checks that the text of a matplotlib figure is inside of it, and that no text or panel lies over another."""

from __future__ import annotations

from itertools import pairwise, permutations
from typing import Any


def assert_nothing_is_cut_off_or_overlaps(figure: Any) -> None:
    """After the figure has been drawn."""
    renderer, bounds = figure.canvas.get_renderer(), figure.bbox
    inside: list[Any] = [*figure.texts, *(axis.get_legend() for axis in figure.axes if axis.get_legend())]
    for axis in figure.axes:
        inside += [axis.title, axis.xaxis.label, axis.yaxis.label]
        slanted = any(label.get_rotation() for label in axis.get_xticklabels())
        for direction, ticks in (("x", axis.xaxis), ("y", axis.yaxis)):
            shown = _shown(axis, ticks, direction)
            inside += shown
            spans = sorted(tuple(getattr(label.get_window_extent(renderer), f"interval{direction}")) for label in shown)
            if not (slanted and direction == "x"):
                assert all(a[1] < b[0] for a, b in pairwise(spans)), (direction, spans)
    for item in inside:
        if not hasattr(item, "get_text") or item.get_text():
            box = item.get_window_extent(renderer)
            assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= bounds.x1 and box.y1 <= bounds.y1, item
    for a, b in permutations(figure.axes, 2):  # with all its labels, no panel lies over another
        assert not a.get_tightbbox(renderer).overlaps(b.bbox)


def _shown(axis: Any, ticks: Any, direction: str) -> list[Any]:
    """Labels of the ticks within the limits; matplotlib keeps some outside."""
    low, high = sorted(axis.get_xlim() if direction == "x" else axis.get_ylim())
    pairs = zip(ticks.get_majorticklocs(), ticks.get_majorticklabels())
    return [label for place, label in pairs if low <= place <= high and label.get_text()]

"""When pictures are drawn: at the first measurement, at every alert, at the last one, and between them where cheap.

    seconds of drawing so far + seconds of the last drawing ≤ 0.1 · seconds of measuring so far

says whether a measurement between them has pictures, those that have changed; one in fifty has, whatever the seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from curvmon.reporting.loggers import Draw

MAX_SHARE = 0.1
"""seconds of drawing as a share of the seconds of measuring"""
MOST_WITHOUT = 50
"""measurements after which pictures are drawn again, however cheap the measurements are"""


class Picture(NamedTuple):
    """`content`: the numbers in it; None if it differs every time."""

    draw: Draw
    content: Tensor | None = None


class Undrawn(NamedTuple):
    """Pictures of one measurement, by key, and its step."""

    pictures: Mapping[str, Picture]
    step: int


class PictureSchedule:
    """Holds the pictures of the latest measurement until they are drawn, or until a later measurement replaces them.

    Attributes:
        undrawn: None if they are drawn.
        due: whether they are to be drawn at once. If not, and no other measurement follows: at the end of training.
    """

    def __init__(self) -> None:
        self.undrawn: Undrawn | None = None
        self.due = False
        self._without: int | None = None
        """measurements since the last one with pictures; None before the first one"""
        self._contents: dict[str, Tensor | None] = {}
        """of the pictures that were drawn last"""
        self._measured = 0.0
        self._drawn = 0.0
        self._last = 0.0
        """seconds of measuring, of drawing, and of the last drawing"""

    def start(self) -> None:
        """Training starts: its first measurement has pictures, and what was not drawn before is out of date."""
        self.undrawn, self.due, self._without = None, False, None

    def measured(self, pictures: Mapping[str, Picture], step: int, seconds: float, alert: bool) -> None:
        """A measurement, which took some seconds and may have raised an alert, and what it would show."""
        self._measured += seconds
        required = alert or self._without is None or self._without + 1 >= MOST_WITHOUT
        affordable = self._drawn + self._last <= MAX_SHARE * self._measured
        if affordable and not required:
            pictures = {key: picture for key, picture in pictures.items() if self._has_changed(key, picture)}
        self.undrawn = Undrawn(pictures, step) if pictures else None
        self.due = self.undrawn is not None and (required or affordable)
        self._without = (self._without or 0) + 1

    def drew(self, seconds: float) -> None:
        """They are drawn, which took some seconds."""
        if self.undrawn is not None:
            self._contents.update({key: picture.content for key, picture in self.undrawn.pictures.items()})
        self.undrawn, self.due, self._without = None, False, 0
        self._drawn += seconds
        self._last = seconds

    def _has_changed(self, key: str, picture: Picture) -> bool:
        before = self._contents.get(key)
        return before is None or picture.content is None or not torch.equal(before, picture.content)

"""Loggers that keep everything in memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from pytorch_lightning.loggers import Logger

from tests.helpers.logger_readers import Pictures, Rows


class Recorder(Logger):
    """A user's own logger, with no more than Lightning asks for."""

    name, version = "recorder", "0"

    def __init__(self) -> None:
        super().__init__()
        self.rows: Rows = []
        self.saved = 0

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        assert step is not None
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        pass

    def save(self) -> None:
        self.saved = len(self.rows)

    def measured(self, key: str = "curvmon/alerts") -> Rows:
        return [(step, row) for step, row in self.rows if key in row]


class PictureRecorder(Recorder):
    """With pictures, in the way of W&B's logger."""

    def __init__(self) -> None:
        super().__init__()
        self.images: Pictures = {}

    def log_image(self, key: str, images: list[np.ndarray], step: int) -> None:
        (self.images.setdefault(key, {})[step],) = images

"""A line in the console for every measurement."""

from __future__ import annotations

import math
import sys
from contextlib import suppress
from typing import Any

from curvmon.records import Snapshot
from curvmon.reporting.canvas import brief


def say(trainer: Any, line: str) -> None:
    """A terminal that has no λ gets a question mark; one that is closed gets nothing."""
    bar = trainer.progress_bar_callback
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    line = line.encode(encoding, errors="replace").decode(encoding)
    with suppress(Exception):
        if bar is not None and hasattr(bar, "print") and bar.is_enabled:
            bar.print(line)
        else:
            print(line, flush=True)


def summary(snapshot: Snapshot) -> str:
    """One line: the largest distance tells most."""
    parts = [f"curvmon: step {snapshot.step}"]
    if snapshot.measurement is not None:
        found = snapshot.measurement
        for metric, letter in (("resonance", "R"), ("coupling", "C"), ("stable_rank", "D"), ("gn_gap", "gap")):
            far = found.by_distance(metric)[-1].item()  # type: ignore[arg-type]
            parts.append(f"{letter}({found.nodes[0]}, {found.nodes[-1]}) {brief(far)}")
    if snapshot.spectrum is not None:
        parts.append(f"λ_1 {brief(snapshot.spectrum.sharpness)}")
    parts.append(f"{snapshot.hvps} products, {snapshot.seconds:.1f} s")
    if math.isfinite(snapshot.overhead):
        parts.append(f"overhead {100 * snapshot.overhead:.1f} %")
    return ", ".join(parts)

"""What the reproductions share: a command line, and a table of the paper's figures beside ours.

The verdict follows one rule for all figures: "agrees" means within 10 % of the paper's (couplings: within 0.03), or
within half a unit of the last digit that it prints, or, where it gives a spread over seeds, within two standard errors
of the difference. docs/reproduction.md says how this came about and what hangs on it.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

RELATIVE, COUPLING = 0.10, 0.03
BLUE, ORANGE, GREEN, PINK, SKY, BLACK = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#000000"
"""colours that colour-blind readers can tell apart"""


@dataclass(frozen=True)
class Options:
    seeds: tuple[int, ...]
    epochs: int
    quick: bool
    tiny: bool
    data: Path | None
    figure: str | None


@dataclass(frozen=True)
class Row:
    what: str
    paper: str
    ours: str
    verdict: str
    values: tuple[float, ...] = ()
    """ours, one per seed"""

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)


@dataclass
class Table:
    title: str
    data: str
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def compare(
        self,
        what: str,
        paper: str,
        ours: Sequence[float],
        *,
        spread: str = "",
        tolerance: float | None = None,
        other: str = "",
    ) -> None:
        """The paper's figure as it is printed (± its spread over seeds) and ours, one value per seed.

        `tolerance` is absolute and replaces the 10 %. `other` replaces the verdict where the two cannot be compared. A
        figure like "<1e-7" is a bound on all of ours.
        """
        verdict = other or _verdict(paper, ours, float(spread or "nan"), tolerance)
        self.rows.append(Row(what, f"{paper} ± {spread}" if spread else paper, _shown(ours), verdict, tuple(ours)))

    def show(self, what: str, ours: Sequence[float]) -> None:
        """Ours alone, where the paper says nothing."""
        self.rows.append(Row(what, "", _shown(ours), "", tuple(ours)))

    def claim(self, what: str, paper: str, ours: str, holds: bool) -> None:
        self.rows.append(Row(what, paper, ours, "holds" if holds else "DOES NOT HOLD"))

    def __getitem__(self, what: str) -> Row:
        return next(row for row in self.rows if row.what == what)

    def __str__(self) -> str:
        cells = [("", "paper", "ours", "verdict"), *((r.what, r.paper, r.ours, r.verdict) for r in self.rows)]
        widths = [max(len(row[c]) for row in cells) for c in range(4)]
        lines = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in cells]
        lines.insert(1, "-|-".join("-" * width for width in widths))
        return "\n".join([self.title, f"data: {self.data}", "", *lines, *(f"note: {note}" for note in self.notes), ""])


def options(
    doc: str | None,
    argv: Sequence[str] | None,
    *,
    seeds: int = 5,
    epochs: int = 0,
    images: bool = True,
    figure: bool = True,
) -> Options:
    """`seeds` networks from seed 42 on; `epochs` of training is the paper's number, 0 where nothing is trained."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, metavar="N", help=f"how many networks (default {seeds})")
    parser.add_argument("--quick", action="store_true", help="a look: two networks, nothing trained, smaller sweeps")
    if figure:
        parser.add_argument("--figure", metavar="PATH.png", help="also draw the paper's figure")
    if images:
        parser.add_argument("--data", type=Path, metavar="CIFAR10.npz", help="x_train, y_train, x_test, y_test (uint8)")
    if epochs:
        parser.add_argument("--epochs", type=int, help=f"of training (default {epochs}, as in the paper; 0: none)")
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    small = given.quick or given.tiny
    asked: int | None = getattr(given, "epochs", None)
    count = given.seeds or (2 if small else seeds)
    torch.set_num_threads(1)  # small networks run fastest so
    return Options(
        seeds=tuple(range(42, 42 + count)),
        epochs=asked if asked is not None else 0 if small else epochs,
        quick=small,
        tiny=given.tiny,
        data=getattr(given, "data", None),
        figure=getattr(given, "figure", None),
    )


def finish(table: Table, given: Options) -> Table:
    if given.tiny:
        table.notes.append("--tiny: much smaller than the paper's; only the claims can be compared")
    elif given.quick:
        table.notes.append(f"--quick: {len(given.seeds)} networks, nothing trained")
    print(table)
    if given.figure:
        print(f"figure: {given.figure}\n")
    return table


def canvas(columns: int = 1, *, width: float = 5.0, height: float = 4.2, **arguments: Any) -> tuple[Any, Any]:
    """A figure and its row of axes, drawn without a display."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt.subplots(1, columns, figsize=(width * columns, height), layout="constrained", squeeze=False, **arguments)


def save(figure: Any, path: str) -> None:
    from matplotlib import pyplot as plt

    figure.savefig(path, dpi=110)
    plt.close(figure)


def _verdict(paper: str, ours: Sequence[float], spread: float, tolerance: float | None) -> str:
    if paper.startswith("<"):
        return "agrees" if max(ours) < float(paper[1:]) else "DIFFERS (above the bound)"
    value, mean = float(paper), statistics.fmean(ours)
    off = mean - value
    allowed = max(RELATIVE * abs(value) if tolerance is None else tolerance, _half_a_unit(paper))
    said = f"{off:+.3f}" if tolerance is not None or not value else f"{off / abs(value):+.1%}"
    agrees = abs(off) <= allowed
    if spread == spread and len(ours) > 1:
        error = math.sqrt((spread**2 + statistics.pstdev(ours) ** 2) / len(ours))
        said += f", {abs(off) / error:.1f} s.e."
        agrees = agrees or abs(off) <= 2 * error
    return f"{'agrees' if agrees else 'DIFFERS'} ({said})"


def _half_a_unit(printed: str) -> float:
    """Half a unit of the last digit: 0.005 for "0.42", 0.5e-3 for "4e-3"."""
    digits, _, exponent = printed.partition("e")
    return 0.5 * 10.0 ** (int(exponent or 0) - len(digits.partition(".")[2]))


def _shown(values: Sequence[float]) -> str:
    """Mean ± spread, three digits of the mean; the spread as the paper's, divided by n."""
    if not any(values):
        return "0"
    mean, spread = statistics.fmean(values), statistics.pstdev(values)
    size = math.floor(math.log10(abs(mean))) if mean else 0
    scale, unit = (1.0, "") if -3 < size < 4 else (10.0**size, f"e{size}")
    places = max(0, 2 - (0 if unit else size))
    return f"{mean / scale:.{places}f}{unit}" + (f" ± {spread / scale:.{places}f}{unit}" if len(values) > 1 else "")

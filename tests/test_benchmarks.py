"""What the benchmarks share: the search for a tolerance, the assembly of tables, the markers of a page."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from benchmarks.accuracy import between_markers
from benchmarks.all import DOCS, TABLES, joined
from benchmarks.header import VARIABLE, cached, commit, measured_on
from benchmarks.new_user import Stopwatch, quarters
from benchmarks.tolerances import Attempt, loosest_of

LADDER = [0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001, 0.0005, 0.0002, 0.0001]


@pytest.mark.parametrize("first", range(len(LADDER)))
@pytest.mark.parametrize("interrupted", range(len(LADDER) + 1))
@pytest.mark.parametrize("begin", [None, 0.0005, 0.0001])
def test_bisection_finds_what_a_scan_finds(first: int, interrupted: int, begin: float | None) -> None:
    """Tolerances from number `first` on serve; from number `interrupted` on, the method takes too many HVPs."""
    tried = []

    def attempt(tolerance: float) -> Attempt:
        i = LADDER.index(tolerance)
        tried.append(i)
        return Attempt(tolerance, [], [], [], math.inf if i >= interrupted else 0.0 if i >= first else 0.5)

    scanned = next(
        (a for a in map(attempt, LADDER) if a.serves or a.interrupted),
        None,
    )
    tried.clear()
    assert loosest_of(LADDER, attempt, begin) == scanned
    assert len(tried) == len(set(tried)) <= 6


def test_nothing_serves() -> None:
    assert loosest_of(LADDER, lambda tolerance: Attempt(tolerance, [], [], [], 0.5)).tolerance == LADDER[-1]


def test_sections_follow_the_first_page_without_their_headers() -> None:
    assert joined(["# title\nheader\n\n### a\n1\n", "# title\nheader\n\n### b\n2\n"]).splitlines() == [
        "# title", "header", "", "### a", "1", "", "### b", "2"
    ]  # fmt: skip


def test_lines_between_markers_are_replaced() -> None:
    page = "a\n<!-- x -->\nold\n<!-- /x -->\nb\n"
    assert between_markers(page, "x", ["new"]) == "a\n<!-- x -->\nnew\n<!-- /x -->\nb\n"
    with pytest.raises(AssertionError, match="<!-- y -->"):
        between_markers(page, "y", ["new"])


def test_tables_are_pages_of_the_docs() -> None:
    assert [table for table in TABLES if not (DOCS / table).exists()] == []


def test_parts_of_a_run_share_commit_and_networks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "0123456"
    monkeypatch.setenv(VARIABLE, str(folder))
    assert commit() == "0123456" and "commit 0123456, with `python -m benchmarks.speed`, a part" in measured_on("speed")
    assert cached("network", lambda: [1.0]) == cached("network", lambda: [2.0]) == [1.0]
    monkeypatch.delenv(VARIABLE)
    assert cached("network", lambda: [2.0]) == [2.0]


def test_quarters_of_a_run() -> None:
    """The measurement before the first step belongs to none; those at the end of a quarter to that one."""
    at = [0.0, 0.25, 0.26, 0.5, 0.75, 0.76, 1.0]
    assert quarters({"snapshots": [{"at": place, "full": True} for place in at]}) == [1, 2, 1, 2]
    assert quarters({"snapshots": [{"at": place, "full": False} for place in at]}) == [0, 0, 0, 0]


def test_time_in_hooks_is_counted_once() -> None:
    watch = Stopwatch()
    inner = watch.around(lambda: watch.seconds)
    assert watch.around(inner)() == 0.0  # still within the outer call
    assert watch.seconds == watch.longest > 0.0

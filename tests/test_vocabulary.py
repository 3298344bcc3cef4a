"""Code and docs use the words of the field; what a reader would have to look up here is not used at all."""

from __future__ import annotations

import io
import re
import tokenize
from pathlib import Path

import pytest

import curvmon

PACKAGE = Path(curvmon.__file__).parent
ROOT = PACKAGE.parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
WORDS = re.compile(
    r"""\b(
        by\ the\ parameters | bears? | ends\ of\ the\ spectrum | proofs? | told
        | (leaves?|leaving|left)\ out | tried\ again | dear | whole\ numbers? | beside | anew
        | standstill | seclusion | secluded | crews? | teams? | houses? | rooms? | floors
        | series | expectations? | circumstances? | readings? | beginnings? | passing
    )\b""",
    re.VERBOSE | re.IGNORECASE,
)
NAMES = {"found", "told", "some", "known"}
"""say nothing of what a value is"""


def words_in(text: str) -> list[str]:
    """Every word to avoid, with its line; quotations (lines that begin with `>`) are somebody else's."""
    return [
        f"line {number}: {match.group(0)!r} in {line.strip()!r}"
        for number, line in enumerate(text.splitlines(), 1)
        if not line.lstrip().startswith("> ")
        for match in WORDS.finditer(line.replace("_", " "))
    ]


@pytest.mark.parametrize("path", [*SOURCES, *PAGES], ids=lambda path: str(path.relative_to(ROOT)))
def test_words(path: Path) -> None:
    assert words_in(path.read_text()) == []


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_say_what_a_value_is(path: Path) -> None:
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    assert [f"line {t.start[0]}: {t.string}" for t in tokens if t.type == tokenize.NAME and t.string in NAMES] == []


def test_the_check_sees_what_it_looks_for() -> None:
    assert len(words_in("The crew is told anew\n> the crew\nby_the_parameters")) == 4

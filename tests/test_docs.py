"""What the README shows is what happens."""

from __future__ import annotations

import doctest
import re
from pathlib import Path
from typing import Any

import pytest

README = Path(__file__).parents[1] / "README.md"


def test_the_readme_example_prints_its_table() -> None:
    text = README.read_text()
    code = re.search(r"```python\n(.*?)```\n```\n(.*?)```", text, re.DOTALL)
    assert code is not None
    names: dict[str, Any] = {}
    exec(code.group(1), names)
    printed = [line.split() for line in str(names["m"]).splitlines()[3:] if not line.startswith("note")]
    shown = [line.split() for line in code.group(2).splitlines()[3:] if not line.startswith("note")]
    assert len(printed) == len(shown) == 6
    for ours, theirs in zip(printed, shown):
        assert ours[:2] == theirs[:2]
        # values may differ in the last digits between processors, by far less than their errors; shown rounded
        assert float(ours[2]) == pytest.approx(float(theirs[2]), rel=2e-2)


def test_examples_in_the_docs() -> None:
    for path in README.parent.glob("docs/*.md"):
        assert doctest.testfile(str(path), module_relative=False).failed == 0, path.name


def test_links_lead_somewhere() -> None:
    for path in [README, *README.parent.glob("docs/*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.name}: {target}"

"""Writes the table of the README that says what each number means, from the metric registry: `make docs`."""

from __future__ import annotations

import re
from pathlib import Path

from curvmon.metrics.registry import markdown_table

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- metrics -->", "<!-- /metrics -->"

if __name__ == "__main__":
    table = f"{BEGIN}\n{markdown_table()}\n{END}"
    README.write_text(re.sub(f"{BEGIN}.*?{END}", lambda _: table, README.read_text(), flags=re.DOTALL))

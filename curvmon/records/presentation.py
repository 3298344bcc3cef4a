"""The way from a record to its pictures and tables, which are in `curvmon.reporting`.

The only imports of the package that point up (`tests/test_layout.py` knows them): users look for `.plot()` on the
record itself. They are made when a picture or a table is asked for, so that records need torch alone.
"""

from __future__ import annotations

import os
from typing import Any


def plot(record: Any, **options: Any) -> tuple[Any, Any]:
    """The figure and its axes."""
    from curvmon.reporting import plots

    return plots.plot(record, **options)


def to_pandas(record: Any) -> Any:
    """A DataFrame."""
    from curvmon.reporting import tables

    return tables.to_pandas(record)


def report(history: Any, path: str | os.PathLike[str] | None) -> str:
    """A page; written to the path, if there is one."""
    from curvmon.reporting import report_page

    page = report_page.report_page([history])
    if path is not None:
        report_page.write(page, path)
    return page


def to_html(record: Any) -> str:
    """What a notebook shows."""
    from curvmon.reporting import html_tables

    return html_tables.to_html(record)

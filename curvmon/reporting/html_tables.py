"""Records as HTML for notebooks: a headline, a table, the notes. In the colours of the notebook, light or dark."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from functools import singledispatch
from typing import Any

from curvmon.errors import InputError
from curvmon.metrics.registry import pair_metrics
from curvmon.records import Measurement, RunHistory, Spectrum
from curvmon.records.formatting import short, with_error
from curvmon.reporting.charts import headline_labels
from curvmon.reporting.tables import headline_rows, rows

MOST_STEPS = 12
"""rows in the table of a run, the latest"""
MOST_ALERTS = 5
_CELL = "padding:1px 10px 1px 0;text-align:left;white-space:nowrap"


@singledispatch
def to_html(record: Any) -> str:
    raise InputError(f"no HTML of a {type(record).__name__}")


@to_html.register
def _(record: Measurement) -> str:
    specs = pair_metrics()
    table = [
        [row["row"], row["col"], *(with_error(row[spec.name], row[f"{spec.name}_stderr"]) for spec in specs)]
        for row in rows(record)
    ]
    return _page(_first_line(record), ["row", "col", *(spec.label for spec in specs)], table, record.notes)


@to_html.register
def _(record: Spectrum) -> str:
    table = [
        [row["name"], with_error(row["eigenvalue"], row["residual"]), "yes" if row["converged"] else "no"]
        for row in rows(record)
    ]
    table += [["Gauss–Newton λ₁", with_error(record.ggn_eigenvalue, 0.0), ""]]
    table += [["trace", with_error(record.trace, record.trace_stderr), ""]]
    table += [["stability ratio", short(record.stability_ratio), ""]] if record.stability_ratio > 0 else []
    return _page(_first_line(record), ["", "value ± error", "converged"], table, record.notes)


@to_html.register
def _(record: RunHistory) -> str:
    steps = headline_rows(record)
    shown = [(key, label) for key, label in headline_labels().items() if any(key in row for row in steps)]
    table = [
        [str(row["step"]), *(short(row[key]) if key in row else "" for key, _ in shown)]
        for row in steps
        if any(key in row for key, _ in shown)
    ]
    notes = [f"step {alert.step}: {alert.headline}" for alert in record.alerts[-MOST_ALERTS:]]
    if len(table) > MOST_STEPS:
        notes.append(f"the last {MOST_STEPS} of {len(table)} steps; to_pandas() has all")
    return _page(_first_line(record), ["step", *(label for _, label in shown)], table[-MOST_STEPS:], notes)


def _first_line(record: Any) -> str:
    return str(record).splitlines()[0]


def _page(head: str, columns: Sequence[str], table: Iterable[Sequence[str]], notes: Iterable[str]) -> str:
    names = "".join(f'<th style="{_CELL}">{html.escape(name)}</th>' for name in columns)
    lines = [f"<tr>{''.join(f'<td style={_CELL!r}>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in table]
    remarks = "".join(f"<div>{html.escape(note)}</div>" for note in notes)
    return (
        f'<div style="overflow-x:auto"><div><strong>{html.escape(head)}</strong></div>'
        f"<table><thead><tr>{names}</tr></thead><tbody>{''.join(lines)}</tbody></table>{remarks}</div>"
    )

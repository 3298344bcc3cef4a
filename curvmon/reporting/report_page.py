"""One HTML page for a run, or for several side by side: it opens from disk and loads nothing.

Text is written here, so that it can be read and printed without a script; charts are drawn by `page/report.js`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from html import escape
from importlib.resources import files
from pathlib import Path

from curvmon.errors import InputError
from curvmon.records import Alert, RunHistory
from curvmon.records.formatting import short
from curvmon.reporting.charts import headline_labels
from curvmon.reporting.report_data import report_data
from curvmon.reporting.tables import Row, headline_rows
from curvmon.version import __version__

MOST_ALERTS = 20
"""of a run, with all their evidence; further ones are a line each"""
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
{style}
</style>
</head>
<body>
<header><h1>{title}</h1><p class="muted">Made by curvmon {version}. {explanation}</p></header>
<main>
{sections}
</main>
<script type="application/json" id="data">{data}</script>
<script>
{script}
</script>
</body>
</html>
"""
_HEATMAPS = """<p>Every cell is a pair of layers, a frame a pair that an alert names. All steps and runs have the same
colours.</p>
<div class="controls">
<label>metric <select id="metric"></select></label>
<label class="wide">step <input type="range" id="slider" min="0" max="0" value="0"></label>
<output id="step"></output><span id="jumps"></span>
</div>
<div id="heatmaps"></div>
<div id="scale"></div>"""


def report_page(histories: Sequence[RunHistory]) -> str:
    """The page as a string.

    Raises:
        InputError: there is no run.
    """
    if not histories:
        raise InputError("a report needs at least one run")
    several = len(histories) > 1
    title = "Curvature of " + (f"{len(histories)} runs" if several else histories[0].name or "a run")
    histories = _with_different_names(histories)
    tables = [headline_rows(history) for history in histories]
    data = report_data(histories, tables)
    spectra = '<div id="spectra"></div>' if any(run["spectra"] for run in data["runs"]) else ""
    sections = [
        _section("verdict", "Verdict", _runs(_verdict(history, several) for history in histories)),
        _section("curves", "Curves", f'{_legend(histories)}<div id="charts"></div>' if data["charts"] else ""),
        _section("numbers", "First and last", _numbers(histories, tables)),
        _section("pairs", "Pairs of layers", _HEATMAPS if any(run["frames"] for run in data["runs"]) else ""),
        _section("spectrum", "Spectrum of the Hessian", spectra),
        _section("cost", "Cost", _cost(histories)),
        _section("notes", "Notes of the last measurement", _runs(_notes(h, several) for h in histories)),
    ]
    page = files("curvmon.reporting") / "page"
    return _PAGE.format(
        title=escape(title),
        version=__version__,
        explanation="All runs have the same axes." if several else "",
        style=(page / "report.css").read_text(encoding="utf-8"),
        script=(page / "report.js").read_text(encoding="utf-8"),
        sections="\n".join(section for section in sections if section),
        data=json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=False).replace("<", "\\u003c"),
    )


def write(page: str, path: str | os.PathLike[str]) -> None:
    """Into a folder that is made if it does not exist."""
    place = Path(path)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(page, encoding="utf-8")


def _with_different_names(histories: Sequence[RunHistory]) -> list[RunHistory]:
    names: list[str] = []
    for history in histories:
        name, count = history.name or "run", 1
        while name in names:
            count += 1
            name = f"{history.name or 'run'} ({count})"
        names.append(name)
    return [replace(history, name=name) for history, name in zip(histories, names)]


def _section(key: str, title: str, content: str) -> str:
    return f'<section id="{key}"><h2>{title}</h2>\n{content}</section>' if content else ""


def _runs(parts: Iterable[str]) -> str:
    content = "".join(f"<div>{part}</div>" for part in parts if part)
    return f'<div class="runs">{content}</div>' if content else ""


def _verdict(history: RunHistory, several: bool) -> str:
    """What happened, in one sentence; the evidence for it and what to do; then the further alerts."""
    alerts, steps = history.alerts, history.steps
    head = f"<h3>{escape(history.name)}</h3>" if several else ""
    if not steps:
        return f'{head}<p class="verdict">Nothing was measured.</p>'
    span = f"steps {steps[0]} to {steps[-1]}"
    if not alerts:
        sentence = f"No alerts in {_count(len(history.snapshots), 'validation')}, {span}."
        return f'{head}<p class="verdict good"><span aria-hidden="true">✓</span> {sentence}</p>{_notices(history)}'
    first = alerts[0]
    sentence = (
        f"{_count(len(alerts), 'alert')} in {span}. "
        f"{'The first, at' if len(alerts) > 1 else 'At'} step {first.step} (epoch {first.epoch}): "
        f"<strong>{escape(first.headline)}</strong>"
    )
    parts = [f'{head}<p class="verdict bad"><span aria-hidden="true">▲</span> {sentence}</p>']
    parts += [_evidence(first), *(map(_alert, alerts[1:MOST_ALERTS]))]
    parts += [f"<p>step {alert.step}: {escape(alert.headline)}</p>" for alert in alerts[MOST_ALERTS:]]
    return "".join(parts) + _notices(history)


def _alert(alert: Alert) -> str:
    summary = f"step {alert.step}, epoch {alert.epoch}: {escape(alert.headline)}"
    return f"<details><summary>{summary}</summary>{_evidence(alert)}</details>"


def _evidence(alert: Alert) -> str:
    points = "".join(f"<li>{escape(point)}</li>" for point in alert.evidence)
    advice = f"<p><strong>What to do:</strong> {escape(alert.suggestion)}</p>" if alert.suggestion else ""
    return (f"<ul>{points}</ul>" if points else "") + advice


def _notices(history: RunHistory) -> str:
    lines = "".join(f"<li>step {notice.step}: {escape(notice.headline)}</li>" for notice in history.notices)
    return (
        f"<details><summary>{_count(len(history.notices), 'notice')}</summary><ul>{lines}</ul></details>"
        if lines
        else ""
    )


def _legend(histories: Sequence[RunHistory]) -> str:
    marked = any(history.alerts for history in histories)
    alert = '<span class="alert-mark">▲ dashed: an alert.</span> ' if marked else ""
    return f'<p class="muted">{alert}Thin line: the step of the heatmap below. Point at a curve for its numbers.</p>'


def _numbers(histories: Sequence[RunHistory], tables: Sequence[Sequence[Row]]) -> str:
    lines = []
    for key, label in headline_labels().items():
        cells = []
        for table in tables:
            values = [row[key] for row in table if key in row]
            cells += [short(values[0]), short(values[-1])] if values else ["–", "–"]
        if set(cells) != {"–"}:
            lines.append([label, *cells])
    if not lines:
        return ""
    heads = [
        f"{history.name}, {end}" if len(histories) > 1 else end for history in histories for end in ("first", "last")
    ]
    return _table(["number", *heads], lines)


def _cost(histories: Sequence[RunHistory]) -> str:
    heads = ["overhead", "seconds of measuring", "Hessian-vector products", "validations", "measured in full", "pulses"]
    columns = []
    for history in histories:
        snapshots = history.snapshots
        overhead = next((s.overhead for s in reversed(snapshots) if math.isfinite(s.overhead)), math.nan)
        columns.append(
            [
                f"{100 * overhead:.1f} % of the training time" if math.isfinite(overhead) else "–",
                f"{sum(snapshot.seconds for snapshot in snapshots):.1f}",
                str(sum(snapshot.hvps for snapshot in snapshots)),
                str(len(snapshots)),
                str(sum(snapshot.is_full for snapshot in snapshots)),
                str(len(history.pulses)),
            ]
        )
    return _table(["", *(history.name for history in histories)], list(zip(heads, *columns)))


def _notes(history: RunHistory, several: bool) -> str:
    notes = history.history[-1].notes if history.history else ()
    lines = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f"{f'<h3>{escape(history.name)}</h3>' if several else ''}<ul>{lines}</ul>" if lines else ""


def _table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(head)}</th>" for head in heads)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in line)}</tr>" for line in lines)
    return f'<div class="table"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"

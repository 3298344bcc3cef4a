"""Records as tables: what is in the rows, in DataFrames, and in a notebook."""

from __future__ import annotations

import math
import sys
from html.parser import HTMLParser

import pytest
import torch

from curvmon.metrics import register, unregister
from curvmon.records import RunHistory
from curvmon.records.formatting import with_error
from curvmon.reporting.html_tables import MOST_STEPS
from curvmon.reporting.scalars import scalars
from curvmon.reporting.tables import rows
from tests.helpers.synthetic_records import synthetic_measurement, synthetic_spectrum
from tests.helpers.synthetic_runs import synthetic_alert, synthetic_run
from tests.helpers.toy_metric import TOY

EIGENVALUES = torch.tensor([5.0, 3.0], dtype=torch.float64)


class Cells(HTMLParser):
    """The cells of a table, and all text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.text, self._inside = "", False
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self._inside = True

    def handle_endtag(self, tag: str) -> None:
        self._inside = self._inside and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._inside:
            self.rows[-1][-1] += data


def test_one_row_per_pair() -> None:
    measurement = synthetic_measurement(3)
    table = rows(measurement)
    assert [(row["row"], row["col"], row["distance"]) for row in table] == [
        ("layer1", "layer1", 0), ("layer1", "layer2", 1), ("layer1", "layer3", 2),
        ("layer2", "layer2", 0), ("layer2", "layer3", 1), ("layer3", "layer3", 0),
    ]  # fmt: skip
    assert table[2]["coupling"] == measurement.coupling[0, 2].item()
    assert table[2]["gn_gap_stderr"] == measurement.stderr["gn_gap"][0, 2].item()


def test_registered_metrics_are_columns() -> None:
    spec = register(TOY)
    try:
        measurement = synthetic_measurement(3)
        assert rows(measurement)[1][spec.name] == spec.values(measurement)[0, 1].item()
    finally:
        unregister(spec.name)


def test_one_row_per_eigenvalue() -> None:
    spectrum = synthetic_spectrum(
        EIGENVALUES, residuals=torch.tensor([0.1, 0.2], dtype=torch.float64), smallest_converged=False
    )
    assert rows(spectrum) == [
        {"name": "lambda_1", "eigenvalue": 5.0, "residual": 0.1, "converged": True},
        {"name": "lambda_2", "eigenvalue": 3.0, "residual": 0.2, "converged": True},
        {"name": "lambda_min", "eigenvalue": -0.4, "residual": 0.0, "converged": False},
    ]


def test_one_row_per_step() -> None:
    run = synthetic_run(count=6, alerts=[300, 305])
    table = rows(run)
    assert [row["step"] for row in table] == run.steps and len(set(run.steps)) == len(run.steps)
    by_step = {row["step"]: row for row in table}
    assert {step for step, row in by_step.items() if row["alert"]} == {300, 305}
    snapshot = run.snapshots[3]
    assert scalars(snapshot).for_callbacks().items() <= by_step[300].items()  # validation and pulse in one row
    assert by_step[300]["curvmon/step_ratio"] == pytest.approx(0.23) and by_step[300]["epoch"] == 3
    assert "curvmon/lambda_1" not in by_step[310]


def test_notices_are_no_alerts() -> None:
    run = RunHistory(raised=(synthetic_alert(5, "info"), synthetic_alert(5), synthetic_alert(5, "error", "again")))
    assert [row["alert"] for row in rows(run)] == ["resonance rose 5 x at layer2; again"]
    assert len(run.alerts) == 2 and len(run.notices) == 1


def test_data_frames() -> None:
    pytest.importorskip("pandas")
    measurement, run = synthetic_measurement(3), synthetic_run()
    frame = measurement.to_pandas()
    assert frame.shape == (6, 11) and frame.groupby("distance")["coupling"].mean().tolist() == pytest.approx(
        measurement.by_distance("coupling").tolist()
    )
    frame = run.to_pandas().set_index("step")
    assert frame["curvmon/lambda_1"].dropna().tolist() == [s.sharpness for s in run.spectra]
    assert list(synthetic_spectrum(EIGENVALUES).to_pandas()["name"]) == ["lambda_1", "lambda_2", "lambda_min"]


def test_without_pandas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="to_pandas needs pandas: pip install pandas"):
        synthetic_measurement(3).to_pandas()


# ---- in a notebook ----


def test_html_of_a_measurement() -> None:
    measurement = synthetic_measurement(3, ["<stem>", "a & b", "head"])
    cells = Cells(measurement._repr_html_())
    assert cells.rows[0] == ["row", "col", "resonance R", "coupling C", "stable rank D", "GN-Gap"]
    assert cells.rows[2][:2] == ["<stem>", "a & b"] and len(cells.rows) == 7
    value = with_error(measurement.coupling[0, 1].item(), measurement.stderr["coupling"][0, 1].item())
    assert cells.rows[2][3] == value
    assert "Measurement: 3 nodes" in cells.text


def test_html_of_a_spectrum() -> None:
    cells = Cells(synthetic_spectrum(EIGENVALUES, stability_ratio=0.5, notes=("a <note>",))._repr_html_())
    assert ["lambda_1", "5.0000", "yes"] in cells.rows and ["stability ratio", "0.5", ""] in cells.rows
    assert "a <note>" in cells.text
    cells = Cells(synthetic_spectrum(EIGENVALUES, stability_ratio=math.nan)._repr_html_())
    assert "stability ratio" not in cells.text


def test_html_of_a_run_has_its_alerts_and_its_last_steps() -> None:
    run = synthetic_run(alerts=[400])
    cells = Cells(run._repr_html_())
    assert len(cells.rows) == 1 + MOST_STEPS and cells.rows[-1][0] == str(run.steps[-1])
    assert "step 400: resonance rose 5 x at layer2" in cells.text and "1 alert" in cells.text
    assert "nothing measured" in Cells(RunHistory()._repr_html_()).text

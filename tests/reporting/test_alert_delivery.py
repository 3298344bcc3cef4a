"""One run, real loggers: an alert is everywhere with prefix, headline and level; a notice is nowhere an alert."""

from __future__ import annotations

import html
import json
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
from pytorch_lightning.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger
from torch.utils.data import DataLoader

from curvmon import Alert, AlertRules, CurvatureMonitor
from curvmon.reporting.alert_delivery import WANDB_TITLE, deliver_alert, markdown, title
from curvmon.reporting.scalars import Keys
from tests.helpers.lightning_runs import QUIET, seeded
from tests.helpers.logger_readers import TensorBoard, Wandb, csv_rows
from tests.helpers.module_zoo import BATCH, REGRESSION, REGRESSION_VAL

PREFIX = "fold_1/"
RULES = AlertRules(changes=False, coupling_above=None, edge_of_stability=1e-9, far_beyond_stability=2e-9, lasting=1)
"""a notice and an alert at the first measurement"""


@dataclass(frozen=True)
class Run:
    alert: Alert
    notice: Alert
    records: list[logging.LogRecord]
    tensorboard: TensorBoard
    wandb: Wandb
    csv: Path
    tags: dict[str, str]
    artifacts: dict[str, str]


@pytest.fixture
def records() -> Iterator[list[logging.LogRecord]]:
    yield from collected()


def collected() -> Iterator[list[logging.LogRecord]]:
    """What the logger `curvmon` gets, notices included."""
    found: list[logging.LogRecord] = []
    handler, logger = logging.Handler(), logging.getLogger("curvmon")
    handler.emit = found.append  # type: ignore[method-assign]
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)
    logger.setLevel(level)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, quiet_wandb: None) -> Iterator[Run]:
    from mlflow.tracking import MlflowClient

    folder = tmp_path_factory.mktemp("alerts")
    (folder / "wandb_runs").mkdir()
    recording = collected()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow 3 raises without it
        patch.chdir(folder)
        uri = f"file:{folder / 'mlflow'}"
        patch.setenv("MLFLOW_TRACKING_URI", uri)
        tensorboard, csv = TensorBoardLogger(folder), CSVLogger(folder, name="csv")
        wandb, mlflow = WandbLogger(project="curvmon", save_dir=folder / "wandb_runs"), MLFlowLogger(tracking_uri=uri)
        found = next(recording)
        monitor = CurvatureMonitor(
            alerts=RULES, log_key_prefix=PREFIX, heatmaps=False, eigenvalues=1, initial=False, max_overhead=None
        )
        trainer = pl.Trainer(callbacks=[monitor], **{**QUIET, "logger": [tensorboard, wandb, csv, mlflow]})
        trainer.fit(seeded(), DataLoader(REGRESSION, BATCH), DataLoader(REGRESSION_VAL, BATCH))
        wandb.experiment.finish()
        (alert,), (notice,) = monitor.alerts, monitor.notices
        below = folder / "mlflow" / str(mlflow.experiment_id) / str(mlflow.run_id) / "artifacts"
        yield Run(
            alert=alert,
            notice=notice,
            records=list(found),
            tensorboard=TensorBoard(tensorboard.log_dir),
            wandb=Wandb(folder / "wandb_runs"),
            csv=Path(csv.log_dir),
            tags=dict(MlflowClient(uri).get_run(str(mlflow.run_id)).data.tags),
            artifacts={path.relative_to(below).as_posix(): path.read_text() for path in below.rglob("*.md")},
        )
    next(recording, None)


def test_the_run_raised_an_alert_and_a_notice(run: Run) -> None:
    assert (run.alert.kind, run.alert.level) == ("far_beyond_stability", "warning")
    assert (run.notice.kind, run.notice.level) == ("edge_of_stability", "info")
    assert run.alert.evidence and run.alert.suggestion


def test_python_log(run: Run) -> None:
    by_level = {record.levelno: record.getMessage() for record in run.records}
    assert list(by_level) == [logging.INFO, logging.WARNING]
    first, *lines = by_level[logging.WARNING].splitlines()
    assert first == f"curvmon {PREFIX}: {run.alert.headline}"
    assert lines == [*(f"  - {point}" for point in run.alert.evidence), f"  {run.alert.suggestion}"]
    assert by_level[logging.INFO].startswith(f"curvmon {PREFIX} notice: {run.notice.headline}\n  - ")


def test_wandb_alert_and_no_notice(run: Run) -> None:
    ((name, text, level),) = run.wandb.alerts
    assert level == "WARN" and len(name) < 64
    assert name.startswith(PREFIX) and name.endswith(f", step {run.alert.step}")
    assert text.splitlines()[-1] == run.alert.suggestion
    assert all(f"- {point}" in text.splitlines() for point in run.alert.evidence)


def test_tensorboard_texts(run: Run) -> None:
    for key, raised in (("alert", run.alert), ("notice", run.notice)):
        ((step, text),) = run.tensorboard.texts(f"{PREFIX}curvmon/{key}")
        assert step == raised.step and f"({raised.level})" in text
        shown = rendered(text)
        assert all(part in shown for part in (PREFIX, raised.headline, *raised.evidence, raised.suggestion))


def test_mlflow_artifacts_and_the_tag_of_the_alert(run: Run) -> None:
    tag = f"{PREFIX}curvmon/alert"
    assert {name: text for name, text in run.tags.items() if "curvmon" in name} == {
        tag: f"{run.alert.headline} (warning)"
    }
    assert run.artifacts == {
        f"{PREFIX}curvmon/{key}/step_{raised.step:08d}_{raised.kind}.md": markdown(raised, Keys(PREFIX))
        for key, raised in (("alert", run.alert), ("notice", run.notice))
    }


def test_notices_are_not_counted(run: Run) -> None:
    key = f"{PREFIX}curvmon/alerts"
    assert {value for _, value in run.tensorboard.series(key)} == {1.0}
    assert {row[key] for _, row in csv_rows(run.csv) if key in row} == {1.0}
    header = (run.csv / "metrics.csv").read_text().splitlines()[0]
    assert "curvmon/alert," not in header and "curvmon/notice" not in header


# ---- formats ----


def alert(headline: str = "The loss rose", **fields: Any) -> Alert:
    values = {"kind": "jump", "metric": "loss", "where": "loss", "before": 1.0, "after": 2.0, "score": 9.0}
    return Alert(**{**values, "step": 3, "epoch": 0, "headline": headline, **fields})  # type: ignore[arg-type]


def rendered(text: str) -> str:
    """As TensorBoard shows it."""
    from tensorboard import plugin_util

    return html.unescape(re.sub(r"<[^>]+>", "", plugin_util.markdown_to_safe_html(text)))


NAMES = [
    "self_attn",
    "__init__",
    "_a_",
    "*b*",
    "[c](d)",
    "`e`",
    "<script>alert(1)</script>",
    "f\\_g",
    "&lt;",
    "# h",
    "- i",
]


@pytest.mark.parametrize("name", NAMES)
def test_names_of_layers_are_no_markdown(name: str) -> None:
    text = markdown(alert(name, evidence=(name, f"coupling {name}--{name}: 1 → 2"), suggestion=name), Keys())
    shown = rendered(text)
    assert shown.splitlines()[0] == f"curvmon: {name} (warning)"
    assert f"coupling {name}--{name}: 1 → 2" in shown and shown.count(name) == 5


def test_ordinary_text_is_left_as_it_is() -> None:
    raised = alert("λ_1 rose (x 3) at model.layer_1 → model.layer_2, step 3", evidence=("a--b: -0.5 → 1e-05",))
    text = markdown(raised, Keys("fold_1/"))
    assert text == f"**curvmon fold_1/: {raised.headline}** (warning)\n\n- {raised.evidence[0]}"


class FakeWandb:
    """W&B's limits, without its files."""

    alerts: list[dict[str, Any]]

    def __init__(self) -> None:
        self.alerts, self.experiment = [], self

    def alert(self, **arguments: Any) -> None:
        assert len(arguments["title"]) <= WANDB_TITLE < 64
        self.alerts.append(arguments)


FakeWandb.__name__ = "WandbLogger"


@pytest.mark.parametrize("prefix", ["", "fold1/", "a/very/long/prefix/of/one/of/many/monitors/"])
@pytest.mark.parametrize("length", [20, 50, 60, 70, 79])
def test_wandb_titles_are_short_and_nothing_is_lost(prefix: str, length: int) -> None:
    logger = FakeWandb()
    raised = alert("x" * (length - 8) + ", step 3", evidence=("a: 1 → 2",), suggestion="Check a.", level="error")
    deliver_alert(type("Trainer", (), {"loggers": [logger]}), raised, Keys(prefix))
    (sent,) = logger.alerts
    assert sent["title"].endswith(", step 3") and sent["level"] == "ERROR"
    assert raised.headline in f"{sent['title']}\n{sent['text']}"
    assert sent["text"].endswith("- a: 1 → 2\nCheck a.")
    if prefix == "fold1/":
        assert "fold1/: " in sent["title"]


def test_a_logger_that_fails_is_a_warning(records: list[logging.LogRecord]) -> None:
    class Broken(FakeWandb):
        def alert(self, **arguments: Any) -> None:
            raise ConnectionError("the server is gone")

    healthy = FakeWandb()
    with pytest.warns(UserWarning, match=r"Broken did not take an alert \(ConnectionError: the server is gone\)"):
        deliver_alert(type("Trainer", (), {"loggers": [Broken(), healthy]}), alert(), Keys())
    assert len(healthy.alerts) == len(records) == 1


def test_alerts_survive_json() -> None:
    raised = alert(evidence=("a", "b"), others=("c--d",))
    assert Alert.from_dict(json.loads(json.dumps(raised.to_dict()))) == raised
    assert title(raised, Keys()) == "curvmon: The loss rose"

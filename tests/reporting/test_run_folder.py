"""Where `history.jsonl` goes: the folder of the first logger that has one; and who writes it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pytorch_lightning.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger
from pytorch_lightning.loggers.logger import DummyLogger

from curvmon.records import METRICS, PulseRecord, RunHistory
from curvmon.reporting.loggers import run_folder
from curvmon.reporting.reporter import Report
from tests.helpers.synthetic_runs import synthetic_alert


def folder_of(*loggers: Any, root: Path | str = "") -> Path | None:
    return run_folder(SimpleNamespace(loggers=list(loggers), default_root_dir=root, folder=None))


def test_loggers_with_a_folder(tmp_path: Path) -> None:
    tensorboard, table = TensorBoardLogger(tmp_path, version=3), CSVLogger(tmp_path, name="csv", version="a")
    assert folder_of(tensorboard, table) == tmp_path / "lightning_logs" / "version_3"
    assert folder_of(DummyLogger(), table) == tmp_path / "csv" / "a"
    assert folder_of() is None and folder_of(DummyLogger(), root=tmp_path) is None


def test_loggers_whose_folder_is_that_of_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = WandbLogger(project="p", save_dir=tmp_path, version="id7", offline=True)
    assert folder_of(wandb) == tmp_path / "p" / "id7"
    assert folder_of(wandb, CSVLogger(tmp_path, version=1)) == tmp_path / "lightning_logs" / "version_1"
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")  # MLFlowLogger sets it, and leaves it
    mlflow = MLFlowLogger(tracking_uri=f"file:{tmp_path}/mlruns")
    assert folder_of(mlflow) == tmp_path / "mlruns" / str(mlflow.name) / str(mlflow.run_id)
    on_a_server = SimpleNamespace(save_dir=None, name="7", version="run5")
    assert folder_of(on_a_server, root=tmp_path) == tmp_path / "7" / "run5"


@pytest.mark.parametrize("address", ["s3://bucket/logs", "gs://bucket"])
def test_a_bucket_is_no_folder(address: str, tmp_path: Path) -> None:
    bucket = SimpleNamespace(log_dir=address)
    assert folder_of(bucket) is None
    assert folder_of(bucket, CSVLogger(tmp_path, version=1)) == tmp_path / "lightning_logs" / "version_1"


def test_rank_zero_alone_writes(tmp_path: Path) -> None:
    report = Report(METRICS, False, False, "", False)
    report.start(RunHistory())
    trainer: Any = SimpleNamespace(is_global_zero=False, folder=None, loggers=[SimpleNamespace(log_dir=str(tmp_path))])
    trainer.log_every_n_steps = 10**9
    trainer.publish = lambda values, stale: None
    alert = synthetic_alert(5)

    def write_everything() -> None:
        report.file.start(RunHistory())
        report.write_alerts(trainer, [alert])
        report.write_pulse(trainer, PulseRecord(6, 0, 1.0, 1.0), [])

    write_everything()
    assert list(tmp_path.iterdir()) == []
    trainer.is_global_zero = True
    write_everything()
    assert [path.name for path in tmp_path.iterdir()] == ["history.jsonl"]
    assert len((tmp_path / "history.jsonl").read_text().splitlines()) == 3

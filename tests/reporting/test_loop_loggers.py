"""What a loop of one's own logs to gets what Lightning's loggers get, and keeps its own rows."""

from __future__ import annotations

from pathlib import Path

import pytest

import curvmon
from tests.helpers.logger_readers import TensorBoard, Wandb, mlflow_series
from tests.helpers.plain_loop import STEPS, Loop, batches, unlimited


def test_a_summary_writer_gets_numbers_pictures_and_layouts(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(tmp_path)
    monitor = unlimited(writer)
    Loop(monitor).run(batches())
    monitor.close()
    writer.close()
    written = TensorBoard(tmp_path)
    assert [step for step, _ in written.series("curvmon/lambda_1")] == [0, 10, 20, 30]
    assert any("heatmap" in key or "resonance" in key for key in written.pictures()) and written.layouts()
    assert (tmp_path / "history.jsonl").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("quiet_wandb")
def test_a_wandb_run_keeps_the_rows_of_the_loop(tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb")
    run = wandb.init(mode="offline", dir=tmp_path, project="p")
    monitor = unlimited(run, pulse=1, heatmaps=False)
    # the loop logs every third step only, with its own step
    Loop(monitor).run(
        batches(), after=lambda loop: run.log({"mine": 1.0}, step=loop.done) if loop.done % 3 == 0 else None
    )
    run.finish()
    rows = Wandb(tmp_path).rows
    assert [row["_step"] for row in rows if "mine" in row] == list(range(3, STEPS + 1, 3))
    measured = {row["trainer/global_step"] for row in rows if "curvmon/lambda_1" in row}
    assert measured == {0, 10, 20, 30}


def test_an_mlflow_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = f"file:{tmp_path}/mlruns"
    mlflow.set_tracking_uri(uri)
    client = mlflow.MlflowClient(uri)
    with pytest.raises(curvmon.InputError, match="no active run"):
        curvmon.Monitor(client)
    with mlflow.start_run() as active:
        Loop(unlimited(client, heatmaps=False)).run(batches())
    series = mlflow_series(uri, active.info.run_id)
    assert [step for step, _ in series["curvmon/lambda_1"]] == [0, 10, 20, 30]

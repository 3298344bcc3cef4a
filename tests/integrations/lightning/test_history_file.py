"""`history.jsonl` in the folder of a Trainer's logger: what the monitor knows, also after a resume; its bounds."""

from __future__ import annotations

import io
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import CSVLogger, Logger, TensorBoardLogger

import curvmon
from curvmon import CurvatureMonitor
from curvmon.monitor import history_file
from tests.helpers.lightning_smoke import module_of
from tests.helpers.synthetic_records import synthetic_measurement
from tests.helpers.synthetic_runs import synthetic_alert, synthetic_run

pytestmark = pytest.mark.slow


def monitor_of(**options: Any) -> CurvatureMonitor:
    return CurvatureMonitor(**{"eigenvalues": 2, "heatmaps": False, "pulse": 2, "max_overhead": None, **options})


def fit(monitor: Any, logger: Any, epochs: int = 2, ckpt: Path | None = None, **options: Any) -> pl.Trainer:
    monitors = monitor if isinstance(monitor, list) else [monitor]
    torch.manual_seed(0)
    trainer = pl.Trainer(
        max_epochs=epochs, callbacks=monitors, logger=logger, accelerator="cpu", enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1, **options,
    )  # fmt: skip
    trainer.fit(module_of(pl)(), ckpt_path=None if ckpt is None else str(ckpt))
    return trainer


def as_dicts(history: Any) -> list[str]:
    kinds = (history.snapshots, history.pulses, [*history.alerts, *history.notices])
    return [json.dumps([record.to_dict() for record in records]) for records in kinds]


@pytest.mark.parametrize("logger", [CSVLogger, TensorBoardLogger], ids=lambda kind: kind.__name__)
def test_the_file_has_what_the_monitor_knows(tmp_path: Path, logger: Any) -> None:
    monitor, logger = monitor_of(), logger(tmp_path)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*is not empty.*")
        fit(monitor, logger)
    found = curvmon.load_history(logger.log_dir)
    assert len(found.snapshots) == 3 and len(found.pulses) == 4
    assert as_dicts(found) == as_dicts(monitor)
    assert found.name == "lightning_logs/version_0"


def test_it_is_complete_while_the_run_goes_on(tmp_path: Path) -> None:
    logger, lengths = CSVLogger(tmp_path), []

    class Reader(pl.Callback):
        def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            lengths.append(len(curvmon.load_history(logger.log_dir).snapshots))

    monitor = monitor_of()
    fit([monitor, Reader()], logger, epochs=3)
    assert lengths == [2, 3, 4]


def test_resumed_in_another_folder(tmp_path: Path) -> None:
    first, again, path = monitor_of(), monitor_of(), tmp_path / "run.ckpt"
    fit(first, CSVLogger(tmp_path)).save_checkpoint(path)
    logger = CSVLogger(tmp_path)
    fit(again, logger, epochs=3, ckpt=path)
    found = curvmon.load_history(logger.log_dir)
    assert logger.version == 1 and len(found.snapshots) == 4
    assert as_dicts(found) == as_dicts(again)
    assert as_dicts(curvmon.load_history(path)) == as_dicts(first)


def test_resumed_in_the_same_folder_after_a_crash(tmp_path: Path) -> None:
    """The file has an epoch more than the checkpoint."""
    first, path = monitor_of(), tmp_path / "run.ckpt"

    class Saver(pl.Callback):
        def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            if trainer.current_epoch == 1:
                trainer.save_checkpoint(path)

    fit([first, Saver()], TensorBoardLogger(tmp_path, version=0), epochs=3)
    lines = (tmp_path / "lightning_logs/version_0/history.jsonl").read_text().splitlines()
    again = monitor_of()
    fit(again, TensorBoardLogger(tmp_path, version=0), epochs=4, ckpt=path)
    found = curvmon.load_history(tmp_path / "lightning_logs/version_0")
    assert (tmp_path / "lightning_logs/version_0/history.jsonl").read_text().splitlines()[: len(lines)] == lines
    assert [snapshot.epoch for snapshot in found.snapshots] == [0, 0, 1, 2, 3]
    assert as_dicts(found) == as_dicts(again)


def test_two_monitors_have_a_file_each(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    fit([monitor_of(), monitor_of(log_key_prefix="other/", eigenvalues=1)], logger, epochs=1)
    assert len(curvmon.load_history(logger.log_dir).spectra[0].eigenvalues) == 2
    assert len(curvmon.load_history(logger.log_dir, log_key_prefix="other/").spectra[0].eigenvalues) == 1


def test_a_disk_that_fails_does_not_stop_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, lines: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(history_file, "_append", full)
    monitor = monitor_of()
    with pytest.warns(UserWarning, match=r"curvmon: .*history\.jsonl could not be written") as caught:
        trainer = fit(monitor, CSVLogger(tmp_path))
    assert sum("could not be written" in str(warning.message) for warning in caught) == 1
    assert trainer.global_step == 8 and len(monitor.snapshots) == 3


def test_without_a_folder_there_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Logger):
        @property
        def name(self) -> str:
            raise RuntimeError("not now")

        @property
        def version(self) -> str:
            return "1"

        @property
        def save_dir(self) -> str:
            return str(tmp_path)

        def log_metrics(self, metrics: Any, step: Any = None) -> None: ...
        def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

    monkeypatch.chdir(tmp_path)
    fit(monitor_of(), False, epochs=1)
    fit(monitor_of(), Broken(), epochs=1)
    fit(monitor_of(), CSVLogger(tmp_path), fast_dev_run=2)
    assert list(tmp_path.rglob("*.jsonl")) == []


def test_a_table_of_the_run(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    monitor = monitor_of()
    fit(monitor, False)
    frame = monitor.to_pandas()
    assert frame["curvmon/lambda_1"].dropna().tolist() == [spectrum.sharpness for spectrum in monitor.spectra]


def test_the_share_of_a_checkpoint_is_bounded() -> None:
    """A long run with many layers, a pulse with attentions at every tenth step, and alerts all the time."""
    monitor, measurement, run = monitor_of(history_size=30_000), synthetic_measurement(8), synthetic_run(2)
    recorder = monitor._recorder
    for i in range(3000):
        snapshot = curvmon.records.Snapshot(
            i, i, measurement, run.snapshots[0].spectrum, vitals=run.snapshots[0].vitals
        )
        recorder.history.append(snapshot)
    signs = tuple(curvmon.AttentionSigns(f"model.layers.{i}.self_attn", 12.5, 0.25) for i in range(24))
    pulses = recorder.pulsing.pulses
    pulses.records = [curvmon.PulseRecord(i, 0, 1.5, 0.25, 0.1, 2.5, 0.5, 0.5, signs) for i in range(20_000)]
    recorder.alerting.raised.extend(synthetic_alert(i) for i in range(5000))
    file = io.BytesIO()
    torch.save(monitor.state_dict(), file)
    assert 1_500_000 < len(file.getvalue()) <= 2_000_000
    again = monitor_of()
    again.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    assert again.snapshots[0].step == 0 and again.snapshots[-1].step == 2999
    assert again.pulses[-1].step == 19_999 and again.alerts[-1].step == 4999 and again.alerts[0].step == 0

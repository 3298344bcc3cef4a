"""Every number and picture of a run, read back from the files of real loggers; and loggers that fail."""

from __future__ import annotations

import errno
import math
import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from curvmon import CurvatureMonitor
from curvmon.records import METRICS
from curvmon.reporting import figures
from curvmon.reporting.scalars import Keys, picture_keys, scalars
from tests.helpers.budgets import monitor_without_time
from tests.helpers.logger_readers import Rows, TensorBoard, Wandb, csv_rows, mlflow_series, png_files
from tests.helpers.recorders import PictureRecorder, Recorder

pytestmark = pytest.mark.slow

PICTURES = picture_keys()
BATCHES, EPOCHS = 4, 3
STEPS = [0, 3, 7, 11]
"""before training, and the last step of each epoch: where Lightning logs validation metrics"""


class Classifier(pl.LightningModule):
    """`depth` hidden layers, "model.0", "model.2" and so on."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers: list[nn.Module] = [nn.Linear(5, 6), nn.Tanh()]
        for _ in range(depth - 1):
            layers += [nn.Linear(6, 6), nn.Tanh()]
        self.model = nn.Sequential(*layers, nn.Linear(6, 3))
        self.names = [f"model.{2 * i}" for i in range(depth)]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.model(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self.model(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def fit(
    *callbacks: pl.Callback,
    logger: Any,
    module: pl.LightningModule | None = None,
    epochs: int = 1,
    validate: bool = True,
    **options: Any,
) -> pl.Trainer:
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(64, 5, generator=generator), torch.randint(3, (64,), generator=generator))
    options = {"enable_checkpointing": False, "log_every_n_steps": 1, **options}
    trainer = pl.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=logger,
        callbacks=list(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    loader = DataLoader(data, 64 // BATCHES)
    trainer.fit(module or Classifier(), loader, loader if validate else None)
    return trainer


def expected(monitor: CurvatureMonitor, prefix: str = "", pairs: bool = False, kind: str = "other") -> Rows:
    """What a logger of that kind has to have; the user's own is of the kind "other"."""
    rows = []
    for snapshot in monitor.snapshots:
        values = scalars(snapshot, pairs=pairs).named(Keys(prefix)).for_logger(kind)
        rows.append((snapshot.step, {**values, "epoch": float(snapshot.epoch)}))
    return rows


def curvmon_warnings(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(w.message) for w in caught if "curvmon" in str(w.message)]


# ---- one run, many loggers ----


@dataclass(frozen=True)
class Run:
    monitor: CurvatureMonitor
    tensorboard: TensorBoard
    wandb: Wandb
    csv: Path
    mlflow: dict[str, list[tuple[int, float]]]
    mlflow_artifacts: Path
    own: PictureRecorder
    callback_metrics: dict[str, Tensor]
    messages: list[str]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, quiet_wandb: None) -> Run:
    folder = tmp_path_factory.mktemp("loggers")
    (folder / "wandb_runs").mkdir()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow 3 raises without it
        patch.chdir(folder)
        uri = f"file:{folder / 'mlflow'}"
        patch.setenv("MLFLOW_TRACKING_URI", uri)  # MLFlowLogger sets it, and leaves it
        tensorboard, csv, own = TensorBoardLogger(folder), CSVLogger(folder, name="csv"), PictureRecorder()
        wandb = WandbLogger(project="curvmon", save_dir=folder / "wandb_runs")
        mlflow = MLFlowLogger(tracking_uri=uri)
        monitor = monitor_without_time(log_pairs=True)
        trainer = fit(monitor, logger=[tensorboard, wandb, csv, mlflow, own], epochs=EPOCHS)
        wandb.experiment.finish()
        return Run(
            monitor=monitor,
            tensorboard=TensorBoard(tensorboard.log_dir),
            wandb=Wandb(folder / "wandb_runs"),
            csv=Path(csv.log_dir),
            mlflow=mlflow_series(uri, str(mlflow.run_id)),
            mlflow_artifacts=folder / "mlflow" / str(mlflow.experiment_id) / str(mlflow.run_id) / "artifacts",
            own=own,
            callback_metrics=dict(trainer.callback_metrics),
            messages=curvmon_warnings(caught),
        )


def test_documented_keys_are_logged(run: Run) -> None:
    """Everything below compares with `scalars`: its own names and values first."""
    assert [s.step for s in run.monitor.snapshots] == STEPS
    assert [s.epoch for s in run.monitor.snapshots] == [0, 0, 1, 2]
    i, j = torch.triu_indices(3, 3, 1)
    for snapshot, (_, row) in zip(run.monitor.snapshots, expected(run.monitor, pairs=True, kind="CSVLogger")):
        found, spectrum = snapshot.measurement, snapshot.spectrum
        assert found is not None and spectrum is not None
        for metric in METRICS:
            values, stderr = getattr(found, metric), found.stderr[metric]
            assert row[f"curvmon_pairs/{metric}/model.0--model.4"] == values[0, 2].item()
            assert row[f"curvmon_detail/{metric}/model.0--model.4_stderr"] == stderr[0, 2].item()
            assert row[f"curvmon_distance/{metric}/1"] == pytest.approx(values.diagonal(1).mean().item(), rel=1e-12)
            error = row[f"curvmon_detail/{metric}/1_stderr"]
            assert error == pytest.approx(stderr.diagonal(1).mean().item(), rel=1e-12)
            if metric != "gn_gap":
                assert row[f"curvmon/{metric}"] == pytest.approx(values[i, j].mean().item(), rel=1e-12)
        assert row["curvmon/lambda_1"] == spectrum.sharpness
        assert [row[f"curvmon_spectrum/lambda_{i}"] for i in range(2, 6)] == spectrum.eigenvalues.tolist()[1:]
        assert row["curvmon/lambda_min"] == spectrum.smallest
        assert row["curvmon/stability_ratio"] == pytest.approx(spectrum.sharpness * 0.5 / 2, rel=1e-9)
        assert row["curvmon_detail/hvps"] == found.hvps + spectrum.hvps
        assert not any(
            key.startswith("curvmon_distance/coupling/0") or key == "curvmon_pairs/coupling/model.0--model.0"
            for key in row
        )
    assert run.messages == []


def test_custom_logger_gets_one_row_per_measurement(run: Run) -> None:
    assert run.own.measured() == expected(run.monitor, pairs=True)
    assert run.own.saved == len(run.own.rows)


def test_tensorboard_has_every_number_at_its_step(run: Run) -> None:
    series: dict[str, list[tuple[int, float]]] = {}
    for step, row in expected(run.monitor, pairs=True, kind="TensorBoardLogger"):
        for key, value in row.items():
            if key != "epoch":
                series.setdefault(key, []).append((step, float(np.float32(value))))
    own = {"train_loss", "val_loss", "epoch", "hp_metric"}
    assert set(run.tensorboard.tags) - own == set(series)
    assert {tag: run.tensorboard.series(tag) for tag in series} == series


def test_tensorboard_layout_charts_have_lines(run: Run) -> None:
    layout = run.tensorboard.layouts()[-1]
    assert list(layout) == [
        "loss, accuracy, alerts",
        "curvmon",
        "spectrum of the Hessian",
        "by distance between layers",
    ]
    lines = {chart.split(":")[0]: tags for chart, tags in run.tensorboard.charts().items()}
    assert all(lines.values())
    assert lines["loss"] == {"train_loss", "val_loss", "curvmon/probe_loss"}
    assert lines["accuracy, alerts so far"] == {"curvmon/alerts"}
    shown = {key for _, row in expected(run.monitor) for key in row if key.startswith("curvmon/")}
    assert set().union(*(lines[title] for title in layout["curvmon"])) == shown - {
        "curvmon/probe_loss",
        "curvmon/alerts",
    }
    assert lines["coupling by distance"] == {f"curvmon_distance/coupling/{d}" for d in (1, 2)}
    assert lines["resonance by distance, log10"] == {f"curvmon_distance/log10_resonance/{d}" for d in range(3)}
    assert lines["top eigenvalues, log10"] == {f"curvmon_spectrum/log10_lambda_{i}" for i in range(1, 6)}
    assert list(layout["curvmon"])[:2] == ["top eigenvalue λ₁", "stability ratio"]


def test_tensorboard_has_logarithms_where_it_should_have_axes(run: Run) -> None:
    """TensorBoard's charts have linear axes, and no layout changes that."""
    for key in ("curvmon_distance/{}resonance/1", "curvmon_spectrum/{}lambda_2"):
        values, logarithms = (run.tensorboard.series(key.format(log10)) for log10 in ("", "log10_"))
        assert logarithms == [(step, pytest.approx(math.log10(value), abs=1e-6)) for step, value in values]
    for logged in (run.own.rows[-1][1], run.mlflow, csv_rows(run.csv)[-1][1]):
        assert not any("log10" in key for key in logged)


def test_standard_errors_and_bookkeeping_are_in_files_alone(run: Run) -> None:
    details = {"seconds", "hvps", "skipped", "ggn_lambda_1", "trace_stderr", "lambda_1_stderr", "resonance/1_stderr"}
    keys = {f"curvmon_detail/{name}" for name in details}
    assert all(keys <= row.keys() for _, row in csv_rows(run.csv) if "curvmon/lambda_1" in row)
    assert keys <= run.callback_metrics.keys()
    others = (run.tensorboard.tags, run.mlflow, *run.wandb.rows, *(row for _, row in run.own.rows))
    assert not [key for logged in others for key in logged if "detail" in key or "stderr" in key]


def test_wandb_has_one_row_of_numbers_per_measurement(run: Run) -> None:
    rows = [row for row in run.wandb.rows if "curvmon/lambda_1" in row]
    kept = [{k: v for k, v in row.items() if k not in ("_step", "_runtime", "_timestamp")} for row in rows]
    assert [(row.pop("trainer/global_step"), row) for row in kept] == expected(run.monitor, pairs=True)
    pictures = [row["trainer/global_step"] for row in run.wandb.rows if set(PICTURES) <= set(row)]
    assert pictures == STEPS
    mine = {key for _, row in expected(run.monitor, pairs=True) for key in row} - {"epoch"} | set(PICTURES)
    assert sum(bool(mine & set(row)) for row in run.wandb.rows) == 2 * len(STEPS)


def test_csv_has_every_number_at_its_step(run: Run) -> None:
    rows = [(step, row) for step, row in csv_rows(run.csv) if "curvmon/lambda_1" in row]
    assert rows == expected(run.monitor, pairs=True, kind="CSVLogger")


def test_mlflow_has_every_number_at_its_step(run: Run) -> None:
    rows = expected(run.monitor, pairs=True)
    for key in {key for _, row in rows for key in row} - {"epoch"}:
        assert run.mlflow[key] == [(step, row[key]) for step, row in rows if key in row], key


def test_all_loggers_have_the_same_pictures(run: Run) -> None:
    pictures = run.own.images
    assert set(pictures) == set(PICTURES)
    for key, by_step in pictures.items():
        assert list(by_step) == STEPS, key
        assert all(image.std() > 10 for image in by_step.values()), key
        first, *others = by_step.values()
        assert all(image.shape != first.shape or (image != first).any() for image in others), key
    places = {
        "TensorBoard": run.tensorboard.pictures(),
        "W&B": run.wandb.pictures(),
        "CSV": png_files(run.csv),
        "MLflow": png_files(run.mlflow_artifacts),
    }
    for place, found in places.items():
        assert {key: list(by_step) for key, by_step in found.items()} == {key: STEPS for key in PICTURES}, place
        for key in PICTURES:
            for step in STEPS:
                assert np.array_equal(found[key][step], pictures[key][step]), (place, key, step)


def test_steps_are_those_of_validation_metrics(run: Run) -> None:
    mine = STEPS[1:]
    assert [step for step, _ in run.tensorboard.series("val_loss")] == mine
    assert [step for step, _ in run.tensorboard.series("curvmon/lambda_1")][1:] == mine
    assert [row["trainer/global_step"] for row in run.wandb.rows if "val_loss" in row] == mine
    assert [step for step, row in csv_rows(run.csv) if "val_loss" in row] == mine
    assert [step for step, _ in run.mlflow["val_loss"]] == mine
    assert [step for step, _ in run.own.measured("val_loss")] == mine


def test_callback_metrics_are_the_last_measurement(run: Run) -> None:
    _, last = expected(run.monitor, pairs=True, kind="CSVLogger")[-1]
    del last["epoch"]
    assert {k: v.item() for k, v in run.callback_metrics.items() if k in last} == {
        k: float(np.float32(v)) for k, v in last.items()
    }


# ---- the step axis elsewhere ----


@pytest.mark.parametrize("options", [{"val_check_interval": 2}, {"accumulate_grad_batches": 2}, {"validate": False}])
def test_steps_match_lightnings_in_other_schedules(options: dict[str, Any]) -> None:
    own = Recorder()

    class Logged(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log("epoch_loss", loss, on_step=False, on_epoch=True)
            return loss

    fit(CurvatureMonitor(initial=False, heatmaps=False), logger=own, module=Logged(), epochs=2, **options)
    reference = "val_loss" if options.get("validate", True) else "epoch_loss"
    steps = [step for step, _ in own.measured(reference)]
    assert len(steps) == (4 if "val_check_interval" in options else 2)
    assert [step for step, _ in own.measured()] == steps


def test_nothing_is_logged_during_the_sanity_check() -> None:
    own = PictureRecorder()

    class Look(pl.Callback):
        seen: tuple[int, Any] | None = None

        def on_sanity_check_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            self.seen = len(own.rows) + len(own.images), [k for k in trainer.callback_metrics if "/" in k]

    look = Look()
    monitor = CurvatureMonitor(initial=False)
    fit(monitor, look, logger=own, num_sanity_val_steps=2)
    assert look.seen == (0, [])
    assert own.measured() == expected(monitor) != []


def test_without_a_logger() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        monitor = CurvatureMonitor()
        trainer = fit(monitor, logger=False)
    last = monitor.spectra[-1].sharpness
    assert trainer.callback_metrics["curvmon/lambda_1"].item() == float(np.float32(last))
    assert curvmon_warnings(caught) == []


def test_fast_dev_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "heatmap", _unexpected)  # its DummyLogger takes everything; nobody would see it
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        monitor = CurvatureMonitor()
        trainer = fit(monitor, logger=True, fast_dev_run=True)
    assert type(trainer.logger).__name__ == "DummyLogger"
    assert monitor.snapshots and "curvmon/lambda_1" in trainer.callback_metrics
    assert curvmon_warnings(caught) == []


def _unexpected(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("drawn for nobody")


# ---- EarlyStopping and ModelCheckpoint ----


@pytest.fixture(scope="module")
def sharpness() -> dict[bool, list[float]]:
    """λ_1 at the end of every epoch, with validation and without."""
    found = {}
    for validate in (True, False):
        monitor = CurvatureMonitor(heatmaps=False, initial=False)
        fit(monitor, logger=False, epochs=EPOCHS, validate=validate)
        found[validate] = [float(np.float32(s.sharpness)) for s in monitor.spectra]
    return found


@pytest.mark.parametrize("validate", [True, False], ids=["validation", "no validation"])
@pytest.mark.parametrize("first", [True, False], ids=["monitor first", "monitor last"])
def test_checkpoints_and_early_stopping_use_the_new_value(
    first: bool, validate: bool, sharpness: dict[bool, list[float]], tmp_path: Path
) -> None:
    series = sharpness[validate]
    assert len(set(series)) == EPOCHS
    falls = series[1] < series[0]
    monitor = CurvatureMonitor(heatmaps=False, initial=False)
    # stops as soon as a value is past the middle of the first two: after the second epoch
    stop = EarlyStopping(
        "curvmon/lambda_1", mode="min" if falls else "max", patience=99, stopping_threshold=sum(series[:2]) / 2
    )
    keep = ModelCheckpoint(tmp_path, filename="{epoch}", monitor="curvmon/lambda_1", save_top_k=-1)
    callbacks = [monitor, stop, keep] if first else [stop, keep, monitor]
    trainer = fit(*callbacks, logger=False, epochs=EPOCHS, validate=validate, enable_checkpointing=True)
    assert trainer.current_epoch == 2 and stop.stopped_epoch == 1
    assert {Path(path).stem: score.item() for path, score in keep.best_k_models.items()} == {
        "epoch=0": series[0],
        "epoch=1": series[1],
    }
    assert Path(keep.best_model_path).stem == f"epoch={series.index(min(series[:2]))}"


# ---- which keys ----


@pytest.mark.parametrize("depth", [1, 3, 8])
@pytest.mark.parametrize("pairs", [True, False])
def test_pairs_are_logged_on_request(depth: int, pairs: bool) -> None:
    own = Recorder()
    module = Classifier(depth)
    monitor = CurvatureMonitor(nodes=module.names, log_pairs=pairs, heatmaps=False, eigenvalues=1, initial=False)
    fit(monitor, logger=own, module=module)
    ((step, row),) = own.measured()
    assert [(step, row)] == expected(monitor, pairs=pairs)
    number = depth * (depth + 1) // 2
    for metric in METRICS:
        diagonal = metric != "coupling"  # its own is one, always
        names = [key for key in row if key.startswith(f"curvmon_pairs/{metric}/") and "--" in key]
        assert len(names) == (number if diagonal else number - depth) * pairs
        means = {key for key in row if key.startswith(f"curvmon_distance/{metric}/")}
        assert means == {f"curvmon_distance/{metric}/{d}" for d in range(0 if diagonal else 1, depth)}
        assert (f"curvmon/{metric}" in row) == (diagonal or depth > 1)


def test_gap_of_a_piecewise_linear_network_is_not_logged_pair_by_pair() -> None:
    """It is zero, whatever the weights."""

    class PiecewiseLinear(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))

    own = Recorder()
    monitor = CurvatureMonitor(nodes=["model.0", "model.2"], log_pairs=True, heatmaps=False, initial=False)
    fit(monitor, logger=own, module=PiecewiseLinear())
    ((_, row),) = own.measured()
    assert row["curvmon/gn_gap"] == row["curvmon_distance/gn_gap/1"] == 0
    assert {key.split("/")[1] for key in row if key.startswith("curvmon_pairs/")} == {*METRICS} - {"gn_gap"}


def test_selected_metrics() -> None:
    own = PictureRecorder()
    fit(CurvatureMonitor(metrics=["coupling"], eigenvalues=0, initial=False), logger=own)
    ((_, row),) = own.measured()
    assert {key.split("/")[0] for key in row} == {"curvmon", "curvmon_distance", "epoch"}
    assert {"curvmon/coupling", "curvmon_distance/coupling/1"} <= row.keys()
    assert not any(metric in key for key in row for metric in ("resonance", "stable_rank", "gn_gap", "lambda"))
    assert set(own.images) == {"curvmon_pictures/coupling", "curvmon_pictures/by_distance"}


def test_keys_have_only_characters_that_every_logger_accepts() -> None:
    class Named(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleDict({"a+b": self.model[:2], "Größe [2]": self.model[2:4], "c:d": self.model[4:6]})

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x = batch[0]
            for part in self.parts.values():
                x = part(x)
            return F.cross_entropy(self.model[6](x), batch[1])

    own = Recorder()
    fit(CurvatureMonitor(nodes=["parts.*"], heatmaps=False, initial=False, log_pairs=True), logger=own, module=Named())
    ((_, row),) = own.measured()
    assert "curvmon_pairs/resonance/parts.a_b--parts.c_d" in row
    assert [key for key in row if re.search(r"[^A-Za-z0-9_/. -]", key)] == []


def test_two_monitors_in_one_trainer(tmp_path: Path) -> None:
    own, board = PictureRecorder(), TensorBoardLogger(tmp_path, prefix="fold1")
    a = CurvatureMonitor(log_key_prefix="a/", initial=False, log_pairs=True)
    b = CurvatureMonitor(log_key_prefix="b/", initial=False, log_pairs=True, nodes=["model.0", "model.2"])
    trainer = fit(a, b, logger=[own, board])
    assert own.measured("a/curvmon/alerts") == expected(a, "a/", pairs=True)
    assert own.measured("b/curvmon/alerts") == expected(b, "b/", pairs=True)
    assert len(own.measured("a/curvmon_pairs/resonance/model.0--model.4")) == 1
    assert own.measured("b/curvmon_pairs/resonance/model.0--model.4") == []
    assert set(own.images) == {f"{prefix}{key}" for prefix in ("a/", "b/") for key in PICTURES}
    # both are measured on the same network and batch
    assert trainer.callback_metrics["a/curvmon/lambda_1"] == trainer.callback_metrics["b/curvmon/lambda_1"]
    found = TensorBoard(board.log_dir)
    assert set(found.pictures()) == {f"fold1-{prefix}{key}" for prefix in ("a/", "b/") for key in PICTURES}
    layout = found.layouts()[-1]
    assert len(layout) == 1 + 2 * 3 and "curvmon (b)" in layout
    assert all(found.charts().values())
    lines = {chart.split(":")[0]: tags for chart, tags in found.charts().items()}
    assert lines["loss"] == {
        f"fold1-{key}" for key in ("train_loss", "val_loss", "a/curvmon/probe_loss", "b/curvmon/probe_loss")
    }
    assert {tag[:8] for tags in found.charts().values() for tag in tags} == {
        "fold1-a/",
        "fold1-b/",
        "fold1-tr",
        "fold1-va",
    }


def test_tensorboard_layout_of_the_user_is_kept(tmp_path: Path) -> None:
    class WithLayout(Classifier):
        def on_fit_start(self) -> None:
            self.logger.experiment.add_custom_scalars({"mine": {"losses": ["Multiline", ["train_loss", "val_loss"]]}})

    board = TensorBoardLogger(tmp_path)
    fit(CurvatureMonitor(heatmaps=False), logger=board, module=WithLayout())
    found = TensorBoard(board.log_dir)
    assert "curvmon/lambda_1" in found.tags
    assert found.layouts() == [{"mine": {"losses": ["train_loss", "val_loss"]}}]


def test_wandb_axis_in_a_run_started_by_the_user(
    tmp_path: Path, quiet_wandb: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    monkeypatch.chdir(tmp_path)  # where W&B's runs have their checkpoints, and their history
    monitor = CurvatureMonitor(heatmaps=False, initial=False, log_key_prefix="x/")
    with wandb.init(project="curvmon", dir=tmp_path) as begun:
        fit(monitor, logger=WandbLogger(experiment=begun))
    found = Wandb(tmp_path)
    assert "*" not in found.step_metrics  # what WandbLogger defines for runs of its own
    parts = ("", "_spectrum", "_distance", "_pairs", "_pictures")
    groups = {f"x/curvmon{part}/*" for part in parts}
    axes = {name: axis for name, axis in found.step_metrics.items() if axis}
    assert axes == dict.fromkeys(groups, "trainer/global_step")
    (row,) = (row for row in found.rows if "x/curvmon/lambda_1" in row)
    assert row["x/curvmon/lambda_1"] == monitor.spectra[0].sharpness


def test_loggers_of_lightning_pytorch(tmp_path: Path) -> None:
    """`lightning.pytorch` has classes of its own with the same names."""
    from lightning.pytorch import loggers

    csv, board = loggers.CSVLogger(tmp_path, name="csv"), loggers.TensorBoardLogger(tmp_path)
    assert not isinstance(csv, CSVLogger) and not isinstance(board, TensorBoardLogger)
    monitor = CurvatureMonitor(initial=False)
    fit(monitor, logger=[csv, board])
    assert [(step, row) for step, row in csv_rows(csv.log_dir) if "curvmon/lambda_1" in row] == expected(
        monitor, kind="CSVLogger"
    )
    found = TensorBoard(board.log_dir)
    assert set(png_files(csv.log_dir)) == set(found.pictures()) == set(PICTURES)
    assert len(found.layouts()) == 1


def test_csv_pictures_are_saved_next_to_metrics_csv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket, say."""
    import fsspec

    monkeypatch.chdir(tmp_path)
    fit(CurvatureMonitor(initial=False), logger=CSVLogger("memory://bucket", name="run", version="1"))
    memory = fsspec.filesystem("memory")
    try:
        files = {path.removeprefix("/bucket/run/1/") for path in memory.find("/bucket")}
        assert files == {"metrics.csv", *(f"{key}/step_00000003.png" for key in PICTURES)}
        assert not list(tmp_path.rglob("*.png"))
    finally:
        memory.rm("/bucket", recursive=True)


# ---- loggers that fail ----


class Raising(Recorder):
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        if "curvmon/lambda_1" in metrics:
            raise ConnectionError("the server is gone")
        super().log_metrics(metrics, step)


class FullDisk(PictureRecorder):
    def save(self) -> None:
        if self.rows and "curvmon/lambda_1" in self.rows[-1][1]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().save()


class Blind(PictureRecorder):
    def log_image(self, key: str, images: list[np.ndarray], step: int) -> None:
        raise TypeError("no pictures, please")


def test_failing_logger_warns_once_and_others_get_everything() -> None:
    raising, full, blind, other_blind, healthy = Raising(), FullDisk(), Blind(), Blind(), PictureRecorder()
    monitor = monitor_without_time()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = fit(monitor, logger=[raising, full, blind, other_blind, healthy], epochs=EPOCHS)
    assert trainer.global_step == EPOCHS * BATCHES and trainer.state.finished
    assert [message.split(";")[0] for message in curvmon_warnings(caught)] == [
        "curvmon: Raising (logger 1) did not take the numbers (ConnectionError: the server is gone)",
        "curvmon: FullDisk (logger 2) did not take the numbers (OSError: [Errno 28] No space left on device)",
        "curvmon: Blind (logger 3) did not take the pictures (TypeError: no pictures, please)",
        "curvmon: Blind (logger 4) did not take the pictures (TypeError: no pictures, please)",
    ]
    assert healthy.measured() == blind.measured() == other_blind.measured() == expected(monitor)
    assert {key: list(by_step) for key, by_step in healthy.images.items()} == {key: STEPS for key in PICTURES}
    assert len(full.measured()) == len(STEPS)  # tried again every time
    assert full.images == {}  # a lost connection would keep training waiting for every one
    assert raising.measured() == [] and len(raising.measured("val_loss")) == EPOCHS


def test_full_disk(tmp_path: Path) -> None:
    """Every write to /dev/full fails with ENOSPC."""
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")

    class Silent(Classifier):
        """Lightning itself does not survive a logger that cannot write."""

        def log(self, *args: Any, **kwargs: Any) -> None:
            pass

    csv, healthy = CSVLogger(tmp_path), Recorder()
    csv.experiment.metrics_file_path = "/dev/full"
    monitor = CurvatureMonitor(heatmaps=False)
    csv.finalize = lambda status: None  # type: ignore[method-assign]  # Lightning's, at the end: would raise as well
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = fit(monitor, logger=[csv, healthy], module=Silent(), epochs=2)
    assert trainer.global_step == 2 * BATCHES
    (message,) = curvmon_warnings(caught)
    assert "CSVLogger (logger 1) did not take the numbers (OSError: [Errno 28]" in message
    assert healthy.measured() == expected(monitor)


def test_picture_that_cannot_be_drawn_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> None:
        raise ValueError("no such font")

    monkeypatch.setattr(figures, "heatmap", broken)
    own, monitor = PictureRecorder(), monitor_without_time()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(monitor, logger=own, epochs=2)
    (message,) = curvmon_warnings(caught)
    assert "a picture could not be drawn (ValueError: no such font)" in message
    assert own.measured() == expected(monitor)
    assert {key: list(by_step) for key, by_step in own.images.items()} == dict.fromkeys(PICTURES[4:], STEPS[:3])


def test_pictures_are_drawn_once_and_only_if_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str] = []
    original = figures.heatmap

    def counted(found: Any, metric: Any, *rest: Any) -> Any:
        drawn.append(metric)
        return original(found, metric, *rest)

    monkeypatch.setattr(figures, "heatmap", counted)
    first, second = PictureRecorder(), PictureRecorder()
    fit(CurvatureMonitor(initial=False), logger=[first, second])
    assert drawn == list(METRICS)
    assert set(first.images) == set(second.images) == set(PICTURES)
    fit(CurvatureMonitor(initial=False), logger=Recorder())
    fit(CurvatureMonitor(initial=False, heatmaps=False), logger=PictureRecorder())
    assert len(drawn) == len(METRICS)

"""Which keys a run has, on dashboards and in files."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from curvmon import CurvatureMonitor
from curvmon.integrations.lightning.demo.network import Classifier, ResNet
from curvmon.metrics import ScalarMetric, register, unregister
from curvmon.metrics.registry import SPECTRUM, get
from curvmon.records import METRICS, Snapshot
from curvmon.reporting.scalars import Keys, groups, log10_key, picture_keys, scalars, stderr_key
from examples.character_gpt import GPT
from tests.helpers.lightning_runs import trained
from tests.helpers.logger_readers import TensorBoard, csv_rows, png_files
from tests.helpers.recorders import PictureRecorder
from tests.helpers.synthetic_records import synthetic_measurement

HEADLINE = {
    "lambda_1", "lambda_min", "stability_ratio", "trace", "ggn_error", "resonance", "coupling", "stable_rank", "gn_gap",
    "step_ratio", "critical_lr", "probe_loss", "alerts", "overhead",
}  # fmt: skip
"""all that the group may have"""


def resnet_like() -> tuple[pl.LightningModule, TensorDataset]:
    images, labels = torch.randn(96, 1, 8, 8), torch.randint(10, (96,))
    return Classifier(ResNet(1, 10, 4, nn.ReLU), lr=0.01), TensorDataset(images, labels)


def gpt_like() -> tuple[pl.LightningModule, TensorDataset]:
    text = torch.randint(10, (96, 9))
    return GPT(10, context=8, width=16, depth=3, heads=2), TensorDataset(text[:, :-1], text[:, 1:])


def grouped(keys: Iterable[str]) -> dict[str, set[str]]:
    """The names by group, which is the part before the first slash."""
    found: dict[str, set[str]] = {}
    for group, _, name in (key.partition("/") for key in keys):
        found.setdefault(group, set()).add(name)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("make", [resnet_like, gpt_like])
def test_a_default_run_has_four_groups_and_pictures(make: Callable[[], Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, data = make()
    board, csv, own = TensorBoardLogger(tmp_path), CSVLogger(tmp_path, name="csv"), PictureRecorder()
    monitor = CurvatureMonitor()
    loaders = DataLoader(data, 16), DataLoader(data, 48)
    assert not trained(module, monitor, loaders, max_epochs=3, logger=[board, csv, own], log_every_n_steps=2)
    n = len(monitor.history[0].nodes)

    tags = TensorBoard(board.log_dir)
    theirs = {"train_loss", "val_loss", "val_accuracy", "epoch"}
    shown = grouped(set(tags.tags) - theirs)
    assert set(shown) == {"curvmon", "curvmon_spectrum", "curvmon_distance"}
    assert shown["curvmon"] <= HEADLINE and len(HEADLINE) == 14
    # the stability limit of Adam is known from the second measurement on
    assert shown["curvmon"] >= HEADLINE - {"step_ratio", "critical_lr"}
    distances = {f"{metric}/{d}" for metric in METRICS for d in range(n)} - {"coupling/0"}
    assert {name for name in shown["curvmon_distance"] if "log10" not in name} == distances
    eigenvalues = {f"lambda_{i}" for i in range(2, 6)}
    assert {name for name in shown["curvmon_spectrum"] if "log10" not in name} == eigenvalues
    assert set(grouped(tags.pictures())) == {"curvmon_pictures"}

    mine = {key for _, row in own.rows for key in row} - theirs
    assert mine == {key for key in set(tags.tags) - theirs if "log10" not in key}
    in_files = {key for _, row in csv_rows(csv.log_dir) for key in row} - theirs
    assert in_files > mine and set(grouped(in_files - mine)) == {"curvmon_detail"}
    assert set(png_files(csv.log_dir)) == set(tags.pictures()) == set(own.images) == set(picture_keys())


@pytest.mark.slow
def test_every_key_can_be_watched() -> None:
    """EarlyStopping and ModelCheckpoint look into callback_metrics."""
    module, data = resnet_like()
    loader, seen = DataLoader(data, 32), set[str]()

    class Watch(CurvatureMonitor):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            super().on_train_end(trainer, pl_module)
            seen.update(trainer.callback_metrics)

    monitor = Watch(log_pairs=True, log_key_prefix="fold1/", heatmaps=False)
    trained(module, monitor, (loader, loader))
    last = scalars(monitor.snapshots[-1], pairs=True).named(Keys("fold1/"))
    assert {*last.shown, *last.detail} <= seen and "fold1/curvmon_detail/hvps" in last.detail


# ---- names ----


def test_standard_errors_are_named_after_their_number() -> None:
    assert stderr_key("curvmon/trace") == "curvmon_detail/trace_stderr"
    assert stderr_key("curvmon_distance/resonance/1") == "curvmon_detail/resonance/1_stderr"
    assert stderr_key("own/size") == "curvmon_detail/own/size_stderr"


def test_logarithms_are_behind_the_headline() -> None:
    assert log10_key("curvmon/lambda_1", get("lambda_1")) == "curvmon_spectrum/log10_lambda_1"
    assert log10_key("curvmon_distance/gn_gap/2", get("gn_gap")) == "curvmon_distance/log10_gn_gap/2"
    assert log10_key("curvmon/resonance", get("resonance")) is None
    assert log10_key("curvmon_distance/coupling/1", get("coupling")) is None


def test_values_without_logarithm_have_none() -> None:
    gap = torch.zeros(3, 3, dtype=torch.float64)
    found = scalars(Snapshot(0, 0, synthetic_measurement(3, gn_gap=gap)))
    assert found.shown["curvmon_distance/gn_gap/1"] == 0
    assert set(found.log10) == {f"curvmon_distance/log10_resonance/{d}" for d in range(3)}


@pytest.mark.parametrize(
    ("key", "pattern"),
    [("own/size", "own/*"), ("sizes_{}", "sizes_*"), ("size", "size"), ("curvmon/size", "curvmon/*")],
)
def test_groups_match_every_key_of_a_dashboard(key: str, pattern: str) -> None:
    register(ScalarMetric(name="size", title="size", key=key, read=lambda snapshot: [1.0]))
    try:
        assert pattern in groups()
        logged = scalars(Snapshot(0, 0, synthetic_measurement(3)), pairs=True)
        globs = [re.escape(group).replace(r"\*", ".*") for group in groups()]
        for shown in (*logged.shown, *picture_keys()):
            assert any(re.fullmatch(glob, shown) for glob in globs), shown
        assert not any(re.fullmatch(glob, detail) for glob in globs for detail in logged.detail)
    finally:
        unregister("size")


def test_detail_of_a_users_own_metric_stays_off_dashboards() -> None:
    spec = ScalarMetric(
        name="size", title="size", key="own/size", read=lambda snapshot: [10.0], detail=True, log_scale=True,
        section=SPECTRUM,
    )  # fmt: skip
    register(spec)
    try:
        found = scalars(Snapshot(0, 0, synthetic_measurement(3)))
        assert found.detail["own/size"] == 10.0
        for kind in ("TensorBoardLogger", "WandbLogger", "MLFlowLogger", "other"):
            assert not any("size" in key for key in found.for_logger(kind))
        assert found.for_logger("CSVLogger") == found.for_callbacks() == {**found.shown, **found.detail}
    finally:
        unregister("size")

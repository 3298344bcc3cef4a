"""The charts of a dashboard: the user's own first, then the headline; what TensorBoard's layout shows, and when."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pytorch_lightning.loggers import TensorBoardLogger

from curvmon.metrics import ScalarMetric, register, unregister
from curvmon.metrics.pair_summaries import mean_over_pairs
from curvmon.metrics.registry import PairMetric
from curvmon.reporting.charts import ORDER, Chart, sections
from curvmon.reporting.dashboards import set_up, tensorboard_layout, tensorboard_link
from curvmon.reporting.scalars import Keys
from tests.helpers.logger_readers import TensorBoard
from tests.helpers.toy_metric import TOY

LOSSES = (
    "loss", "train_loss", "val_loss", "train/loss", "loss/train", "val_loss_epoch", "lossG", "Loss/val",
    "test/dice_loss", "trainLoss", "val_loss/dataloader_idx_0",
)  # fmt: skip
ACCURACIES = (
    "acc",
    "val_acc",
    "train/accuracy",
    "accuracy/val",
    "val_MulticlassAccuracy",
    "val_f1",
    "mIoU",
    "test/auroc",
)
OTHERS = ("lr-Adam", "epoch", "hp_metric", "grad_norm", "curvmon/lambda_1", "curvmon_distance/coupling/1", "val_bleu")


def own_charts() -> list[Chart]:
    (_, charts), *_ = sections().items()
    return charts


def test_users_metrics_are_recognised_by_their_names() -> None:
    loss, accuracy = own_charts()
    for key in (*LOSSES, *ACCURACIES, *OTHERS):
        assert bool(re.fullmatch(loss.own, key)) == (key in LOSSES), key
        assert bool(re.fullmatch(accuracy.own, key)) == (key in ACCURACIES), key


def test_the_users_charts_come_first_then_the_headline() -> None:
    found = sections()
    titles = ["loss, accuracy, alerts", "curvmon", "spectrum of the Hessian", "by distance between layers"]
    assert list(found) == titles
    assert [chart.names for chart in own_charts()] == ["curvmon/probe_loss", "curvmon/alerts"]
    names = [chart.names.removeprefix("curvmon/") for chart in found["curvmon"]]
    assert names == [name for name in ORDER if name in names] and len(names) >= 10


def test_headline_of_pulses_stands_behind_the_stability_ratio() -> None:
    """Metrics with these names are in the layout as soon as they are registered."""
    place = ORDER.index("stability_ratio")
    assert ORDER[place + 1 : place + 3] == ("step_ratio", "critical_lr")


@pytest.mark.parametrize(
    "spec",
    [
        replace(TOY, headline=mean_over_pairs),
        ScalarMetric(name="toy", title="toy metric", symbol="Y", key="curvmon/toy", read=lambda snapshot: [1.0]),
    ],
)
def test_further_numbers_of_the_headline_are_last(spec: PairMetric | ScalarMetric) -> None:
    register(spec)
    try:
        assert sections()["curvmon"][-1][:2] == ("toy metric Y", "curvmon/toy")
    finally:
        unregister("toy")


def test_section_of_a_users_own_metric_is_last() -> None:
    register(
        ScalarMetric(name="size", title="size", key="own/size_{}", read=lambda s: [1.0], section="mine", chart="sizes")
    )
    try:
        assert list(sections())[-1] == "mine" and sections()["mine"][0].names == r"own/size_\d+"
    finally:
        unregister("size")


# ---- TensorBoard's layout ----

SOME = {"curvmon/lambda_1", "curvmon/alerts", "curvmon_distance/coupling/1"}


def test_charts_without_lines_are_omitted() -> None:
    layout = tensorboard_layout({"": SOME})
    assert {section: list(charts) for section, charts in layout.items()} == {
        "loss, accuracy, alerts": ["loss", "accuracy, alerts so far"],
        "curvmon": ["top eigenvalue λ₁"],
        "by distance between layers": ["coupling by distance"],
    }


def test_all_monitors_share_the_users_charts() -> None:
    layout = tensorboard_layout({"a/": {f"a/{key}" for key in SOME}, "b/": {"b/curvmon/trace"}}, "fold1-")
    kind, lines = layout["loss, accuracy, alerts"]["accuracy, alerts so far"]
    assert kind == "Multiline" and lines[1:] == [rf"fold1\-{prefix}/curvmon/alerts$" for prefix in "ab"]
    assert re.match(lines[0], "fold1-val_acc") and re.match(lines[0], "fold1-val/acc")
    assert list(layout["curvmon (a)"]) == ["top eigenvalue λ₁"] and list(layout["curvmon (b)"]) == ["trace tr H"]


@pytest.fixture
def board(tmp_path: Path) -> Any:
    return TensorBoardLogger(tmp_path)


def layouts(board: Any) -> list[list[str]]:
    """The titles of all charts, of one layout after the other."""
    board.experiment.flush()
    return [
        [title for charts in layout.values() for title in charts] for layout in TensorBoard(board.log_dir).layouts()
    ]


def test_a_layout_grows_with_what_is_logged(board: Any) -> None:
    for names in (SOME, SOME, {"curvmon/alerts"}, {*SOME, "curvmon/unknown"}, {"curvmon/overhead"}):
        set_up(board, "TensorBoardLogger", Keys(), names)
    first, second = layouts(board)
    assert "overhead" not in first and second == [*first[:3], "overhead", *first[3:]]


@pytest.mark.parametrize("before", [True, False])
def test_a_users_layout_is_not_replaced(board: Any, before: bool) -> None:
    """Neither by a later layout of the same monitor, nor by that of another one."""
    mine = {"mine": {"losses": ["Multiline", ["train_loss"]]}}
    if not before:
        set_up(board, "TensorBoardLogger", Keys(), SOME)
    board.experiment.add_custom_scalars(mine)
    for prefix in ("", "b/"):
        set_up(board, "TensorBoardLogger", Keys(prefix), {f"{prefix}curvmon/trace"})
    assert layouts(board)[-1] == ["losses"] and len(layouts(board)) == 2 - before


def test_a_resumed_run_keeps_its_layout(board: Any) -> None:
    set_up(board, "TensorBoardLogger", Keys(), SOME)
    board.experiment.close()
    again = TensorBoardLogger(Path(board.root_dir).parent, version=board.version)
    assert again.log_dir == board.log_dir
    set_up(again, "TensorBoardLogger", Keys(), SOME)
    assert len(layouts(again)) == 1


def test_link_with_pinned_charts() -> None:
    assert tensorboard_link("a/b") == (
        "http://localhost:6006/?pinnedCards=%5B%7B%22plugin%22%3A%22scalars%22%2C%22tag%22%3A%22a/b%22%7D%5D#timeseries"
    )

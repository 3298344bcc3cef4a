"""Which measurements have pictures, in the files of real loggers, with a clock that only measuring and drawing move."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import TensorBoardLogger, WandbLogger
from torch import nn

from curvmon import CurvatureMonitor
from curvmon.alerts.rules import AlertRules
from curvmon.monitor.budget import Budget
from curvmon.monitor.fallbacks import Failure
from curvmon.monitor.measurement import Outcome, attempt
from curvmon.records import METRICS, Snapshot
from curvmon.reporting import figures
from curvmon.reporting.pictures import MAX_SHARE, MOST_WITHOUT, Picture, PictureSchedule
from curvmon.reporting.reporter import Report
from curvmon.reporting.scalars import EIGENVALUES, picture_keys
from tests.helpers.budgets import monitor_with, monitor_without_time
from tests.helpers.fake_clock import FakeClock
from tests.helpers.lightning_runs import run
from tests.helpers.logger_readers import TensorBoard, Wandb
from tests.helpers.module_zoo import Regression
from tests.helpers.recorders import PictureRecorder
from tests.helpers.synthetic_records import synthetic_measurement

# ---- the schedule alone ----


def drawn_at(count: int, measuring: float, drawing: float, alerts: tuple[int, ...] = ()) -> list[int]:
    schedule, places = PictureSchedule(), []
    schedule.start()
    for i in range(count):
        schedule.measured({"key": Picture(lambda: None)}, i, measuring, alert=i in alerts)
        if schedule.due:
            places.append(i)
            schedule.drew(drawing)
    return places


def test_cheap_pictures_are_drawn_every_time() -> None:
    assert drawn_at(20, measuring=1.0, drawing=0.0) == list(range(20))
    assert drawn_at(20, measuring=32.0, drawing=1.0) == list(range(20))


@pytest.mark.parametrize("drawing", [0.125, 0.25, 1.0])
def test_drawing_takes_a_tenth_of_measuring(drawing: float) -> None:
    count = 1000
    places = drawn_at(count, measuring=1.0, drawing=drawing)
    total = len(places) * drawing
    assert places[0] == 0 and places[1] == pytest.approx(2 * drawing / MAX_SHARE - 1, abs=1)
    assert MAX_SHARE * count - 2 * drawing <= total <= MAX_SHARE * count


def test_pictures_that_take_longer_than_measuring_are_rare_but_not_absent() -> None:
    assert drawn_at(120, measuring=1.0, drawing=1000.0) == [0, MOST_WITHOUT, 2 * MOST_WITHOUT]


def test_alerts_have_pictures_and_count() -> None:
    without, places = (drawn_at(60, measuring=1.0, drawing=1.0, alerts=alerts) for alerts in ((), (3, 4)))
    assert without == [0, 19, 29, 39, 49, 59]
    assert places == [0, 3, 4, 39, 49, 59]


def test_nothing_to_draw_is_never_due() -> None:
    schedule = PictureSchedule()
    schedule.start()
    schedule.measured({}, 0, 1.0, alert=True)
    assert not schedule.due and schedule.undrawn is None


def test_only_what_has_changed_is_drawn_between() -> None:
    schedule = PictureSchedule()
    schedule.start()

    def keys(content: float, alert: bool = False) -> set[str]:
        pictures = {"same": Picture(lambda: None, torch.zeros(2, 2)), "new": Picture(lambda: None)}
        pictures["some"] = Picture(lambda: None, torch.full((2, 2), content))
        schedule.measured(pictures, 0, 1.0, alert)
        assert schedule.due and schedule.undrawn is not None
        drawn = set(schedule.undrawn.pictures)
        schedule.drew(0.0)
        return drawn

    everything = {"same", "new", "some"}
    assert keys(1.0) == everything
    assert keys(2.0) == {"new", "some"}
    assert keys(2.0) == {"new"}
    assert keys(2.0, alert=True) == everything
    assert keys(1.0) == {"new", "some"}  # compared with what is shown, not with the last measurement
    schedule.start()
    assert keys(1.0) == everything


# ---- in a run ----

DRAWING = 0.25
"""seconds of all pictures of a measurement, which itself takes one"""
STEPS = [0, *range(3, 52, 4)]
"""before training, and the last step of each of 13 epochs"""
ALERT = AlertRules(gn_gap_above=0.0, lasting=4, changes=False, edge_of_stability=None, coupling_above=None)
"""one alert, at the fourth measurement"""


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., CurvatureMonitor]:
    """Makes monitors whose measurements take a second, and their pictures a quarter of it."""
    clock, original = FakeClock(), figures.by_distance

    def drawn(*args: Any) -> Any:
        clock.advance(DRAWING)
        return original(*args)

    monkeypatch.setattr(figures, "by_distance", drawn)

    def measured(*args: Any) -> Outcome:
        clock.advance(1.0)
        return attempt(*args)

    def make(attempt: Callable[..., Outcome] = measured, **options: Any) -> CurvatureMonitor:
        return monitor_with(Budget(None, clock=clock), attempt, **{"eigenvalues": 1, "alerts": ALERT, **options})

    return make


@pytest.mark.slow
def test_first_last_and_alerts_have_pictures(timed: Any, tmp_path: Path, quiet_wandb: None) -> None:
    (tmp_path / "wandb_runs").mkdir()
    board = TensorBoardLogger(tmp_path)
    wandb, own = WandbLogger(project="curvmon", save_dir=tmp_path / "wandb_runs"), PictureRecorder()
    monitor = timed()
    messages = run(monitor, epochs=13, logger=[board, wandb, own])
    wandb.experiment.finish()
    assert messages == [] and [s.step for s in monitor.snapshots] == STEPS
    (alert,) = monitor.alerts
    assert alert.step == STEPS[3]
    # n seconds of measuring pay for n / 2.5 pictures: those of the first, the alert, the eighth and the tenth
    steps = [STEPS[i] for i in (0, 3, 7, 9, 12, 13)]
    for pictures in (own.images, TensorBoard(board.log_dir).pictures(), Wandb(tmp_path / "wandb_runs").pictures()):
        assert {key: sorted(by_step) for key, by_step in pictures.items()} == dict.fromkeys(picture_keys(), steps)


@pytest.mark.parametrize("rank", [0, 1])
def test_only_rank_0_has_pictures(rank: int) -> None:
    report = Report(METRICS, False, True, "", False)
    report.schedule.start()
    own = PictureRecorder()
    trainer = SimpleNamespace(
        is_global_zero=rank == 0, loggers=[own], counts_epochs=True, folder=None, publish=lambda values, stale: None
    )
    report.write(trainer, [Snapshot(step=7, epoch=1, measurement=synthetic_measurement(2))], [], [])
    assert report.schedule.due == (rank == 0)
    report.draw(trainer)
    assert {key: list(by_step) for key, by_step in own.images.items()} == {
        key: [7] for key in picture_keys() if rank == 0 and key != EIGENVALUES
    }


@pytest.mark.slow
def test_one_measurement_has_its_pictures_once(timed: Any) -> None:
    own = PictureRecorder()
    run(timed(initial=False), epochs=1, logger=own)
    assert {key: list(by_step) for key, by_step in own.images.items()} == {key: [3] for key in picture_keys()}


@pytest.mark.slow
def test_no_heatmaps_no_drawing(timed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def unexpected(*args: Any) -> None:
        raise AssertionError("drawn")

    for name in ("heatmap", "by_distance", "spectrum_over_time"):
        monkeypatch.setattr(figures, name, unexpected)
    own = PictureRecorder()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        run(timed(heatmaps=False), epochs=4, logger=own)
    assert own.images == {} and len(own.measured()) == 5


@pytest.mark.slow
def test_constant_heatmap_is_drawn_at_the_first_measurement_only() -> None:
    """With ReLU, the GN-Gap is zero between all layers: nothing new to see."""
    own = PictureRecorder()

    class PiecewiseLinear(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))

    run(monitor_without_time(eigenvalues=1), epochs=3, logger=own, module=PiecewiseLinear)
    steps = {key: list(by_step) for key, by_step in own.images.items()}
    assert steps.pop("curvmon_pictures/gn_gap") == STEPS[:1]
    assert steps == {key: STEPS[:4] for key in picture_keys() if key != "curvmon_pictures/gn_gap"}


@pytest.mark.slow
def test_pictures_after_a_failure_keep_their_step(timed: Any) -> None:
    """The last measurement that succeeded is drawn at the end of training, at its own step."""
    count = iter(range(100))

    def failing(*args: Any) -> Outcome:
        return attempt(*args) if next(count) < 3 else Outcome(failure=Failure("transient", "ValueError: no"))

    own, monitor = PictureRecorder(), timed(failing, alerts=False)
    # a clock that stands still while measuring: only the first and the last are drawn
    run(monitor, epochs=4, logger=own)
    assert [s.step for s in monitor.snapshots if s.is_full] == STEPS[:3]
    drawn = {key: list(by_step) for key, by_step in own.images.items()}
    assert drawn == {key: [STEPS[0], STEPS[2]] for key in picture_keys()}


@pytest.mark.slow
def test_interrupted_run_leaves_nothing_for_the_next(timed: Any) -> None:
    class Stop(pl.Callback):
        def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            raise RuntimeError("stop")

    works = True

    def measured(*args: Any) -> Outcome:
        return attempt(*args) if works else Outcome(failure=Failure("transient", "ValueError: no"))

    own, later = PictureRecorder(), PictureRecorder()
    monitor = timed(measured, alerts=False)
    with pytest.raises(RuntimeError, match="stop"):
        run([monitor, Stop()], epochs=2, logger=own)
    assert [s.step for s in monitor.snapshots] == STEPS[:2]
    assert {step for by_step in own.images.values() for step in by_step} == {STEPS[0]}  # nothing on an exception
    works = False
    run(monitor, epochs=1, logger=later)
    assert later.images == {}
    works = True
    run(monitor, epochs=1, logger=later)
    assert {step for by_step in later.images.values() for step in by_step} == {STEPS[1]}

"""Alerts in a Trainer: one for every event, at the right place, delivered everywhere, through checkpoints and ranks."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.loggers import TensorBoardLogger, WandbLogger

from benchmarks.alert_runs import EVENTS
from curvmon import Alert, AlertRules, CurvatureMonitor, InputError
from curvmon.alerts.manager import AlertManager
from curvmon.reporting.figures import heatmap, spectrum_over_time
from tests.helpers.disturbed_runs import fit
from tests.helpers.logger_readers import TensorBoard, Wandb
from tests.helpers.time_limits import PATIENCE

pytestmark = pytest.mark.slow

QUIET = 12
"""epochs before the event"""
AFTER = 3
LOGGED = "half of a layer's weights zeroed"
"""the event whose run is logged everywhere; resumed from a checkpoint, its weights and settings are the same"""
CAUSES = {
    "learning rate x 20": "learning rate",
    "half of a layer's weights zeroed": "weights zeroed",
    "batch norm statistics reset and frozen": "statistics",
    "skip connection cut": "forward pass",
    "activation exchanged": "forward pass",
    "data shifted": "inputs",
}
"""of the events whose cause is clear"""


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, CurvatureMonitor]:
    folder = tmp_path_factory.mktemp("quiet")
    monitor, trainer = fit(folder, QUIET)
    trainer.save_checkpoint(folder / "quiet.ckpt")
    return folder / "quiet.ckpt", monitor


@pytest.fixture(scope="module")
def disturbed(quiet: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., CurvatureMonitor]:
    """The monitor of the run disturbed by an event after the quiet epochs; every run is made once."""
    made: dict[str, CurvatureMonitor] = {}

    def run(event: str) -> CurvatureMonitor:
        if event not in made:
            folder = tmp_path_factory.mktemp("disturbed")
            made[event], _ = fit(folder, QUIET + AFTER, event, QUIET, checkpoint=quiet[0])
        return made[event]

    return run


def test_a_quiet_run_raises_none(quiet: Any) -> None:
    assert quiet[1].alerts == []
    assert len(quiet[1].history) == QUIET + 1


@pytest.mark.filterwarnings("ignore:curvmon. not measured")
@pytest.mark.parametrize("event", EVENTS)
def test_every_event_gives_exactly_one_alert_in_the_right_place(event: str, disturbed: Any) -> None:
    monitor = disturbed(event)
    (alert,) = monitor.alerts
    steps = [snapshot.step for snapshot in monitor.snapshots]
    per_epoch = steps[2] - steps[1]
    first = steps[QUIET] + per_epoch
    assert alert.step == first
    place = EVENTS[event].place
    if event == "NaN in a weight":
        assert alert.kind == "not_finite" and "parameter 'model." in alert.message
    elif place is None:
        assert alert.kind == "jump"
    else:
        assert alert.where == alert.places[0][0] and f"{alert.where}.".startswith(f"model.{place}.")
        assert f"model.{place}" in alert.message
    assert len(alert.headline) < 80 and alert.headline.endswith(f", step {alert.step}")
    assert 2 <= len(alert.evidence) <= 4 and any(" → " in point for point in alert.evidence)
    assert alert.suggestion.startswith(("Check ", "Lower ", "Go back to "))
    assert event not in CAUSES or (alert.causes[0][0] == CAUSES[event] and alert.causes[0][1] > 0.5)


def test_a_learning_rate_is_named_as_the_cause(disturbed: Any) -> None:
    (alert,) = disturbed("learning rate x 20").alerts
    assert alert.headline.startswith("Learning rate x 20: val_loss ")
    assert "learning rate: 0.004 → 0.08" in alert.evidence
    assert alert.suggestion.startswith("Lower the learning rate")


def test_changed_operations_and_settings_are_named(disturbed: Any) -> None:
    (cut,), (exchanged,) = (disturbed(event).alerts for event in ("skip connection cut", "activation exchanged"))
    assert "operations of model.blocks.2: 1 fewer Add" in cut.message
    assert "model.blocks.1.activation.class: ReLU → Tanh" in exchanged.message


def test_the_tensor_that_was_zeroed_is_named(disturbed: Any) -> None:
    (alert,) = disturbed("half of a layer's weights zeroed").alerts
    assert alert.headline.startswith("Weights of model.blocks.1.conv1 zeroed: val_loss ")
    assert "share of zeros in model.blocks.1.conv1.weight: 0 → 0.5" in alert.message


@pytest.fixture(scope="module")
def logged(quiet: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One run with every way of delivery, stopped by its alert."""
    folder = tmp_path_factory.mktemp("logged")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_SILENT", "true")
        for kind in ("CONFIG", "CACHE", "DATA", "ARTIFACT"):
            patch.setenv(f"WANDB_{kind}_DIR", str(tmp_path_factory.mktemp(f"wandb_{kind.lower()}")))
        records: list[logging.LogRecord] = []
        handler = logging.Handler()
        handler.emit = records.append  # type: ignore[method-assign]
        logging.getLogger("curvmon").addHandler(handler)
        tensorboard, wandb = TensorBoardLogger(folder / "tb"), WandbLogger(project="curvmon", save_dir=folder)
        monitor, _ = fit(
            folder,
            QUIET + AFTER,
            LOGGED,
            QUIET,
            checkpoint=quiet[0],
            logger=[tensorboard, wandb],
            on_alert="checkpoint",
            heatmaps=True,
        )
        logging.getLogger("curvmon").removeHandler(handler)
        wandb.experiment.finish()
        import wandb as package

        package.teardown()
        return monitor, folder, TensorBoard(tensorboard.log_dir), Wandb(folder), records


def test_tensorboard_has_the_text_and_the_count(logged: Any) -> None:
    monitor, _, tensorboard, _, _ = logged
    (alert,) = monitor.alerts
    ((step, text),) = tensorboard.texts("curvmon/alert")
    assert step == alert.step and f"**curvmon: {alert.headline}** (warning)" in text
    notices = [notice.step for notice in monitor.notices if notice.step >= alert.step]
    assert [step for step, _ in tensorboard.texts("curvmon/notice")] == notices
    counts = tensorboard.series("curvmon/alerts")
    assert [count for _, count in counts] == [float(s >= alert.step) for s, _ in counts]


def test_wandb_has_the_alert(logged: Any) -> None:
    monitor, _, _, wandb, _ = logged
    (alert,) = monitor.alerts
    ((title, text, level),) = wandb.alerts
    assert level == "WARN" and title.endswith(f", step {alert.step}")
    assert alert.headline in f"{title}\n{text}" and all(line in text for line in alert.details)


def test_the_python_log_has_the_message(logged: Any) -> None:
    monitor, folder, _, _, records = logged
    (alert,) = monitor.alerts
    path = folder / f"curvmon-alert-step={alert.step}.ckpt"
    assert [r.getMessage() for r in records if r.levelno == logging.WARNING] == [
        f"curvmon: {alert.message}",
        f"curvmon wrote {path}: {alert.headline}; on_alert='checkpoint'",
    ]


def test_a_resumed_run_neither_repeats_nor_loses_it(logged: Any, tmp_path: Path) -> None:
    """From the checkpoint that `on_alert` wrote at the alert itself."""
    monitor, folder, _, _, _ = logged
    (alert,) = monitor.alerts
    checkpoint = folder / f"curvmon-alert-step={alert.step}.ckpt"
    torch.load(checkpoint, weights_only=True)["callbacks"]["CurvatureMonitor"]
    resumed, _ = fit(tmp_path, QUIET + AFTER, checkpoint=checkpoint)
    assert [a.to_dict() for a in resumed.alerts] == [alert.to_dict()]


def test_pictures_mark_the_alert(logged: Any) -> None:
    monitor = logged[0]
    found = monitor.history[-1]
    pair = f"{found.nodes[0]}--{found.nodes[1]}"
    assert len(heatmap(found, "coupling", "", [pair]).axes[0].patches) == 2  # both halves of the matrix
    assert not heatmap(found, "coupling").axes[0].patches
    labels = [line.get_label() for line in spectrum_over_time(monitor.snapshots, "", [30]).axes[0].lines]
    assert "alert" in labels


def test_stop_ends_training_and_says_why(quiet: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    monitor, trainer = fit(tmp_path, QUIET + AFTER, LOGGED, QUIET, checkpoint=quiet[0], on_alert="stop")
    (alert,) = monitor.alerts
    assert trainer.current_epoch == QUIET + 1
    own = [record.getMessage() for record in caplog.records if record.name == "curvmon"]
    assert own == [
        f"curvmon: {alert.message}",
        f"curvmon stopped this run at step {alert.step}: {alert.headline}; on_alert='stop'",
    ]


def test_a_callable_is_called_once(quiet: Any, tmp_path: Path) -> None:
    called: list[Alert] = []

    def tell(alert: Alert) -> None:
        called.append(alert)
        raise RuntimeError("the pager is down")

    with pytest.warns(UserWarning, match="on_alert raised RuntimeError: the pager is down"):
        monitor, _ = fit(tmp_path, QUIET + AFTER, LOGGED, QUIET, checkpoint=quiet[0], on_alert=tell)
    assert called == monitor.alerts


def test_alerts_can_be_switched_off(quiet: Any, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="not measured: parameter .* not finite"):
        monitor, _ = fit(tmp_path, QUIET + 1, "NaN in a weight", QUIET, checkpoint=quiet[0], alerts=False)
    assert monitor.alerts == []


@pytest.mark.parametrize("settings", [{"alerts": "yes"}, {"on_alert": "sing"}, {"on_alert": 3}])
def test_invalid_settings_raise_at_once(settings: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(settings))):
        CurvatureMonitor(**settings)


@pytest.mark.filterwarnings("ignore:curvmon. not measured")
def test_rules_are_an_argument(quiet: Any, tmp_path: Path) -> None:
    for rules, count in ((AlertRules(not_finite=False), 0), (AlertRules(changes=False), 1)):
        monitor, _ = fit(tmp_path, QUIET + 1, "NaN in a weight", QUIET, checkpoint=quiet[0], alerts=rules)
        assert len(monitor.alerts) == count


@pytest.mark.parametrize(
    "rules",
    [{"lasting": 3.0}, {"lasting": 0}, {"coupling_above": "1"}, {"saddle": True}, {"changes": 1}, {"sensitivity": 0}],
)
def test_invalid_rules_raise_at_once(rules: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(rules))):
        AlertRules(**rules)


def test_alerts_that_fail_are_a_warning(quiet: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> Any:
        raise RuntimeError("out of order")

    monkeypatch.setattr(AlertManager, "update", broken)
    with pytest.warns(UserWarning, match="alerts failed at this measurement .RuntimeError: out of order"):
        monitor, trainer = fit(tmp_path, QUIET + 1, checkpoint=quiet[0])
    assert trainer.current_epoch == QUIET + 1 and len(monitor.history) == QUIET + 2


def test_two_processes_give_one_alert(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("LOCAL_RANK", "WORLD_SIZE")}
    subprocess.run(
        [sys.executable, "-m", "tests.helpers.alert_ddp_run", str(tmp_path)],
        cwd=Path(__file__).parents[3],
        env={**environment, "OMP_NUM_THREADS": "1"},
        check=True,
        timeout=PATIENCE,
        capture_output=True,
    )
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)]
    assert [alert["kind"] for alert in ranks[0]["alerts"]] == ["jump"]
    assert ranks[0]["alerts"] == ranks[1]["alerts"]
    assert [ranks[0]["called"], ranks[1]["called"]] == [1, 0]
    assert len(TensorBoard(tmp_path / "tb").texts("curvmon/alert")) == 1

"""Every example runs, at a small size, shows what it says, and writes nowhere but into its folder."""

from __future__ import annotations

import ast
import csv
import logging
import math
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import curvmon
from examples import (
    attention_against_mlp,
    character_gpt,
    fabric,
    image_classifier,
    monitored_loop,
    plain_pytorch,
    quickstart,
)
from tests.helpers.time_limits import PATIENCE

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(autouse=True)
def the_process_as_before() -> Iterator[None]:
    """Examples seed everything, use one thread and quieten loggers; the tests after them should not notice."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    threads, environment = torch.get_num_threads(), dict(os.environ)
    levels = {logger: logger.level for logger in map(logging.getLogger, ("pytorch_lightning", "lightning.pytorch"))}
    torch.set_num_threads(1)
    yield
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])
    torch.set_num_threads(threads)
    for logger, level in levels.items():
        logger.setLevel(level)
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of an example, which is started in another one that stays empty."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    yield tmp_path / "out"
    assert list(elsewhere.iterdir()) == []
    assert {path.name for path in tmp_path.iterdir()} <= {"elsewhere", "out", "data"}


def columns(folder: Path) -> dict[str, list[float]]:
    """Of the one CSV below a folder: the values of every key, where it has one."""
    (path,) = folder.rglob("*.csv")
    found: dict[str, list[float]] = {}
    with path.open() as file:
        for row in csv.DictReader(file):
            for key, value in row.items():
                if value:
                    found.setdefault(key, []).append(float(value))
    return found


def test_every_example_is_run_by_a_test() -> None:
    """Its name is used in one of four files: a module that is called, or a program that is started."""
    programs = [path for path in EXAMPLES.rglob("*.py") if "__main__" in path.read_text()]
    used = set()
    for name in ("test_examples", "test_spectrum_examples", "test_paper_examples", "reporting/test_dashboards"):
        for node in ast.walk(ast.parse((Path(__file__).parent / f"{name}.py").read_text())):
            if isinstance(node, ast.Name):
                used.add(node.id)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                used.add(node.value.removeprefix("examples.").removesuffix(".py"))
    assert len(programs) > 20
    assert {path.parent.name if path.stem == "main" else path.stem for path in programs} <= used


def test_image_classifier(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monitor = image_classifier.main(["--epochs", "2", "--width", "4", "--activation", "silu", "--out", str(out)])
    assert len(monitor.history) == 3
    assert monitor.history[-1].nodes == ("model.stem", "model.layer1", "model.layer2", "model.layer3")
    logged = columns(out)
    assert logged["val_accuracy"][-1] > 0.5
    for key in ("curvmon_distance/resonance/3", "curvmon_distance/gn_gap/2", "curvmon/lambda_1"):
        assert len(logged[key]) == 3 and all(math.isfinite(value) and value > 0 for value in logged[key])
    pictures = len(list(out.rglob("curvmon_pictures/coupling/*.png")))
    assert list(out.rglob("events.out.tfevents.*")) and 2 <= pictures <= 3  # the first and the last, at least
    printed = capsys.readouterr().out
    assert str(monitor.history[-1]) in printed and "metrics.csv" in printed


def test_cifar10_from_either_kind_of_file(out: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    arrays = {
        name: torch.randint(256, (count, 3, 32, 32), dtype=torch.uint8, generator=generator).numpy()
        for name, count in (("x_train", 40), ("x_test", 8))
    }
    arrays |= {"y_train": np.arange(40, dtype=np.uint8) % 10, "y_test": np.arange(8, dtype=np.uint8)}
    data = out.parent / "data"
    data.mkdir()
    np.savez(data / "cifar.npz", **arrays)
    parts = {f"data_batch_{i + 1}": ("train", slice(8 * i, 8 * i + 8)) for i in range(5)}
    for name, (kind, part) in {**parts, "test_batch": ("test", slice(8))}.items():
        images, labels = arrays[f"x_{kind}"][part].reshape(8, -1), arrays[f"y_{kind}"][part].tolist()
        (data / name).write_bytes(pickle.dumps({b"data": images, b"labels": labels}))
    pickles, archive = image_classifier.cifar10(data), image_classifier.cifar10(data / "cifar.npz")
    assert [tuple(tensor.shape) for tensor in pickles] == [(40, 3, 32, 32), (40,), (8, 3, 32, 32), (8,)]
    assert all(torch.equal(a.long(), b.long()) for a, b in zip(pickles, archive))
    monitor = image_classifier.main(["--data", str(data), "--width", "2", "--epochs", "1", "--out", str(out)])
    assert monitor.history[-1].gn_gap.max() == 0  # ReLU
    assert torch.isfinite(monitor.history[-1].resonance).all()


def test_character_gpt(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = ["--context", "16", "--width", "16", "--depth", "2", "--steps", "30", "--every", "15"]
    monitor = character_gpt.main([*size, "--out", str(out)])
    assert [moment.step for moment in monitor.snapshots] == [0, 14, 29]
    assert all(found.nodes == ("blocks.0", "blocks.1") for found in monitor.history)
    assert monitor.snapshots[-1].loss < 0.9 * monitor.snapshots[0].loss
    logged = columns(out)
    for key in ("curvmon/coupling", "curvmon_distance/gn_gap/1", "curvmon/ggn_error", "curvmon_spectrum/lambda_3"):
        assert len(logged[key]) == 3 and all(map(math.isfinite, logged[key]))
    assert len(logged["curvmon/stability_ratio"]) == 2  # AdamW has no averages before its first step
    assert "The model writes: The " in capsys.readouterr().out


def test_a_character_is_predicted_from_those_before_it() -> None:
    torch.manual_seed(0)
    model = character_gpt.GPT(10, context=8, width=16, depth=2)
    text = torch.randint(10, (1, 8))
    other = text.clone()
    other[0, 5] = (text[0, 5] + 1) % 10
    change = (model(text) - model(other)).abs().amax(2)[0]
    assert change[:5].max() == 0 and change[5:].min() > 0


def test_the_gap_of_attention_is_larger_than_that_of_an_mlp(out: Path) -> None:
    monitors = attention_against_mlp.main(["--epochs", "8", "--out", str(out)])
    found = {name: attention_against_mlp.series(monitor) for name, monitor in monitors.items()}
    assert all(len(gaps) == 9 for gaps, _ in found.values())
    for (attention, a_error), (gelu, g_error) in zip(zip(*found["attention"]), zip(*found["gelu_mlp"])):
        assert attention - gelu > 4 * math.hypot(a_error, g_error)
    assert min(found["gelu_mlp"][0]) > 0 == max(found["relu_mlp"][0])
    assert (out / "gn_gap.png").stat().st_size > 10_000


def test_the_three_models_have_as_many_parameters() -> None:
    models = attention_against_mlp.Attention(), attention_against_mlp.MLP(torch.nn.GELU)
    assert len({sum(p.numel() for p in model.parameters()) for model in models}) == 1


def test_monitor_in_a_plain_loop(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = monitored_loop.main(["--steps", "480", "--out", str(out)])
    assert len(found.history) == 41 and [alert.step for alert in found.alerts][:1] == [324]
    assert "step 324" in capsys.readouterr().out
    assert (out / "report.html").exists() and list(out.glob("events.out.tfevents.*"))
    assert len(curvmon.load_history(out).snapshots) == 41


def test_fabric(out: Path) -> None:
    found = fabric.main(["--steps", "40", "--out", str(out)])
    assert [snapshot.step for snapshot in found.snapshots] == [0, 20, 40]
    saved = torch.load(out / "last.ckpt", weights_only=True)
    assert len(curvmon.load_history(saved).snapshots) == 3
    assert len(curvmon.load_history(out / "digits" / "version_0").snapshots) == 3


def test_hugging_face_trainer(out: Path) -> None:
    pytest.importorskip("accelerate")
    from examples import hugging_face_trainer

    found = hugging_face_trainer.main(["--epochs", "1", "--passages", "200", "--out", str(out)])
    assert [snapshot.step for snapshot in found.snapshots] == [0, 5]
    assert list(out.rglob("events.out.tfevents.*")) and list(out.rglob("curvmon.pt"))


def test_plain_pytorch_loop_raises_one_alert(out: Path) -> None:
    alerts = plain_pytorch.main(["--steps", "300", "--every", "6", "--out", str(out)])
    assert len(alerts) == 1
    step, alert = alerts[0]
    assert 200 < step <= 230 and alert.kind == "jump" and alert.after < 0.5 * alert.before
    logged = columns(out)
    assert logged["step"] == list(range(0, 301, 6))
    assert all(len(values) == 51 and all(map(math.isfinite, values)) for values in logged.values())
    assert logged["loss"][30] < 0.3 < 2 < logged["loss"][-1]


def test_command_line_with_a_configuration(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jsonargparse")
    from examples.cli import main as cli

    monkeypatch.setattr(sys, "argv", sys.argv[:1])
    few = ["--trainer.max_epochs", "1", "--model.depth", "2"]
    found = cli.main(["fit", "--config", str(cli.CONFIG), *few, "--out", str(out)])
    (monitor,) = (callback for callback in found.trainer.callbacks if isinstance(callback, cli.CurvatureMonitor))
    assert [m.nodes for m in monitor.history] == [("stem", "blocks.0", "blocks.1")] * 2
    logged = columns(out)
    assert (
        all(map(math.isfinite, logged["curvmon_distance/gn_gap/1"])) and len(logged["curvmon_spectrum/lambda_3"]) == 2
    )
    assert not [key for key in logged if "stable_rank" in key] and "curvmon_spectrum/lambda_4" not in logged
    assert any("curvmon.CurvatureMonitor" in path.read_text() for path in out.rglob("config.yaml"))


def test_two_processes_have_the_same_numbers(out: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "ddp.py"), "--epochs", "1", "--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=environment)
    assert done.returncode == 0, done.stderr
    assert "2 processes have the same numbers" in done.stdout
    logged = columns(out)
    for key in ("curvmon_distance/resonance/1", "curvmon_distance/gn_gap/1", "curvmon_spectrum/lambda_5"):
        assert len(logged[key]) == 2 and all(map(math.isfinite, logged[key]))


def test_hugging_face_model(out: Path) -> None:
    pytest.importorskip("transformers")
    from examples import hugging_face

    monitor = hugging_face.main(["--epochs", "1", "--passages", "400", "--out", str(out)])
    assert len(monitor.history) == 2
    first, last = monitor.history
    assert last.loss < first.loss
    assert {f"model.bert.encoder.layer.{i}" for i in range(3)} <= set(last.nodes)
    assert torch.isfinite(last.gn_gap).all() and last.gn_gap[0, 1] > 0
    assert "val_accuracy" in columns(out)


def test_quickstart(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = quickstart.main(["--epochs", "2"])
    assert after.loss < before.loss
    assert after.coupling[0, -1] > before.coupling[0, -1]
    assert str(before) in capsys.readouterr().out

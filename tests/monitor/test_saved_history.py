"""`curvmon.load_history`: files, folders and checkpoints, and what it says where there is no history."""

from __future__ import annotations

import io
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import curvmon
from curvmon.errors import InputError
from curvmon.monitor.history import MOST_BYTES, History
from curvmon.monitor.history_file import HistoryFile
from curvmon.records import Snapshot
from curvmon.records.thinning import thinned
from tests.helpers.synthetic_records import synthetic_measurement
from tests.helpers.synthetic_runs import synthetic_run


def state_of(run: curvmon.RunHistory) -> dict[str, Any]:
    return {
        "version": 5,
        "history": [snapshot.to_dict() for snapshot in run.snapshots],
        "pulses": {"records": [pulse.to_dict() for pulse in run.pulses]},
        "alerts": {"raised": [alert.to_dict() for alert in run.raised]},
    }


@pytest.fixture(scope="module")
def run() -> curvmon.RunHistory:
    return synthetic_run(alerts=[400])


def test_from_a_file_and_from_its_folder(tmp_path: Path, run: curvmon.RunHistory) -> None:
    folder = tmp_path / "lightning_logs" / "version_3"
    HistoryFile().write(folder, [*run.snapshots, *run.pulses, *run.raised])
    for place in (folder, str(folder), folder / "history.jsonl"):
        found = curvmon.load_history(place)
        assert found.name == "lightning_logs/version_3"
        assert found.steps == run.steps and found.alerts == run.alerts and len(found.history) == len(run.history)


def test_two_monitors_of_one_run(tmp_path: Path, run: curvmon.RunHistory) -> None:
    HistoryFile("fold1/").write(tmp_path, run.snapshots[:1])
    HistoryFile("fold2/").write(tmp_path, run.snapshots[:2])
    assert len(curvmon.load_history(tmp_path, log_key_prefix="fold2/").snapshots) == 2
    with pytest.raises(InputError, match=r"there is no .*history\.jsonl; further down: .*fold1.*fold2"):
        curvmon.load_history(tmp_path)


@pytest.mark.parametrize("key", ["CurvatureMonitor", "CurvatureMonitor[a/]"])
def test_from_a_checkpoint_of_lightning(tmp_path: Path, run: curvmon.RunHistory, key: str) -> None:
    path = tmp_path / "last.ckpt"
    torch.save({"state_dict": {"w": torch.zeros(3)}, "callbacks": {"Other": {}, key: state_of(run)}}, path)
    found = curvmon.load_history(path, log_key_prefix="" if key == "CurvatureMonitor" else "a/")
    assert (found.name, found.steps, found.alerts) == ("last", run.steps, run.alerts)
    with pytest.raises(InputError, match=re.escape(f"it has {key}: pass its log_key_prefix")):
        curvmon.load_history(path, log_key_prefix="b/")


def test_from_what_a_user_has_saved(tmp_path: Path, run: curvmon.RunHistory) -> None:
    for checkpoint in (state_of(run), {"model": {}, "monitor": state_of(run), "epoch": 3}):
        assert curvmon.load_history(checkpoint).steps == run.steps


def test_where_there_is_none(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no .*absent\.ckpt"):
        curvmon.load_history(tmp_path / "absent.ckpt")
    torch.save({"callbacks": {}}, tmp_path / "a.ckpt")
    with pytest.raises(InputError, match=r"has no state of a CurvatureMonitor$"):
        curvmon.load_history(tmp_path / "a.ckpt")
    torch.save([1], tmp_path / "b.ckpt")
    with pytest.raises(InputError, match="is no checkpoint: it has a list"):
        curvmon.load_history(tmp_path / "b.ckpt")
    torch.save({"hyper_parameters": Path}, tmp_path / "c.ckpt")
    with pytest.raises(InputError, match="if you trust it: "):
        curvmon.load_history(tmp_path / "c.ckpt")
    with pytest.raises(InputError, match="is of another version"):
        curvmon.load_history({"history": [{"steps": 1}], "pulses": {}, "alerts": {}})


# ---- the share of a checkpoint ----


def bytes_of(state: Any) -> int:
    file = io.BytesIO()
    torch.save(state, file)
    return len(file.getvalue())


def test_thinning_keeps_the_latest_and_some_of_all_before() -> None:
    entries = [{"step": i, "text": "x" * (50 + i % 7)} for i in range(5000)]
    kept = [entry["step"] for entry in thinned(entries, 40_000)]
    assert kept[0] == 0 and kept[-1] == 4999 and kept == sorted(set(kept))
    recent = next(i for i in range(1, 5000) if 4999 - i not in kept)
    older = kept[:-recent]
    assert recent > 100 and len(older) > 100
    assert len({b - a for a, b in pairwise(older)}) == 1  # evenly
    assert bytes_of(thinned(entries, 40_000)) < 40_000 + 2000
    assert thinned(entries[:10], 40_000) is not entries and thinned(entries[:10], 40_000) == entries[:10]
    assert thinned(entries[:3], 10) == entries[2:3]
    again = thinned(thinned(entries, 40_000), 40_000)
    assert [entry["step"] for entry in again] == kept


@pytest.mark.parametrize(("nodes", "count"), [(8, 1000), (24, 300), (2, 20_000)])
def test_snapshots_in_a_checkpoint_are_bounded(nodes: int, count: int) -> None:
    history = History(count)
    measurement = synthetic_measurement(nodes)
    for step in range(count):
        history.append(Snapshot(step, step, measurement))
    state = history.state_dict()
    assert 0.5 * MOST_BYTES < bytes_of(state) <= MOST_BYTES
    assert state[0]["step"] == 0 and state[-1]["step"] == count - 1

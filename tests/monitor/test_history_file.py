"""`history.jsonl`: nothing is lost but the line that was being written, and disks that fail stop nothing."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import time
import warnings
from pathlib import Path

import pytest

from curvmon.errors import InputError
from curvmon.monitor import history_file
from curvmon.monitor.history_file import FORMAT, HistoryFile, file_name, read
from curvmon.records import PulseRecord, RunHistory, Snapshot, VitalSigns
from tests.helpers.synthetic_runs import synthetic_run


def signs(step: int, text: str = "") -> Snapshot:
    return Snapshot(step, 0, vitals=VitalSigns(loss=math.nan, not_finite=(text,)))


def steps_in(path: Path) -> list[int]:
    return [snapshot.step for snapshot in read(path).snapshots]


def as_dicts(history: RunHistory) -> str:
    records = (*history.snapshots, *history.pulses, *history.raised)
    return json.dumps([record.to_dict() for record in records])


def test_every_kind_of_record_comes_back(tmp_path: Path) -> None:
    run = synthetic_run(alerts=[400])
    file = HistoryFile()
    for snapshot in run.snapshots:
        file.write(tmp_path, [snapshot])
    file.write(tmp_path, [*run.pulses, *run.raised, signs(5000)])
    found = read(tmp_path / "history.jsonl")
    assert math.isnan(found.snapshots[-1].loss)
    assert as_dicts(found) == as_dicts(RunHistory((*run.snapshots, signs(5000)), run.pulses, run.raised))
    lines = (tmp_path / "history.jsonl").read_text().splitlines()
    header = json.loads(lines[0])
    assert (header["record"], header["version"], header["resumed_at"]) == ("run", FORMAT, None)
    assert len(lines) == 1 + len(run.snapshots) + len(run.pulses) + 1 + 1


def test_names_of_files() -> None:
    assert file_name() == "history.jsonl"
    assert file_name("fold1/") == "history-fold1.jsonl"
    assert file_name("a b/../c/") == "history-a-b-..-c.jsonl"


# ---- processes that are killed ----


@pytest.mark.parametrize("cut", range(1, 400, 7))
def test_a_line_that_is_cut_off_costs_itself_alone(tmp_path: Path, cut: int) -> None:
    path, file = tmp_path / "history.jsonl", HistoryFile()
    for step in range(4):
        file.write(tmp_path, [signs(step, "x" * 300)])
    whole = path.read_bytes()
    last = whole[:-1].rindex(b"\n") + 1
    assert len(whole) - last > 400
    path.write_bytes(whole[: last + cut])
    assert steps_in(path) == [0, 1, 2]
    file.write(tmp_path, [signs(4)])
    assert steps_in(path) == [0, 1, 2, 4]


def write_until_killed(folder: Path, acknowledge: int) -> None:
    """In a process of its own: long lines, so that it is killed in the middle of one, each acknowledged by a byte."""
    file, text = HistoryFile(), "x" * 3_000_000
    for step in range(10_000):
        file.write(folder, [signs(step, text)])
        os.write(acknowledge, b".")


def test_fifty_kills_lose_at_most_the_last_record(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    torn = 0
    for trial in range(50):
        path.unlink(missing_ok=True)
        ours, theirs = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                write_until_killed(tmp_path, theirs)
            finally:
                os._exit(1)
        os.close(theirs)
        while not path.exists() or path.stat().st_size <= 3_000_000 * (trial % 3):
            assert os.waitpid(child, os.WNOHANG) == (0, 0)
            time.sleep(0)
        os.kill(child, signal.SIGKILL)  # as soon as the file has grown
        os.waitpid(child, 0)
        written = len(os.read(ours, 100_000))
        os.close(ours)
        torn += not path.read_bytes().endswith(b"\n")
        steps = steps_in(path)
        assert steps == list(range(len(steps))) and len(steps) >= written, trial
        HistoryFile().write(tmp_path, [signs(9)])
        assert steps_in(path) == [9]  # of another run, which the same file has now
    print(f"{torn} of 50 in the middle of a line")


# ---- runs that are resumed ----


def test_a_resumed_run_goes_on_in_its_own_file(tmp_path: Path) -> None:
    first = HistoryFile()
    for step in (0, 10, 20, 30):
        first.write(tmp_path, [signs(step), PulseRecord(step + 5, 0, 1.0, 1.0)])
    state = first.state_dict()
    resumed = HistoryFile()
    resumed.load_state_dict(state, last_step=15)  # the checkpoint is from before step 20
    resumed.start(RunHistory((signs(0), signs(10))))
    resumed.write(tmp_path, [signs(20, "again")])
    resumed.write(tmp_path, [signs(30, "again")])
    found = read(tmp_path / "history.jsonl")
    assert [snapshot.step for snapshot in found.snapshots] == [0, 10, 20, 30]
    assert found.snapshots[2].vitals is not None and found.snapshots[2].vitals.not_finite == ("again",)
    assert [pulse.step for pulse in found.pulses] == [5, 15]


def test_a_resumed_run_begins_a_new_file_with_what_the_checkpoint_has(tmp_path: Path) -> None:
    first, resumed, run = HistoryFile(), HistoryFile(), synthetic_run(alerts=[200])
    first.write(tmp_path / "version_0", [signs(0)])
    resumed.load_state_dict(first.state_dict(), last_step=1190)
    resumed.start(run)
    resumed.write(tmp_path / "version_1", [signs(1200)])
    found = read(tmp_path / "version_1" / "history.jsonl")
    assert as_dicts(found) == as_dicts(RunHistory((*run.snapshots, signs(1200)), run.pulses, run.raised))
    assert steps_in(tmp_path / "version_0" / "history.jsonl") == [0]


def test_another_fit_of_the_same_monitor_keeps_the_first(tmp_path: Path) -> None:
    file = HistoryFile()
    for _ in range(2):
        file.start(RunHistory())
        file.write(tmp_path, [signs(0)])
        file.write(tmp_path, [signs(10)])
    assert steps_in(tmp_path / "history.jsonl") == [0, 10, 0, 10]


def test_another_run_in_the_same_folder_is_the_one_that_is_read(tmp_path: Path) -> None:
    for step in (1, 2):
        HistoryFile().write(tmp_path, [signs(step)])
    assert steps_in(tmp_path / "history.jsonl") == [2]
    assert len((tmp_path / "history.jsonl").read_text().splitlines()) == 4  # nothing is deleted


# ---- what goes wrong ----


def test_a_disk_that_fails_is_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, append = HistoryFile(), history_file._append

    def full(path: Path, lines: list[bytes]) -> None:
        append(path, [lines[0][:20]])
        raise OSError(errno.ENOSPC, "No space left on device")

    file.write(tmp_path, [signs(0)])
    monkeypatch.setattr(history_file, "_append", full)
    with pytest.warns(UserWarning, match=r"history\.jsonl could not be written .*No space left.*training goes on"):
        file.write(tmp_path, [signs(1)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        file.write(tmp_path, [signs(2)])
        monkeypatch.setattr(history_file, "_append", append)
        file.write(tmp_path, [signs(3)])
    assert steps_in(tmp_path / "history.jsonl") == [0, 3]


def test_a_folder_that_cannot_be_made_is_one_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    file = HistoryFile()
    with pytest.warns(UserWarning, match="could not be written"):
        file.write(tmp_path / "file" / "folder", [signs(0)])
    file.write(None, [signs(0)])


def test_files_that_are_no_history(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    path.write_text('{"loss": 1}\n[1]\nnonsense\n')
    with pytest.raises(InputError, match="no line that is a record"):
        read(path)
    path.write_text("")  # a run that has just started
    assert read(path).steps == []
    path.write_text(
        json.dumps({"record": "run", "version": FORMAT + 1, "run": "a", "resumed_at": None, "curvmon": "9"})
    )
    with pytest.raises(InputError, match="written by curvmon 9, which is newer"):
        read(path)

"""`history.jsonl`: every record of a run in a file that is appended to while the run goes on, one line for each.

    {"record": "run", "version": 1, "run": "3f…", "resumed_at": null, "curvmon": "0.1.0", "started": "2026-…"}
    {"record": "snapshot", "step": 24, "epoch": 0, "measurement": {…}, …}
    {"record": "pulse", "step": 30, "gain": …}
    {"record": "alert", "step": 311, "kind": "jump", …}

Lines are JSON as Python writes it, with NaN and Infinity. A line is appended by one call: what kills the process in the
middle of it costs this record and none before it, and the next record starts a line of its own.

A resumed run appends to the file if it is its own: what the file has of later steps than the checkpoint is read over,
because those steps are made once more. In a folder without that file it begins one, with what the checkpoint has.
"""

from __future__ import annotations

import json
import os
import re
import uuid
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from curvmon.errors import InputError, warn
from curvmon.records import Alert, PulseRecord, RunHistory, Snapshot
from curvmon.version import __version__

FORMAT = 1
"""version of the lines"""
Record = Snapshot | PulseRecord | Alert
KINDS: dict[str, type[Record]] = {"snapshot": Snapshot, "pulse": PulseRecord, "alert": Alert}


class HistoryFile:
    """Appends to the file of one monitor; on rank 0. A disk that fails is one warning, and training goes on.

    Args:
        prefix: `log_key_prefix` of the monitor: two monitors of one run have a file each.
    """

    def __init__(self, prefix: str = "") -> None:
        self._name = file_name(prefix)
        self._run = ""
        self._earlier = RunHistory()
        self._resumed_at: int | None = None
        self._begun: Path | None = None
        self._has_warned = False

    def start(self, earlier: RunHistory) -> None:
        """Training starts; `earlier`: what is known of this run from before."""
        self._begun, self._earlier = None, earlier

    def write(self, folder: Path | None, records: Sequence[Record]) -> None:
        """Append records to the file in a folder; None: there is no folder, and nothing is written."""
        if folder is None or not records:
            return
        path = folder / self._name
        try:
            lines = [*(self._first_lines(path) if self._begun != path else ()), *map(_line, records)]
            _append(path, lines)
            self._begun, self._resumed_at = path, None
        except Exception as error:
            if not self._has_warned:
                self._has_warned = True
                warn(f"{path} could not be written ({type(error).__name__}: {error}); training goes on")

    def _first_lines(self, path: Path) -> list[bytes]:
        """What the file has to begin, or to go on, with."""
        self._run = self._run or uuid.uuid4().hex
        header = {
            "record": "run",
            "version": FORMAT,
            "run": self._run,
            "resumed_at": self._resumed_at,
            "curvmon": __version__,
            "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }
        is_own = path.exists() and _run_of(path) == self._run
        earlier = self._earlier
        records: list[Record] = [] if is_own else [*earlier.snapshots, *earlier.pulses, *earlier.raised]
        return [_encoded(header), *map(_line, sorted(records, key=lambda record: record.step))]

    def state_dict(self) -> dict[str, Any]:
        return {"run": self._run}

    def load_state_dict(self, state: dict[str, Any], last_step: int | None) -> None:
        """`last_step`: the last one that the checkpoint has a record of."""
        self._run, self._resumed_at = state["run"], last_step


def file_name(prefix: str = "") -> str:
    """`history.jsonl`, `history-fold1.jsonl`."""
    suffix = re.sub(r"[^A-Za-z0-9_.-]+", "-", prefix).strip("-")
    return f"history-{suffix}.jsonl" if suffix else "history.jsonl"


def read(path: Path) -> RunHistory:
    """The last run in a file, which may be in the middle of being written.

    Raises:
        InputError: it is no such file, or a newer curvmon has written it.
    """
    run, is_empty = None, True
    kept: list[Record] = []
    for entry in _entries(path):
        is_empty = False
        kind = entry.pop("record")
        if kind == "run":
            if entry["version"] > FORMAT:
                raise InputError(f"{path} was written by curvmon {entry['curvmon']}, which is newer: update curvmon")
            resumed_at = entry["resumed_at"]
            if entry["run"] != run:
                kept = []
            elif resumed_at is not None:
                kept = [record for record in kept if record.step <= resumed_at]
            run = entry["run"]
        elif kind in KINDS:
            kept.append(KINDS[kind].from_dict(entry))
    if is_empty and path.stat().st_size:
        raise InputError(f"{path} is no history of curvmon: it has no line that is a record")
    return RunHistory(
        tuple(record for record in kept if isinstance(record, Snapshot)),
        tuple(record for record in kept if isinstance(record, PulseRecord)),
        tuple(record for record in kept if isinstance(record, Alert)),
    )


def _entries(path: Path) -> Iterator[dict[str, Any]]:
    """The lines that are complete."""
    with path.open("rb") as file:
        for line in file:
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if isinstance(entry, dict) and "record" in entry:
                yield entry


def _run_of(path: Path) -> str | None:
    """The last run that has written to a file."""
    return next((entry["run"] for entry in reversed(list(_entries(path))) if entry["record"] == "run"), None)


def _line(record: Record) -> bytes:
    kind = next(name for name, type_ in KINDS.items() if isinstance(record, type_))
    return _encoded({"record": kind, **record.to_dict()})


def _encoded(entry: dict[str, Any]) -> bytes:
    return json.dumps(entry, separators=(",", ":")).encode() + b"\n"


def _append(path: Path, lines: Sequence[bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(size - 1)
            lines = [b"\n", *lines] if file.read(1) != b"\n" else lines
        file.write(b"".join(lines))

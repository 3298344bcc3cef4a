"""Read the history of a run back: from `history.jsonl`, also while the run goes on, or from a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from curvmon.errors import InputError
from curvmon.monitor.history_file import file_name, read
from curvmon.records import Alert, PulseRecord, RunHistory, Snapshot

STATE_KEY = "CurvatureMonitor"
"""of a callback in a checkpoint of Lightning, followed by `[prefix]` where it has one"""
_PARTS = {"history", "pulses", "alerts"}
_MOST_NAMED = 5


def load_history(path: str | os.PathLike[str] | Mapping[str, Any], log_key_prefix: str = "") -> RunHistory:
    """The history, pulses and alerts of a run.

    A `history.jsonl` has all of it. A checkpoint has at most 2 MB of it: the latest records, and every n-th before.

    Args:
        path: a `history.jsonl`, the folder that it is in, a checkpoint, or what `torch.load` has read from one.
        log_key_prefix: of the monitor, where a run has several.

    Raises:
        InputError: there is no history there.

    Example:
        >>> import tempfile, pathlib, curvmon
        >>> from curvmon.monitor.history_file import HistoryFile
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> HistoryFile().write(folder, [curvmon.PulseRecord(step=10, epoch=0, gain=0.5, curvature=0.2)])
        >>> curvmon.load_history(folder).pulses[0].ratio
        0.2
    """
    if isinstance(path, Mapping):
        return _from_checkpoint(path, log_key_prefix, "the checkpoint")
    place = Path(path)
    if place.is_dir():
        place = _file_in(place, log_key_prefix)
    if not place.exists():
        raise InputError(f"there is no {place}")
    if place.suffix == ".jsonl":
        folder = place.resolve().parent
        return replace(read(place), name=f"{folder.parent.name}/{folder.name}".strip("/"))
    return replace(_from_checkpoint(_loaded(place), log_key_prefix, str(place)), name=place.stem)


def _file_in(folder: Path, prefix: str) -> Path:
    path = folder / file_name(prefix)
    if path.exists():
        return path
    others = sorted(folder.rglob("history*.jsonl"))
    names = ", ".join(str(other) for other in others[:_MOST_NAMED])
    raise InputError(f"there is no {path}" + (f"; further down: {names}" if others else ""))


def _loaded(path: Path) -> Mapping[str, Any]:
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise InputError(
            f"{path} cannot be loaded with weights_only=True ({type(error).__name__}); if you trust it: "
            "curvmon.load_history(torch.load(path, weights_only=False))"
        ) from error
    if not isinstance(checkpoint, Mapping):
        raise InputError(f"{path} is no checkpoint: it has a {type(checkpoint).__name__}")
    return checkpoint


def _from_checkpoint(checkpoint: Mapping[str, Any], prefix: str, name: str) -> RunHistory:
    """The state may be that of a Lightning callback, one of the user's entries, or the checkpoint itself."""
    key = f"{STATE_KEY}[{prefix}]" if prefix else STATE_KEY
    callbacks = checkpoint.get("callbacks")
    of_callback = [callbacks[key]] if isinstance(callbacks, Mapping) and key in callbacks else []
    states = [
        state
        for state in (*of_callback, checkpoint, *checkpoint.values())
        if isinstance(state, Mapping) and state.keys() >= _PARTS
    ]
    if not states:
        others = [other for other in callbacks or () if str(other).startswith(STATE_KEY)]
        hint = f"; it has {', '.join(others)}: pass its log_key_prefix" if others else ""
        raise InputError(f"{name} has no state of a {key}{hint}")
    try:
        return RunHistory(
            tuple(map(Snapshot.from_dict, states[0]["history"])),
            tuple(map(PulseRecord.from_dict, states[0]["pulses"]["records"])),
            tuple(map(Alert.from_dict, states[0]["alerts"]["raised"])),
        )
    except (KeyError, TypeError) as error:
        raise InputError(f"the state of curvmon in {name} is of another version ({error!r})") from error

"""What loggers have written, read back with their own means: numbers and pictures by key and step."""

from __future__ import annotations

import csv
import io
import json
import re
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.helpers.time_limits import PATIENCE

Rows = list[tuple[int, dict[str, float]]]
"""(step, numbers by key), in the order in which they were written"""
Pictures = dict[str, dict[int, np.ndarray]]
"""by key and step, height x width x RGB"""


def pixels_of(png: Path | bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(png) if isinstance(png, bytes) else png).convert("RGB"))


class TensorBoard:
    def __init__(self, folder: str | Path) -> None:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        self._events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0, "tensors": 0})
        self._events.Reload()
        self.tags: list[str] = self._events.Tags()["scalars"]

    def series(self, tag: str) -> list[tuple[int, float]]:
        return [(event.step, event.value) for event in self._events.Scalars(tag)]

    def texts(self, tag: str) -> list[tuple[int, str]]:
        name = f"{tag}/text_summary"
        if name not in self._events.Tags()["tensors"]:
            return []
        return [(event.step, event.tensor_proto.string_val[0].decode()) for event in self._events.Tensors(name)]

    def pictures(self) -> Pictures:
        tags = self._events.Tags()["images"]
        return {t: {e.step: pixels_of(e.encoded_image_string) for e in self._events.Images(t)} for t in tags}

    def layouts(self) -> list[dict[str, dict[str, list[str]]]]:
        """As written, one after the other; TensorBoard shows the last: section -> chart -> patterns."""
        from tensorboard.plugins.custom_scalar import layout_pb2

        found = []
        if "custom_scalars__config__" in self._events.Tags()["tensors"]:
            for event in self._events.Tensors("custom_scalars__config__"):
                layout = layout_pb2.Layout.FromString(event.tensor_proto.string_val[0])
                found.append(
                    {
                        category.title: {chart.title: list(chart.multiline.tag) for chart in category.chart}
                        for category in layout.category
                    }
                )
        return found

    def charts(self) -> dict[str, set[str]]:
        """The lines of every chart, as TensorBoard finds them: `match`, from the beginning of a tag."""
        section_charts = [charts for charts in self.layouts()[-1].values()]
        return {
            f"{title}:{patterns}": {tag for tag in self.tags if any(re.match(pattern, tag) for pattern in patterns)}
            for charts in section_charts
            for title, patterns in charts.items()
        }


class Wandb:
    """An offline run that was finished: `run-*.wandb` is a LevelDB log of protobuf records."""

    def __init__(self, folder: Path) -> None:
        (path,) = folder.rglob("run-*.wandb")
        self._files = path.parent / "files"
        self.rows: list[dict[str, Any]] = []
        self.step_metrics: dict[str, str] = {}
        self.alerts: list[tuple[str, str, str]] = []
        """title, text, level"""
        for record in _finished_records(path):
            kind = record.WhichOneof("record_type")
            if kind == "history":
                self.rows.append(_row(record.history.item))
            elif kind == "alert":
                self.alerts.append((record.alert.title, record.alert.text, record.alert.level))
            elif kind == "metric":
                self.step_metrics[record.metric.glob_name or record.metric.name] = record.metric.step_metric

    def pictures(self) -> Pictures:
        found: Pictures = {}
        for row in self.rows:
            for key, value in row.items():
                if isinstance(value, dict) and value.get("_type") == "images/separated":
                    (name,) = value["filenames"]
                    found.setdefault(key, {})[row["trainer/global_step"]] = pixels_of(self._files / name)
        return found


def _row(items: Any) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for item in items:
        keys = list(item.nested_key) or [item.key]
        inner = row
        for key in keys[:-1]:
            inner = inner.setdefault(key, {})
        inner[keys[-1]] = json.loads(item.value_json)
    return row


def _finished_records(path: Path) -> list[Any]:
    """`finish` returns before W&B's own process has written the file (0.31): wait for the record of the exit."""
    deadline = time.monotonic() + PATIENCE
    while True:
        records = list(_wandb_records(path))
        if any(record.WhichOneof("record_type") == "exit" for record in records):
            return records
        assert time.monotonic() < deadline, f"{path} was not finished in {PATIENCE} s"
        time.sleep(0.05)


def _wandb_records(path: Path) -> Iterator[Any]:
    from wandb.proto.wandb_internal_pb2 import Record

    data = path.read_bytes()
    assert data.startswith(b":W&B")
    block, header, position, whole = 32768, 7, 7, b""
    while position + header <= len(data):
        left = block - position % block
        if left < header:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        position += header
        part = data[position : position + length]
        position += length
        if position > len(data):
            return  # still being written
        whole = part if kind in (1, 2) else whole + part  # 1 full, 2 first, 3 middle, 4 last
        if kind in (1, 4):
            yield Record.FromString(whole)


def csv_rows(folder: str | Path) -> Rows:
    with (Path(folder) / "metrics.csv").open(newline="") as file:
        rows = [{key: float(text) for key, text in row.items() if text} for row in csv.DictReader(file)]
    return [(int(row.pop("step")), row) for row in rows]


def png_files(folder: str | Path) -> Pictures:
    """`<key>/step_00000003.png` below a folder."""
    found: Pictures = {}
    for path in sorted(Path(folder).rglob("step_*.png")):
        key = path.parent.relative_to(folder).as_posix()
        found.setdefault(key, {})[int(path.stem.removeprefix("step_"))] = pixels_of(path)
    return found


def mlflow_series(uri: str, run_id: str) -> dict[str, list[tuple[int, float]]]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(uri)
    keys = client.get_run(run_id).data.metrics
    return {key: [(m.step, m.value) for m in client.get_metric_history(run_id, key)] for key in keys}

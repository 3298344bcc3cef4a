"""What a run keeps, and what a checkpoint gives back."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import curvmon
from curvmon.monitor.history import History
from curvmon.records import METRICS, Snapshot


@pytest.fixture(scope="module")
def measured() -> tuple[curvmon.Measurement, curvmon.Spectrum]:
    """Two branches with a loss each: their block is zero, and its coupling NaN."""
    torch.manual_seed(0)
    net = nn.ModuleDict({"a": nn.Linear(3, 4), "b": nn.Linear(3, 4)})

    def loss(net: Any, batch: Any) -> torch.Tensor:
        return F.mse_loss(torch.tanh(net["a"](batch)).sum(1), batch[:, 0]) + F.mse_loss(
            net["b"](batch).sum(1), batch[:, 1]
        )

    batch = torch.randn(8, 3)
    found = curvmon.measure(net, batch, loss=loss, nodes=["a", "b"])
    assert found.coupling.isnan().any() and found.notes
    return found, curvmon.spectrum(net, batch, loss=loss, k=3)


def through_a_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def same(one: Any, other: Any) -> bool:
    """With NaN equal to NaN."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) and math.isnan(one):
        return isinstance(other, float) and math.isnan(other)
    return type(one) is type(other) and bool(one == other)


def test_round_trip_through_a_checkpoint(measured: Any) -> None:
    measurement, spectrum = measured
    history, restored = History(10), History(10)
    history.append(Snapshot(0, 0, measurement, spectrum, seconds=1.5, overhead=0.25, skipped=2))
    history.append(Snapshot(5, 1, measurement, None))
    history.append(Snapshot(9, 2, None, spectrum))
    restored.load_state_dict(through_a_file(history.state_dict()))
    assert len(restored) == 3 and same(restored.state_dict(), history.state_dict())
    first, second, third = restored
    assert (first.step, first.epoch, first.seconds, first.overhead, first.skipped) == (0, 0, 1.5, 0.25, 2)
    assert second.spectrum is None and third.measurement is None and third.step == 9
    assert first.measurement is not None and first.spectrum is not None
    assert first.measurement.nodes == measurement.nodes and first.measurement.notes == measurement.notes
    for metric in METRICS:
        ours, theirs = getattr(first.measurement, metric), getattr(measurement, metric)
        assert ours.dtype == torch.float64 and torch.equal(ours.nan_to_num(-1.0), theirs.nan_to_num(-1.0))
        torch.testing.assert_close(
            first.measurement.stderr[metric], measurement.stderr[metric], rtol=0, atol=0, equal_nan=True
        )
    assert torch.equal(first.spectrum.eigenvalues, spectrum.eigenvalues)
    assert first.spectrum.parameters == () and first.spectrum.converged.dtype == torch.bool
    assert str(first.measurement) == str(measurement)


def test_only_the_latest_are_kept(measured: Any) -> None:
    history = History(3)
    for step in range(10):
        history.append(Snapshot(step, step // 2, measured[0] if step % 2 else None))
        assert len(history) == min(3, step + 1) and history.last is list(history)[-1]
    assert [snapshot.step for snapshot in history] == [7, 8, 9]
    smaller = History(2)
    smaller.load_state_dict(history.state_dict())
    assert [snapshot.step for snapshot in smaller] == [8, 9]
    larger = History(100)
    larger.load_state_dict(history.state_dict())
    assert [snapshot.step for snapshot in larger] == [7, 8, 9]


def test_a_checkpoint_does_not_grow_beyond_its_bound(measured: Any) -> None:
    def size(count: int) -> int:
        history = History(20)
        for step in range(count):
            history.append(Snapshot(step, step, *measured))
        file = io.BytesIO()
        torch.save(history.state_dict(), file)
        return len(file.getvalue())

    assert size(2) < size(20)
    assert abs(size(200) - size(20)) < 1000  # numbers of steps have more digits


def test_nodes_loss_and_products(measured: Any) -> None:
    measurement, spectrum = measured
    history = History(5)
    assert history.nodes is None and history.last is None
    history.append(Snapshot(0, 0, measurement, spectrum))
    history.append(Snapshot(1, 0, None, spectrum))
    assert history.nodes == measurement.nodes
    first, second = history
    assert first.hvps == measurement.hvps + spectrum.hvps and second.hvps == spectrum.hvps
    assert first.loss == measurement.loss and second.loss == spectrum.loss
    assert math.isnan(Snapshot(0, 0).loss) and Snapshot(0, 0).hvps == 0

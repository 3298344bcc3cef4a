"""The records that users hold in their hands."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import pickle

import pytest
import torch

import curvmon
from curvmon.records import METRICS, AttentionSigns
from curvmon.records.formatting import with_error
from curvmon.records.pulses import most_concentrated


@pytest.fixture
def measurement() -> curvmon.Measurement:
    values = torch.tensor([[4.0, 1.0, math.nan], [1.0, 2.0, 0.5], [math.nan, 0.5, 3.0]], dtype=torch.float64)
    return curvmon.Measurement(
        nodes=("stem", "body", "head"),
        resonance=values,
        coupling=values / 4,
        stable_rank=values + 1,
        gn_gap=values * 1e-7,
        stderr={metric: values / 100 for metric in METRICS},
        spectral_norm=values,
        gn_norm=values,
        loss=0.25,
        hvps=12,
        seconds=0.5,
        notes=("stem--head: zero",),
    )


def test_by_distance_is_the_mean_over_defined_pairs(measurement: curvmon.Measurement) -> None:
    means = measurement.by_distance("resonance")
    assert means[0] == 3 and means[1] == 0.75 and math.isnan(means[2])
    with pytest.raises(ValueError, match="no metric 'sharpness'; the metrics are resonance"):
        measurement.by_distance("sharpness")  # type: ignore[arg-type]


def test_to_dict_is_json(measurement: curvmon.Measurement) -> None:
    restored = json.loads(json.dumps(measurement.to_dict()))
    assert restored["nodes"] == ["stem", "body", "head"]
    assert restored["resonance"][0][1] == 1.0 and restored["stderr"]["coupling"][1][1] == 0.02
    assert restored["hvps"] == 12 and restored["notes"] == ["stem--head: zero"]


def test_from_dict_restores_the_class_it_is_called_on(measurement: curvmon.Measurement) -> None:
    exact = curvmon.ExactMeasurement(**{f.name: getattr(measurement, f.name) for f in dataclasses.fields(measurement)})
    restored = curvmon.ExactMeasurement.from_dict(exact.to_dict())
    assert type(restored) is curvmon.ExactMeasurement and restored.blocks == {} and restored.operations == {}
    assert type(curvmon.Measurement.from_dict(exact.to_dict())) is curvmon.Measurement
    assert torch.equal(restored.spectral_norm.nan_to_num(), measurement.spectral_norm.nan_to_num())


def test_str_has_pairs_values_errors_and_notes(measurement: curvmon.Measurement) -> None:
    lines = str(measurement).splitlines()
    assert lines[0] == "Measurement: 3 nodes, loss 0.25, 12 HVPs, 0.5 s"
    assert lines[1].split() == ["row", "col", *METRICS]
    assert "4.00 ±0.04" in lines[3] and lines[3].startswith("stem")
    assert len([line for line in lines if "±" in line]) == 5
    assert lines[-1] == "note: stem--head: zero"


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (0.03125, 0.0004, "0.0312 ±0.0004"),
        (12345.6, 71.0, "12346 ±70"),
        (3.2e-8, 1e-9, "3.2e-08 ±1e-09"),
        (1.0, 0.0, "1.0000"),
        (0.0, 0.0, "0"),
        (math.nan, math.nan, "nan"),
        (math.inf, math.nan, "inf"),
        (0.5, 3.0, "0.5 ±3"),
    ],
)
def test_with_error(value: float, error: float, text: str) -> None:
    assert with_error(value, error) == text


def test_records_are_frozen_and_picklable(measurement: curvmon.Measurement) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        measurement.hvps = 3  # type: ignore[misc]
    for twin in (copy.deepcopy(measurement), pickle.loads(pickle.dumps(measurement))):
        assert str(twin) == str(measurement)


def test_pairs_have_an_orientation() -> None:
    pair = curvmon.Pair("a", "b")
    assert pair.T == ("b", "a") and pair == pair.T.T and str(pair) == "a--b"


def test_attentions_of_several_ranks() -> None:
    nan = math.nan
    ranks = [
        (AttentionSigns("a", 1.0, 0.5), AttentionSigns("b", 2.0, nan)),
        (AttentionSigns("a", 3.0, 0.7), AttentionSigns("b", nan, nan), AttentionSigns("c", 1.0, 0.1)),
    ]
    a, b, c = most_concentrated(ranks)
    assert a == AttentionSigns("a", 3.0, 0.5) and c == ranks[1][2]
    assert (b.name, b.largest_logit) == ("b", 2.0) and math.isnan(b.lowest_entropy)
    record = curvmon.PulseRecord(0, 0, 0.0, 0.0, attention=(a, b, c))
    assert (record.attention_largest_logit, record.attention_lowest_entropy) == (3.0, 0.1)
    assert curvmon.PulseRecord.from_dict(json.loads(json.dumps(record.to_dict()))).attention[::2] == (a, c)


def test_a_pulse_record_is_json() -> None:
    record = curvmon.PulseRecord(7, 1, gain=0.5, curvature=0.2, learning_rate=0.1, loss=2.0, step_ratio=0.3)
    assert curvmon.PulseRecord.from_dict(json.loads(json.dumps(record.to_dict()))).to_dict().items() >= {
        ("step", 7), ("gain", 0.5), ("curvature", 0.2), ("step_ratio", 0.3)
    }  # fmt: skip
    assert record.ratio == 0.2 and math.isnan(record.critical_lr)
    old = {name: value for name, value in record.to_dict().items() if name not in ("critical", "attention")}
    assert math.isnan(curvmon.PulseRecord.from_dict(old).critical)
    assert math.isnan(curvmon.PulseRecord(0, 0, 0.0, 0.0).ratio)
    assert curvmon.PulseRecord(0, 0, 0.0, -1.0).ratio == -math.inf


def test_alerts_are_printable_whatever_modules_are_called() -> None:
    name = "layer\n\x1b[31m1"
    alert = curvmon.Alert(
        "jump", "coupling", name, 1.0, 2.0, 9.0, 1, 0, f"at {name}", (f"{name}: 1 → 2",), f"Check {name}."
    )
    assert alert.headline == "at layer??[31m1"
    assert len(alert.message.splitlines()) == 3 and "\x1b" not in alert.message
    assert alert.where == name  # as the model has it

"""The records that curvmon returns. Frozen: a result never changes after it was measured."""

from curvmon.records.events import PROBE_LOSS, Alert, Level, Snapshot, VitalSigns
from curvmon.records.measurement import (
    AFTER_LAST_NODE,
    METRICS,
    ExactMeasurement,
    Measurement,
    Metric,
    Pair,
    mean_by_distance,
)
from curvmon.records.pulses import AttentionSigns, PulseRecord
from curvmon.records.run_history import RunHistory
from curvmon.records.spectrum import Density, GroupSpectrum, Spectrum

__all__ = [
    "AFTER_LAST_NODE",
    "METRICS",
    "PROBE_LOSS",
    "Alert",
    "AttentionSigns",
    "Density",
    "ExactMeasurement",
    "GroupSpectrum",
    "Level",
    "Measurement",
    "Metric",
    "Pair",
    "PulseRecord",
    "RunHistory",
    "Snapshot",
    "Spectrum",
    "VitalSigns",
    "mean_by_distance",
]

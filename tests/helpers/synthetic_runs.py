"""The history of a run made up of numbers that a test can choose, with an alert where it asks for one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from curvmon.records import Alert, PulseRecord, RunHistory, Snapshot, VitalSigns
from tests.helpers.synthetic_records import synthetic_measurement, synthetic_spectra


def synthetic_alert(step: int, level: str = "warning", headline: str = "resonance rose 5 x at layer2") -> Alert:
    return Alert(
        "jump", "resonance", "layer2--layer3", 1.0, 5.0, 9.0, step, step // 100, headline,
        ("R(layer2, layer3) 1 -> 5",), "Look at layer2.", level,  # type: ignore[arg-type]
    )  # fmt: skip


def synthetic_run(
    count: int = 12, name: str = "run", alerts: Sequence[int] = (), rise: float = 1.2, nodes: int = 4
) -> RunHistory:
    """A snapshot every 100 steps, every third with vital signs alone, a pulse every 10; resonance and λ_1 rise."""
    snapshots = []
    for i, snapshot in enumerate(synthetic_spectra(count, rise)):
        if i % 3 == 2:
            snapshots.append(Snapshot(snapshot.step, i, vitals=VitalSigns(loss=2.0 / (i + 1), learning_rate=0.1)))
            continue
        flat = synthetic_measurement(nodes)
        measurement = replace(flat, resonance=flat.resonance * torch.tensor(rise**i), loss=2.0 / (i + 1))
        raised = sum(step <= snapshot.step for step in alerts)
        snapshots.append(
            replace(snapshot, measurement=measurement, overhead=0.01, seconds=0.5, alerts=raised, vitals=VitalSigns())
        )
    pulses = [
        PulseRecord(step, step // 100, 1.0, 0.4, 0.1, 1.0, 0.2 + 1e-4 * step, 0.5)
        for step in range(10, 100 * count, 10)
    ]
    return RunHistory(tuple(snapshots), tuple(pulses), tuple(synthetic_alert(step) for step in alerts), name)

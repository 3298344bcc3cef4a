"""Trouble late in a run that is watched by vital signs alone: is there an alert in the first validation after it?

    python -m benchmarks.late_trouble           about four minutes on one core
    python -m benchmarks.late_trouble --seeds 2

Small residual networks on digits (`alert_runs`), `max_overhead=0.01` and no free seconds, so that nothing is measured
in full between the first step and the end. After ten quiet epochs the learning rate is multiplied by 300 for good, or a
weight becomes NaN, or nothing happens. Thresholds were not tuned on these runs.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import warnings
from pathlib import Path

import torch

from benchmarks.alert_runs import EVENTS, Event, Run
from curvmon import CurvatureMonitor
from curvmon.monitor.budget import Budget
from tests.helpers.budgets import monitor_with
from tests.helpers.disturbed_runs import fit

AT, EPOCHS = 10, 12
OVERHEAD = 0.01


def learning_rate(run: Run) -> None:
    run.factor = 300.0


CASES: dict[str, Event | None] = {
    "learning rate x 300": Event(learning_rate, None),
    "NaN in a weight": EVENTS["NaN in a weight"],
    "nothing": None,
}


def starved(**options: object) -> CurvatureMonitor:
    return monitor_with(Budget(OVERHEAD, free_seconds=0.0), **{**options, "max_overhead": OVERHEAD})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    seeds = parser.parse_args().seeds
    torch.set_num_threads(1)
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    for name, event in CASES.items():
        at_once = early = full = 0
        kinds: dict[str, int] = {}
        for seed in range(100, 100 + seeds):
            with tempfile.TemporaryDirectory() as folder:
                monitor, _ = fit(Path(folder), EPOCHS, event, AT, seed=seed, make=starved)
            steps = [snapshot.step for snapshot in monitor.snapshots]
            full += sum(snapshot.is_full for snapshot in monitor.snapshots[1:-1])
            raised = [alert.step for alert in monitor.alerts]
            early += any(step < steps[AT + 1] for step in raised)
            at_once += steps[AT + 1] in raised
            for alert in monitor.alerts:
                kinds[alert.kind] = kinds.get(alert.kind, 0) + 1
        what = "runs with an alert in the first validation after it" if event else "runs with an alert then"
        print(
            f"{name}: {at_once} of {seeds} {what}, {early} with one before; {kinds}; {full} full measurements between"
        )


if __name__ == "__main__":
    main()

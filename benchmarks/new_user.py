"""What a new user gets: six projects with `CurvatureMonitor()` and no arguments, timed from outside.

    python -m benchmarks.new_user                                       digits instead of CIFAR-10
    python -m benchmarks.new_user --data cifar10_subset.npz --seeds 2 --write docs/new-user-table.md

Every run is a process of its own with one thread, and is made three times: without the monitor, with it, and with it
but without free seconds, where the promise of `max_overhead` is tight. Results are kept below runs/new_user, so that an
interrupted benchmark is continued.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch

from benchmarks.header import ROOT, commit, measured_on
from benchmarks.new_user_projects import PROJECTS
from curvmon import CurvatureMonitor
from curvmon.monitor.budget import FREE_SECONDS, Budget
from tests.helpers.budgets import monitor_with

PROMISED = 0.05
BUDGETS = {"none": "without the monitor", "default": "default", "tight": "no free seconds"}
KEPT = ROOT / "runs" / "new_user"


class Stopwatch:
    """Seconds and processor seconds inside functions, nested calls counted once."""

    def __init__(self) -> None:
        self.seconds = self.cpu = 0.0
        self.longest = 0.0
        self._depth = 0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            began, cpu = time.perf_counter(), time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    seconds = time.perf_counter() - began
                    self.seconds, self.cpu = self.seconds + seconds, self.cpu + time.process_time() - cpu
                    self.longest = max(self.longest, seconds)

        return timed


def watch(monitor: CurvatureMonitor) -> Stopwatch:
    """Every hook with a stopwatch, which the budget knows nothing of."""
    watch = Stopwatch()
    for name in dir(CurvatureMonitor):
        is_hook = name.startswith("on_") or name in ("setup", "state_dict", "load_state_dict")
        if is_hook and getattr(CurvatureMonitor, name) is not getattr(pl.Callback, name, None):
            setattr(monitor, name, watch.around(getattr(monitor, name)))
    return watch


class Lines(logging.Handler):
    """What curvmon says."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.endswith("callbacks.curvmon"):
            self.said.append(record.getMessage())


def run(project: str, seed: int, budget: str, data: Path | None, cpu: bool) -> dict[str, Any]:
    """One run in this process, as a user would start it but for the stopwatches.

    `cpu`: the budget counts processor seconds, on a machine that is busy with other things.
    """
    torch.set_num_threads(1)
    pl.seed_everything(seed, verbose=False)
    module, train, val, options = PROJECTS[project](data)
    free = FREE_SECONDS if budget == "default" else 0.0
    own = Budget(PROMISED, free, time.process_time if cpu else time.perf_counter)
    monitor, lines, whole = monitor_with(own), Lines(), Stopwatch()
    hooks = watch(monitor)
    logging.getLogger("pytorch_lightning").addHandler(lines)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        callbacks = [] if budget == "none" else [monitor]
        trainer = pl.Trainer(accelerator="cpu", default_root_dir=folder, callbacks=callbacks, **options)
        whole.around(trainer.fit)(module, train, val)
    steps, recorder = trainer.global_step, monitor._recorder
    return {
        "project": project,
        "seed": seed,
        "budget": budget,
        "clock": "cpu" if cpu else "seconds",
        "commit": commit(),
        "steps": steps,
        "seconds": whole.seconds,
        "cpu": whole.cpu,
        "hooks": hooks.seconds,
        "hooks_cpu": hooks.cpu,
        "counted": recorder.budget.measured,
        "vital_seconds": recorder.budget.vital_seconds,
        "weights": sum(p.detach().double().abs().sum().item() for p in module.parameters()),
        "parameters": sum(p.numel() for p in module.parameters()),
        "val": {k: v.item() for k, v in trainer.callback_metrics.items() if k.startswith("val")},
        "snapshots": [
            {
                "at": 0.0 if i == 0 and snapshot.step == 0 else (snapshot.step + 1) / steps,
                "step": snapshot.step,
                "full": snapshot.is_full,
                "vital": snapshot.vitals is not None and snapshot.loss == snapshot.loss,
                "hvps": snapshot.hvps,
                "seconds": snapshot.seconds,
                "sharpness": snapshot.sharpness,
                "loss": snapshot.loss,
                "notes": [
                    *(snapshot.measurement.notes if snapshot.measurement else ()),
                    *(snapshot.spectrum.notes if snapshot.spectrum else ()),
                ],
            }
            for i, snapshot in enumerate(monitor.snapshots)
        ],
        "alerts": [str(alert) for alert in monitor.alerts],
        "notices": [str(notice) for notice in monitor.notices],
        "lines": lines.said,
        "warnings": [str(w.message) for w in caught if "curvmon" in str(w.message)],
    }


def kept(project: str, seed: int, budget: str, data: Path | None, cpu: bool) -> dict[str, Any]:
    """The result of a process of its own, or of an earlier one at this commit."""
    name = "".join(letter for letter in project if letter.isalnum())
    path = KEPT / commit() / f"{name}-{seed}-{budget}{'-cpu' if cpu else ''}.json"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "benchmarks.new_user", "--one", project, "--budget", budget]
        command += ["--seed", str(seed), "--out", str(path)] + ([] if data is None else ["--data", str(data)])
        command += ["--cpu"] if cpu else []
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        path.with_suffix(".log").write_text(done.stdout + done.stderr)
        if done.returncode:
            raise RuntimeError(f"{project} failed:\n{done.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(path.read_text())
    return result


# ---- the page ----


def quarters(result: dict[str, Any]) -> list[int]:
    """Measurements after the first step in each quarter of the run."""
    counts = [0] * 4
    for snapshot in result["snapshots"]:
        if snapshot["full"] and snapshot["at"]:
            counts[min(3, math.ceil(4 * snapshot["at"] - 1e-9) - 1)] += 1
    return counts


def watched(result: dict[str, Any]) -> str:
    """What was measured of a run, and where."""
    snapshots = result["snapshots"]
    first = sum(s["full"] for s in snapshots if not s["at"])
    last = "yes" if snapshots[-1]["full"] else "**no**"
    vital = f"{sum(s['vital'] for s in snapshots)} of {len(snapshots)}"
    return f"{vital} | {first} + {' + '.join(map(str, quarters(result)))} | {last}"


def allowed(result: dict[str, Any], spent: float, training: float) -> str:
    """Seconds: 5 % of the training and the free seconds; without any, the first and the last measurement."""
    full = [s["seconds"] for s in result["snapshots"] if s["full"]]
    extra = FREE_SECONDS if result["budget"] == "default" else full[0] + full[-1]
    limit = extra + PROMISED * training
    return f"{spent:.1f} s of {limit:.1f} s" if spent <= limit else f"**{spent:.1f} s** of {limit:.1f} s"


def row(result: dict[str, Any], plain: dict[str, Any] | None) -> str:
    wall, cpu = result["hooks"], result["hooks_cpu"]
    training, processor = result["seconds"] - wall, result["cpu"] - cpu
    within = allowed(result, cpu, processor) if result["clock"] == "cpu" else allowed(result, wall, training)
    same = "not compared"
    if plain is not None:
        same = "yes" if result["weights"] == plain["weights"] and result["val"] == plain["val"] else "**no**"
    return (
        f"| {result['project']} | {result['seed']} | {training:.0f} s ({processor:.0f} s), {result['steps']} steps | "
        f"{watched(result)} | {within} | {wall / training:.1%} | {cpu / processor:.1%} | {same} | "
        f"{len(result['alerts'])} |"
    )


COLUMNS = [
    "project",
    "seed",
    "training (processor time)",
    "vital signs",
    "full: before the first step + in the quarters",
    "at the end",
    "in hooks, of allowed",
    "overhead",
    "of processor time",
    "same weights as without",
    "alerts",
]
HEADER = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
Results = dict[tuple[str, int, str], dict[str, Any]]


def table(results: Results, budget: str) -> list[str]:
    chosen = {key: result for key, result in results.items() if key[2] == budget}
    return [*HEADER, *(row(result, results.get((*key[:2], "none"))) for key, result in chosen.items())]


def page(results: Results, data: Path | None, cpu: bool) -> str:
    images = "digits of scikit-learn" if data is None else "a part of CIFAR-10 (3,540 images)"
    clock = " The machine was busy with other things, so the budget counted processor seconds (`--cpu`)." if cpu else ""
    lines = [
        "# What a new user gets",
        "",
        f"{measured_on('new_user')} Images: {images}.{clock}",
        "",
        "Six projects with `CurvatureMonitor()` and no arguments, all hooks timed from outside. Allowed: 5 % of the "
        "training time and 30 free seconds.",
        "",
        *table(results, "default"),
        "",
    ]
    if any(budget == "tight" for _, _, budget in results):
        lines += ["Without free seconds. Allowed: 5 %, and the first and the last measurement.", ""]
        lines += [*table(results, "tight"), ""]
    lines += ["What the runs say (first seed):", "", "```"]
    for (project, seed, budget), result in results.items():
        if seed == 0 and budget == "default":
            lines += [f"{project}:", *(f"  {line}" for line in result["lines"] + result["warnings"])]
    lines += ["```", ""]
    texts = [f"- {key[0]}, seed {key[1]}, {key[2]}: {text}" for key, r in results.items() for text in r["alerts"]]
    lines += ["Alerts:", "", *texts] if texts else ["No run raised an alert."]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="CIFAR-10 as in examples/image_classifier.py")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--one", choices=PROJECTS, help="one run in this process")
    parser.add_argument("--budget", choices=BUDGETS, default="default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cpu", action="store_true", help="the budget counts processor seconds")
    parser.add_argument("--budgets", nargs="+", choices=BUDGETS, default=["default", "none", "tight"])
    options = parser.parse_args()
    if options.one:
        text = json.dumps(run(options.one, options.seed, options.budget, options.data, options.cpu), indent=1)
        print(text) if options.out is None else options.out.write_text(text)
        return
    results = {}
    for budget in options.budgets:
        for seed in range(options.seeds):
            for project in PROJECTS:
                results[project, seed, budget] = kept(project, seed, budget, options.data, options.cpu)
                print(f"{project}, seed {seed}, {BUDGETS[budget]}", flush=True)
    text = page(results, options.data, options.cpu)
    print(text) if options.write is None else options.write.write_text(text)


if __name__ == "__main__":
    main()

"""All tables of the docs in one run: two processes with one thread each, side by side, about an hour on two idle cores.

    make bench-all DATA=cifar10_subset.npz                          installs the other packages, too
    python -m benchmarks.all --data cifar10_subset.npz
    python -m benchmarks.all --only accuracy                        one of the tables

Every table names machine, torch, threads and commit. Logs, trained networks and finished parts are kept in
runs/bench/<commit>, so that an interrupted run is continued; with uncommitted changes it begins again. A table is
written only when all of its parts are there.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from benchmarks.header import ROOT, VARIABLE, commit

PROCESSES = 2
DOCS = ROOT / "docs"


class Part(NamedTuple):
    """A process that writes a table or some sections of one."""

    name: str
    module: str
    arguments: str
    minutes: float
    """roughly, in parts estimated; the longest is started first"""
    takes_data: bool = True


TABLES: dict[str, list[Part]] = {
    "spectrum-table.md": [
        Part("spectrum-trained", "spectra", "--parts eigenvalues,trace --only resnet,decoder", 20),
        Part("spectrum-relu", "spectra", "--parts cost --only relu --starts 1", 10),
        Part("spectrum-silu", "spectra", "--parts cost --only silu --starts 1", 10),
        Part("spectrum-gpt6", "spectra", "--parts cost --only gpt6", 8),
    ],
    "warm-start-table.md": [Part("warm-starts", "monitor_warm_starts", "", 17)],
    "speed-table.md": [Part("speed", "speed", "", 18)],
    "measurement-table.md": [Part("measurement", "measurement", "--only gpt6,relu,silu,gpt12 --warm 3", 20)],
    "memory-table.md": [Part("memory", "memory", "", 10, takes_data=False)],
    "accuracy.md": [Part("accuracy", "accuracy", "", 1)],
}
"""parts in the order in which they stand in the table"""


def run(part: Part, folder: Path, data: Path | None) -> float | None:
    """Minutes that it took, also if it was finished before; None if it failed."""
    done, target = folder / f"{part.name}.minutes", folder / f"{part.name}.md"
    if done.exists():
        return float(done.read_text())
    if part.module == "accuracy":  # a page with markers
        shutil.copy(DOCS / "accuracy.md", target)
    command = [sys.executable, "-W", "ignore", "-m", f"benchmarks.{part.module}", *part.arguments.split()]
    command += ["--write", str(target)]
    command += ["--data", str(data)] if data is not None and part.takes_data else []
    began = time.monotonic()
    with (folder / f"{part.name}.log").open("w") as log:
        code = subprocess.run(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", VARIABLE: str(folder)},
        ).returncode
    minutes = (time.monotonic() - began) / 60
    print(f"{part.name}: {f'failed, see {log.name}' if code else 'done'}, {minutes:.1f} minutes", flush=True)
    if code:
        return None
    done.write_text(f"{minutes:.2f}")
    return minutes


def joined(pages: Sequence[str]) -> str:
    """The first page, then the sections of the others without their header."""
    first, *others = pages
    return "\n".join([first, *(f"{page[page.index('### ') :]}" for page in others)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="npz file with x_train, y_train, x_test, y_test; else random images")
    names = [table.removesuffix(".md") for table in TABLES]
    parser.add_argument("--only", default=",".join(names), help=f"of {', '.join(names)}")
    arguments = parser.parse_args()
    data = arguments.data and arguments.data.resolve()
    chosen = {f"{name}.md": TABLES[f"{name}.md"] for name in arguments.only.split(",")}
    folder = ROOT / "runs" / "bench" / commit()
    if folder.name.endswith("-dirty"):
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    parts = sorted((part for parts in chosen.values() for part in parts), key=lambda part: -part.minutes)
    with ThreadPoolExecutor(PROCESSES) as pool:
        minutes = dict(zip((part.name for part in parts), pool.map(lambda part: run(part, folder, data), parts)))
    failed = [name for name, took in minutes.items() if took is None]
    for table, parts in chosen.items():
        if not any(part.name in failed for part in parts):
            (DOCS / table).write_text(joined([(folder / f"{part.name}.md").read_text() for part in parts]))
    print(f"all of it: {(time.monotonic() - began) / 60:.0f} minutes; commit {folder.name}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""The line above every table, and what the parts of one run share: machine, torch, threads, commit; trained networks.

`make bench-all` names the folder of its run, which is the commit's, in an environment variable.
"""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

ROOT = Path(__file__).parents[1]
VARIABLE = "CURVMON_BENCH_RUN"
Value = TypeVar("Value")


def run_folder() -> Path | None:
    """Of a run of all benchmarks; None in a run of one of them."""
    name = os.environ.get(VARIABLE)
    return Path(name) if name else None


def commit() -> str:
    """Short hash; `-dirty` where files differ from it."""
    folder = run_folder()
    if folder is not None:  # the tables that a run writes make the checkout dirty
        return folder.name
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def machine() -> str:
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = f"{names[0]}, {len(names)} cores" if names else model
    count = torch.get_num_threads()
    threads = "1 thread" if count == 1 else f"{count} threads"
    return f"{model} (shared), {platform.system()}, torch {torch.__version__}, {threads}"


def measured_on(module: str) -> str:
    whole = "" if run_folder() is None else ", a part of `make bench-all`"
    return f"Measured on {machine()}, commit {commit()}, with `python -m benchmarks.{module}`{whole}."


def cached(name: str, make: Callable[[], Value]) -> Value:
    """`make()`, or what another part of the same run got from it."""
    folder = run_folder()
    if folder is None:
        return make()
    path = folder / "cache" / f"{name}.pt"
    if path.exists():
        value: Any = torch.load(path, weights_only=False)
        return value
    made = make()
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    torch.save(made, partial)
    partial.rename(path)  # another part may be writing the same
    return made

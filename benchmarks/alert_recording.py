"""Records runs of all families: quiet ones, and disturbed copies that branch off at random moments.

    python -m benchmarks.alert_recording --cache runs/alerts --seeds 10 --event-seeds 3 --processes 2

One file for each family and seed; an interrupted recording is continued. A disturbed run has the random streams of the
quiet run, which is what would have happened without the event: its twin. `load` reads the files.
"""

from __future__ import annotations

import argparse
import copy
import os
import time
import warnings
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from benchmarks.alert_event import Event, NotApplicableError, chance
from benchmarks.alert_events import EVENTS, FIRST, HAND, SECOND
from benchmarks.alert_families import FAMILIES, FIRST_SEED, Family
from benchmarks.alert_monitoring import Plain, Seen, Watch
from benchmarks.alert_schedules import EPOCHS
from benchmarks.alert_training import Run

AFTER, AFTER_DRIFT = 7, 12
"""measurements from an event on"""
GAPS = (3, 6)
"""measurements from the first event of two to the second, the end excluded"""
Role = Literal["quiet", "event", "drift", "hand", "second"]


class Happened(NamedTuple):
    name: str
    cause: str
    place: str | None
    at: int
    """index of the first measurement after it"""


class Recorded(NamedTuple):
    """One run."""

    family: str
    seed: int
    role: Role
    happened: list[Happened]
    """none in quiet runs, two with the role "second" """
    measured: list[Seen]
    twin: list[Seen]
    """the same run without the last event; a quiet run is its own"""


# ---- recording ----


def record(family: Family, seed: int, disturbed: bool, data: Path | None = None, epochs: int = EPOCHS) -> Plain:
    """The quiet run, and with `disturbed` a branch for each event that can happen in this family."""
    run = Run(family, seed, data)
    watch = Watch(run)
    quiet = [watch.look(run).plain()]
    moments = {name: _moment(run, name, epochs) for name in [*EVENTS, *HAND]} if disturbed else {}
    branches: list[Plain] = []
    for at in range(1, epochs):
        for name, moment in moments.items():
            if moment == at:
                branches += _branches(run, watch, name, at)
        run.train(watch)
        quiet.append(watch.look(run).plain())
    return {"family": family.name, "seed": seed, "quiet": quiet, "branches": branches}


def _moment(run: Run, name: str, epochs: int) -> int:
    """Between a third and three quarters of the run; drifts begin earlier."""
    is_drift = name in EVENTS and EVENTS[name].is_drift
    latest = epochs * 3 // (5 if is_drift else 4)
    return int(torch.randint(epochs // 3, latest, (1,), generator=_chance(run, name)))


def _chance(run: Run, name: str) -> torch.Generator:
    return chance(run.seed, f"{name} in {run.family.name}")


def _branches(run: Run, watch: Watch, name: str, at: int) -> list[Plain]:
    """Of one event, and of the same one followed by another."""
    event = EVENTS.get(name) or HAND[name]
    role: Role = "hand" if name in HAND else "drift" if event.is_drift else "event"
    branch = _Branch(run, watch)
    try:
        alone = branch.go([(name, event, at)], at, AFTER_DRIFT if event.is_drift else AFTER)
    except NotApplicableError:
        return []
    recorded = [{"role": role, **alone}]
    if name in FIRST:
        random = _chance(run, f"second after {name}")
        gap, index = (int(torch.randint(*ends, (1,), generator=random)) for ends in (GAPS, (0, len(SECOND))))
        second = SECOND[index]
        branch = _Branch(run, watch)
        try:
            both = branch.go([(name, event, at), (second, EVENTS[second], at + gap)], at, gap + AFTER)
        except NotApplicableError:
            return recorded
        recorded.append({"role": "second", **both})
    return recorded


class _Branch:
    """A copy of a run and of what watches it."""

    def __init__(self, run: Run, watch: Watch) -> None:
        self.run, self.watch = run.copied(), copy.deepcopy(watch)

    def go(self, events: list[tuple[str, Event, int]], at: int, count: int) -> Plain:
        happened: list[Happened] = []
        measured = []

        def happen(name: str, event: Event, now: int) -> None:
            place = event.apply(self.run, _chance(self.run, f"what {name} does"))
            happened.append(Happened(name, event.cause, place, now))

        for i in range(at, at + count):
            here = {event.when: (name, event, i) for name, event, moment in events if moment == i}
            if "start" in here:
                happen(*here["start"])
            self.run.train(self.watch, partial(happen, *here["middle"]) if "middle" in here else None)
            if "end" in here:
                happen(*here["end"])
            measured.append(self.watch.look(self.run).plain())
        return {"happened": [tuple(each) for each in happened], "measured": measured}


# ---- files ----


class Job(NamedTuple):
    family: str
    seed: int
    disturbed: bool
    cache: Path
    data: Path | None

    @property
    def path(self) -> Path:
        what = "disturbed" if self.disturbed else "quiet"
        return self.cache / f"{self.family}-{self.seed}-{what}.pt".replace(" ", "-")

    def run(self) -> str:
        if self.path.exists():
            return f"{self.path.name}: there"
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        began = time.process_time()
        plain = record(FAMILIES[self.family], self.seed, self.disturbed, self.data)
        self.cache.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(f".{os.getpid()}")
        torch.save(plain, partial)
        partial.rename(self.path)
        count = len(plain["quiet"]) + sum(len(branch["measured"]) for branch in plain["branches"])
        return f"{self.path.name}: {count} measurements, {time.process_time() - began:.0f} s of CPU time"


def jobs(families: Iterable[str], seeds: int, event_seeds: int, cache: Path, data: Path | None) -> list[Job]:
    """`event_seeds` of the `seeds` have disturbed runs. Of every family the first of both kinds comes first."""
    disturbed, quiet = list(range(event_seeds)), list(range(event_seeds, seeds))
    ordered = [each for pair in zip(disturbed, quiet) for each in pair]
    ordered += [each for each in (*disturbed, *quiet) if each not in ordered]
    return [
        Job(name, FIRST_SEED[name] + seed, seed < event_seeds, cache, data) for seed in ordered for name in families
    ]


def record_missing(
    families: Iterable[str], seeds: int, event_seeds: int, cache: Path, data: Path | None, processes: int
) -> None:
    with ProcessPoolExecutor(processes) as pool:
        for line in pool.map(Job.run, jobs(families, seeds, event_seeds, cache, data)):
            print(line, flush=True)


def load(cache: Path, families: Iterable[str] = tuple(FAMILIES), seeds: Iterable[int] | None = None) -> list[Recorded]:
    """All runs of these families (and seeds) that are in the cache."""
    wanted = None if seeds is None else set(seeds)
    recorded: list[Recorded] = []
    for name in families:
        seeds_seen: set[int] = set()
        # a file of disturbed runs has the quiet one as well, and its name comes first
        for path in sorted(cache.glob(f"{name.replace(' ', '-')}-[0-9]*-*.pt")):
            plain = torch.load(path, weights_only=True)
            seed = plain["seed"]
            if seed not in seeds_seen and (wanted is None or seed in wanted):
                recorded += runs_of(plain)
            seeds_seen.add(seed)
    return recorded


def runs_of(plain: Plain) -> list[Recorded]:
    """The runs in one file, each with the past that it shares with the quiet one."""
    head: tuple[Any, Any] = plain["family"], plain["seed"]
    quiet = [Seen.of(seen) for seen in plain["quiet"]]
    runs = [Recorded(*head, "quiet", [], quiet, quiet)]
    alone: dict[str, list[Seen]] = {}
    for branch in plain["branches"]:
        happened = [Happened(*each) for each in branch["happened"]]
        measured = [*quiet[: happened[0].at], *(Seen.of(seen) for seen in branch["measured"])]
        twin = alone[happened[0].name] if branch["role"] == "second" else quiet
        alone[happened[0].name] = alone.get(happened[0].name, measured)
        runs.append(Recorded(*head, branch["role"], happened, measured, twin))
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, default=Path("runs/alerts"))
    parser.add_argument("--families", default=",".join(FAMILIES), help="names, with commas between them")
    parser.add_argument("--seeds", type=int, default=10, help="of each family")
    parser.add_argument("--event-seeds", type=int, default=3, help="of these, with disturbed runs")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--data", type=Path, help="CIFAR-10 as an npz file; without it, digits")
    arguments = parser.parse_args()
    counts = arguments.seeds, arguments.event_seeds
    families = arguments.families.split(",")
    record_missing(families, *counts, arguments.cache, arguments.data, arguments.processes)


if __name__ == "__main__":
    main()

"""How good alerts are: false alarms, detection, causes and places, on networks that no threshold was chosen on.

    python -m benchmarks.alerts --write docs/alerts-table.md
    python -m benchmarks.alerts --tuned                         families and seeds for tuning

Trains and records what is missing in --cache first (`alert_recording`). Twelve families of networks; half of them are
for tuning, the other half, with other seeds, are reported. What events look like is fitted anew for every family, to
the runs of the other eleven (`alert_fit`).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from benchmarks import alert_synthetic
from benchmarks.alert_events import EVENTS, HAND
from benchmarks.alert_families import FAMILIES, FIRST_SEED, REPORTED, TUNED
from benchmarks.alert_fit import left_out
from benchmarks.alert_recording import Recorded, load, record_missing
from benchmarks.alert_scores import (
    Find,
    Judged,
    alerts_of,
    answers,
    detection,
    false_alarms,
    judged,
    reliability,
    three_sigma,
)
from benchmarks.markdown import table
from curvmon.alerts.signatures import Signatures

RULES: dict[str, Find] = {
    "three sigma, validation loss": three_sigma("val_loss"),
    "three sigma, validation or training loss": three_sigma("val_loss", "train_loss"),
}


class Results:
    """Of everything that raises alerts, on the same runs."""

    def __init__(self, runs: Sequence[Recorded], signatures: Mapping[str, Signatures]) -> None:
        """`signatures`: by family."""
        self.runs = runs
        self.finders: dict[str, Find] = {"curvmon": partial(alerts_of, signatures=signatures), **RULES}
        self.judged = {name: judged(find, runs) for name, find in self.finders.items()}

    def of(self, *roles: str) -> dict[str, list[Judged]]:
        return {name: [each for each in rows if each.run.role in roles] for name, rows in self.judged.items()}


def quiet_section(results: Results) -> list[str]:
    rows = [["false alarms per 1,000 measurements", "measurements", *results.finders, "notices of curvmon"]]
    for name, runs in [*_by_family(results.runs), ("all", list(results.runs))]:
        alarms = [false_alarms(find, runs) for find in results.finders.values()]
        rates = [f"{each.per_thousand:.1f}" for each in alarms]
        rows.append([name, str(alarms[0].measurements), *rates, str(alarms[0].notices)])
    return ["### Quiet runs", table(rows)]


def event_section(results: Results) -> list[str]:
    """At the first measurement / within two, of those that mattered."""
    events = results.of("event")
    families = {name: partial(_is_of_family, name) for name in dict.fromkeys(run.family for run in results.runs)}
    kinds = {name: partial(_is_of_kind, name) for name, event in EVENTS.items() if not event.is_drift}
    everything: dict[str, Callable[[Judged], bool]] = {"all": lambda each: True}
    return [
        "### Events",
        "Reported at the first measurement after the event / within two / never, of those that mattered. An event "
        "matters if the validation loss of the next three validations is clearly above that of the same run without "
        "it, or the accuracy five points lower.",
        _detections(events, {**families, **everything}),
        _detections(events, {**kinds, **everything}),
    ]


def drift_section(results: Results) -> list[str]:
    """Of drifts that mattered in the end: reported before the validation loss had doubled."""
    rows = [["drift", "mattered", *(f"{name}: in time / reported" for name in results.finders)]]
    kinds = [name for name, event in EVENTS.items() if event.is_drift]
    by_finder = results.of("drift")
    for kind in [*kinds, "all"]:
        cells = []
        for drifts in by_finder.values():
            own = [each for each in drifts if kind in (each.name, "all")]
            mattered = [each for each in own if each.mattered]
            early, ever = (
                sum(flags) for flags in zip(*((e.is_early, math.isfinite(e.delay)) for e in mattered), (0, 0))
            )
            cells.append(f"{early} / {ever}")
        rows.append([kind, f"{len(mattered)} of {len(own)}", *cells])
    text = "In time: before the mean validation loss of three validations was twice that of the same run without it."
    return ["### Drifts", text, table(rows)]


def answer_section(results: Results) -> list[str]:
    rows = [["event", "reported", "cause right", "among the first two", "place right", "a place where there is none"]]
    events = results.of("event", "drift")["curvmon"]
    for kind in [*EVENTS, "all"]:
        a = answers(each for each in events if kind in (each.name, "all"))
        place = f"{_percent(a.place)} of {a.with_place}" if a.with_place else ""
        rows.append([kind, str(a.count), _percent(a.first), _percent(a.second), place, _percent(a.misplaced)])
    sections = [
        "### Cause and place",
        "Of events that mattered and were reported within two measurements.",
        table(rows),
    ]
    bins = reliability(events)
    if bins:
        head = ["stated probability", "causes", "mean of the stated", "right"]
        lines = [[f"{b.low:.1f} to {b.high:.1f}", str(b.count), f"{b.stated:.2f}", f"{b.right:.2f}"] for b in bins]
        sections += ["Are stated probabilities as often right as they say?", table([head, *lines])]
    return sections


def second_section(results: Results) -> list[str]:
    rows = [["", "first reported, second mattered", "second at once", "within two"]]
    for name, runs in results.of("second").items():
        d = detection([each for each in runs if each.is_first_reported])
        rows.append([name, str(d.count), _percent(d.at_once), _percent(d.within_two)])
    return ["### A second event, three to five measurements after the first", table(rows)]


def hand_section(results: Results) -> list[str]:
    """What users change themselves."""
    rows = [
        [
            "changed by the user",
            "runs",
            *(f"alerts: {name}" for name in results.finders),
            "runs with a notice of curvmon",
        ]
    ]
    by_finder = results.of("hand")
    for kind in HAND:
        own = [[each for each in runs if each.name == kind] for runs in by_finder.values()]
        alerts = [str(sum(len(each.alarms) for each in runs)) for runs in own]
        rows.append([kind, str(len(own[0])), *alerts, str(sum(bool(each.notices) for each in own[0]))])
    rows += _scheduled(results)
    return ["### The user's own hand", "Alerts are wrong here, notices are not.", table(rows)]


def _scheduled(results: Results) -> list[list[str]]:
    """What schedules do abruptly, in quiet runs: raised in the two measurements after it."""
    rows = []
    for name, own in _by_family(results.runs):
        quiet = [run for run in own if run.role == "quiet"]
        for what in dict.fromkeys(what for _, what in FAMILIES[name].hand):
            moments = [epoch + 1 for epoch, each in FAMILIES[name].hand if each == what]
            near = [
                [each for run in quiet for each in find(run) if any(0 <= each.at - m < 2 for m in moments)]
                for find in results.finders.values()
            ]
            alerts = [str(sum(not each.is_notice for each in raised)) for raised in near]
            notices = sum(each.is_notice for each in near[0])
            rows.append([f"{what} of {name}", str(len(quiet)), *alerts, str(notices)])
    return rows


def _detections(events: dict[str, list[Judged]], rows: dict[str, Callable[[Judged], bool]]) -> str:
    lines = [["", "mattered", *events]]
    for name, belongs in rows.items():
        own = {finder: [each for each in judged if belongs(each)] for finder, judged in events.items()}
        count = len(own["curvmon"])
        if count:
            found = [detection(each) for each in own.values()]
            cells = [" / ".join(map(_percent, d[1:])) if d.count else "" for d in found]
            lines.append([name, f"{found[0].count} of {count}", *cells])
    return table(lines)


def _is_of_family(name: str, each: Judged) -> bool:
    return each.run.family == name


def _is_of_kind(name: str, each: Judged) -> bool:
    return each.name == name


def _by_family(runs: Iterable[Recorded]) -> list[tuple[str, list[Recorded]]]:
    runs = list(runs)
    names = dict.fromkeys(run.family for run in runs)
    return [(name, [run for run in runs if run.family == name]) for name in names]


def _percent(share: float) -> str:
    return "" if math.isnan(share) else f"{share:.0%}"


def report(runs: Sequence[Recorded], others: Sequence[Recorded], with_synthetic: bool) -> str:
    """`others`: runs that signatures are fitted to, those of the same families left out."""
    results = Results(runs, left_out(others))
    names = list(dict.fromkeys(run.family for run in runs))
    seeds = len({run.seed for run in runs})
    disturbed = len({run.seed for run in runs if run.happened})
    chosen = (
        "What events look like was fitted to the other eleven families, again for each of these. Thresholds were "
        "chosen on the families for tuning; the first one or two seeds of these were looked at while the method was "
        "made."
    )
    if not set(names) <= REPORTED.keys():
        chosen = "Thresholds were chosen on these families: these figures are for tuning."
    head = [
        "# Alerts: false alarms and detection",
        f"Made with `make bench-alerts`: {', '.join(names)}; {seeds} seeds of each, {disturbed} of them with events; "
        f"30 measurements of each quiet run. {chosen}",
    ]
    sections = [quiet_section, event_section, drift_section, answer_section, second_section, hand_section]
    synthetic = alert_synthetic.sections() if with_synthetic else []
    return "\n\n".join([*head, *(text for section in sections for text in section(results)), *synthetic])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, default=Path("runs/alerts"))
    parser.add_argument("--seeds", type=int, default=10, help="of each family")
    parser.add_argument("--event-seeds", type=int, default=3, help="of these, with disturbed runs")
    parser.add_argument("--processes", type=int, default=2, help="0: only what is in the cache already")
    parser.add_argument("--data", type=Path, help="CIFAR-10 as an npz file; without it, digits")
    parser.add_argument("--tuned", action="store_true", help="the families for tuning instead of those for the table")
    parser.add_argument("--without-synthetic", action="store_true", help="which needs river")
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    families = list(TUNED if arguments.tuned else REPORTED)
    if arguments.processes:
        counts = arguments.seeds, arguments.event_seeds
        record_missing(families, *counts, arguments.cache, arguments.data, arguments.processes)
    seeds = {FIRST_SEED[name] + seed for name in families for seed in range(arguments.seeds)}
    runs = load(arguments.cache, families, seeds)
    text = report(runs, load(arguments.cache), not arguments.without_synthetic)
    print(text)
    if arguments.write:
        arguments.write.write_text(text + "\n")


if __name__ == "__main__":
    main()

"""What the benchmarks share: the search for a tolerance, the assembly of tables, the markers of a page."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import curvmon
from benchmarks import pulse_runs
from benchmarks.accuracy import between_markers
from benchmarks.all import DOCS, TABLES, joined
from benchmarks.header import VARIABLE, cached, commit, measured_on
from benchmarks.new_user import Stopwatch, quarters
from benchmarks.pulse import false_warnings, leads, ours, spikes, summary
from benchmarks.pulse_budget import RULES, monitored
from benchmarks.pulse_networks import OPTIMIZERS, REPORTED, TUNED, Family, loss
from benchmarks.pulse_runs import EVENTS, Recorded, Run, Step
from benchmarks.pulse_trials import trials
from benchmarks.tolerances import Attempt, loosest_of

LADDER = [0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001, 0.0005, 0.0002, 0.0001]


@pytest.mark.parametrize("first", range(len(LADDER)))
@pytest.mark.parametrize("interrupted", range(len(LADDER) + 1))
@pytest.mark.parametrize("begin", [None, 0.0005, 0.0001])
def test_bisection_finds_what_a_scan_finds(first: int, interrupted: int, begin: float | None) -> None:
    """Tolerances from number `first` on serve; from number `interrupted` on, the method takes too many HVPs."""
    tried = []

    def attempt(tolerance: float) -> Attempt:
        i = LADDER.index(tolerance)
        tried.append(i)
        return Attempt(tolerance, [], [], [], math.inf if i >= interrupted else 0.0 if i >= first else 0.5)

    scanned = next(
        (a for a in map(attempt, LADDER) if a.serves or a.interrupted),
        None,
    )
    tried.clear()
    assert loosest_of(LADDER, attempt, begin) == scanned
    assert len(tried) == len(set(tried)) <= 6


def test_nothing_serves() -> None:
    assert loosest_of(LADDER, lambda tolerance: Attempt(tolerance, [], [], [], 0.5)).tolerance == LADDER[-1]


def test_sections_follow_the_first_page_without_their_headers() -> None:
    assert joined(["# title\nheader\n\n### a\n1\n", "# title\nheader\n\n### b\n2\n"]).splitlines() == [
        "# title", "header", "", "### a", "1", "", "### b", "2"
    ]  # fmt: skip


def test_lines_between_markers_are_replaced() -> None:
    page = "a\n<!-- x -->\nold\n<!-- /x -->\nb\n"
    assert between_markers(page, "x", ["new"]) == "a\n<!-- x -->\nnew\n<!-- /x -->\nb\n"
    with pytest.raises(AssertionError, match="<!-- y -->"):
        between_markers(page, "y", ["new"])


def test_tables_are_pages_of_the_docs() -> None:
    assert [table for table in TABLES if not (DOCS / table).exists()] == []


def test_parts_of_a_run_share_commit_and_networks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "0123456"
    monkeypatch.setenv(VARIABLE, str(folder))
    assert commit() == "0123456" and "commit 0123456, with `python -m benchmarks.speed`, a part" in measured_on("speed")
    assert cached("network", lambda: [1.0]) == cached("network", lambda: [2.0]) == [1.0]
    monkeypatch.delenv(VARIABLE)
    assert cached("network", lambda: [2.0]) == [2.0]


@pytest.mark.parametrize("name", REPORTED)
def test_pulses_of_recorded_runs_are_those_of_the_package(name: str) -> None:
    run = Run(REPORTED[name], "AdamW", 0, None)
    batch, generator = run.draw(), torch.Generator().manual_seed(0)
    u = [1e-3 * torch.randn(p.shape, generator=generator) for p in run.model.parameters()]
    expected = curvmon.pulse(run.model, batch, loss=loss, step=u)
    gain, curvature = pulse_runs.pulse(run.model, batch, u)
    assert gain == pytest.approx(expected.gain, rel=1e-3) and curvature == pytest.approx(expected.curvature, rel=1e-2)


def test_a_copied_run_goes_on_as_the_original() -> None:
    run = Run(TUNED["MLP"], "AdamW", 3, None)
    for _ in range(3):
        run.train()
    twin = run.copied()
    for _ in range(3):
        assert list(run.train()) == pytest.approx(list(twin.train()), nan_ok=True)


def recorded_run(kind: str, losses: list[float]) -> Recorded:
    steps = [Step(value, 1.0, 1.0, 1.0) for value in losses]
    return Recorded("MLP", "SGD", 0, kind, 100 if kind in EVENTS else len(steps), steps)


def test_leads_and_false_warnings_are_counted() -> None:
    """The smoothed loss rises twelve steps after the event; a warning before the event is a false one."""
    event, quiet = next(iter(EVENTS)), [1.0] * 300
    risen = recorded_run(event, [*quiet[:100], *([1.2] * 100)])
    rises_at = risen.rises_at()
    assert rises_at is not None and 105 < rises_at < 120
    runs = [risen, recorded_run(event, quiet), recorded_run("constant", quiet)]
    early = leads(lambda run: [50, 103], runs)
    assert [outcome.lead for outcome in early] == [rises_at - 103]
    assert [outcome.lead for outcome in leads(lambda run: [50, 150], runs)] == [None]
    assert summary(early) == ["1/1 (100%)", str(rises_at - 103)]
    assert false_warnings(lambda run: [50, 150], runs) == (2, 300)
    assert false_warnings(lambda run: [i for i in (50, 150) if i < len(run.steps)], runs[:2]) == (1, 100)
    assert spikes(recorded_run("constant", [*quiet, 4.0])) == [300] and spikes(runs[0]) == []


def test_pulses_of_the_schedule_are_picked_from_recorded_ones() -> None:
    """Every second step has one; ten times the usual ratio and gain from step 400 on."""
    usual = [Step(1.0, 1.0, 1.0, 1.0, 1.0, 0.2) if i % 2 == 0 else Step(1.0, 1.0, 1.0, 1.0) for i in range(500)]
    unusual = [step._replace(gain=10 * step.gain, curvature=100 * step.curvature) for step in usual[400:]]
    taken = [
        monitored(make, looks_closer, 0.33, 0, Recorded("MLP", "SGD", 0, "constant", 500, usual[:400] + unusual))
        for make, looks_closer in RULES.values()
    ]
    assert all(i % 2 == 0 for of in taken for i in of.pulses)
    assert {b - a for a, b in pairwise(taken[0].pulses)} == {34}
    assert taken[1].pulses[:20] == taken[2].pulses[:20] == list(range(10, 201, 10))
    assert len(taken[2].pulses) >= len(taken[1].pulses) + 10
    assert taken[0].raised_at == [] and 400 < taken[2].raised_at[0] < 450
    assert monitored(*RULES["at a fixed interval"], 0.33, 0, Recorded("MLP", "SGD", 0, "constant", 500, usual)) == (
        [],
        taken[0].pulses,
    )


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_recorded_ramp_is_warned_and_critical_rates_are_critical(
    optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulse_runs, "EVENTS", {"ramp, 5 % per step": EVENTS["ramp, 5 % per step"]})
    family: Family = TUNED["MLP"]
    (run,) = pulse_runs.disturbed_runs(family, optimizer, 5, None, at=150, every=5)
    (warned,) = ours(run, 5)
    assert 150 < warned < (run.rises_at() or len(run.steps))
    made = trials(family, optimizer, 5, None)
    for falls, rises in (("smoothed_falls", "smoothed_rises"), ("quadratic_falls", "quadratic_rises")):
        assert sum(getattr(trial, falls) is not False for trial in made) >= 0.8 * len(made)
        assert sum(getattr(trial, rises) is not False for trial in made) >= 0.8 * len(made)
    assert all(trial.measured_falls is not False and trial.measured_rises is not False for trial in made)
    assert sum(trial.is_measured for trial in made) in range(len(made) // 4, len(made) // 2)


def test_quarters_of_a_run() -> None:
    """The measurement before the first step belongs to none; those at the end of a quarter to that one."""
    at = [0.0, 0.25, 0.26, 0.5, 0.75, 0.76, 1.0]
    assert quarters({"snapshots": [{"at": place, "full": True} for place in at]}) == [1, 2, 1, 2]
    assert quarters({"snapshots": [{"at": place, "full": False} for place in at]}) == [0, 0, 0, 0]


def test_time_in_hooks_is_counted_once() -> None:
    watch = Stopwatch()
    inner = watch.around(lambda: watch.seconds)
    assert watch.around(inner)() == 0.0  # still within the outer call
    assert watch.seconds == watch.longest > 0.0

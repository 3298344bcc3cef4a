"""The benchmark of alerts: twins that differ by an event alone, what mattered, and how alerts are scored."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import alert_recording
from benchmarks.alert_answers import TEXTS, causes_of, is_cause_right, is_place_right, places_of
from benchmarks.alert_event import NotApplicableError, chance
from benchmarks.alert_events import CAUSES, EVENTS, FIRST, HAND, SECOND
from benchmarks.alert_families import FAMILIES, Batch
from benchmarks.alert_harm import doubled_at, matters
from benchmarks.alert_monitoring import Seen
from benchmarks.alert_recording import Happened, Job, Recorded, Role, jobs, load
from benchmarks.alert_scores import (
    Find,
    Raised,
    alerts_of,
    answers,
    detection,
    false_alarms,
    judged,
    reliability,
    three_sigma,
)
from benchmarks.alert_training import Run
from curvmon.alerts.context import Context
from curvmon.records import Alert, Snapshot

QUIET = [1.0, 1.02, 0.99, 1.01, 0.98, 1.0, 1.01, 0.99, 1.0, 1.02, 0.98, 1.0]
AT = 8
EVENT = Happened("labels shuffled", "labels", None, AT)


class Ignore:
    """Observes nothing."""

    def before_step(self, run: Run, batch: Batch) -> None:
        pass

    def after_step(self, run: Run, loss: Tensor) -> None:
        pass


@dataclass(frozen=True)
class StatedAlert(Alert):
    """As an alert that states causes and places."""

    causes: tuple[tuple[str, float], ...] = ()
    places: tuple[tuple[str, float], ...] = ()


def seen(loss: float, accuracy: float = 0.9, settings: dict[str, str] | None = None) -> Seen:
    logged = {"train_loss": loss, "val_loss": loss, "val_accuracy": accuracy}
    return Seen(Snapshot(0, 0), Context(settings=settings or {}), None, logged, [], [], 32)


def run_of(losses: Sequence[float], role: Role = "event", *happened: Happened, accuracy: float = 0.9) -> Recorded:
    measured = [seen(loss, accuracy if i >= AT else 0.9) for i, loss in enumerate(losses)]
    quiet = [seen(loss) for loss in QUIET]
    return Recorded("GELU MLP", 0, role, list(happened or ([] if role == "quiet" else [EVENT])), measured, quiet)


def after(*values: float) -> list[float]:
    return [*QUIET[:AT], *values]


def alert(
    causes: tuple[tuple[str, float], ...] = (), places: tuple[tuple[str, float], ...] = (), level: str = "warning"
) -> Alert:
    start = ("jump", "loss", "loss", 1.0, 2.0, 9.0, 0, 0, "The loss jumped from 1 to 2, step 0")
    return StatedAlert(*start, level=level, causes=causes, places=places)  # type: ignore[arg-type]


def raising(*at: int, what: Alert | None = None) -> Find:
    return lambda run: [Raised(i, what or alert()) for i in at if i < len(run.measured)]


@pytest.mark.parametrize(
    ("losses", "accuracy", "expected"),
    [
        (after(1.5, 1.4, 1.3, 1.0), 0.9, True),
        (after(1.05, 1.05, 1.05, 1.05), 0.9, False),
        (after(1.0, 1.0, 1.0, 9.0), 0.9, False),
        (after(1.0, 1.0, 1.0, 1.0), 0.8, True),
        (after(1.0, math.nan, math.nan, math.nan), 0.9, True),
        (after(0.5, 0.5, 0.5, 0.5), 0.9, False),
    ],
)
def test_an_event_matters_if_the_loss_suffers_in_three_validations(
    losses: list[float], accuracy: float, expected: bool
) -> None:
    assert matters(run_of(losses, accuracy=accuracy)) == expected


def test_a_rise_within_the_usual_fluctuation_does_not_matter() -> None:
    """25 percent, where the twin goes up and down by 30."""
    run = run_of(after(1.25, 1.25, 1.25))
    rough = [seen(loss) for loss in [1.0, 1.3] * 6]
    assert matters(run) and not matters(run._replace(twin=rough))


def test_drifts_matter_by_their_last_validations() -> None:
    assert matters(run_of(after(1.0, 1.3, 1.5, 1.9), "drift"))
    assert not matters(run_of(after(1.9, 1.0, 1.0, 1.0), "drift"))


def test_nothing_matters_after_the_twin_has_diverged() -> None:
    run = run_of(after(math.nan, math.nan, math.nan))
    assert not matters(run._replace(twin=[seen(math.nan)] * len(QUIET)))


def test_a_drift_is_reported_in_time_before_the_smoothed_loss_doubles() -> None:
    run = run_of(after(1.2, 1.8, 2.5, 3.5), "drift")
    assert doubled_at(run) == AT + 3
    assert [judged(raising(at), [run])[0].is_early for at in (AT, AT + 2, AT + 3)] == [True, True, False]
    assert doubled_at(run_of(after(1.2, 1.3, 1.4, 1.5), "drift")) is None
    assert judged(raising(AT + 3), [run_of(after(1.2, 1.3, 1.4, 1.5), "drift")])[0].is_early


def test_detection_counts_events_that_mattered() -> None:
    runs = [run_of(after(3.0, 3.0, 3.0, 3.0)), run_of(QUIET)]
    assert detection(judged(raising(AT), runs)) == (1, 1.0, 1.0, 0.0)
    assert detection(judged(raising(AT + 1), runs)) == (1, 0.0, 1.0, 0.0)
    assert detection(judged(raising(AT + 3), runs)) == (1, 0.0, 0.0, 0.0)
    assert detection(judged(raising(AT - 1), runs)) == (1, 0.0, 0.0, 1.0)
    assert detection(judged(raising(AT, what=alert(level="info")), runs)) == (1, 0.0, 0.0, 1.0)


def test_false_alarms_are_those_of_quiet_runs() -> None:
    runs = [run_of(QUIET, "quiet"), run_of(after(3.0))]
    assert false_alarms(raising(2, 5), runs) == (len(QUIET), 2, 0)
    assert false_alarms(raising(2, 5), runs).per_thousand == pytest.approx(2000 / len(QUIET))
    assert false_alarms(raising(2, what=alert(level="info")), runs) == (len(QUIET), 0, 1)


def test_the_first_of_two_events_is_reported_before_the_second() -> None:
    first = Happened("learning rate x 5", "learning rate", None, AT - 4)
    run = run_of(after(3.0, 3.0, 3.0), "second", first, EVENT)
    reported = [judged(raising(*at), [run])[0] for at in [(AT - 4, AT), (AT,), (AT - 5,)]]
    assert [each.is_first_reported for each in reported] == [True, False, False]
    assert [each.delay for each in reported] == [0, 0, math.inf]


def test_three_sigma_waits_for_five_values_and_sees_what_is_not_finite() -> None:
    def raised_at(losses: Sequence[float]) -> list[int]:
        return [each.at for each in three_sigma("val_loss")(run_of(losses))]

    assert raised_at([*QUIET[:4], 5.0]) == []
    assert raised_at([*QUIET[:5], 5.0]) == [5]
    assert raised_at([*QUIET[:2], math.nan, 1.0]) == [2]
    assert raised_at(QUIET) == [] and three_sigma("not logged")(run_of([1.0] * 9)) == []


def test_stated_causes_are_compared_with_what_happened() -> None:
    stated = alert((("learning rate", 0.2), ("labels", 0.7), ("dropout", 0.1)))
    assert [label for label, _ in causes_of(stated)] == ["labels", "learning rate", "dropout"]
    assert is_cause_right(stated, EVENT) and not is_cause_right(stated, EVENT._replace(cause="dropout"), 2)
    result = answers(judged(raising(AT, what=stated), [run_of(after(3.0, 3.0, 3.0))]))
    assert (result.count, result.first, result.second, result.with_place, result.misplaced) == (1, 1.0, 1.0, 0, 0.0)


def test_causes_and_places_of_alerts_in_free_text() -> None:
    start = "jump", "coupling", "stem--layer1", 1.0, 2.0, 9.0, 0, 0
    grew = Alert(*start, "Weights of layer1 grew: coupling rose at stem → layer1, step 3")
    assert causes_of(grew)[0][0] == "weights grown" and places_of(grew)[0] == "layer1"
    rate = Alert("jump", "loss", "loss", 1.0, 2.0, 9.0, 0, 0, "Learning rate x 20: the loss jumped from 1 to 2, step 3")
    assert causes_of(rate)[0][0] == "learning rate" and places_of(rate) == []
    assert causes_of(alert()) == []
    stated = StatedAlert(*start, grew.headline, causes=(("labels", 0.9),))
    assert causes_of(stated) == [("labels", 0.9)] and places_of(stated) == []


def test_labels_in_free_text_are_those_of_events() -> None:
    assert {label for _, label in TEXTS} <= set(CAUSES)


@pytest.mark.parametrize(
    ("named", "right"), [("2", True), ("2.branch", True), ("2.branch.0.weight", True), ("20", False)]
)
def test_a_place_may_contain_the_module_or_be_within(named: str, right: bool) -> None:
    run = run_of(after(3.0), "event", EVENT._replace(place="2.branch.0"))
    assert is_place_right(alert(places=((named, 0.9),)), run) == right
    assert not is_place_right(alert(places=((named, 0.9),)), run_of(after(3.0)))


def test_reliability_bins_every_stated_probability() -> None:
    stated = alert((("labels", 0.8), ("dropout", 0.1), ("learning rate", 0.1)))
    runs = [run_of(after(3.0)), run_of(after(3.0), "event", EVENT._replace(cause="dropout"))]
    low, high = reliability(judged(raising(AT, what=stated), runs))
    assert (low.count, low.stated, low.right) == (4, pytest.approx(0.1), 0.25)
    assert (high.count, high.stated, high.right) == (2, pytest.approx(0.8), 0.5)
    assert reliability(judged(raising(AT), runs)) == []


@pytest.mark.parametrize("name", ["GELU MLP", "VAE", "ViT", "Fine-tuning"])
def test_a_copied_run_goes_on_as_its_twin(name: str) -> None:
    """Also with dropout, noise, and layers that are unfrozen."""
    run = Run(FAMILIES[name], 3)
    run.epoch = (FAMILIES[name].unfreeze_at or 1) - 1
    run.train(Ignore())
    twin = run.copied()
    for each in (run, twin):
        each.train(Ignore())
    assert run.validate() == twin.validate()
    twin.train(Ignore())
    assert run.validate() != twin.validate()


@pytest.mark.parametrize("name", FAMILIES)
def test_every_event_happens_to_the_copy_alone_or_does_not_apply(name: str) -> None:
    run = Run(FAMILIES[name], 0)
    before = {key: value.clone() for key, value in run.model.state_dict().items()}
    applied = []
    for kind, event in {**EVENTS, **HAND}.items():
        twin = run.copied()
        try:
            place = event.apply(twin, chance(0, kind))
        except NotApplicableError:
            continue
        applied.append(kind)
        if place is not None:
            twin.model.get_submodule(place)
    assert len(applied) >= 24
    assert all(torch.equal(value, before[key]) for key, value in run.model.state_dict().items())
    assert run.factor == 1.0 and not run.corrupt and not run.after_step and not run.ascends


def test_events_of_two_are_events() -> None:
    assert {*FIRST, *SECOND} <= EVENTS.keys() and not set(FIRST) & set(SECOND)


@pytest.mark.slow
def test_recorded_runs_are_loaded_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quiet run of four epochs, one event and the same followed by another; replayed without training."""
    monkeypatch.setattr(alert_recording, "EVENTS", {name: EVENTS[name] for name in ("learning rate x 5", *SECOND)})
    monkeypatch.setattr(alert_recording, "HAND", {"step decay": HAND["step decay"]})
    monkeypatch.setattr(alert_recording, "SECOND", ("learning rate x 20",))
    plain = alert_recording.record(FAMILIES["Regression"], 0, True, epochs=4)
    torch.save(plain, tmp_path / "Regression-0-disturbed.pt")
    torch.save({**plain, "branches": []}, tmp_path / "Regression-0-quiet.pt")
    runs = load(tmp_path, ["Regression"], [0])
    assert load(tmp_path, ["Regression"], [1]) == load(tmp_path, ["VAE"]) == []
    assert len(runs) == len(plain["branches"]) + 1
    by_name = {tuple(each.name for each in run.happened): run for run in runs}
    quiet, alone = by_name[()], by_name["learning rate x 5",]
    both = by_name["learning rate x 5", "learning rate x 20"]
    assert [run.role for run in (quiet, alone, both, by_name["step decay",])] == ["quiet", "event", "second", "hand"]
    at, second = alone.happened[0].at, both.happened[1].at
    assert all(a is b for a, b in zip(alone.measured[:at], quiet.measured[:at]))
    assert both.twin is alone.measured and len(both.measured) == second + alert_recording.AFTER
    # until the second event, both are the same run
    assert [s.logged for s in both.measured[1:second]] == [s.logged for s in alone.measured[1:second]]
    assert both.measured[second].logged != alone.measured[second].logged
    now = alone.measured[at]
    assert now.groups[0]["lr"] == pytest.approx(5 * quiet.measured[1].groups[0]["lr"])
    assert now.snapshot.is_full and now.snapshot.vitals is not None and math.isfinite(now.snapshot.vitals.update_norm)
    assert ("metric", "val_loss") in now.context.signs and now.context.settings and len(now.trainable) == 8
    assert all(each.at < len(both.measured) for each in alerts_of(both))


def test_jobs_are_resumed_and_begin_with_one_of_each(tmp_path: Path) -> None:
    order = jobs(["GELU MLP", "ResNet"], 4, 1, tmp_path, None)
    assert [(job.family, job.seed, job.disturbed) for job in order[:4]] == [
        ("GELU MLP", 0, True),
        ("ResNet", 1000, True),
        ("GELU MLP", 1, False),
        ("ResNet", 1001, False),
    ]
    assert len(order) == len(set(order)) == 8
    job = Job("Group norm", 1003, False, tmp_path, None)
    job.path.write_bytes(b"")
    assert job.run() == "Group-norm-1003-quiet.pt: there"

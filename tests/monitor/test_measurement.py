"""Fallbacks and state of a measurement, with scripted attempts: no Trainer and no model."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import FrozenInstanceError, dataclass
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

import curvmon.monitor.measurement as attempt_module
from curvmon.errors import DivergedError, DoubleBackwardError, InputError, LossError, NodeError, NonFiniteError
from curvmon.isolation.collectives import CollectiveError
from curvmon.monitor.fallbacks import MAX_MESSAGE, RESPONSES, ErrorKind, Failure, classify, describe
from curvmon.monitor.measurement import MeasurementRunner, Outcome, Request, attempt
from curvmon.monitor.pairs_and_spectrum import MAX_PAIR_HVPS
from curvmon.monitor.probe_batch import ProbeBatch
from curvmon.monitor.process_group import Ranks
from curvmon.monitor.settings import Settings
from curvmon.monitor.target import Target

KINDS = get_args(ErrorKind)
ALONE = Ranks(1)
BOTH = frozenset({"pairs", "spectrum"})
VALIDATION, TRAINING = torch.arange(8.0), -torch.arange(8.0)


@dataclass(frozen=True)
class Measured:
    """In the place of a Measurement."""

    hvps: int = 100
    notes: tuple[str, ...] = ("a note",)


def target(**options: Any) -> Target:
    return Target(nn.Identity(), lambda model, batch: batch.sum(), torch.device("cpu"), **options)


def success(**options: Any) -> Outcome:
    return Outcome(**{"measurement": Measured(), "spectrum": "spectrum", **options})


def failure(kind: Any, part: Any = "pairs", **options: Any) -> Outcome:
    return Outcome(failure=Failure(kind, f"{kind} error", part), **options)


def kind_of(outcome: Outcome) -> ErrorKind | None:
    return None if outcome.failure is None else outcome.failure.kind


class Scripted:
    """Makes attempts with these outcomes, and records the requests."""

    def __init__(self, outcomes: tuple[Outcome, ...]) -> None:
        self._outcomes = iter(outcomes)
        self.requests: list[Request] = []

    def __call__(self, target: Target, request: Request, ranks: Ranks) -> Outcome:
        self.requests.append(request)
        return next(self._outcomes)

    @property
    def batches(self) -> list[list[float]]:
        return [request.batches[0].tolist() for request in self.requests]

    @property
    def parts(self) -> list[Any]:
        return [request.parts for request in self.requests]


class Session:
    """A runner after one validation batch and one training batch."""

    def __init__(self, *outcomes: Outcome, validation: Any = VALIDATION, **settings: Any) -> None:
        self.attempts, self.warnings = Scripted(outcomes), []  # type: ignore[var-annotated]
        probe = ProbeBatch(8, 1, "val")
        probe.observe("val", validation)
        probe.observe("train", TRAINING)
        self.runner = MeasurementRunner(Settings(**settings), probe, self.attempts)

    def run(self, **options: Any) -> Outcome:
        return self.runner.run(target(), ALONE, warn=lambda *message: self.warnings.append(message[0]), **options)


# ---- without errors ----


def test_a_measurement_that_succeeds_takes_one_attempt() -> None:
    session = Session(success())
    outcome = session.run(is_first=True)
    assert outcome == Outcome(Measured(), "spectrum")  # type: ignore[arg-type]
    assert session.attempts.parts == [BOTH] and session.attempts.batches == [VALIDATION.tolist()]
    assert not session.warnings


@pytest.mark.parametrize(
    ("settings", "parts"), [({"pairs": False}, {"spectrum"}), ({"eigenvalues": 0}, {"pairs"}), ({}, BOTH)]
)
def test_settings_say_which_parts_are_measured(settings: Any, parts: Any) -> None:
    session = Session(success(), **settings)
    session.run()
    assert session.attempts.parts == [parts] == [session.runner.parts]


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        Session().runner.settings.eigenvalues = 3  # type: ignore[misc]


def test_share_and_hvps_of_the_last_full_measurement_are_passed_on() -> None:
    session = Session(success(), success(measurement=Measured(50)), success())
    for share in (1.0, 0.5, 0.5):
        session.run(share=share)
    assert [(r.share, r.full_hvps) for r in session.attempts.requests] == [(1.0, None), (0.5, 100), (0.5, 100)]


# ---- the table, row by row ----


def test_every_kind_of_error_has_a_response() -> None:
    assert set(RESPONSES) == set(KINDS)
    for response in RESPONSES.values():
        # what is dropped is not tried later, and what is tried later is not dropped
        assert response.retry_later != ("without the failed part" in response.fallbacks)


@pytest.mark.parametrize("kind", ["transient", "diverged", "input"])
def test_the_first_measurement_may_fall_back_to_the_training_batch(kind: Any) -> None:
    session = Session(failure(kind), success(), success())
    assert session.run(is_first=True).succeeded
    assert session.attempts.batches == [VALIDATION.tolist(), TRAINING.tolist()]
    assert session.warnings == [f"measured on the first training batch, not on a validation batch: {kind} error"]
    session.run()
    assert session.attempts.batches[2] == TRAINING.tolist() and len(session.warnings) == 1


@pytest.mark.parametrize("kind", ["transient", "diverged", "input"])
def test_later_measurements_stay_on_their_batch(kind: Any) -> None:
    session = Session(failure(kind), eigenvalues=0)
    assert not session.run().succeeded
    assert session.attempts.batches == [VALIDATION.tolist()] and not session.warnings


@pytest.mark.parametrize("kind", ["transient", "diverged", "input"])
def test_where_the_training_batch_fails_as_well_the_validation_batch_stays(kind: Any) -> None:
    session = Session(failure(kind), failure(kind), success(), eigenvalues=0)
    outcome = session.run(is_first=True)
    assert outcome.failure == Failure(kind, f"{kind} error") and not session.warnings
    session.run(is_first=True)
    assert session.attempts.batches == [VALIDATION.tolist(), TRAINING.tolist(), VALIDATION.tolist()]


def test_out_of_memory_halves_the_samples_until_it_fits() -> None:
    session = Session(failure("memory"), failure("memory"), success(), success())
    outcome = session.run(is_first=True)
    assert [len(batch) for batch in session.attempts.batches] == [8, 4, 2]
    note = "out of memory: measured on the first 2 samples of the batch"
    assert outcome.measurement is not None and outcome.measurement.notes == (note, "a note")
    session.run()
    assert session.attempts.batches[3] == [0.0, 1.0]


def test_out_of_memory_for_every_size_restores_all_samples() -> None:
    session = Session(*[failure("memory")] * 4, success())
    assert kind_of(session.run(is_first=True)) == "memory"
    assert [len(batch) for batch in session.attempts.batches] == [8, 4, 2, 1]
    outcome = session.run()
    assert len(session.attempts.batches[4]) == 8
    assert outcome.measurement is not None and outcome.measurement.notes == ("a note",)


def test_out_of_memory_where_the_batch_cannot_be_split() -> None:
    session = Session(failure("memory"), validation=torch.tensor(1.0))
    assert kind_of(session.run(is_first=True)) == "memory" and len(session.attempts.requests) == 1


def test_an_error_after_halving_restores_all_samples() -> None:
    session = Session(failure("memory"), failure("transient"), success())
    assert kind_of(session.run()) == "transient"
    session.run()
    assert [len(batch) for batch in session.attempts.batches] == [8, 4, 8]


@pytest.mark.parametrize("kind", ["input", "permanent"])
@pytest.mark.parametrize(("part", "other"), [("pairs", "spectrum"), ("spectrum", "pairs")])
def test_a_part_that_can_never_work_is_dropped(kind: Any, part: Any, other: Any) -> None:
    session = Session(failure(kind, part), success(), success())
    assert session.run().succeeded
    assert session.attempts.parts == [BOTH, {other}]
    name = {"pairs": "pairs of layers", "spectrum": "eigenvalues"}[part]
    assert session.warnings == [f"{name} are not measured in this run: {kind} error"]
    session.run()
    assert session.attempts.parts[2] == {other} and len(session.warnings) == 1


def test_wrong_input_is_tried_on_the_training_batch_before_a_part_is_dropped() -> None:
    session = Session(failure("input"), failure("input"), success())
    assert session.run(is_first=True).succeeded
    assert session.attempts.batches == [VALIDATION.tolist(), TRAINING.tolist(), VALIDATION.tolist()]
    assert session.attempts.parts == [BOTH, BOTH, {"spectrum"}]
    assert session.warnings == ["pairs of layers are not measured in this run: input error"]


@pytest.mark.parametrize("kind", ["input", "permanent"])
def test_where_no_part_works_both_are_kept(kind: Any) -> None:
    session = Session(failure(kind, "pairs"), failure(kind, "spectrum"))
    outcome = session.run()
    assert outcome.failure is not None and outcome.failure.part == "spectrum" and not RESPONSES[kind].retry_later
    assert session.runner.parts == BOTH and not session.warnings


@pytest.mark.parametrize("kind", ["input", "permanent"])
@pytest.mark.parametrize("settings", [{"pairs": False}, {"eigenvalues": 0}])
def test_the_only_part_is_not_dropped(kind: Any, settings: Any) -> None:
    for part in ("pairs", "spectrum"):  # an error before there is anything to measure counts as one of the pairs
        session = Session(failure(kind, part), **settings)
        assert not session.run().succeeded and len(session.attempts.requests) == 1


@pytest.mark.parametrize("kind", ["transient", "diverged", "memory"])
def test_pairs_without_eigenvalues_are_a_success(kind: Any) -> None:
    session = Session(failure(kind, "spectrum", measurement=Measured()), success())
    outcome = session.run(is_first=True)
    assert outcome.succeeded and kind_of(outcome) == kind and len(session.attempts.requests) == 1
    assert outcome.measurement is not None
    assert outcome.measurement.notes == ("a note", f"no eigenvalues: {kind} error")
    (warning,) = session.warnings
    assert warning.startswith(f"eigenvalues not measured: {kind} error. The pairs of layers are")
    session.run()
    assert session.attempts.parts == [BOTH, BOTH]


@pytest.mark.parametrize("kind", ["input", "permanent"])
def test_eigenvalues_that_can_never_work_are_dropped_without_another_attempt(kind: Any) -> None:
    session = Session(failure(kind, "spectrum", measurement=Measured()), success())
    outcome = session.run()
    assert outcome.failure is None
    assert outcome.measurement is not None and outcome.measurement.notes == ("a note",)
    assert session.warnings == [f"eigenvalues are not measured in this run: {kind} error"]
    session.run()
    assert session.attempts.parts == [BOTH, {"pairs"}]


# ---- without a batch ----


def test_without_a_batch_there_is_no_attempt() -> None:
    attempts = Scripted(())
    runner = MeasurementRunner(Settings(), ProbeBatch(8, 1, "val"), attempts)
    outcome = runner.run(target(), ALONE, warn=print)
    assert outcome.failure == Failure("transient", "no batch has been seen yet") and not attempts.requests


def test_a_batch_that_cannot_be_copied_is_named() -> None:
    class Stubborn(dict):  # type: ignore[type-arg]
        def __copy__(self) -> Any:
            raise RuntimeError("there is only one")

    probe = ProbeBatch(8, 1, "train")
    probe.observe("train", Stubborn(x=torch.ones(2)))
    outcome = MeasurementRunner(Settings(), probe, Scripted(())).run(target(), ALONE, warn=print)
    assert outcome.failure is not None
    assert "cannot be copied (RuntimeError: there is only one)" in outcome.failure.message


# ---- state ----


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_the_state_goes_through_a_checkpoint() -> None:
    start = torch.tensor([1.0, 2.0])
    first = Session(failure("memory"), success(start=start))
    assert first.run(is_first=True).start is None
    second = Session(success(), validation=VALIDATION + 100)
    second.runner.load_state_dict(through_a_file(first.runner.state_dict()))
    second.run(share=0.5)
    (request,) = second.attempts.requests
    assert isinstance(request.start, Tensor) and torch.equal(request.start, start)
    assert request.full_hvps == 100 and request.batches[0].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert second.runner.probe.notes == ("out of memory: measured on the first 4 samples of the batch",)
    ours, theirs = first.runner.state_dict(), second.runner.state_dict()
    assert torch.equal(ours.pop("start"), theirs.pop("start"))
    assert torch.equal(ours["probe"].pop("tensors")[0][0], theirs["probe"].pop("tensors")[0][0])
    assert ours == theirs


def test_the_training_batch_of_a_checkpoint_is_used_again() -> None:
    first, second = Session(failure("input"), success()), Session(success())
    first.run(is_first=True)
    second.runner.load_state_dict(through_a_file(first.runner.state_dict()))
    second.run()
    assert second.attempts.batches == [TRAINING.tolist()] and not second.warnings


def test_another_batch_than_that_of_the_checkpoint_warns() -> None:
    first, second = Session(success()), Session(success(), validation=VALIDATION + 100)
    first.run()
    state = through_a_file(first.runner.state_dict())
    state["probe"]["tensors"] = None  # too large to be stored
    second.runner.load_state_dict(state)
    second.run()
    (warning,) = second.warnings
    assert "the probe batch differs from that of the checkpoint" in warning


def test_a_state_that_cannot_be_read_changes_nothing() -> None:
    session = Session(success(start=torch.ones(2)), success())
    session.run()
    before = session.runner.state_dict()
    for wrong in ({"probe": {}, "start": None, "full_hvps": 3}, {"probe": before["probe"], "full_hvps": 3}):
        with pytest.raises(KeyError):
            session.runner.load_state_dict(wrong)
    session.run()
    request = session.attempts.requests[-1]
    assert request.start is not None and request.full_hvps == 100


def test_the_start_vector_stays_if_a_search_fails() -> None:
    start = torch.ones(2)
    failed = failure("transient", "spectrum", measurement=Measured())
    session = Session(success(start=start), failed, success())
    for _ in range(3):
        session.run()
    assert [request.start for request in session.attempts.requests] == [None, start, start]


def test_a_large_start_vector_is_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(success(start=torch.ones(3)))
    session.run()
    assert session.runner.state_dict()["start"] is not None
    monkeypatch.setattr(attempt_module, "MAX_START_ENTRIES", 2)
    assert session.runner.state_dict()["start"] is None


# ---- one attempt ----


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """What is measured, with which limit."""
    made: list[tuple[str, Any]] = []

    def pairs(*args: Any, max_hvps: Any, **options: Any) -> Any:
        made.append(("pairs", max_hvps))
        return Measured()

    def spectrum(*args: Any, share: float, **options: Any) -> Any:
        made.append(("spectrum", share))
        return "spectrum", torch.ones(2)

    monkeypatch.setattr(attempt_module, "measure_pairs", pairs)
    monkeypatch.setattr(attempt_module, "measure_spectrum", spectrum)
    return made


def test_an_attempt_measures_the_requested_parts(calls: Any) -> None:
    for parts in (BOTH, frozenset({"pairs"}), frozenset({"spectrum"})):
        outcome = attempt(target(), Request(Settings(), parts, [VALIDATION]), ALONE)  # type: ignore[arg-type]
        assert (outcome.measurement is not None) == ("pairs" in parts)
        assert (outcome.spectrum is not None) == (outcome.start is not None) == ("spectrum" in parts)
    assert [name for name, _ in calls] == ["pairs", "spectrum", "pairs", "spectrum"]


@pytest.mark.parametrize(
    ("share", "full", "limit"), [(1.0, 80, None), (0.5, None, 0.5 * MAX_PAIR_HVPS), (0.5, 80, 40.0)]
)
def test_a_share_limits_the_hvps(calls: Any, share: float, full: int | None, limit: float | None) -> None:
    attempt(target(), Request(Settings(), BOTH, [VALIDATION], share, full), ALONE)  # type: ignore[arg-type]
    assert calls == [("pairs", limit), ("spectrum", share)]


@pytest.mark.parametrize("error", [None, ValueError("no")])
def test_an_attempt_is_made_in_isolation(calls: Any, error: Exception | None) -> None:
    events = []

    @contextmanager
    def isolation() -> Iterator[None]:
        events.append("enter")
        try:
            yield
            if error is not None:
                raise error
        finally:
            events.append("exit")

    request = Request(Settings(), BOTH, [VALIDATION])  # type: ignore[arg-type]
    outcome = attempt(target(isolation=isolation), request, ALONE)
    assert events == ["enter", "exit"]
    assert (outcome.failure and outcome.failure.message) == (None if error is None else "ValueError: no")


def test_an_attempt_says_where_the_error_is(calls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **options: Any) -> Any:
        raise NonFiniteError("not finite")

    request = Request(Settings(), BOTH, [VALIDATION])  # type: ignore[arg-type]
    monkeypatch.setattr(attempt_module, "measure_spectrum", fails)
    outcome = attempt(target(), request, ALONE)
    assert outcome.succeeded and outcome.failure == Failure("diverged", "NonFiniteError: not finite", "spectrum")
    monkeypatch.setattr(attempt_module, "measure_pairs", fails)
    outcome = attempt(target(), request, ALONE)
    assert not outcome.succeeded and outcome.failure == Failure("diverged", "NonFiniteError: not finite", "pairs")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), "memory"),
        (MemoryError(), "memory"),
        (DivergedError("the loss is nan"), "diverged"),
        (NonFiniteError("not finite"), "diverged"),
        (InputError("complex parameters"), "input"),
        (NodeError("no module"), "input"),
        (DoubleBackwardError("ctc_loss"), "permanent"),
        (CollectiveError("all_reduce"), "permanent"),
        (LossError("not a scalar"), "transient"),
        (KeyError("anything else"), "transient"),
    ],
)
def test_kinds_of_errors(error: Exception, kind: str) -> None:
    assert classify(error) == kind


def test_errors_are_described_by_class_and_first_line() -> None:
    assert describe(ValueError()) == "ValueError"
    assert describe(ValueError("one\ntwo")) == "ValueError: one"
    assert len(describe(ValueError("x" * 5000))) < MAX_MESSAGE + 20

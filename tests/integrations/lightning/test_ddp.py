"""Several processes: one result on all of them, that of a single process; all of them measure, or none does.

The processes are real: see ddp_run.py. They run once per test session, for two and for three processes.
"""

from __future__ import annotations

import math
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from filelock import FileLock

import curvmon
from curvmon.monitor.pairs_and_spectrum import ACCURACY, measure_pairs
from curvmon.monitor.pulse_taker import CLOSE, CROSSING_EVERY
from curvmon.monitor.settings import Settings
from curvmon.pulse import mean_pulse
from curvmon.records import METRICS, Measurement
from tests.helpers.ddp_run import SCENARIOS, Lit
from tests.helpers.time_limits import PATIENCE

pytestmark = pytest.mark.slow

STUCK = PATIENCE
"""seconds without any progress: a deadlock"""
AGREEMENT = 1e-4
"""relative: float32 products, batched in other ways"""


def launch(folder: Path, processes: int) -> None:
    folder.mkdir()
    environment = {name: value for name, value in os.environ.items() if name not in ("LOCAL_RANK", "WORLD_SIZE")}
    with (folder / "output").open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.ddp_run", str(folder), str(processes)],
            cwd=Path(__file__).parents[3],
            env={**environment, "OMP_NUM_THREADS": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        progress, since = -1, time.monotonic()
        while process.poll() is None:
            done = len(list(folder.glob("*.pt")))
            if done != progress:
                progress, since = done, time.monotonic()
            if time.monotonic() - since > STUCK:
                os.killpg(process.pid, signal.SIGKILL)  # the processes it started, too
            time.sleep(0.1)


@pytest.fixture(scope="session")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the processes of a world saw in a scenario, in the order of their ranks."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def seen(processes: int, scenario: str) -> list[dict[str, Any]]:
        folder = shared / f"ddp-{processes}"
        with FileLock(f"{folder}.lock"):
            if not folder.exists():
                launch(folder, processes)
        files = [folder / f"{scenario}-{rank}.pt" for rank in range(processes)]
        missing = [file.name for file in files if not file.exists()]
        if missing:
            tail = (folder / "output").read_text()[-3000:]
            pytest.fail(f"no {', '.join(missing)}: a deadlock here or before, or a process died\n{tail}")
        found = [torch.load(file, weights_only=False) for file in files]
        for one in found:
            assert "traceback" not in one, one["traceback"]
        return found

    return seen


def same(a: Any, b: Any) -> bool:
    """Equal to the last bit, NaN included."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b))
    if isinstance(a, torch.Tensor):
        return torch.equal(a.nan_to_num(7.25), b.nan_to_num(7.25))
    return bool(a == b or (isinstance(a, float) and math.isnan(a) and math.isnan(b)))


def check_agreement(ranks: list[dict[str, Any]], measurements: int) -> None:
    """All processes trained to the end, have the same histories and metrics, and torch.distributed is whole."""
    for one in ranks:
        assert one["finished"] and one["restored"]
        assert len(one["monitors"][0]["history"]) == measurements
        for monitor, first in zip(one["monitors"], ranks[0]["monitors"]):
            # the start of the next search is for those who search and who write checkpoints
            assert same({**monitor, "start": None}, {**first, "start": None})
        ours = {key: value for key, value in one["metrics"].items() if "loss" not in key or "curvmon" in key}
        assert ours and all(same(value, ranks[0]["metrics"][key]) for key, value in ours.items())


def weights_of(one: dict[str, Any], kind: str) -> Lit:
    module = Lit(kind)
    module.load_state_dict(one["weights"])
    return module


def loss(module: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(module.model(batch[0]), batch[1])


def check_numbers(one: dict[str, Any], kind: str) -> None:
    """The last measurement is that of a single process on the same batches and weights."""
    module, monitor = weights_of(one, kind), one["monitors"][0]
    batches = monitor["probe"]["tensors"]
    expected = measure_pairs(Settings(), module, batches, loss)
    found = Measurement.from_dict(monitor["history"][-1]["measurement"])
    assert found.nodes == expected.nodes and found.hvps == expected.hvps
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)
    for metric in METRICS:
        ours, theirs = getattr(found, metric), getattr(expected, metric)
        torch.testing.assert_close(ours, theirs, rtol=AGREEMENT, atol=0, equal_nan=True)
        error = found.stderr[metric]
        torch.testing.assert_close(error, expected.stderr[metric], rtol=0.02, atol=1e-5, equal_nan=True)
    spectrum = monitor["history"][-1]["spectrum"]
    if spectrum is not None:
        truth = curvmon.spectrum(module, batches[0], loss=loss, k=6)
        assert truth.converged.all()
        assert spectrum["eigenvalues"][0] == pytest.approx(truth.sharpness, rel=ACCURACY.first)
        # λ_2 and λ_3 differ by 1 % here: at these tolerances, one of them may be missing
        for value, residual in zip(spectrum["eigenvalues"], spectrum["residuals"], strict=True):
            assert (truth.eigenvalues - value).abs().min() <= residual + 1e-4 * truth.sharpness
        assert spectrum["ggn_eigenvalue"] == pytest.approx(truth.ggn_eigenvalue, rel=ACCURACY.others)


def products(one: dict[str, Any]) -> int:
    return int(one["work"]["columns"] + one["work"]["remainders"])


# ---- one result, that of a single process ----


@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.parametrize(("scenario", "kind"), [("silu", "silu"), ("relu", "relu"), ("pairs", "gelu")])
def test_all_processes_have_the_result_of_one(worlds: Any, processes: int, scenario: str, kind: str) -> None:
    ranks = worlds(processes, scenario)
    check_agreement(ranks, 1)
    check_numbers(ranks[0], kind)


def test_several_probe_batches(worlds: Any) -> None:
    ranks = worlds(2, "batches")
    check_agreement(ranks, 1)
    assert len(ranks[0]["monitors"][0]["probe"]["tensors"]) == 2
    check_numbers(ranks[0], "silu")


def test_running_statistics_of_batchnorm_are_those_of_the_first_process(worlds: Any) -> None:
    ranks = worlds(3, "statistics")
    means = [one["weights"]["model.1.running_mean"] for one in ranks]
    assert not torch.equal(means[0], means[1]) and not torch.equal(means[0], means[2])
    check_agreement(ranks, 1)
    check_numbers(ranks[0], "silu-norm")
    history = ranks[0]["monitors"][0]["history"]
    assert not any("suspect" in note for note in history[0]["measurement"]["notes"])


# ---- who measures what ----


@pytest.mark.parametrize("processes", [2, 3])
def test_rank_0_measures_pairs_and_the_last_rank_eigenvalues(worlds: Any, processes: int) -> None:
    ranks = worlds(processes, "silu")
    counts = [products(one) for one in ranks]
    # all but the two HVPs that check the Gauss-Newton factors
    assert counts[0] == ranks[0]["monitors"][0]["history"][0]["measurement"]["hvps"] - 2
    assert counts[1:] == [0] * (processes - 1)
    assert [one["work"]["searches"] for one in ranks] == [0] * (processes - 1) + [1]


@pytest.mark.parametrize("processes", [2, 3])
def test_without_eigenvalues_only_rank_0_measures(worlds: Any, processes: int) -> None:
    ranks = worlds(processes, "pairs")
    counts = [products(one) for one in ranks]
    assert counts[0] > 0 and counts[1:] == [0] * (processes - 1)
    assert [one["work"]["searches"] for one in ranks] == [0] * processes


# ---- failures ----


@pytest.mark.parametrize(
    ("processes", "scenario"),
    [
        (2, "error"),
        (2, "error_of_the_first"),
        (3, "error"),
    ],
)
def test_an_error_of_one_process_skips_the_measurement_on_all(worlds: Any, processes: int, scenario: str) -> None:
    ranks = worlds(processes, scenario)
    check_agreement(ranks, 2)
    assert [h["epoch"] for h in ranks[0]["monitors"][0]["history"]] == [0, 3]
    (warning,) = ranks[0]["warnings"]
    assert "not measured: ValueError: only here" in warning
    assert all(not one["warnings"] for one in ranks[1:])


@pytest.mark.parametrize("processes", [2, 3])
def test_an_error_of_the_search_leaves_the_pairs(worlds: Any, processes: int) -> None:
    ranks = worlds(processes, "error_in_the_search")
    check_agreement(ranks, 4)
    history = ranks[0]["monitors"][0]["history"]
    assert [h["measurement"] is not None for h in history] == [True] * 4
    assert [h["spectrum"] is not None for h in history] == [True, False, False, True]
    (warning,) = ranks[0]["warnings"]
    assert "eigenvalues not measured: ValueError: only here. The pairs of layers are" in warning
    assert all(not one["warnings"] for one in ranks[1:])
    check_numbers(ranks[0], "silu")


@pytest.mark.parametrize("scenario", ["unprepared", "first_unprepared"])
def test_a_process_that_cannot_begin_keeps_nobody_waiting(worlds: Any, scenario: str) -> None:
    ranks = worlds(2, scenario)
    check_agreement(ranks, 1)
    (warning,) = ranks[0]["warnings"]
    assert "not measured: RuntimeError: not prepared" in warning
    check_numbers(ranks[0], "silu")


def test_a_batch_that_is_an_object(worlds: Any) -> None:
    ranks = worlds(2, "loose")
    check_agreement(ranks, 1)
    assert not ranks[0]["warnings"] and ranks[0]["monitors"][0]["probe"]["source"] == "val"


@pytest.mark.parametrize("scenario", ["alert_stop", "alert_checkpoint", "alert_unwritable"])
def test_all_processes_do_what_an_alert_asks_for(worlds: Any, scenario: str) -> None:
    ranks = worlds(2, scenario)
    epochs = 1 if scenario == "alert_stop" else 3
    check_agreement(ranks, epochs)
    assert [one["epochs"] for one in ranks] == [epochs] * 2
    assert [one["alerts"] for one in ranks] == [["gn_gap_above"]] * 2
    assert len(ranks[0]["written"]) == (scenario == "alert_checkpoint")
    told = [line for line in ranks[0]["warnings"] if "no checkpoint of an alert was written" in line]
    assert len(told) == len(ranks[0]["warnings"]) == (scenario == "alert_unwritable")


def test_out_of_memory_on_one_process(worlds: Any) -> None:
    ranks = worlds(2, "memory")
    check_agreement(ranks, 2)
    assert [h["epoch"] for h in ranks[0]["monitors"][0]["history"]] == [0, 3]
    (warning,) = ranks[0]["warnings"]
    assert "out of memory" in warning
    assert not ranks[1]["warnings"]
    assert len(ranks[0]["monitors"][0]["probe"]["tensors"][0][0]) == 12  # not halved for good


def test_a_failing_product_of_one_process(worlds: Any) -> None:
    ranks = worlds(2, "failing_product")
    check_agreement(ranks, 1)
    (warning,) = ranks[0]["warnings"]
    assert "not measured: RuntimeError: a broken product" in warning


def test_a_loss_that_is_not_finite_anywhere(worlds: Any) -> None:
    ranks = worlds(2, "not_finite")
    measured = [h for h in ranks[0]["monitors"][0]["history"] if h["measurement"] is not None]
    check_agreement(ranks, len(ranks[0]["monitors"][0]["history"]))
    assert [h["epoch"] for h in measured] == [0, 2]
    (warning,) = ranks[0]["warnings"]
    assert "the loss is nan" in warning and not ranks[1]["warnings"]


def test_a_batch_that_cannot_be_sent(worlds: Any) -> None:
    ranks = worlds(2, "unpicklable")
    check_agreement(ranks, 1)
    assert ranks[0]["monitors"][0]["probe"]["source"] == "train"
    (warning,) = ranks[0]["warnings"]
    assert "cannot be shared among processes" in warning


# ---- unequal processes ----


@pytest.mark.parametrize(
    ("scenario", "first"), [("unequal", 0), ("second_without", 0), ("first_without", 1), ("sized_without", 0)]
)
def test_processes_with_different_numbers_of_validation_batches(worlds: Any, scenario: str, first: int) -> None:
    ranks = worlds(2, scenario)
    check_agreement(ranks, 2)
    assert ranks[first]["monitors"][0]["probe"]["source"] == "val"
    check_numbers(ranks[0], "silu")
    assert not ranks[0]["warnings"]


# ---- collectives in the training step ----


def test_a_step_that_gathers_from_all_processes_is_measured_as_one(worlds: Any) -> None:
    ranks = worlds(2, "gathering")
    check_agreement(ranks, 2)
    assert not ranks[0]["warnings"]
    check_numbers(ranks[0], "silu")


@pytest.mark.parametrize("scenario", ["reducing", "reducing_imported"])
def test_a_collective_of_torch_in_the_step_is_declined(worlds: Any, scenario: str) -> None:
    for one in worlds(2, scenario):
        assert one["finished"] and one["restored"] and one["reduced"] == 2
        assert not one["monitors"][0]["history"]
        told = [warning for warning in one["warnings"] if "talks to other processes" in warning and "loss=" in warning]
        assert len(told) == len(one["warnings"]) == (1 if one["rank"] == 0 else 0)


def test_a_step_that_asks_whether_there_are_others_is_measured(worlds: Any) -> None:
    ranks = worlds(2, "reducing_guarded")
    check_agreement(ranks, 2)
    assert not ranks[0]["warnings"]


# ---- a run as a whole ----


def test_training_is_the_same_to_the_last_bit(worlds: Any) -> None:
    for one in worlds(2, "undisturbed"):
        assert len(one["with"]["monitors"][0]["history"]) == 5
        assert same(one["with"]["weights"], one["without"]["weights"])
        assert all(same(value, one["with"]["metrics"][key]) for key, value in one["without"]["metrics"].items())


def test_the_first_process_decides_what_the_budget_allows(worlds: Any) -> None:
    ranks = worlds(2, "budget")
    # the first and the last
    assert [len(one["monitors"][0]["history"]) for one in ranks] == [2, 2]
    assert [one["monitors"][0]["skipped"] for one in ranks] == [1, 1]
    assert [one["metrics"]["curvmon_detail/skipped"] for one in ranks] == [1, 1]
    vitals = [one["monitors"][0]["vitals"] for one in ranks]
    assert len(vitals[0]) == 3 and same(vitals[0], vitals[1])
    # where a measurement has the loss, vital signs do not, but for the first, which is planned by their forward pass
    assert [math.isfinite(signs["loss"]) for signs in vitals[0]] == [True, True, False]
    ranks = worlds(2, "share")
    full, half = ranks[0]["monitors"][0]["history"]
    assert same(ranks[0]["monitors"][0]["history"], ranks[1]["monitors"][0]["history"])
    assert half["measurement"]["hvps"] < 0.6 * full["measurement"]["hvps"]
    assert math.isfinite(full["spectrum"]["trace"]) and math.isnan(half["spectrum"]["trace"])


def test_early_stopping_stops_all_processes_together(worlds: Any) -> None:
    ranks = worlds(2, "early_stopping")
    assert [(one["epochs"], one["steps"]) for one in ranks] == [(2, 6), (2, 6)]
    check_agreement(ranks, len(ranks[0]["monitors"][0]["history"]))


@pytest.mark.parametrize(("scenario", "every"), [("pulses", 1), ("pulses_accumulated", 3)])
def test_pulses_are_means_over_the_processes(worlds: Any, scenario: str, every: int) -> None:
    """Each takes its own, of its own batch and with the statistics of its own batch, along the common step."""
    ranks = worlds(2, scenario)
    assert same(ranks[0]["pulses"], ranks[1]["pulses"]) and not ranks[0]["warnings"]
    assert len(ranks[0]["pulses"]) == len(ranks[0]["batches"]) // every // 2
    for i, record in enumerate(ranks[0]["pulses"]):
        own = []
        for one in ranks:
            batch, before, after = one["batches"][every * (2 * i + 2) - 1]
            module = Lit("silu-norm" if scenario == "pulses" else "silu")
            module.load_state_dict(before)
            step = [before[name] - after[name] for name, _ in module.named_parameters()]
            loss = lambda module, batch: module.loss(batch)  # noqa: E731
            own.append(curvmon.pulse(module.train(), batch, loss=loss, step=step, critical=True))
        assert record["loss"] == pytest.approx(sum(pulse.loss for pulse in own) / 2, rel=1e-5)
        size = max(max(abs(pulse.gain), abs(pulse.curvature)) for pulse in own)
        assert record["gain"] == pytest.approx(sum(pulse.gain for pulse in own) / 2, abs=0.02 * size)
        assert record["curvature"] == pytest.approx(sum(pulse.curvature for pulse in own) / 2, abs=0.02 * size)
        if i % CROSSING_EVERY == 0:
            assert abs(math.log(record["critical"] / mean_pulse(own).critical)) < CLOSE
        else:
            assert math.isnan(record["critical"])
    for one in ranks:
        assert one["finished"] and one["restored"] and same(one["weights"], one["without"])


def test_a_pulse_that_fails_on_one_process_is_none_on_all(worlds: Any) -> None:
    ranks = worlds(2, "failing_pulses")
    assert same(ranks[0]["pulses"], ranks[1]["pulses"]) and ranks[0]["finished"]
    assert [pulse["step"] for pulse in ranks[0]["pulses"]] == [1]
    once, for_good = ranks[0]["warnings"]
    assert "a pulse failed: ValueError: only here" in once and not ranks[1]["warnings"]
    assert "no pulses in this run: ValueError: only here" in for_good


def test_two_monitors(worlds: Any) -> None:
    ranks = worlds(2, "two_monitors")
    check_agreement(ranks, 1)
    pairs, eigenvalues = (monitor["history"][0] for monitor in ranks[1]["monitors"])
    assert pairs["measurement"]["nodes"] == ["model.0", "model.2"] and pairs["spectrum"] is None
    assert eigenvalues["measurement"] is None and len(eigenvalues["spectrum"]["eigenvalues"]) == 2
    assert {"curvmon_distance/resonance/1", "train/curvmon/lambda_1"} <= ranks[1]["metrics"].keys()


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(worlds: Any) -> None:
    ranks = worlds(2, "resumed")
    for one in ranks:
        first, second, whole = (one[part]["monitors"][0] for part in ("first", "second", "whole"))
        assert [len(part["history"]) for part in (first, second, whole)] == [2, 4, 4]
        assert same(second["history"][:2], first["history"])
        assert same(second["probe"], whole["probe"]) and same(one["second"]["weights"], one["whole"]["weights"])
        for resumed, expected in zip(second["history"], whole["history"]):
            assert same(resumed["spectrum"]["eigenvalues"], expected["spectrum"]["eigenvalues"])
            assert same(resumed["measurement"]["resonance"], expected["measurement"]["resonance"])
    assert ranks[0]["first"]["monitors"][0]["start"] is not None  # in the checkpoint, though the second searched
    assert same(ranks[0]["second"]["monitors"], ranks[1]["second"]["monitors"])


def test_a_run_of_one_process_after_one_of_several(worlds: Any) -> None:
    """torch.distributed stays initialised; a monitor that asked the others would wait for ever."""
    first, second = worlds(2, "alone")
    assert len(first["history"]) == 1 and "history" not in second


def test_a_monitor_can_be_sent_to_processes_that_are_spawned() -> None:
    assert pickle.loads(pickle.dumps(curvmon.CurvatureMonitor())).history == []


def test_every_scenario_is_looked_at() -> None:
    text = Path(__file__).read_text()
    assert all(f'"{name}"' in text for scenarios in SCENARIOS.values() for name in scenarios)

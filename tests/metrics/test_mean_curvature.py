"""Several measurements as one: root mean squares, as computed by hand, with errors that cover the truth."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import MetricCollection

import curvmon
from curvmon.metrics.mean_curvature import MeanCurvature, combined
from curvmon.records import METRICS

NODES = ("0", "2")
STATES = ("resonance", "spectral_norm", "gn_norm")


def loss(net: Any, batch: Any) -> Tensor:
    return F.mse_loss(net(batch[0]), batch[1])


@pytest.fixture(scope="module")
def measured() -> list[curvmon.Measurement]:
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    batches = [[torch.randn(12, n, generator=generator) for n in (4, 2)] for _ in range(5)]
    return [curvmon.measure(net, batch, loss=loss, nodes=NODES) for batch in batches]


def updated(measurements: Any) -> MeanCurvature:
    metric = MeanCurvature(measurements[0].nodes)
    for measurement in measurements:
        metric.update(measurement)
    return metric


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-12, atol=0, equal_nan=True)


def assert_same(one: curvmon.Measurement, other: curvmon.Measurement) -> None:
    assert one.nodes == other.nodes and one.hvps == other.hvps
    assert one.loss == pytest.approx(other.loss, rel=1e-12) and one.seconds == pytest.approx(other.seconds, rel=1e-12)
    for metric in METRICS:
        close(getattr(one, metric), getattr(other, metric))
        close(one.stderr[metric], other.stderr[metric])
    close(one.spectral_norm, other.spectral_norm)
    close(one.gn_norm, other.gn_norm)


def test_one_update_equals_the_measurement(measured: Any) -> None:
    for measurement in measured:
        assert_same(updated([measurement]).measurement(), measurement)
        assert combined([measurement]) is measurement


def test_undefined_entries_stay_undefined() -> None:
    """A block of zeros, and one without a Gauss-Newton part."""
    nan, inf = math.nan, math.inf
    r = torch.tensor([[2.0, 0.0], [0.0, 3.0]], dtype=torch.float64)
    gn = torch.tensor([[0.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    gap = torch.tensor([[inf, nan], [nan, 3.0]], dtype=torch.float64)
    ones = torch.tensor([[1.0, nan], [nan, 1.0]], dtype=torch.float64)
    c = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    error = {metric: torch.zeros(2, 2, dtype=torch.float64) for metric in METRICS}
    wanted = curvmon.Measurement(NODES, r, c, ones, gap, error, r, gn, loss=1.0, hvps=3, seconds=0.5)
    assert_same(updated([wanted]).measurement(), wanted)
    twice = updated([wanted, wanted]).measurement()
    for metric in METRICS:
        close(getattr(twice, metric), getattr(wanted, metric))
    unknown = replace(wanted, gn_norm=torch.full_like(gn, nan), gn_gap=torch.full_like(gn, nan))
    assert updated([unknown, unknown]).measurement().gn_gap.isnan().all()
    close(updated([unknown, unknown]).measurement().resonance, r)


def test_several_updates_are_root_mean_squares(measured: Any) -> None:
    found = updated(measured).measurement()
    n = len(measured)

    def mean_square(values: list[Tensor]) -> Tensor:
        total = torch.zeros(2, 2, dtype=torch.float64)
        for value in values:
            total += value * value / n
        return total

    r2 = mean_square([m.resonance for m in measured])
    s2 = mean_square([m.spectral_norm for m in measured])
    g2 = mean_square([m.gn_norm for m in measured])
    t2 = mean_square([m.gn_gap * m.gn_norm for m in measured])
    close(found.resonance, r2.sqrt())
    close(found.spectral_norm, s2.sqrt())
    close(found.gn_norm, g2.sqrt())
    close(found.stable_rank, r2 / s2)
    close(found.gn_gap, (t2 / g2).sqrt())
    wanted = torch.tensor(
        [[(r2[i, j] / (r2[i, i] * r2[j, j]).sqrt()).sqrt() for j in range(2)] for i in range(2)], dtype=torch.float64
    )
    close(found.coupling, wanted)
    assert found.loss == pytest.approx(sum(m.loss for m in measured) / n, rel=1e-12)
    assert found.hvps == sum(m.hvps for m in measured)
    assert found.seconds == pytest.approx(sum(m.seconds for m in measured))
    assert found.notes == (f"mean over {n} batches",)
    notes = combined(measured).notes
    assert notes[0] == f"mean over {n} batches" and notes[1:] == tuple(dict.fromkeys(measured[0].notes))


def test_standard_error_by_hand(measured: Any) -> None:
    """Student's t with four degrees of freedom is 2.776 at 97.5 %, the normal distribution 1.960."""
    found = updated(measured).measurement()
    squares = torch.stack([m.resonance.square() for m in measured])
    of_square = squares.std(0, correction=1) / math.sqrt(len(measured)) * 2.7764 / 1.95996
    wanted = of_square / (2 * found.resonance)
    torch.testing.assert_close(found.stderr["resonance"], wanted, rtol=1e-4, atol=0)
    assert found.stderr["coupling"].diagonal().eq(0).all()


def test_torchmetrics_interface(measured: Any) -> None:
    """forward returns that of one, and accumulates; reset forgets; merge_state and a pickle keep everything."""
    import pickle

    metric = MeanCurvature(NODES)
    for measurement in measured:
        close(metric(measurement)["resonance"], measurement.resonance)
    assert_same(metric.measurement(), updated(measured).measurement())
    one, other = updated(measured[:2]), updated(measured[2:])
    one.merge_state(other)
    assert_same(one.measurement(), updated(measured).measurement())
    assert_same(pickle.loads(pickle.dumps(metric)).measurement(), updated(measured).measurement())
    metric.reset()
    assert metric.count == 0
    with pytest.warns(UserWarning, match="before the ``update``"):
        assert all(metric.compute()[name].isnan().all() for name in METRICS)
    with pytest.raises(ValueError, match="nothing was measured"):
        metric.measurement()
    metric.update(measured[3])
    assert_same(metric.measurement(), measured[3])


@pytest.mark.parametrize("shares", [[1, 4], [2, 2, 1], [1, 1, 1, 1, 1], [0, 5]])
def test_states_are_summed_over_processes(measured: Any, shares: list[int]) -> None:
    """What torchmetrics does between processes: gather every state, and reduce it."""
    parts, start = [], 0
    for share in shares:
        parts.append(MeanCurvature(NODES))
        for measurement in measured[start : start + share]:
            parts[-1].update(measurement)
        start += share
    whole = MeanCurvature(NODES)
    for name, reduce in whole._reductions.items():
        setattr(whole, name, reduce(torch.stack([getattr(part, name) for part in parts])))
    whole._update_count = 1
    assert_same(whole.measurement(), updated(measured).measurement())


def test_single_node(measured: Any) -> None:
    def corner(found: curvmon.Measurement) -> curvmon.Measurement:
        cut = {name: getattr(found, name)[:1, :1] for name in (*METRICS, "spectral_norm", "gn_norm")}
        return replace(found, nodes=("0",), stderr={m: e[:1, :1] for m, e in found.stderr.items()}, **cut)

    found = updated([corner(m) for m in measured]).measurement()
    assert found.resonance.shape == (1, 1)
    close(found.resonance, updated(measured).measurement().resonance[:1, :1])


def test_other_nodes_are_rejected(measured: Any) -> None:
    with pytest.raises(ValueError, match="does not belong to one of"):
        MeanCurvature(["0", "4"]).update(measured[0])


@pytest.mark.parametrize("shares", [(2, 3), (0, 5)])
def test_measurement_covers_all_processes(measured: Any, shares: tuple[int, int]) -> None:
    """Its matrices, and its loss and products as well; afterwards each process has its own states again."""
    other = MeanCurvature(NODES)
    for measurement in measured[shares[0] :]:
        other.update(measurement)

    def gather(tensor: Tensor, group: Any) -> list[Tensor]:
        name = next(name for name in metric._reductions if getattr(metric, name) is tensor)
        return [tensor, getattr(other, name)]

    metric = MeanCurvature(NODES, dist_sync_fn=gather, distributed_available_fn=lambda: True)
    for measurement in measured[: shares[0]]:
        metric.update(measurement)
    for _ in range(2):
        assert_same(metric.measurement(), updated(measured).measurement())
        assert metric.measurement().notes == ("mean over 5 batches",)
        assert metric.count == shares[0]
    metric.sync(dist_sync_fn=gather)
    assert_same(metric.measurement(), updated(measured).measurement())
    metric.unsync()
    assert metric.count == shares[0]


def test_process_without_measurements_can_continue(measured: Any) -> None:
    """torchmetrics leaves a metric locked if `compute` raises between the processes' sum and its end."""
    metric = MeanCurvature(
        NODES, dist_sync_fn=lambda tensor, group: [tensor, tensor], distributed_available_fn=lambda: True
    )
    with pytest.warns(UserWarning, match="before the ``update``"):
        metric.compute()
    with pytest.raises(ValueError, match="nothing was measured"):
        metric.measurement()
    metric.update(measured[0])
    close(metric.measurement().resonance, measured[0].resonance)


def test_states_stay_float64_in_any_module(measured: Any) -> None:
    module = nn.ModuleDict({"curvature": updated(measured)})
    for convert in (
        lambda: module.to(torch.bfloat16),
        lambda: module.half(),
        lambda: module["curvature"].set_dtype(torch.float16),
        lambda: module.to("cpu", torch.float32),
    ):
        convert()
        metric: Any = module["curvature"]
        assert all(getattr(metric, name).dtype == torch.float64 for name in metric._reductions)
        assert_same(metric.measurement(), updated(measured).measurement())
        metric.reset()
        for measurement in measured:
            metric.update(measurement)
    assert module.to("meta")["curvature"].count.is_meta  # it does follow to devices


def test_invalid_arguments(measured: Any) -> None:
    assert MeanCurvature("0").nodes == ("0",)
    with pytest.raises(ValueError, match="nodes is empty"):
        MeanCurvature([])
    with pytest.raises(ValueError, match=r"takes what curvmon\.measure returns, not Tensor"):
        MeanCurvature(NODES).update(measured[0].resonance)


def test_metric_collection(measured: Any) -> None:
    collection = MetricCollection({"curvature": MeanCurvature(NODES)}, prefix="val_")
    for measurement in measured:
        collection.update(measurement)
    found = collection.clone().compute()
    close(found["val_resonance"], updated(measured).compute()["resonance"])
    close(found["val_stderr/gn_gap"], updated(measured).compute()["stderr/gn_gap"])


# ---- standard errors ----

N, ROUNDS = 20, 10
"""a matrix of twenty nodes is four hundred experiments at once"""


def simulated(generator: torch.Generator, together: float) -> curvmon.Measurement:
    """One batch: squares of norms vary by ten per cent, of which `together` is common to all norms of a pair."""

    def varied() -> Tensor:
        return torch.randn(N, N, generator=generator, dtype=torch.float64)

    common = varied()
    r2, s2, g2, t2 = (
        mean * (1 + 0.1 * (math.sqrt(together) * common + math.sqrt(1 - together) * varied()))
        for mean in (9.0, 3.0, 4.0, 1.0)
    )
    return curvmon.Measurement(
        nodes=tuple(map(str, range(N))),
        resonance=r2.sqrt(),
        coupling=torch.ones(N, N, dtype=torch.float64),
        stable_rank=r2 / s2,
        gn_gap=(t2 / g2).sqrt(),
        stderr={metric: torch.full((N, N), 1e-9, dtype=torch.float64) for metric in METRICS},
        spectral_norm=s2.sqrt(),
        gn_norm=g2.sqrt(),
        loss=1.0,
        hvps=1,
        seconds=0.0,
    )


@pytest.mark.parametrize("together", [0.0, 0.7])
@pytest.mark.parametrize("batches", [2, 3, 5, 20])
def test_standard_errors_cover_the_truth(batches: int, together: float) -> None:
    """± 1.96 standard errors, in 4000 experiments; those of R are exact, the others may be too cautious."""
    truth = {"resonance": 3.0, "coupling": 1.0, "stable_rank": 3.0, "gn_gap": 0.5}
    generator, covered = torch.Generator().manual_seed(1), {metric: [] for metric in METRICS}  # type: ignore[var-annotated]
    others = ~torch.eye(N, dtype=torch.bool)
    for _ in range(ROUNDS):
        found = updated([simulated(generator, together) for _ in range(batches)]).measurement()
        for metric in METRICS:
            inside = (getattr(found, metric) - truth[metric]).abs() <= 1.96 * found.stderr[metric]
            covered[metric].append(inside[others])
    share = {metric: torch.cat(values).double().mean().item() for metric, values in covered.items()}
    # four standard deviations of a share of 4000
    doubt = 4 * math.sqrt(0.95 * 0.05 / (ROUNDS * N * (N - 1)))
    assert abs(share["resonance"] - 0.95) < doubt
    assert all(value > 0.95 - doubt for value in share.values()), share

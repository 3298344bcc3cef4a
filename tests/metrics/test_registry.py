"""The metric registry: what is in it, and that a fifth pair metric needs its own file and one registration."""

from __future__ import annotations

import math
import random
import re
import warnings
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor

import curvmon
import curvmon.metrics.mean_curvature
from curvmon import Alert, CurvatureMonitor, CurvmonError
from curvmon.alerts.manager import AlertManager
from curvmon.errors import InputError
from curvmon.metrics import PairMetric, ScalarMetric, register, registry, unregister
from curvmon.records import METRICS, Measurement, Snapshot
from curvmon.reporting import figures
from curvmon.reporting.console import summary
from curvmon.reporting.dashboards import sections
from curvmon.reporting.reporter import Report
from curvmon.reporting.scalars import scalars
from tests.helpers.lightning_smoke import module_of
from tests.helpers.recorders import PictureRecorder
from tests.helpers.synthetic_records import synthetic_measurement, synthetic_spectra
from tests.helpers.toy_metric import TOY

README = Path(__file__).parents[2] / "README.md"


@pytest.fixture
def toy() -> Iterator[PairMetric]:
    yield register(TOY)
    unregister("toy")


# ---- what is registered ----


def test_measured_metrics_are_registered() -> None:
    assert registry.pair_metric_names() == METRICS
    assert len({spec.name for spec in registry.all_metrics()}) == len(registry.all_metrics())


def test_every_metric_of_the_table_is_described() -> None:
    described = [spec for spec in registry.all_metrics() if spec.meaning]
    assert {spec.name for spec in described} >= {*METRICS, "lambda_1", "lambda_min", "stability_ratio", "ggn_error"}
    assert all(spec.good and spec.bad and spec.action for spec in described)
    # a cell must not end the cell
    assert not any("|" in text for spec in described for text in (spec.meaning, spec.good, spec.bad, spec.action))


def test_every_logged_key_has_a_metric() -> None:
    (snapshot,) = synthetic_spectra(1)
    found = scalars(replace(snapshot, measurement=synthetic_measurement(3), seconds=1.0, overhead=0.1))
    own = {key for spec in registry.scalar_metrics() for key in spec.scalars(replace(snapshot, seconds=1.0))}
    rest = found.shown.keys() - own
    assert rest == {f"curvmon/{name}" for name in METRICS} | {
        key for key in rest if key.startswith("curvmon_distance/")
    }
    assert all(key.endswith("_stderr") for key in found.detail.keys() - own)
    lines = [chart.names for charts in sections().values() for chart in charts]
    assert all(any(re.fullmatch(names, key) for names in lines) for key in found.shown)


def test_headline_numbers() -> None:
    """Means over pairs of different layers; the GN-Gap is pooled, so that pairs without curvature do not dominate."""
    measurement = synthetic_measurement(4)
    i, j = torch.triu_indices(4, 4, 1)
    for name in ("resonance", "coupling", "stable_rank"):
        value, stderr = registry.pair_metric(name).summary(measurement)
        assert value == pytest.approx(getattr(measurement, name)[i, j].mean().item(), rel=1e-12)
        assert stderr == pytest.approx(0.07 * value, rel=1e-12)
    small = measurement.gn_norm.clone()
    small[0, 1] = small[1, 0] = 1e-6
    gap = measurement.gn_gap.clone()
    gap[0, 1] = gap[1, 0] = 1e3
    gap[2, 3] = gap[3, 2] = math.inf
    small[2, 3] = small[3, 2] = 0.0
    total = tensor = 0.0
    for v in range(4):
        for w in range(v, 4):
            total += small[v, w].item()
            infinite = (v, w) == (2, 3)
            tensor += (measurement.resonance if infinite else gap * small)[v, w].item()
    value, stderr = registry.pair_metric("gn_gap").summary(replace(measurement, gn_gap=gap, gn_norm=small))
    assert value == pytest.approx(tensor / total, rel=1e-12) and 0 < stderr < value < 1


def test_headline_of_one_node() -> None:
    measurement = synthetic_measurement(1)
    assert registry.pair_metric("resonance").summary(measurement)[0] == measurement.resonance.item()
    assert registry.pair_metric("gn_gap").summary(measurement)[0] == pytest.approx(measurement.gn_gap.item())
    assert math.isnan(registry.pair_metric("coupling").summary(measurement)[0])  # 1 by definition


def test_headline_of_undefined_values() -> None:
    nothing = torch.full((3, 3), math.nan, dtype=torch.float64)
    broken = replace(synthetic_measurement(3), gn_gap=nothing, gn_norm=nothing, coupling=nothing)
    assert not {"curvmon/gn_gap", "curvmon/coupling"} & scalars(Snapshot(0, 0, broken)).for_callbacks().keys()


@pytest.mark.parametrize("headline", [lambda m, values, stderr: 1 / 0, lambda m, values, stderr: None])
def test_headline_that_cannot_be_computed_is_absent(headline: Any) -> None:
    register(replace(TOY, headline=headline))
    try:
        with pytest.warns(UserWarning, match="metric 'toy' could not be computed"):
            found = scalars(Snapshot(0, 0, synthetic_measurement(3))).shown
        assert "curvmon/toy" not in found and "curvmon_distance/toy/1" in found and "curvmon/coupling" in found
    finally:
        unregister("toy")


def test_specifications_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        registry.get("resonance").log_scale = False  # type: ignore[misc]


def test_names_are_unique_and_checked() -> None:
    with pytest.raises(CurvmonError, match="a metric named 'coupling' is registered already"):
        register(replace(TOY, name="coupling"))
    with pytest.raises(CurvmonError, match=r"no metric 'toy'; .* are resonance, coupling, stable_rank, gn_gap$"):
        CurvatureMonitor(metrics=["toy"])
    with pytest.raises(CurvmonError, match="no metric 'lambda_1'; the metrics are resonance"):
        registry.pair_metric("lambda_1")
    with pytest.raises(CurvmonError, match=r"no metric 'lambda_0'; the metrics are resonance.*lambda_1"):
        registry.get("lambda_0")


def test_readme_table() -> None:
    """`make docs` writes it."""
    table = re.search(r"<!-- metrics -->\n(.*?)\n<!-- /metrics -->", README.read_text(), re.DOTALL)
    assert table is not None
    assert table[1] == registry.markdown_table()


def test_mean_curvature_is_imported_on_first_use() -> None:
    assert curvmon.metrics.MeanCurvature is curvmon.metrics.mean_curvature.MeanCurvature
    with pytest.raises(AttributeError, match="no attribute 'Accuracy'"):
        curvmon.metrics.Accuracy  # noqa: B018


# ---- a fifth pair metric ----


def test_toy_metric_in_a_run(toy: PairMetric, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scalars, heatmap, figure by distance and callback_metrics of a real fit."""
    panels: list[str] = []
    original = figures.by_distance

    def by_distance(*args: Any) -> Any:
        figure = original(*args)
        panels.extend(axis.get_title() for axis in figure.axes)
        return figure

    monkeypatch.setattr(figures, "by_distance", by_distance)
    torch.manual_seed(0)
    logger = PictureRecorder()
    monitor = CurvatureMonitor(metrics=["coupling", "toy"], eigenvalues=0, initial=False, log_pairs=True)
    trainer = pl.Trainer(
        max_epochs=1, callbacks=[monitor], logger=logger, enable_checkpointing=False, enable_model_summary=False,
        enable_progress_bar=False, accelerator="cpu", log_every_n_steps=1,
    )  # fmt: skip
    trainer.fit(module_of(pl)())
    (measurement,) = monitor.history
    ((step, row),) = logger.measured()
    n = len(measurement.nodes)
    assert {key for key in row if key.startswith("curvmon_distance") and key.endswith("/1")} == {
        "curvmon_distance/coupling/1",
        "curvmon_distance/toy/1",
    }
    for d in range(n):
        mean = measurement.spectral_norm.diagonal(d).mean().item()
        assert row[f"curvmon_distance/toy/{d}"] == pytest.approx(mean, rel=1e-12)
        stderr = trainer.callback_metrics[f"curvmon_detail/toy/{d}_stderr"].item()
        assert stderr == pytest.approx(0.01 * mean, rel=1e-6)
    for pair in measurement.pairs():
        i, j = (measurement.nodes.index(name) for name in pair)
        assert row[f"curvmon_pairs/toy/{pair}"] == measurement.spectral_norm[i, j].item()
    assert trainer.callback_metrics["curvmon_distance/toy/0"].item() == pytest.approx(row["curvmon_distance/toy/0"])
    assert set(logger.images) == {f"curvmon_pictures/{name}" for name in ("coupling", "toy", "by_distance")}
    assert logger.images["curvmon_pictures/toy"][step].std() > 10
    assert panels == ["coupling  C", "toy metric"]


def test_toy_metric_in_figures(toy: PairMetric) -> None:
    measurement = synthetic_measurement(4)
    axes = figures.heatmap(measurement, "toy").axes[0]
    assert torch.equal(torch.from_numpy(axes.images[0].get_array().data), measurement.spectral_norm)
    assert type(axes.images[0].norm).__name__ == "LogNorm"
    axis = figures.by_distance(measurement).axes[4]
    assert axis.get_title() == "toy metric" and axis.get_yscale() == "log"
    (mean,) = (line for line in axis.lines if line.get_label() == "mean")
    assert list(mean.get_ydata()) == toy.by_distance(measurement).tolist()


def test_toy_metric_in_dashboards_console_and_table(toy: PairMetric) -> None:
    charts = {chart.title: chart for chart in sections()["by distance between layers"]}
    assert charts["toy metric by distance"].log_scale
    assert re.fullmatch(charts["toy metric by distance"].names, "curvmon_distance/toy/2")
    assert "Y(layer1, layer3) " in summary(Snapshot(step=0, epoch=0, measurement=synthetic_measurement(3)))
    row = "| toy metric Y | the largest singular value of a block | any | none | nothing |"
    assert row in registry.markdown_table().splitlines()


def alerts_of_a_jump(factor: float) -> list[Alert]:
    """Twenty snapshots; in the last five the toy metric of every pair, and nothing else, is `factor` times as large."""
    rng, manager, past, alerts = random.Random(0), AlertManager(), [], []
    for i in range(20):
        quiet = synthetic_measurement(4)
        level = math.exp(0.02 * rng.gauss(0, 1)) * (factor if i >= 15 else 1.0)
        snapshot = Snapshot(step=i, epoch=i, measurement=replace(quiet, spectral_norm=level * quiet.spectral_norm))
        alerts += [alert for alert in manager.update(snapshot, past) if alert.level != "info"]
        past.append(snapshot)
    return alerts


def test_toy_metric_raises_an_alert(toy: PairMetric) -> None:
    (alert,) = alerts_of_a_jump(5.0)
    assert (alert.kind, alert.metric, alert.step) == ("jump", "toy", 15)
    assert 4 < alert.after / alert.before < 6
    assert "toy metric" in alert.message and "the toy metric rises in tests only" in alert.message
    (alert,) = alerts_of_a_jump(0.2)
    assert "the toy metric falls in tests only" in alert.message
    assert alerts_of_a_jump(1.0) == []


@pytest.mark.parametrize("compute", [lambda m: 1 / 0, lambda m: (torch.zeros(2, 3), torch.zeros(2, 3))])
def test_metric_that_cannot_be_computed_is_undefined(compute: Any) -> None:
    """A user's function must not stop a run, nor hide the other metrics and alerts."""
    broken = register(replace(TOY, name="broken", compute=compute))
    try:
        measurement = synthetic_measurement(3)
        with pytest.warns(UserWarning, match=r"metric 'broken' could not be computed \((ZeroDivision|Runtime)Error: "):
            assert broken.values(measurement).isnan().all() and broken.stderr(measurement).isnan().all()
            keys = scalars(Snapshot(step=0, epoch=0, measurement=measurement)).for_callbacks()
            assert "curvmon_distance/coupling/1" in keys and not any("broken" in key for key in keys)
            assert len(figures.by_distance(measurement).axes) == 5
            assert alerts_of_a_jump(5.0) == []
    finally:
        unregister("broken")


def test_compute_is_called_once_per_measurement() -> None:
    """By alerts, loggers, the console and figures together."""
    computed: list[float] = []

    def compute(measurement: curvmon.Measurement) -> tuple[torch.Tensor, torch.Tensor]:
        computed.append(measurement.loss)
        return measurement.spectral_norm, 0.01 * measurement.spectral_norm

    spec = register(replace(TOY, name="counted", compute=compute))
    try:
        for _ in range(2):
            computed.clear()
            current = Snapshot(step=0, epoch=0, measurement=synthetic_measurement(4))
            assert current.measurement is not None
            AlertManager().update(current)
            assert "curvmon_pairs/counted/layer1--layer2" in scalars(current, pairs=True).shown
            assert "Y(layer1" in summary(current)
            figures.by_distance(current.measurement), figures.heatmap(current.measurement, "counted")
            assert torch.equal(spec.stderr(current.measurement), 0.01 * current.measurement.spectral_norm)
            assert computed == [current.measurement.loss]
    finally:
        unregister("counted")


def test_metrics_that_cannot_work_are_refused() -> None:
    with pytest.raises(InputError, match="metric 'foo' needs compute"):
        register(PairMetric(name="foo", title="foo"))
    with pytest.raises(InputError, match="register takes a PairMetric or a ScalarMetric, not str"):
        register("foo")  # type: ignore[type-var]
    with pytest.raises(InputError, match="the name 'level' is reserved"):
        register(replace(TOY, name="level"))
    assert TOY.alert is not None
    with pytest.raises(InputError, match="has per_pair=False"):
        register(replace(TOY, alert=replace(TOY.alert, per_pair=False)))
    assert "foo" not in registry.pair_metric_names()


def test_built_in_metrics_stay() -> None:
    for name in ("coupling", "lambda_1"):
        with pytest.raises(InputError, match=f"metric '{name}' is built-in"):
            unregister(name)
        assert registry.get(name).name == name
    with pytest.raises(InputError, match="no metric 'foo'"):
        unregister("foo")


# ---- a further scalar metric ----


@pytest.mark.parametrize("read", [lambda snapshot: 1 / 0, lambda snapshot: None, lambda snapshot: ["a"]])
def test_scalar_that_cannot_be_read_has_no_value(read: Any) -> None:
    """And one warning, however often it is read."""
    register(ScalarMetric(name="broken", title="broken", key="broken/x", read=read, alert=TOY.alert))
    try:
        current = Snapshot(step=0, epoch=0, measurement=synthetic_measurement(3))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            for _ in range(3):
                keys = scalars(current).for_callbacks()
                AlertManager().update(current)
        assert "curvmon_distance/coupling/1" in keys and "broken/x" not in keys
        (warning,) = caught
        assert "metric 'broken' could not be computed (" in str(warning.message)
    finally:
        unregister("broken")


@pytest.mark.parametrize(("key", "place"), [("own/size", "size of the run"), ("own/size_{}", "own/size_2")])
def test_alert_of_a_further_scalar(key: str, place: str) -> None:
    """It is reported under its own name and title, not as a resonance."""

    def read(snapshot: Snapshot) -> list[float]:
        sizes = [1.0 + 0.01 * (snapshot.step % 2), 3.0 if snapshot.step < 15 else 12.0]
        return sizes if "{}" in key else sizes[1:]

    assert TOY.alert is not None
    register(ScalarMetric(name="size", title="size of the run", key=key, read=read, alert=TOY.alert))
    try:
        manager, past, alerts = AlertManager(), [], []
        for i in range(20):
            current = Snapshot(step=i, epoch=i, measurement=synthetic_measurement(4))
            alerts += [alert for alert in manager.update(current, past) if alert.level != "info"]
            past.append(current)
        (alert,) = alerts
        assert (alert.kind, alert.metric, alert.step) == ("jump", "size", 15)
        assert (alert.before, alert.after) == pytest.approx((3.0, 12.0))
        assert alert.headline.startswith("Size of the run ") and f"{place}: 3 → 12" in alert.message
        assert "the toy metric rises in tests only" in alert.message and "resonance" not in alert.message
    finally:
        unregister("size")


def test_no_alert_without_the_registration() -> None:
    assert alerts_of_a_jump(5.0) == []


def test_compute_changes_neither_measurement_nor_random_state() -> None:
    def compute(measurement: Measurement) -> tuple[Tensor, Tensor]:
        torch.rand(3)
        measurement.resonance.mul_(2)
        return measurement.resonance.clone().requires_grad_(), measurement.resonance

    measurement, metric = measured(), registry.PairMetric(name="doubled", title="doubled", compute=compute)
    before, state = measurement.resonance.clone(), torch.get_rng_state()
    assert torch.equal(metric.values(measurement), 2 * before) and not metric.values(measurement).requires_grad
    assert torch.equal(measurement.resonance, before) and torch.equal(torch.get_rng_state(), state)


def test_complex_values_are_undefined_with_a_warning() -> None:
    metric = registry.PairMetric(name="turned", title="turned", compute=lambda m: (1j * m.resonance, m.resonance))
    with pytest.warns(UserWarning, match="'turned' could not be computed"):
        assert metric.values(measured()).isnan().all()


def test_metric_that_is_not_registered_any_more_is_skipped_with_a_warning() -> None:
    metric = registry.register(registry.PairMetric(name="gone", title="gone", compute=lambda m: (m.gn_norm, m.gn_norm)))
    published: list[dict[str, float]] = []
    names = ["coupling", metric.name]
    report = Report(names, False, False, "", False)
    registry.unregister(metric.name)
    trainer = SimpleNamespace(is_global_zero=False, publish=lambda values, stale: published.append(values))
    with pytest.warns(UserWarning, match="'gone' is not registered"):
        report.write(trainer, [Snapshot(step=1, epoch=0, measurement=measured())], [], [])
    assert "curvmon_distance/coupling/1" in published[0] and not any("gone" in key for key in published[0])


def measured() -> Measurement:
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    return curvmon.measure(net, torch.ones(16, 4), nodes=["0", "2"], loss=lambda net, x: net(x).square().mean())

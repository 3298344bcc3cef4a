"""`.plot()` of records: what is in the figures, whom they belong to, and what is said where they cannot be drawn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import matplotlib
import pytest
import torch

from curvmon.errors import InputError
from curvmon.metrics import MeanCurvature
from curvmon.records import METRICS, Density, Metric, RunHistory
from curvmon.reporting import plots
from curvmon.reporting.canvas import pixels
from tests.helpers.figure_layout import assert_nothing_is_cut_off_or_overlaps
from tests.helpers.synthetic_records import synthetic_measurement, synthetic_spectrum
from tests.helpers.synthetic_runs import synthetic_run

EIGENVALUES = torch.tensor([5.0, 3.0, 2.0], dtype=torch.float64)


@pytest.fixture(autouse=True)
def pyplot() -> Iterator[Any]:
    matplotlib.use("Agg")
    from matplotlib import pyplot

    yield pyplot
    pyplot.close("all")


def texts_in(figure: Any) -> list[str]:
    figure.canvas.draw()
    return [text.get_text() for text in figure.findobj(matplotlib.text.Text) if text.get_visible()]


@pytest.mark.parametrize("metric", METRICS)
def test_measurement(metric: Metric, pyplot: Any) -> None:
    measurement = synthetic_measurement(4)
    figure, axis = measurement.plot(metric)
    assert torch.equal(torch.tensor(axis.images[0].get_array().data), getattr(measurement, metric))
    assert figure.axes[0] is axis and pyplot.gcf() is figure


def test_measurement_shows_resonance_and_names_the_metrics_there_are() -> None:
    figure, _ = synthetic_measurement(3).plot()
    assert "resonance  R = ‖H‖" in texts_in(figure)
    with pytest.raises(InputError, match="no metric 'curvature'; the metrics are resonance, coupling"):
        synthetic_measurement(3).plot("curvature")


def test_each_plot_is_a_figure_of_its_own() -> None:
    measurement = synthetic_measurement(3)
    first, second = measurement.plot()[0], measurement.plot()[0]
    assert first is not second
    assert (pixels(first) == pixels(second)).all()


def test_plots_on_a_backend_without_pixels(pyplot: Any) -> None:
    pyplot.switch_backend("svg")
    figure, _ = synthetic_measurement(3).plot()
    pyplot.switch_backend("Agg")
    assert not hasattr(figure.canvas, "get_renderer")


def test_spectrum_has_its_eigenvalues_and_references() -> None:
    converged = torch.tensor([True, True, False])
    spectrum = synthetic_spectrum(EIGENVALUES, stability_ratio=0.5, converged=converged)
    figure, axis = spectrum.plot()
    heights = {round(float(y), 6) for line in axis.lines for y in line.get_ydata()}
    assert {5.0, 3.0, 2.0, -0.4, 4.5, 10.0} <= heights  # with the Gauss-Newton one and the stability limit 5 / 0.5
    assert {"λ₁", "λ₃", "smallest", "Gauss–Newton λ₁", "stability limit", "not converged"} <= set(texts_in(figure))
    figure.canvas.draw()
    assert_nothing_is_cut_off_or_overlaps(figure)


def test_spectrum_with_a_density_shows_it() -> None:
    density = Density(torch.tensor([0.0, 1.0, 5.0]).double(), torch.tensor([0.9, 0.08, 0.02]).double())
    figure, axis = synthetic_spectrum(EIGENVALUES, density=density).plot()
    grid, height = density.smoothed()
    curve = axis.lines[0]
    assert (curve.get_xdata() == grid.numpy()).all() and (curve.get_ydata() == height.numpy()).all()
    figure.canvas.draw()
    assert_nothing_is_cut_off_or_overlaps(figure)


def test_history_has_a_chart_for_each_number_and_marks_alerts() -> None:
    run = synthetic_run(alerts=[400, 410])
    figure, axes = run.plot()
    assert {"top eigenvalue λ₁", "resonance R", "step ratio", "loss of the probe batch"} <= set(texts_in(figure))
    table = {row["step"]: row for row in plots.rows(run)}
    for axis in axes:
        assert [line.get_xdata()[0] for line in axis.lines[1:]] == [400, 410]
        assert axis.get_xlim() == axes[0].get_xlim()
    (top,) = (axis for axis in axes if axis.get_title() == "top eigenvalue λ₁")
    x, y = top.lines[0].get_data()
    assert len(x) == 8 and all(table[step]["curvmon/lambda_1"] == value for step, value in zip(x, y))
    figure.canvas.draw()
    assert_nothing_is_cut_off_or_overlaps(figure)


def test_history_of_chosen_numbers() -> None:
    figure, axis = synthetic_run().plot(["curvmon_spectrum/lambda_2"])
    assert figure.axes == [axis] and axis.get_title() == "curvmon_spectrum/lambda_2"
    with pytest.raises(InputError, match=r"has no 'lambda_9'; it has .*curvmon/lambda_1"):
        synthetic_run().plot(["lambda_9"])
    with pytest.raises(InputError, match="has no anything; it has nothing"):
        RunHistory().plot()


def test_mean_curvature() -> None:
    measurement = synthetic_measurement(3)
    metric = MeanCurvature(measurement.nodes)
    with pytest.raises(InputError, match="nothing was measured yet"):
        metric.plot()
    metric.update(measurement)
    _, axis = metric.plot(metric="coupling")
    torch.testing.assert_close(torch.tensor(axis.images[0].get_array().data), measurement.coupling)
    with pytest.raises(InputError, match="on its own axes"):
        metric.plot(ax=axis)


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "available", lambda: False)
    with pytest.raises(ImportError, match="plot needs matplotlib: pip install matplotlib"):
        synthetic_measurement(3).plot()


def test_style_of_the_user_changes_nothing() -> None:
    before = pixels(synthetic_measurement(3).plot()[0])
    with matplotlib.style.context("dark_background"):
        figure = synthetic_measurement(3).plot()[0]
    assert (pixels(figure) == before).all()

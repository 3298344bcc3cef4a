"""Figures: scales, names, error bars, colours, nothing cut off; and drawing changes no global state."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import random
import subprocess
import sys
import weakref
from collections.abc import Callable
from functools import partial
from itertools import combinations
from typing import Any

import matplotlib
import numpy as np
import pytest
import torch

from curvmon.metrics.registry import pair_metric
from curvmon.records import METRICS, Metric, Snapshot
from curvmon.reporting import figures
from curvmon.reporting.canvas import KeptFigures, brief, pixels, plain, short_names
from tests.helpers.figure_layout import assert_nothing_is_cut_off_or_overlaps
from tests.helpers.synthetic_records import synthetic_measurement, synthetic_spectra

LONG = [f"model.encoder.layers.{i}.self_attn.out_proj" for i in range(6)]
ALIKE = [f"transformer_block_number_{i}_attention_output" for i in range(6)]
OKABE_ITO = {"#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7"}
GREY, DARKEST, BRIGHTEST = (217, 217, 217), (68, 1, 84), (253, 231, 36)


def drawn(figure: Any) -> np.ndarray:
    with plain():
        return pixels(figure).numpy()


# ---- heatmaps ----


@pytest.mark.parametrize("metric", METRICS)
def test_heatmap_colour_scale(metric: Metric) -> None:
    found = synthetic_measurement(6)
    (image,) = figures.heatmap(found, metric).axes[0].images
    matrix = getattr(found, metric)
    assert np.array_equal(image.get_array(), matrix.numpy())
    if metric in ("resonance", "gn_gap"):
        assert type(image.norm).__name__ == "LogNorm"
        assert (image.norm.vmin, image.norm.vmax) == (matrix.min().item(), matrix.max().item())
    else:
        assert type(image.norm).__name__ == "Normalize"
        low, high = (0.0, max(1.0, matrix.max().item())) if metric == "coupling" else (1.0, matrix.max().item())
        assert (image.norm.vmin, image.norm.vmax) == (low, high)
    assert image.get_cmap().name == "viridis"


def test_heatmap_axes_have_node_names() -> None:
    names = ["stem", "layer1", "layer2.conv"]
    axes = figures.heatmap(synthetic_measurement(3, names), "resonance").axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == names
    assert [label.get_text() for label in axes.get_yticklabels()] == names
    assert axes.get_ylim() == (2.5, -0.5)  # the first on top


def test_heatmap_common_part_of_names_is_the_footer() -> None:
    figure = figures.heatmap(synthetic_measurement(6, LONG), "resonance")
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == list("012345")
    assert "model.encoder.layers.*.self_attn.out_proj" in [text.get_text() for text in figure.texts]


def test_heatmap_cells_have_numbers_up_to_ten_nodes() -> None:
    found = synthetic_measurement(3)
    texts = {tuple(t.get_position()): t.get_text() for t in figures.heatmap(found, "resonance").axes[0].texts}
    assert texts == {(j, i): brief(found.resonance[i, j].item()) for i in range(3) for j in range(3)}
    assert len(figures.heatmap(synthetic_measurement(24), "resonance").axes[0].texts) == 0


def test_heatmap_colours_of_nan_zero_and_infinity() -> None:
    gap = synthetic_measurement(4).gn_gap.clone()
    gap[0, 1], gap[1, 0], gap[2, 2], gap[3, 3] = math.nan, math.nan, 0.0, math.inf
    figure = figures.heatmap(synthetic_measurement(4, gn_gap=gap), "gn_gap")
    image, axes = drawn(figure), figure.axes[0]

    def colour(row: int, column: int) -> tuple[int, ...]:
        x, y = axes.transData.transform((column + 0.35, row + 0.35))  # beside the number
        return tuple(image[image.shape[0] - int(y), int(x)].tolist())

    assert colour(0, 1) == colour(1, 0) == GREY
    assert colour(2, 2) == DARKEST
    assert colour(3, 3) == BRIGHTEST
    texts = {tuple(t.get_position()): (t.get_text(), t.get_color()) for t in axes.texts}
    assert texts[1, 0] == ("–", "black")
    assert texts[2, 2] == ("0", "white")
    assert texts[3, 3] == ("∞", "black")


def test_heatmap_zero_has_its_own_colour() -> None:
    gap = torch.tensor([[0.6, 0.0], [0.0, 0.9]], dtype=torch.float64)
    (image,) = figures.heatmap(synthetic_measurement(2, gn_gap=gap), "gn_gap").axes[0].images
    assert image.norm.vmin <= 0.3 and image.norm.vmax == 0.9
    zero, smallest = (image.cmap(image.norm(value)) for value in (image.get_array()[0, 1], 0.6))
    assert zero == image.cmap(0.0)
    assert sum(abs(a - b) for a, b in zip(zero, smallest)) > 0.3


@pytest.mark.parametrize("value", [0.0, math.nan], ids=["all zero", "all NaN"])
def test_heatmap_without_positive_numbers_is_linear(value: float) -> None:
    gap = torch.full((3, 3), value, dtype=torch.float64)
    figure = figures.heatmap(synthetic_measurement(3, gn_gap=gap), "gn_gap")
    assert type(figure.axes[0].images[0].norm).__name__ == "Normalize"
    assert {text.get_text() for text in figure.axes[0].texts} == {brief(value)}
    drawn(figure)


# ---- by distance ----


@pytest.mark.parametrize("place", range(4))
def test_by_distance_error_bars_and_mean(place: int) -> None:
    found, metric = synthetic_measurement(5), METRICS[place]
    axis = figures.by_distance(found).axes[place]
    assert axis.get_title() == pair_metric(metric).heading
    (bars,) = axis.containers
    points, _, (sticks,) = bars.lines
    rows, columns = torch.triu_indices(5, 5)
    values, errors = getattr(found, metric)[rows, columns], found.stderr[metric][rows, columns]
    assert np.array_equal(points.get_xdata(), (columns - rows).numpy())
    assert np.array_equal(points.get_ydata(), values.numpy())
    for segment, value, error in zip(sticks.get_segments(), values.tolist(), errors.tolist()):
        assert segment[:, 1] == pytest.approx([value - error, value + error], rel=1e-12)
    (mean,) = (line for line in axis.lines if line.get_label() == "mean")
    assert np.array_equal(mean.get_ydata(), found.by_distance(metric).numpy())
    assert axis.get_yscale() == ("log" if metric in ("resonance", "gn_gap") else "linear")


def test_by_distance_skips_undefined_entries() -> None:
    nothing = torch.full((3, 3), math.nan, dtype=torch.float64)
    resonance = synthetic_measurement(3).resonance.clone()
    resonance[0, 2] = resonance[2, 0] = math.nan
    axes = figures.by_distance(synthetic_measurement(3, gn_gap=nothing, resonance=resonance)).axes
    assert [text.get_text() for text in axes[3].texts] == ["not defined"]
    assert len(axes[0].containers[0].lines[0].get_xdata()) == 5 and not axes[0].texts


def test_by_distance_shows_a_gap_of_zero() -> None:
    axis = figures.by_distance(synthetic_measurement(3, gn_gap=torch.zeros(3, 3, dtype=torch.float64))).axes[3]
    low, high = axis.get_ylim()
    assert axis.get_yscale() == "linear" and low < 0 < high
    assert axis.containers[0].lines[0].get_ydata().tolist() == [0.0] * 6


def test_by_distance_zeros_on_log_scale_are_triangles() -> None:
    gap = synthetic_measurement(4).gn_gap.clone()
    gap[3], gap[:, 3] = 0.0, 0.0
    figure = figures.by_distance(synthetic_measurement(4, gn_gap=gap))
    axis = figure.axes[3]
    (triangles,) = (line for line in axis.lines if line.get_marker() == "v")
    assert sorted(triangles.get_xdata()) == [0, 1, 2, 3]
    means = synthetic_measurement(4, gn_gap=gap).by_distance("gn_gap")
    low, high = axis.get_ylim()
    assert means[3] == 0 and low < means[:3].min() and means[:3].max() < high  # the line stays in sight
    assert "triangles" in figure.get_suptitle()
    assert "triangles" not in figures.by_distance(synthetic_measurement(4)).get_suptitle()


# Machado, Oliveira and Fernandes (2009), severity 1, for linear RGB
COLOUR_VISION = {
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}
TO_XYZ = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]


def lab(colour: str, vision: np.ndarray) -> np.ndarray:
    """CIELAB of a colour as somebody sees it; a distance of 2 can just be seen."""
    from matplotlib.colors import to_rgb

    rgb = np.array(to_rgb(colour))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    xyz = TO_XYZ @ np.clip(vision @ linear, 0, 1) / np.array([0.9505, 1.0, 1.089])
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("kind", COLOUR_VISION)
def test_curves_have_colours_that_colour_blind_readers_distinguish(kind: str) -> None:
    vision = np.array(COLOUR_VISION[kind])
    axis = figures.spectrum_over_time(synthetic_spectra(4), alerts=[200]).axes[0]
    drawn = {str(line.get_color()) for line in axis.lines}
    assert len(drawn) == 6
    for colours in (drawn, figures.PALETTE):
        for one, other in combinations(colours, 2):
            assert np.linalg.norm(lab(one, vision) - lab(other, vision)) > 15, (one, other)


def test_by_distance_selected_metrics_keep_their_colours() -> None:
    axes = figures.by_distance(synthetic_measurement(3), metrics=["stable_rank", "resonance"]).axes
    assert [axis.get_title() for axis in axes] == [pair_metric(name).heading for name in ("stable_rank", "resonance")]
    colours = [next(line for line in axis.lines if line.get_label() == "mean").get_color() for axis in axes]
    assert colours == [figures.PALETTE[2], figures.PALETTE[0]]  # a metric keeps its colour


# ---- spectrum ----


def lines_of(figure: Any) -> dict[str, list[float]]:
    return {line.get_label(): list(line.get_ydata()) for line in figure.axes[0].lines}


def test_spectrum_lines() -> None:
    snapshots = synthetic_spectra(4, rise=1.2)
    figure = figures.spectrum_over_time(snapshots)
    top = [s.spectrum.sharpness for s in snapshots if s.spectrum is not None]
    lines = lines_of(figure)
    assert lines["λ₁"] == top
    assert lines["λ₂ … λ₅"] == pytest.approx([value / 2 for value in top])
    assert lines["Gauss–Newton λ₁"] == pytest.approx([0.9 * value for value in top])
    assert lines["stability limit"] == pytest.approx([2 * value for value in top])
    assert lines["smallest"] == [-0.4] * 4
    assert [t.get_text() for t in figure.axes[0].get_legend().get_texts()] == [
        "λ₁", "λ₂ … λ₅", "Gauss–Newton λ₁", "stability limit", "smallest",
    ]  # fmt: skip
    assert len(figure.axes[0].lines) == 8
    assert all(list(line.get_xdata()) == [0, 100, 200, 300] for line in figure.axes[0].lines)


def test_spectrum_undefined_values_have_no_line() -> None:
    lines = lines_of(figures.spectrum_over_time(synthetic_spectra(3, count=1, ratio=math.nan, ggn=math.nan)))
    assert set(lines) == {"λ₁", "smallest"}
    assert "λ₂" in lines_of(figures.spectrum_over_time(synthetic_spectra(3, count=2)))


@pytest.mark.parametrize(
    ("rise", "ratio", "scale"),
    [(1.1, 0.5, "linear"), (1.1, 0.01, "symlog"), (3.0, 0.5, "symlog"), (0.3, 0.5, "symlog")],
)
def test_spectrum_scale(rise: float, ratio: float, scale: str) -> None:
    """Logarithmic only where a line would be flat otherwise."""
    assert figures.spectrum_over_time(synthetic_spectra(6, rise=rise, ratio=ratio)).axes[0].get_yscale() == scale


@pytest.mark.parametrize("rise", [1.1, 3.0])
def test_spectrum_lines_avoid_frame_and_alert_colour(rise: float) -> None:
    figure = figures.spectrum_over_time(synthetic_spectra(6, rise=rise), alerts=[300])
    drawn(figure)
    axis = figure.axes[0]
    (alert,) = (line for line in axis.lines if line.get_label() == "alert")
    others = [line for line in axis.lines if line is not alert]
    assert alert.get_color() not in {line.get_color() for line in others}
    ends = max(max(line.get_ydata()) for line in others), min(min(line.get_ydata()) for line in others)
    top, bottom = ((axis.transData - axis.transAxes).transform((0, end))[1] for end in ends)
    assert 0.02 < bottom < top < 0.98


def test_spectrum_of_incomplete_snapshots() -> None:
    snapshots = [*synthetic_spectra(2, count=2), Snapshot(step=150, epoch=1), *synthetic_spectra(1, count=5)]
    figure = figures.spectrum_over_time(snapshots)
    fourth = [line for line in figure.axes[0].lines if str(line.get_label()).startswith("_")][-1]
    assert [math.isnan(value) for value in fourth.get_ydata()] == [True, True, False]
    drawn(figure)


# ---- all of them ----


def everything() -> dict[str, Callable[[], Any]]:
    holes = synthetic_measurement(6).resonance.clone()
    holes[0, 3] = holes[3, 0] = holes[2, 2] = math.nan
    zero = torch.zeros(8, 8, dtype=torch.float64)
    measured = {
        "one node": synthetic_measurement(1),
        "three": synthetic_measurement(3),
        "six with holes": synthetic_measurement(6, resonance=holes),
        "six long": synthetic_measurement(6, LONG),
        "six alike": synthetic_measurement(6, ALIKE),
        "eight without gap": synthetic_measurement(8, gn_gap=zero),
        "twenty-four": synthetic_measurement(24),
        "wide range": synthetic_measurement(8, resonance=synthetic_measurement(8).resonance ** 9),
    }
    spectra = {(n, rise): synthetic_spectra(n, rise) for n in (1, 2, 40, 200) for rise in (1.0, 1.3)}
    return {
        **{
            f"{name}, {metric}": partial(figures.heatmap, m, metric)
            for metric in METRICS
            for name, m in measured.items()
        },
        **{f"{name}, by distance": partial(figures.by_distance, m, "step 12") for name, m in measured.items()},
        **{f"spectrum {key}": partial(figures.spectrum_over_time, snapshots) for key, snapshots in spectra.items()},
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", everything())
def test_nothing_is_cut_off_or_overlaps(name: str) -> None:
    with plain():
        figure = everything()[name]()
        figure.canvas.draw()
    assert_nothing_is_cut_off_or_overlaps(figure)


def test_pixels() -> None:
    figure = figures.heatmap(synthetic_measurement(3), "coupling")
    image = pixels(figure)
    width, height = figure.canvas.get_width_height()
    assert image.shape == (height, width, 3) and image.dtype == torch.uint8
    assert tuple(image[0, 0].tolist()) == (255, 255, 255)


def test_pictures_stay_small() -> None:
    """A logger keeps every one of them."""
    assert max(drawn(figures.heatmap(synthetic_measurement(n), "resonance")).shape[0] for n in (1, 8, 24)) < 900


def test_colours_are_distinguishable() -> None:
    assert set(figures.PALETTE) <= OKABE_ITO and len(set(figures.PALETTE)) == len(figures.PALETTE)


def test_matplotlib_style_of_the_user_is_ignored_and_kept() -> None:
    def pictures() -> list[np.ndarray]:
        with plain():
            return [
                pixels(figures.heatmap(synthetic_measurement(3), "resonance")).numpy(),
                pixels(figures.by_distance(synthetic_measurement(3))).numpy(),
            ]

    before = pictures()
    with matplotlib.rc_context({"text.usetex": True, "text.color": "white", "font.size": 30, "axes.grid": True}):
        inside = pictures()
        assert matplotlib.rcParams["text.usetex"] and matplotlib.rcParams["font.size"] == 30
    assert all(np.array_equal(a, b) for a, b in zip(before, inside))


def test_figures_do_not_accumulate() -> None:
    figure = figures.by_distance(synthetic_measurement(3))
    drawn(figure)
    gone = weakref.ref(figure)
    del figure
    gc.collect()
    assert gone() is None


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_figures_that_are_drawn_on_again_have_the_same_pixels(seed: int) -> None:
    """Whatever was on them before: other metrics, scales, frames, titles, networks, alerts."""
    kept, order = KeptFigures(), random.Random(seed)
    gap = synthetic_measurement(4).gn_gap.clone()
    gap[3], gap[:, 3], gap[0, 1], gap[1, 2] = 0.0, 0.0, math.nan, math.inf
    nothing = torch.full((4, 4), math.nan, dtype=torch.float64)
    measured = [
        synthetic_measurement(4),
        synthetic_measurement(4, gn_gap=gap, coupling=3 * synthetic_measurement(4).coupling),
        synthetic_measurement(4, gn_gap=0 * nothing.nan_to_num()),
        synthetic_measurement(4, gn_gap=nothing),
        synthetic_measurement(4, resonance=synthetic_measurement(4).resonance ** 9),
        synthetic_measurement(4, LONG[:4]),
        synthetic_measurement(12),
    ]
    pairs = ["layer1--layer1", "layer2--layer4"]
    draws: list[Callable[..., Any]] = [
        *(partial(figures.heatmap, m, metric, title, marked) for m in measured for metric in METRICS
          for title, marked in (("", ()), ("a title much longer than its picture is wide", pairs))),
        *(partial(figures.by_distance, m, title, metrics) for m in measured for title in ("", "step 12")
          for metrics in (None, METRICS[::-1], METRICS[:1])),
        *(partial(figures.spectrum_over_time, synthetic_spectra(n, rise, count, ratio), title, alerts)
          for n in (1, 2, 60) for rise, ratio, count in ((1.1, 0.5, 5), (3.0, 0.5, 2), (1.1, math.nan, 1))
          for title, alerts in (("", ()), ("title", (0, 100)))),
    ]  # fmt: skip
    order.shuffle(draws)
    for draw in draws[:60]:
        assert np.array_equal(drawn(draw(kept=kept)), drawn(draw())), draw


def test_kept_figures_are_the_same_objects_and_stay_few() -> None:
    kept, found, other = KeptFigures(), synthetic_measurement(3), synthetic_measurement(4)
    first = figures.heatmap(found, "resonance", kept=kept)
    assert figures.heatmap(found, "coupling", kept=kept) is first
    gone = weakref.ref(first)
    del first
    figures.by_distance(found, kept=kept)
    assert gone() is not None
    figures.heatmap(other, "resonance", kept=kept)
    gc.collect()
    assert gone() is None


def test_kept_figures_are_not_copied() -> None:
    """Spawned processes get a copy of the monitor; parts of a figure cannot be pickled."""
    kept = KeptFigures()
    first = figures.spectrum_over_time(synthetic_spectra(40, 1.3), kept=kept)
    for copied in (copy.deepcopy(kept), pickle.loads(pickle.dumps(kept))):
        assert figures.spectrum_over_time(synthetic_spectra(40, 1.3), kept=copied) is not first


@pytest.mark.slow
def test_pyplot_is_not_imported() -> None:
    code = (
        "import sys\n"
        "from tests.reporting.test_figures import drawn, everything\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
        "print(len([drawn(draw()) for draw in list(everything().values())[::5]]), 'matplotlib.pyplot' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(len(list(everything())[::5])), "False"]


# ---- names and numbers ----


@pytest.mark.parametrize(
    ("names", "short", "shared"),
    [
        (["stem", "layer1"], ["stem", "layer1"], ""),
        (["model.0", "model.2"], ["0", "2"], "model.*"),
        (["a.x", "a.x.y"], ["x", "x.y"], "a.*"),
        (["a.0.mlp", "b.1.mlp"], ["a.0", "b.1"], "*.mlp"),
        (["model.encoder"], ["model.encoder"], ""),
        (LONG, list("012345"), "model.encoder.layers.*.self_attn.out_proj"),
    ],
)
def test_short_names(names: list[str], short: list[str], shared: str) -> None:
    assert short_names(names) == (short, shared)


def test_shortened_names_stay_unique() -> None:
    short, _ = short_names(ALIKE)
    assert len(set(short)) == 6
    assert all("…" in name and len(name) < len(ALIKE[0]) for name in short)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.824, "0.82"), (13.2, "13"), (99.7, "100"), (417.0, "417"), (0.00413, "4.1e-3"), (1000.0, "1e3"), (999.7, "1e3"),
     (-0.4, "-0.4"), (0.0, "0"), (math.nan, "–"), (math.inf, "∞"), (-math.inf, "-∞")],
)  # fmt: skip
def test_brief(value: float, text: str) -> None:
    assert brief(value) == text

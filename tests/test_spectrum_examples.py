"""What the examples on spectra claim is what they compute."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from examples import closed_forms, edge_of_stability, gauss_newton_error

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def one_thread_and_the_same_random_state() -> Iterator[None]:
    """The examples seed torch and use one thread; the tests after them should not notice."""
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_rng_state(state)
    torch.set_num_threads(threads)


@pytest.mark.parametrize("seed", [0, 1])
def test_closed_forms_agree_with_the_spectrum(seed: int) -> None:
    found = closed_forms.runs(quick=True, seed=seed)
    assert [len(run.forms[0].eigenvalues) for run in found] == [12, 12, 9]
    for run in found:
        assert len(run.forms) == len(run.measured) == len(run.steps)
        assert run.disagreement < 1e-4
        assert run.measured[-1].loss < run.measured[0].loss


def test_the_sign_of_the_smaller_outlier_is_the_phase() -> None:
    small, large, _ = closed_forms.runs(quick=True)
    assert list(dict.fromkeys(small.phases)) == ["early", "late"]
    assert set(large.phases) == {"divergent"}
    for form in [*small.forms, *large.forms]:
        assert (form.outliers[-1] > 0) == (form.phase == "late")


@pytest.mark.parametrize("seed", range(3))
def test_attention_sharpens_up_to_the_limit_and_stays_there(seed: int) -> None:
    series = edge_of_stability.attention(seed)
    assert series.limit == pytest.approx(2 / 2.3)
    assert series.relative[0] < 0.6
    assert 1 < max(series.relative) < 1.3
    assert series.hovering == pytest.approx(1, abs=0.1)
    assert series.losses[-1] < 0.05 * series.losses[0]


def test_a_tanh_mlp_sharpens() -> None:
    series = edge_of_stability.mlp(quick=True)
    assert series.relative[0] < 0.6
    assert series.hovering > 1.5 * series.relative[0]
    assert max(series.relative) < 1.3
    assert series.losses[-1] < 0.2 * series.losses[0]


def test_the_two_models_have_as_many_parameters() -> None:
    sizes = [
        sum(p.numel() for p in gauss_newton_error.Network(100, 64, 64, 4, attention).parameters())
        for attention in (True, False)
    ]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.01)


def test_a_character_is_predicted_from_those_before_it() -> None:
    torch.manual_seed(0)
    model = gauss_newton_error.Network(10, 8, 16, 2, attention=True)
    text = torch.randint(10, (1, 8))
    other = text.clone()
    other[0, 5] = (text[0, 5] + 1) % 10
    change = (model(text) - model(other)).abs().amax(2)[0]
    assert change[:5].max() == 0 and change[5:].min() > 0


def test_gauss_newton_errors_at_equal_losses(tmp_path: Path) -> None:
    runs = gauss_newton_error.train_all(quick=True, seeds=range(1))
    for points in (points for seeds in runs.values() for points in seeds):
        assert len(points) == 5
        assert all(math.isfinite(value) for point in points for value in point)
        assert all(point.error >= 0 for point in points)
        assert points[-1].loss < points[0].loss
        known = torch.tensor([point.loss for point in points], dtype=torch.float64)
        errors = gauss_newton_error.interpolated(points, "loss", known)
        torch.testing.assert_close(errors.tolist(), [point.error for point in points])
    for by in ("loss", "residual", "step"):
        at, errors_of = gauss_newton_error.at_equal(runs, by)
        assert torch.isfinite(at).all()
        for errors in errors_of.values():
            assert errors.shape == (1, len(at)) and torch.isfinite(errors).all()
        assert 0 <= gauss_newton_error.share_larger(runs, by) <= 1
    pytest.importorskip("matplotlib")
    gauss_newton_error.plot(runs, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000


def test_an_example_prints_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    closed_forms.main(["--quick", "--out", str(tmp_path / "new")])
    assert capsys.readouterr().out.count("largest disagreement") == 3
    assert (tmp_path / "new" / "closed_forms.png").stat().st_size > 10_000


def test_the_edge_of_stability_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    series = edge_of_stability.Series("title", [0, 1, 2, 3], [0.5, 1.0, 1.1, 0.9], [1.0, 0.5, 0.4, 0.3], 1.0)
    assert series.hovering == pytest.approx(0.9)
    edge_of_stability.plot([series, series], tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000

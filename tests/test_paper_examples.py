"""The reproductions in examples/paper, at smallest size: what the papers claim in words holds there too."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from examples.paper import (
    data,
    exp1_depth,
    exp1b_spectral_norm,
    exp2_bottleneck,
    exp3_activations,
    exp4_diamond,
    exp5_attention,
    exp6_resnet18,
    fig3_paired_outliers,
    fig4_sharpness_norms,
    fig5_gauss_newton,
    fig7_data_scale,
    fig8_training_outliers,
    fig9_attention_sink,
    fig27_edge_of_stability,
    metrics,
    networks,
)
from examples.paper.report import Table

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def digits_one_thread_and_the_same_random_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No images from the neighbourhood: the tests need nothing but what scikit-learn ships."""
    pytest.importorskip("sklearn")
    monkeypatch.setattr(data, "NEIGHBOUR", Path("nowhere.npz"))
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    yield
    assert torch.equal(torch.get_rng_state(), state)
    torch.set_num_threads(threads)


def claims(table: Table) -> dict[str, str]:
    return {row.what: row.verdict for row in table.rows if row.verdict in ("holds", "DOES NOT HOLD")}


def test_coupling_decays_in_plain_and_stays_in_residual_networks() -> None:
    table = exp1_depth.main(["--tiny"])
    assert "digits" in table.data
    assert table["L = 12 plain: R(d) and C(d) fall"].verdict == "holds"
    assert table["L = 12 residual: smallest C(d)"].verdict == "holds"
    assert table["L = 12 plain: C(11)"].mean < 0.5


def test_spectral_normalisation_makes_resonance_fall_exponentially() -> None:
    table = exp1b_spectral_norm.main(["--tiny", "--seeds", "1"])
    for depth in (8, 16):
        assert table[f"L = {depth}: ρ"].mean <= 1.05
        assert table[f"L = {depth}: λ_1 as the paper defines it"].mean < 0
        assert table[f"L = {depth}: gap"].values == (0.0,)
        assert table[f"L = {depth}: R(d) falls exponentially"].verdict == "holds"
    assert table["L = 16: orders of magnitude from R(0) to R(15)"].mean > 3


def test_stable_rank_grows_with_the_bottleneck_and_stays_below_its_width() -> None:
    assert set(claims(exp2_bottleneck.main(["--tiny", "--seeds", "1"])).values()) == {"holds"}


def test_gaps_rank_by_the_curvature_of_the_activation() -> None:
    table = exp3_activations.main(["--tiny"])
    assert table["ranking of the gaps"].verdict == "holds"
    moments = [table[f"without LayerNorm, {name}: E[σ''²]"].mean for name in ("ReLU", "Softplus", "SiLU", "GELU")]
    assert moments[0] == 0 and moments == sorted(moments)
    for name in ("ReLU", "LeakyReLU"):
        assert set(table[f"without LayerNorm, {name}: gap"].values) == {0.0}
        assert table[f"with LayerNorm, {name}: gap"].mean > 0.1  # LayerNorm is smooth
    for name in ("Softplus", "SiLU", "GELU"):
        assert set(table[f"{name}: gap(5), before a linear head"].values) == {0.0}


def test_only_concatenation_and_a_smooth_activation_couple_the_branches() -> None:
    table = exp4_diamond.main(["--tiny", "--seeds", "1"])
    for name in ("sum+ReLU", "sum+SiLU", "cat+ReLU"):
        assert table[f"{name}, k = 2: gap"].values == (0.0,)
    assert table["cat+SiLU, k = 2: gap"].mean > 0.1
    assert table["k = 2: orders of magnitude between cat+SiLU and the rest"].verdict == "holds"


def test_attention_has_a_large_gap_and_the_mlp_none() -> None:
    models = [networks.seeded(kind, 0) for kind, _ in exp5_attention.MODELS.values()]
    assert [sum(p.numel() for p in model.parameters()) for model in models] == [785, 833]
    table = exp5_attention.main(["--tiny"])
    for inputs in ("inputs of each seed", "the same inputs"):
        assert min(table[f"{inputs}: attention init, gap"].values) > 10
        assert set(table[f"{inputs}: MLP init, gap"].values) == {0.0}


def test_shortcuts_preserve_the_resonance_of_resnets() -> None:
    table = exp6_resnet18.main(["--tiny", "--seeds", "1"])
    for activation in ("ReLU", "SiLU"):
        decay = [table[f"{activation} {kind}: R(0) / R(4)"].mean for kind in ("ResNet", "plain")]
        assert decay[1] > 10 * decay[0]
        for kind in ("ResNet", "plain"):
            assert table[f"{activation} {kind}: gap(4)"].values == (0.0,)
            assert (table[f"{activation} {kind}: gap(0)"].mean > 0) == (activation == "SiLU")


def test_a_pair_of_outliers_sums_to_its_share_of_the_trace() -> None:
    table = fig3_paired_outliers.main(["--tiny"])
    assert all(table[f"orthonormal, decorrelated, D = {d}"].verdict == "holds" for d in (1, 2, 5))
    assert table["standard, standardised, D = 1"].verdict == "holds"


def test_sharpness_goes_with_the_spectral_norm_after_training() -> None:
    assert fig4_sharpness_norms.main(["--tiny"])["D = 5, trained: best correlation with λ_1"].verdict == "holds"


def test_gauss_newton_runs_on_both_models() -> None:
    with torch.random.fork_rng():
        table = fig5_gauss_newton.main(["--tiny", "--seeds", "1"])
    assert len(claims(table)) == 2  # which of the two errs more is not decided at this size


@pytest.mark.parametrize("script", [fig7_data_scale, fig8_training_outliers, fig27_edge_of_stability])
def test_closed_forms_agree_and_their_claims_hold(script: object) -> None:
    table = script.main(["--tiny", "--seeds", "1"])  # type: ignore[attr-defined]
    assert set(claims(table).values()) == {"holds"}
    assert all(row.verdict == "holds" or row.verdict.startswith("agrees") for row in table.rows)


def test_an_attention_sink_shrinks_the_bulk() -> None:
    table = fig9_attention_sink.main(["--tiny", "--seeds", "1"])
    assert table["tokens alike: the bulk shrinks"].verdict == "holds"


def test_figures_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for script in (exp4_diamond, fig27_edge_of_stability):
        path = tmp_path / f"{script.__name__}.png"
        script.main(["--tiny", "--seeds", "1", "--figure", str(path)])
        assert path.stat().st_size > 10_000


def test_verdicts() -> None:
    table = Table("title", "data")
    table.compare("within 10 %", "2.0", [2.1, 2.2])
    table.compare("beyond", "2.0", [2.3, 2.4])
    table.compare("rounding", "0.003", [2.6e-3])
    table.compare("seeds", "57.5", [30.0, 60.0], spread="16.4")
    table.compare("far", "57.5", [2.0, 2.2], spread="16.4")
    table.compare("coupling", "0.24", [0.26], tolerance=0.03)
    table.compare("bound", "<1e-7", [0.0, 2e-7])
    table.compare("elsewhere", "1", [5.0], other="other data")
    seen = [row.verdict.split()[0] for row in table.rows]
    assert seen == ["agrees", "DIFFERS", "agrees", "agrees", "DIFFERS", "agrees", "DIFFERS", "other"]
    assert "57.5 ± 16.4" in str(table) and table["bound"].values == (0.0, 2e-7)


def test_a_pooled_gap_weighs_pairs_by_their_curvature() -> None:
    batch = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(0)), torch.arange(8)
    model = networks.seeded(networks.PlainMLP, 0, widths=[6] * 3, activation=torch.nn.SiLU, layer_norm=False)
    found = exp3_activations.look(model, batch).found
    blocks = [(found.blocks[v, w], found.gauss_newton[v, w]) for v, w in found.pairs()]  # type: ignore[attr-defined]
    expected = sum((h - g).norm() for h, g in blocks) / sum(g.norm() for _, g in blocks)
    assert metrics.pooled_gap(found) == pytest.approx(expected.item(), rel=1e-10)
    assert metrics.pooled_gap(found) < found.gn_gap.nanmean()


def test_straight_lines_and_exponents() -> None:
    slope, explained = metrics.straight_line([math.exp(-0.5 * d) for d in range(6)])
    assert slope == pytest.approx(0.5) and explained == pytest.approx(1)
    turns = [2 * torch.eye(3).expand(4, 3, 3)] * 5
    assert metrics.lyapunov_exponent(turns) == pytest.approx(math.log(2))
    assert metrics.lyapunov_exponent_by_qr(turns) == pytest.approx(math.log(2))
    assert metrics.largest_norm(turns) == pytest.approx(2)

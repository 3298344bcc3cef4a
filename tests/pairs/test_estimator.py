"""The estimator against dense matrices: no network, so thousands of repetitions are cheap."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from torch import Tensor

import curvmon
from curvmon.numerics import gaussian, small_sample_factor
from curvmon.operators.node_blocks import Products
from curvmon.pairs.estimator import FOR_NORMS
from curvmon.pairs.images import Images
from curvmon.pairs.random_probes import RestSamples
from curvmon.pairs.shared_basis import SharedBasis
from tests.helpers.dense_blocks import (
    METRICS,
    PAIRS,
    SIZES,
    DenseBlocks,
    coverage,
    deviations,
    estimate,
    network_deviations,
    problem,
    symmetric,
)


@pytest.mark.slow
@pytest.mark.parametrize("decay", [0.5, 1.0, 2.0])
def test_intervals_cover_the_truth(decay: float) -> None:
    """Of the 95 % intervals, 90 to 99 % hold the truth, for each metric over 150 seeds and all pairs."""
    found = deviations(problem(decay), range(150))
    shares = coverage(found)
    assert all(0.90 <= share <= 0.99 for share in shares.values()), shares
    # a normal distribution has 6e-5 beyond four; a rest of one dominant direction, met by five probes, has more
    assert all(share > 0.98 for share in coverage(found, 4).values())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cross_entropy", "mse"])
def test_intervals_cover_the_truth_on_a_network(kind: str) -> None:
    shares = coverage(network_deviations(kind, range(60)))
    assert all(0.90 <= share <= 0.99 for share in shares.values()), shares


@pytest.mark.slow
def test_estimates_are_unbiased() -> None:
    operator = problem(1.0)
    squares = [estimate(operator, seed).matrices.get("resonance", 0, 1) ** 2 for seed in range(200)]
    mean, spread = sum(squares) / 200, torch.tensor(squares).std().item()
    assert abs(mean - operator.truth("resonance", 0, 1) ** 2) < 4 * spread / math.sqrt(200)


def test_stops_at_the_tolerance() -> None:
    """A tighter tolerance costs more and delivers what it promises."""
    operator = problem(0.5)
    loose, tight = (estimate(operator, 0, None, rtol) for rtol in (0.1, 0.01))
    assert loose.hvps < tight.hvps
    assert not loose.notes and not tight.notes
    for v, w in PAIRS:
        for metric in ("resonance", "coupling"):
            assert tight.matrices.get(f"stderr/{metric}", v, w) <= 0.01 * tight.matrices.get(metric, v, w)


def test_a_node_with_one_remaining_probe_is_exact_and_cheap() -> None:
    """Six nodes, twelve directions each, and a node of thirteen entries: one probe spans what is left."""
    sizes = (13, 40, 20, 50, 16, 30)
    matrix = symmetric(1.0, 3, size=sum(sizes))
    found = estimate(DenseBlocks(matrix, matrix @ matrix, sizes), 0, None)
    assert torch.isfinite(found.matrices.errors()["resonance"]).all()
    assert found.hvps < 2 * sum(sizes)


@pytest.mark.slow
def test_a_flat_spectrum_widens_the_error_of_the_stable_rank_honestly() -> None:
    """D of a hundred cannot be found with few directions: what the spectral norm lacks is estimated, with an error."""
    matrix = symmetric(0.05, 4, size=600)
    operator = DenseBlocks(matrix, matrix @ matrix, (300, 300))
    inside, errors = [], []
    for seed in range(20):
        found = estimate(operator, seed, 60)
        for v, w in ((0, 0), (0, 1), (1, 1)):
            value, error = found.matrices.get("stable_rank", v, w), found.matrices.get("stderr/stable_rank", v, w)
            errors.append(error / value)
            inside.append(abs(value - operator.truth("stable_rank", v, w)) < 1.96 * error)
        assert any("stable_rank has not converged" in note for note in found.notes)
    assert sum(inside) >= 0.9 * len(inside)
    assert statistics.median(errors) < 0.5


NORMS = ("resonance", "coupling", "gn_gap")


def test_three_probes_are_enough_for_the_norms_of_flat_spectra() -> None:
    operator = problem(0.05, sizes=(500, 500, 500))
    found = [estimate(operator, seed, None, rtol=0.1, effort=FOR_NORMS) for seed in range(8)]
    assert statistics.median(each.hvps for each in found) == 2 * 3 * 3
    shares = coverage(deviations(operator, range(8), None, FOR_NORMS))
    assert all(shares[metric] >= 0.85 for metric in NORMS), shares


@pytest.mark.slow
@pytest.mark.parametrize("decay", [0.05, 0.5, 1.0])
def test_intervals_of_few_directions_cover_the_truth(decay: float) -> None:
    """Also where probes without a basis turn out not to be enough."""
    operator = problem(decay, sizes=(500, 500, 500) if decay < 0.5 else SIZES)
    shares = coverage(deviations(operator, range(80), None, FOR_NORMS))
    assert all(0.90 <= shares[metric] <= 0.995 for metric in NORMS), shares


@pytest.mark.parametrize("limit", [30, 31, 42, 50, 77])
def test_probes_without_a_basis_stay_within_the_budget(limit: int) -> None:
    operator = problem(1.0)
    found = estimate(operator, 0, limit, rtol=1e-3, effort=FOR_NORMS)
    assert found.hvps == operator.products <= limit
    assert any("max_hvps" in note for note in found.notes)


@pytest.mark.parametrize("limit", [30, 31, 50, 77, 200])
def test_never_spends_more_than_allowed_and_counts_right(limit: int) -> None:
    operator = problem(0.5)
    found = estimate(operator, 0, limit, rtol=1e-4)
    assert found.hvps == operator.products <= limit
    assert any("max_hvps" in note for note in found.notes)


def test_a_budget_below_the_minimum_is_refused() -> None:
    with pytest.raises(curvmon.InputError, match="max_hvps=29 is too few: at least 30 HVPs"):
        estimate(problem(1.0), 0, 29)


@pytest.mark.parametrize("rtol", [0.0, -1.0, math.nan])
def test_a_tolerance_that_is_not_positive_is_refused(rtol: float) -> None:
    with pytest.raises(curvmon.InputError, match="rtol must be positive"):
        curvmon.measure(torch.nn.Linear(3, 2), torch.ones(2, 3), loss=lambda m, b: m(b).sum(), rtol=rtol)


def test_small_nodes_are_exact() -> None:
    sizes = (3, 12, 8)
    matrix = symmetric(0.5, 3, size=sum(sizes))
    operator = DenseBlocks(matrix, matrix @ matrix, sizes)
    found = estimate(operator, 0, None)
    assert found.hvps == 2 * sum(sizes)
    for metric in METRICS:
        for v, w in PAIRS:
            assert found.matrices.get(metric, v, w) == pytest.approx(operator.truth(metric, v, w), rel=1e-10)


def test_low_rank_blocks_are_exact() -> None:
    """The basis holds all of a block of rank two: no probe is needed to know the rest is nothing."""
    factors = torch.randn(sum(SIZES), 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    operator = DenseBlocks(factors @ factors.T, factors @ factors.T)
    found = estimate(operator, 0).matrices
    for v, w in PAIRS:
        assert found.get("resonance", v, w) == pytest.approx(operator.truth("resonance", v, w), rel=1e-10)
        assert found.get("stable_rank", v, w) == pytest.approx(operator.truth("stable_rank", v, w), rel=1e-10)
        assert found.get("gn_gap", v, w) < 1e-10


def random_basis(operator: DenseBlocks, generator: torch.Generator) -> tuple[Images, SharedBasis]:
    """Three random directions at every node."""
    images = Images(operator, range(3))
    drawn = {v: torch.randn(size, 3, generator=generator, dtype=torch.float64) for v, size in enumerate(SIZES)}
    images.add({v: torch.linalg.qr(directions).Q for v, directions in drawn.items()})
    images.read()
    return images, SharedBasis(images, dict.fromkeys(range(3), 3))


def outside(images: Images, v: int, x: Tensor) -> Tensor:
    basis = images.vectors[v][:, :3]
    return x - basis @ (basis.T @ x)


def test_the_split_of_a_norm_adds_up() -> None:
    """‖A‖² = ‖A^T Q_v‖² + ‖P_v A Q_w‖² + ‖P_v A P_w‖²"""
    operator = problem(0.5)
    images, basis = random_basis(operator, torch.Generator().manual_seed(5))
    for v, w in PAIRS:
        A = operator.block(0, v, w)
        rest = torch.linalg.norm(outside(images, w, outside(images, v, A).T)) ** 2
        assert basis.captured(v, w).hessian + rest.item() == pytest.approx(torch.linalg.norm(A).item() ** 2)


def test_the_spectral_norm_is_that_of_the_captured_part() -> None:
    """The dense A - P_v A P_w, and the residual of its leading singular vectors."""
    operator = problem(0.5)
    images, basis = random_basis(operator, torch.Generator().manual_seed(5))
    found = basis.spectral_norms(PAIRS)
    for i, (v, w) in enumerate(PAIRS):
        A = operator.block(0, v, w)
        captured = A - outside(images, w, outside(images, v, A).T).T
        u, s, _ = torch.linalg.svd(captured)
        assert found.norms[i].norm == pytest.approx(s[0].item(), rel=1e-7)
        assert found.norms[i].ritz[1].value == pytest.approx((s[1] / s[0]).item(), rel=1e-6)
        assert found.norms[i].ritz[0].row == pytest.approx(outside(images, v, u[:, 0]).square().sum().item(), rel=1e-5)
        combination, size = basis.leading_residual(v, [(w, found.rows[i, 0])])
        residual = outside(images, v, images.combination(v, combination)[:, 0])
        assert size**2 == pytest.approx(found.norms[i].ritz[0].row, rel=1e-6)
        cosine = residual @ outside(images, v, u[:, 0]) / size**2
        assert abs(cosine.item()) == pytest.approx(1, rel=1e-6)


def test_a_wrong_second_derivative_shows_as_asymmetry() -> None:
    class Skewed(DenseBlocks):
        def columns(self, w: int, z: Tensor) -> Products:
            true = super().columns(w, z)
            return true._replace(remainder=[x * (1.1 if v > w else 1.0) for v, x in enumerate(true.remainder)])

    matrix = symmetric(1.0, 1)
    found = estimate(Skewed(matrix + symmetric(1.0, 2), matrix), 0)
    assert any("not symmetric" in note for note in found.notes)
    assert not any("not symmetric" in note for note in estimate(problem(1.0), 0).notes)


def test_probes_come_from_the_generator_alone() -> None:
    before = torch.get_rng_state()
    like = torch.zeros(1000, dtype=torch.float64)
    one, two = (gaussian(like, 3, torch.Generator().manual_seed(4)) for _ in range(2))
    assert torch.equal(one, two) and one.shape == (1000, 3) and abs(one.mean()) < 0.1
    assert torch.equal(before, torch.get_rng_state())


def test_probes_are_orthogonal_and_exact_when_they_span_the_rest() -> None:
    """Sampling without replacement: after as many probes as there are dimensions nothing is left to chance."""
    operator, g = problem(0.5), torch.Generator().manual_seed(5)
    images, basis = random_basis(operator, g)
    rest = RestSamples(images, basis)
    spent = sum(rest.add({0: count}, g) for count in (5, 20, 100))
    assert rest.remaining(0) == 0 and spent == 2 * (SIZES[0] - 3)
    A = outside(images, 0, outside(images, 0, operator.block(0, 0, 0)).T)
    assert rest.mean("hessian", 0, 0) == pytest.approx(torch.linalg.norm(A).item() ** 2)
    assert rest.standard_error([(1.0, "hessian", 0, 0)]) == 0


@pytest.mark.parametrize(
    ("degrees_of_freedom", "quantile"), [(1, 12.7062), (4, 2.7764), (5, 2.5706), (10, 2.2281), (30, 2.0423)]
)
def test_small_sample_factor_is_students(degrees_of_freedom: int, quantile: float) -> None:
    """97.5 % points of Student's t from the usual tables."""
    assert 1.959964 * small_sample_factor(degrees_of_freedom) == pytest.approx(quantile, rel=4e-3)

"""How many products a search takes one epoch later, by where it begins; among others at the eigenvectors of before."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import curvmon
from benchmarks.trained import Setting
from curvmon.operators.parameter_hessian import ParameterOperator, open_parameters
from curvmon.spectrum.krylov_space import KrylovSpace
from curvmon.spectrum.starting_vector import start_cotangents
from curvmon.spectrum.trace import trace_of_parts

TOLERANCE = 1e-2
"""of a residual, relative to its eigenvalue"""
CLOSE = 1e-2
"""of an eigenvalue, relative to itself"""
SEEDS = range(2)
LIMIT = 60
STARTS = ("random", "gradient", "Gauss-Newton", "warm", "perfect")


def warm_starts(settings: Iterable[Setting]) -> Iterator[str]:
    yield "### Warm start, one epoch (100 steps for the decoders) later"
    yield ""
    columns = [f"top-{k}: {', '.join(STARTS)} | rule | overlap" for k in (1, 5)]
    yield f"| | λ_1, λ_5 | {' | '.join(columns)} |\n|---|---|---|---|---|---|---|---|"
    for setting in settings:
        (_, first), (ends, second) = (_cells(setting, k) for k in (1, 5))
        yield f"| {setting.name} | {ends} | {first} | {second} |"
    yield ""
    yield (
        f"HVPs until all eigenvalues are within {100 * CLOSE:g} % of the truth, by starting vector: "
        f'{", ".join(STARTS)}. "Rule": HVPs until all residuals are below {TOLERANCE:g} of their eigenvalue. '
        f"Random and Gauss-Newton: median of {len(SEEDS)} seeds; a dash where there is no such vector. Warm: the sum "
        "of the eigenvectors of an epoch before, the smallest eigenvalue's included; perfect: that of the true ones. "
        '"Overlap": the share of the new eigenvectors that lies in the span of the old ones.'
    )


def _cells(setting: Setting, k: int) -> tuple[str, str]:
    """The first and the last of k eigenvalues, before and after; and what it takes to find them after."""
    options: dict[str, Any] = {"loss": setting.loss, "k": k, "ggn": False, "trace": False, "smallest": False}
    before = curvmon.spectrum(setting.model, setting.batch, rtol=TOLERANCE, verify=False, **options)
    after = curvmon.spectrum(setting.later, setting.batch, rtol=1e-3, **options)
    with open_parameters(setting.later, [setting.batch], loss=setting.loss) as operator:
        newton = [start for seed in SEEDS if (start := _gauss_newton(operator, k, seed)) is not None]
        singles = [[_random(operator, seed) for seed in SEEDS], [operator.gradient], newton]
        starts = [[_perturbed(operator, start) for start in group] for group in singles]
        starts += [[each.start_vector().unsqueeze(0)] for each in (before, after)]
        counts = [[_until(operator, rows, after.eigenvalues) for rows in group] for group in starts]
    medians = [[f"{statistics.median(each):g}" for each in zip(*group)] or ["–", "–"] for group in counts]
    close, ruled = (", ".join(column) for column in zip(*medians))
    overlap = (before.eigenvectors.T @ after.eigenvectors).square().sum(0).mean().item()
    ends = [f"{s.eigenvalues[0].item():.3g}, {s.eigenvalues[-1].item():.3g}" for s in (before, after)]
    return " → ".join(ends), f"{close} | {ruled} | {overlap:.2f}"


def _random(operator: ParameterOperator, seed: int) -> Tensor:
    vector = torch.randn(operator.size, generator=torch.Generator().manual_seed(seed))
    return vector / torch.linalg.vector_norm(vector)


def _gauss_newton(operator: ParameterOperator, k: int, seed: int) -> Tensor | None:
    """The start with trace=True: the sum of sketched eigenvectors; None where outputs are too many for that."""
    generator = torch.Generator().manual_seed(seed)
    estimate = trace_of_parts(operator.layered(), generator, sketched=True)
    sketches = None if estimate is None else estimate.sketches
    cotangents = None if sketches is None else start_cotangents(sketches, k)
    return None if cotangents is None else operator.pullback(cotangents)


def _perturbed(operator: ParameterOperator, start: Tensor) -> Tensor:
    """One row, with a small random component, as `EigenvalueSearch` does."""
    return (start / torch.linalg.vector_norm(start) + 0.1 * _random(operator, 100)).unsqueeze(0)


def _until(operator: ParameterOperator, starts: Tensor, true: Tensor) -> tuple[int, int]:
    """Products until the values are within CLOSE of the truth, and until the residuals are below TOLERANCE.

    As `EigenvalueSearch` does: first with all starting vectors, then with the worst residual of the k largest values.
    These only grow, to the eigenvalues: what is close stays close.
    """
    k = len(true)
    space = KrylovSpace(operator.matmat, starts)
    space.expand()
    close = ruled = 0
    while True:
        ritz = space.ritz_pairs()
        values, residuals = ritz.values.flip(0)[:k], ritz.residuals.flip(0)[:k]
        excess = residuals / (TOLERANCE * values.abs())
        if len(values) == k:
            if not close and bool(((values - true).abs() <= CLOSE * true.abs()).all()):
                close = space.products
            if not ruled and bool((excess <= 1).all()):
                ruled = space.products
        if (close and ruled) or space.exhausted or space.products >= LIMIT:
            return close or LIMIT, ruled or LIMIT
        worst = len(ritz.values) - 1 - int(excess.argmax())
        space.expand(ritz.directions[:, [worst]])


def best_combination(setting: Setting, k: int, products: int, trials: int = 150) -> float:
    """The smallest residual that so many products could leave, from the best start among the old eigenvectors.

    The largest of the k residuals relative to their eigenvalues, smallest over all combinations of the k vectors of
    before and the new gradient: 2 * `trials` of them, half at random, half near the best so far. A block Krylov space
    of depth `products` + 1 holds the single-vector spaces of all combinations, so each takes no product of its own.
    """
    options: dict[str, Any] = {"k": k, "rtol": TOLERANCE, "verify": False, "ggn": False, "trace": False}
    before = curvmon.spectrum(setting.model, setting.batch, loss=setting.loss, smallest=False, **options)
    basis: list[Tensor] = []
    images: list[Tensor] = []

    def add(vector: Tensor) -> None:
        for known in [*basis, *basis]:
            vector = vector - known.dot(vector) * known
        basis.append(vector / torch.linalg.vector_norm(vector))

    with open_parameters(setting.later, [setting.batch], loss=setting.loss) as operator:
        for start in (*before.eigenvectors.T, operator.gradient):
            add(start)
        for i in range((k + 1) * products):
            image = operator.hessian(basis[i])
            add(image)
            images.append(torch.stack([known.dot(image) for known in basis]).double())
    matrix = torch.zeros(len(basis), len(basis), dtype=torch.float64)
    for i, image in enumerate(images):
        matrix[: len(image), i] = matrix[i, : len(image)] = image

    def residual(weights: Tensor) -> float:
        following = F.pad(weights / torch.linalg.vector_norm(weights), (0, len(matrix) - len(weights)))
        krylov: list[Tensor] = []
        for _ in range(products):
            krylov.append(following)
            q = torch.stack(krylov)
            following = matrix @ following
            for _ in range(2):
                following = following - q.T @ (q @ following)
            beta = torch.linalg.vector_norm(following)
            following = following / beta
        values, vectors = torch.linalg.eigh(q @ matrix @ q.T)
        return (beta * vectors[-1, -k:].abs() / values[-k:].abs()).max().item()

    generator = torch.Generator().manual_seed(0)
    best, smallest = torch.ones(k + 1, dtype=torch.float64), float("inf")
    for trial in range(2 * trials):
        noise = torch.randn(k + 1, generator=generator, dtype=torch.float64)
        weights = noise if trial < trials else best + 0.2 * torch.linalg.vector_norm(best) * noise
        found = residual(weights)
        if found < smallest:
            best, smallest = weights, found
    return smallest

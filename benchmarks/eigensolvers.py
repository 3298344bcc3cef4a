"""The top eigenvalues of a network by curvmon, PyHessian, eigsh, hessian-eigenthings and power iteration.

Each stops by its own rule; all products are counted. At what tolerance all values are right: `loosest`.
"""

from __future__ import annotations

import copy
import importlib
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from curvlinops import HessianLinearOperator
from hessian_eigenthings import HessianOperator, deflated_power_iteration, lanczos
from scipy.sparse.linalg import LinearOperator, eigsh
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import curvmon
from benchmarks.counting import (
    MOST_PRODUCTS,
    InterruptedSearchError,
    counted_besides,
    counted_calls,
    counted_products,
    one_more,
)
from benchmarks.header import cached
from benchmarks.tolerances import Answer, Attempt, loosest_of
from benchmarks.trained import Setting
from curvmon.operators.parameter_hessian import open_parameters
from tests.helpers.kernel_counts import KernelCounts

# the package hides its module behind a class of the same name
pyhessian: Any = importlib.import_module("pyhessian.hessian")

LADDER = [0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001, 0.0005, 0.0002, 0.0001]
"""tolerances, from loose to strict, the same for all methods"""
STEPS = [6, 8, 10, 12, 15, 20, 25, 30, 40, 50, 70, 100]
"""for a method that has no tolerance and takes as many products as it is given"""


def by_curvmon(setting: Setting, k: int, seed: int, trace: bool = False, **options: Any) -> Answer:
    with counted_products() as count, counted_besides() as besides:
        found = curvmon.spectrum(
            setting.model,
            setting.batch,
            loss=setting.loss,
            k=k,
            seed=seed,
            ggn=False,
            trace=trace,
            smallest=False,
            **{"max_hvps": MOST_PRODUCTS, **options},
        )
    # the trace is counted first; then, where it tells where to begin, the start
    start = besides[1] if len(besides) > 1 else 0
    return Answer(found.eigenvalues.tolist(), count[0], count[0] + start if start else 0, found.hvps if trace else 0)


def by_pyhessian(setting: Setting, k: int, seed: int, tol: float) -> Answer:
    torch.manual_seed(seed)
    model = copy.deepcopy(setting.model)  # it leaves gradients behind
    with (
        counted_calls(pyhessian, "hessian_vector_product") as count,
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    ):
        calculator = pyhessian.hessian(model, setting.criterion, data=setting.batch, cuda=False)
        values, _ = calculator.eigenvalues(maxIter=100, tol=tol, top_n=k)
    return Answer(sorted(values, reverse=True), count[0])


def by_eigsh(setting: Setting, k: int, seed: int, tol: float, limit: int = MOST_PRODUCTS) -> Answer:
    parameters = [p for p in setting.model.parameters() if p.requires_grad]
    count = [0]
    with sdpa_kernel(SDPBackend.MATH):
        hessian = HessianLinearOperator(
            setting.model, setting.criterion, parameters, [setting.batch], check_deterministic=False
        ).to_scipy()

        def counting(z: Any) -> Any:
            one_more(count, limit)
            return hessian @ z.astype(np.float32)

        size = hessian.shape[0]
        operator = LinearOperator((size, size), matvec=counting, dtype=np.float32)
        start = np.random.default_rng(seed).standard_normal(size).astype(np.float32)
        values = eigsh(operator, k=k, which="LA", tol=tol, v0=start, return_eigenvectors=False)
    return Answer(sorted(values.tolist(), reverse=True), count[0])


def by_power_iteration(setting: Setting, k: int, seed: int, tol: float) -> Answer:
    """With deflation, stopped when the residual is `tol` of the eigenvalue: the rule by which curvmon stops."""
    values: list[float] = []
    vectors: list[Tensor] = []
    generator = torch.Generator().manual_seed(seed)
    with open_parameters(setting.model, [setting.batch], loss=setting.loss) as operator:
        for _ in range(k):
            z = torch.randn(operator.size, generator=generator)
            while True:
                if operator.products >= MOST_PRODUCTS:
                    raise InterruptedSearchError
                for known in vectors:
                    z = z - known.dot(z) * known
                z = z / torch.linalg.vector_norm(z)
                image = operator.hessian(z)
                value = z.dot(image).item()
                if torch.linalg.vector_norm(image - value * z).item() <= tol * abs(value):
                    break
                z = image
            values.append(value)
            vectors.append(z / torch.linalg.vector_norm(z))
        return Answer(sorted(values, reverse=True), operator.products)


@contextmanager
def eigenthings(setting: Setting) -> Iterator[tuple[Any, list[int]]]:
    """Its operator, which runs the network again for every product, and the number of products."""
    with counted_calls(HessianOperator, "matvec") as count, sdpa_kernel(SDPBackend.MATH):
        yield HessianOperator(setting.model, [setting.batch], setting.loss), count


def by_eigenthings(setting: Setting, k: int, seed: int, steps: float) -> Answer:
    with eigenthings(setting) as (operator, count):
        values = lanczos(operator, k=k, max_iter=int(steps), which="LA", seed=seed).eigenvalues
    return Answer(values.tolist(), count[0])


def by_eigenthings_power(setting: Setting, k: int, seed: int, tol: float) -> Answer:
    with eigenthings(setting) as (operator, count):
        values = deflated_power_iteration(operator, k=k, max_iter=100, tol=tol, seed=seed).eigenvalues
    return Answer(sorted(values.tolist(), reverse=True), count[0])


METHODS: dict[str, Callable[[Setting, int, int, float], Answer]] = {
    "curvmon": lambda setting, k, seed, tol: by_curvmon(setting, k, seed, trace=True, rtol=tol, verify=False),
    "curvmon, verified": lambda setting, k, seed, tol: by_curvmon(setting, k, seed, trace=True, rtol=tol),
    "curvmon, trace=False": lambda setting, k, seed, tol: by_curvmon(setting, k, seed, rtol=tol, verify=False),
    "curvmon, trace=False, verified": lambda setting, k, seed, tol: by_curvmon(setting, k, seed, rtol=tol),
    "PyHessian": by_pyhessian,
    "eigsh on curvlinops": by_eigsh,
    "hessian-eigenthings, Lanczos": by_eigenthings,
    "hessian-eigenthings, power iteration": by_eigenthings_power,
    "power iteration": by_power_iteration,
}
LADDERS = {"hessian-eigenthings, Lanczos": STEPS}
"""of the methods that have another one"""

BEGIN = {"PyHessian": 5e-4, "hessian-eigenthings, power iteration": 5e-3}
"""where the tolerance for several eigenvalues is about to be: the search begins there"""

LADDER_NOTE = (
    f"Tolerances tried: {', '.join(f'{tolerance:g}' for tolerance in LADDER)}, by bisection (verified: that of the "
    "search without); for hessian-eigenthings' Lanczos, which has no tolerance, its number of steps, the "
    f"first that serves of {', '.join(map(str, STEPS))}. A search of {MOST_PRODUCTS} HVPs is interrupted."
)
VERIFIED = {"curvmon, verified": "curvmon", "curvmon, trace=False, verified": "curvmon, trace=False"}
"""the method whose tolerance they are given: they add a second search to it"""


def truth(setting: Setting, k: int = 5) -> list[float]:
    """k eigenvalues from a longer run; the error of an eigenvalue is about the square of its residual: 1e-6 of it.

    That eigsh, from other starting vectors, is right by this truth confirms it.
    """
    return cached(f"truth of {k}, {setting.name}", lambda: by_curvmon(setting, k, 0, rtol=1e-3, max_hvps=600).values)


def truth_note(true: Sequence[float]) -> str:
    values = ", ".join(f"{value:.4g}" for value in true)
    return (
        f"True eigenvalues {values} (curvmon, verified, at a tolerance of 0.001; the errors of eigsh, which starts "
        "elsewhere, say how well they are known)."
    )


def attempt_at(
    tolerance: float,
    name: str,
    setting: Setting,
    k: int,
    true: list[float],
    starts: Sequence[int],
    first: Attempt | None = None,
) -> Attempt:
    """From every start, as long as it serves; `first`: what is known of the first one."""
    attempt = first or Attempt(tolerance, [], [], [], 0.0)
    for seed in starts[len(attempt.answers) :]:
        began = time.process_time()
        with KernelCounts() as counts:
            try:
                answer = METHODS[name](setting, k, seed, tolerance)
            except InterruptedSearchError:
                answer = Answer([math.nan] * k, MOST_PRODUCTS)
            except NotImplementedError as error:  # curvlinops needs forward derivatives of what torch has none for
                print(f"{name} does not run on {setting.name}: {error}", file=sys.stderr)
                answer = Answer([math.nan] * k, 0)
        attempt = Attempt(
            tolerance,
            [*attempt.answers, answer],
            [*attempt.seconds, time.process_time() - began],
            [*attempt.kernels, counts.totals[0]],
            max(attempt.error, _error(answer, true)),
        )
        if not attempt.serves:
            break
    return attempt


def loosest(
    name: str, setting: Setting, k: int, true: list[float], starts: Sequence[int], ladder: Sequence[float]
) -> Attempt:
    """At the loosest tolerance of the ladder with which all values are within one percent from every start.

    That of the first start is searched for, then the ladder is followed until the others are content, too.
    """

    def attempt(tolerance: float, among: Sequence[int] = starts, first: Attempt | None = None) -> Attempt:
        return attempt_at(tolerance, name, setting, k, true, among, first)

    # with more steps, hessian-eigenthings' Lanczos finds copies of eigenvalues: no bisection
    begin = BEGIN.get(name) if k > 1 else None
    first = loosest_of(ladder, lambda tolerance: attempt(tolerance, starts[:1]), begin, scan=name in LADDERS)
    if not first.serves:
        return first
    every = attempt(first.tolerance, first=first)
    for tolerance in ladder[ladder.index(first.tolerance) + 1 :]:
        if every.serves or every.interrupted:
            break
        every = attempt(tolerance)
    return every


def all_loosest(
    names: Iterable[str], setting: Setting, k: int, true: list[float], starts: Sequence[int]
) -> Iterator[tuple[str, Attempt]]:
    """Of every method; with a second search at the tolerance of the first."""
    attempts: dict[str, Attempt] = {}
    for name in names:
        first = attempts.get(VERIFIED.get(name, ""))
        ladder = LADDERS.get(name, LADDER) if first is None else [first.tolerance]
        attempts[name] = loosest(name, setting, k, true, starts, ladder)
        yield name, attempts[name]


def _error(answer: Answer, true: list[float]) -> float:
    errors = [abs(a - b) / abs(b) for a, b in zip(answer.values, true)]
    return math.inf if any(map(math.isnan, errors)) else max(errors)

"""The top eigenvalues of a network by curvmon, PyHessian, eigsh, hessian-eigenthings and power iteration.

Each stops by its own rule; all products are counted. At what tolerance all values are right: `loosest`.
"""

from __future__ import annotations

import copy
import importlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from curvlinops import HessianLinearOperator
from hessian_eigenthings import HessianOperator, deflated_power_iteration, lanczos
from scipy.sparse.linalg import LinearOperator, eigsh
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import curvmon
from benchmarks.trained import Setting
from curvmon.operators.parameter_hessian import ParameterOperator, open_parameters

# the package hides its module behind a class of the same name
pyhessian: Any = importlib.import_module("pyhessian.hessian")

LADDER = [step * 10.0**-decade for decade in (1, 2, 3) for step in (1, 0.7, 0.5, 0.3, 0.2)] + [1e-4]
"""tolerances, from loose to strict, the same for all methods"""
STEPS = [6, 8, 10, 12, 15, 20, 25, 30, 40, 50, 70, 100]
"""for a method that has no tolerance and takes as many products as it is given"""
WANTED = 1e-2
MOST_PRODUCTS = 400


class Answer(NamedTuple):
    values: list[float]
    products: int
    """of the search for eigenvalues"""
    started: int = 0
    """with what the start takes besides; 0 where there is nothing besides"""
    counted: int = 0
    """with all that curvmon counts, the trace too; 0 without these"""


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
            **options,
        )
    # the trace is counted first; then, where it tells where to begin, the start
    start = besides[1] if len(besides) > 1 else 0
    return Answer(found.eigenvalues.tolist(), count[0], count[0] + start if start else 0, found.hvps if trace else 0)


@contextmanager
def replaced(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, wrap(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def counted_calls(owner: Any, name: str) -> Iterator[list[int]]:
    count = [0]

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*args: Any) -> Any:
            count[0] += 1
            return original(*args)

        return counting

    with replaced(owner, name, wrap):
        yield count


@contextmanager
def counted_products() -> Iterator[list[int]]:
    """Products with H alone; `Spectrum.hvps` also counts what the trace and the start are worth."""
    count = [0]

    def wrap(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def counting(self: ParameterOperator, rows: Any, columns: Any, vectors: Tensor) -> Tensor:
            count[0] += vectors.shape[1]
            return original(self, rows, columns, vectors)

        return counting

    with replaced(ParameterOperator, "_block", wrap):
        yield count


@contextmanager
def counted_besides() -> Iterator[list[int]]:
    """What else is counted as so many products, in the order in which it was done."""
    spent: list[int] = []

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def noting(self: ParameterOperator, products: int) -> Any:
            spent.append(products)
            return original(self, products)

        return noting

    with replaced(ParameterOperator, "spend", wrap):
        yield spent


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


def by_eigsh(setting: Setting, k: int, seed: int, tol: float) -> Answer:
    parameters = [p for p in setting.model.parameters() if p.requires_grad]
    count = [0]
    with sdpa_kernel(SDPBackend.MATH):
        hessian = HessianLinearOperator(
            setting.model, setting.criterion, parameters, [setting.batch], check_deterministic=False
        ).to_scipy()

        def counting(z: Any) -> Any:
            count[0] += 1
            return hessian @ z.astype(np.float32)

        size = hessian.shape[0]
        operator = LinearOperator((size, size), matvec=counting, dtype=np.float32)
        start = np.random.default_rng(seed).standard_normal(size).astype(np.float32)
        values = eigsh(operator, k=k, which="LA", tol=tol, v0=start, return_eigenvectors=False)
    return Answer(sorted(values.tolist(), reverse=True), count[0])


def by_power_iteration(setting: Setting, k: int, seed: int, tol: float) -> Answer:
    """With deflation, stopped when the residual is `tol` of the eigenvalue: the rule by which curvmon stops.

    Given up after MOST_PRODUCTS.
    """
    values: list[float] = []
    vectors: list[Tensor] = []
    generator = torch.Generator().manual_seed(seed)
    with open_parameters(setting.model, [setting.batch], loss=setting.loss) as operator:
        for _ in range(k):
            z = torch.randn(operator.size, generator=generator)
            while operator.products < MOST_PRODUCTS:
                for known in vectors:
                    z = z - known.dot(z) * known
                z = z / torch.linalg.vector_norm(z)
                image = operator.hessian(z)
                value = z.dot(image).item()
                if torch.linalg.vector_norm(image - value * z).item() <= tol * abs(value):
                    break
                z = image
            else:
                return Answer([math.nan] * k, operator.products)
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


def truth(setting: Setting, k: int = 8) -> tuple[list[float], float]:
    """k eigenvalues from a long run, and how far eigsh at a tolerance of 1e-5 is from them, relatively."""
    long = by_curvmon(setting, k, 0, rtol=1e-5, max_hvps=600).values
    other = by_eigsh(setting, k, 1, tol=1e-5).values
    return long, max(abs(a - b) for a, b in zip(long, other)) / abs(long[0])


class Attempt(NamedTuple):
    """What a method finds from every start at one tolerance; if that does not serve, from some of them.

    Attributes:
        tolerance: or number of steps.
        answers: one for each start.
        seconds: of computing time, for each start.
        error: the largest relative error of any eigenvalue.
    """

    tolerance: float
    answers: list[Answer]
    seconds: list[float]
    error: float

    @property
    def serves(self) -> bool:
        return self.error <= WANTED


def loosest(name: str, setting: Setting, k: int, true: list[float], starts: Sequence[int]) -> Attempt:
    """At the loosest tolerance with which all values are within one percent; the last attempt if there is none."""
    for tolerance in LADDERS.get(name, LADDER):
        attempt = Attempt(tolerance, [], [], 0.0)
        for seed in starts:
            began = time.process_time()
            attempt.answers.append(METHODS[name](setting, k, seed, tolerance))
            attempt.seconds.append(time.process_time() - began)
            attempt = attempt._replace(error=max(attempt.error, _error(attempt.answers[-1], true)))
            if not attempt.serves:
                break
        if attempt.serves or math.isinf(attempt.error):  # given up: a stricter tolerance takes longer still
            break
    return attempt


def _error(answer: Answer, true: list[float]) -> float:
    errors = [abs(a - b) / abs(b) for a, b in zip(answer.values, true)]
    return math.inf if any(map(math.isnan, errors)) else max(errors)

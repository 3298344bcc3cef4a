"""The top eigenvalues of a trained network by curvmon, PyHessian, eigsh and power iteration, products counted."""

from __future__ import annotations

import copy
import importlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from curvlinops import HessianLinearOperator
from scipy.sparse.linalg import LinearOperator, eigsh
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import curvmon
from benchmarks.trained import Setting
from curvmon.operators.parameter_hessian import ParameterOperator, open_parameters

# the package hides its module behind a class of the same name
pyhessian: Any = importlib.import_module("pyhessian.hessian")


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
        def counting(self: ParameterOperator, vectors: Tensor) -> Tensor:
            count[0] += vectors.shape[1]
            return original(self, vectors)

        return counting

    with replaced(ParameterOperator, "_columns", wrap):
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


METHODS: dict[str, Callable[[Setting, int, int, float], Answer]] = {
    "curvmon": lambda setting, k, seed, tol: by_curvmon(setting, k, seed, trace=True, rtol=tol, verify=False),
    "curvmon, verified": lambda setting, k, seed, tol: by_curvmon(setting, k, seed, trace=True, rtol=tol),
    "curvmon, trace=False": lambda setting, k, seed, tol: by_curvmon(setting, k, seed, rtol=tol, verify=False),
    "curvmon, trace=False, verified": lambda setting, k, seed, tol: by_curvmon(setting, k, seed, rtol=tol),
    "PyHessian": by_pyhessian,
    "eigsh on curvlinops": by_eigsh,
    "power iteration": by_power_iteration,
}

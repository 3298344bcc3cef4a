"""The first paper's estimators, pair by pair: the baseline that curvmon.measure is compared with.

For every pair: R from 30 Rademacher probes; the spectral norm from 20 power iterations on H^T H; the gap from 30 more
probes, each with a product with H and one with GN. In its favour, graphs are built once and kept for all products (the
papers' code builds them again for each), and only what a pair needs is differentiated.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from curvmon.graph.autograd import differentiate, product
from curvmon.graph.taps import TappedGraph
from curvmon.operators.session import open_session
from curvmon.records import METRICS

PROBES, POWER_STEPS, GAP_PROBES = 30, 20, 30
PLAIN: dict[str, Any] = {"output": None, "batch_dim": 0, "dtype": None, "efficient": False}
"""torch's own operations: what `curvmon.graph.efficient_operations` saves is no part of the papers' protocol"""


class Protocol(NamedTuple):
    resonance: Tensor
    coupling: Tensor
    stable_rank: Tensor
    gn_gap: Tensor
    hvps: int
    seconds: float
    """of computing time"""


class _Pair:
    """Products with H[v, w], its transpose and GN[v, w] of one graph."""

    def __init__(self, graph: TappedGraph) -> None:
        self._graph = graph
        self._gradients = differentiate([graph.loss], graph.taps, create_graph=True)
        self._at_output = differentiate([graph.loss], graph.output_taps, create_graph=True)
        self._cotangents = [torch.zeros_like(out, requires_grad=True) for out in graph.outputs]
        self._pullbacks = differentiate(graph.outputs, graph.taps, self._cotangents, create_graph=True)
        self.products = 0

    def hessian(self, v: int, w: int, z: Tensor) -> Tensor:
        self.products += 1
        return product([self._gradients[w]], [self._graph.taps[v]], [z])[0]

    def gauss_newton(self, v: int, w: int, z: Tensor) -> Tensor:
        self.products += 1
        tangents = product([self._pullbacks[w]], self._cotangents, [z])
        curved = product(self._at_output, self._graph.output_taps, tangents)
        return product(self._graph.outputs, [self._graph.taps[v]], curved)[0]


def papers_protocol(
    model: nn.Module,
    batch: Any,
    *,
    loss: Callable[[Any, Any], Tensor],
    nodes: Sequence[str],
    seed: int = 0,
    only: Sequence[tuple[int, int]] | None = None,
) -> Protocol:
    """All pairs, or those given by their indices (v, w) with v <= w."""
    start = time.process_time()
    torch.manual_seed(seed)
    with open_session(model, batch, loss=loss, nodes=nodes, **PLAIN) as session:
        pair = _Pair(session.operator.graph)
        taps = session.operator.graph.taps
        n = len(taps)
        found = {name: torch.full((n, n), math.nan, dtype=torch.float64) for name in METRICS}
        for v, w in only or list(itertools.combinations_with_replacement(range(n), 2)):
            norm = _mean_square(lambda z: pair.hessian(v, w, z), taps[w], PROBES)  # noqa: B023
            values = math.sqrt(norm), norm / _power_iteration(pair, v, w, taps[w]) ** 2, _gap(pair, v, w, taps[w])
            for name, value in zip(("resonance", "stable_rank", "gn_gap"), values):
                found[name][v, w] = found[name][w, v] = value
    own = found["resonance"].diagonal()
    found["coupling"] = found["resonance"] / (own.unsqueeze(0) * own.unsqueeze(1)).sqrt()
    return Protocol(**found, hvps=pair.products, seconds=time.process_time() - start)


def seconds_of_protocol(
    model: nn.Module, batch: Any, *, loss: Callable[[Any, Any], Tensor], nodes: Sequence[str]
) -> float:
    """What `papers_protocol` would take: every kind of product of every pair is timed (best of two) and multiplied."""
    total = 0.0
    with open_session(model, batch, loss=loss, nodes=nodes, **PLAIN) as session:
        pair, taps = _Pair(session.operator.graph), session.operator.graph.taps
        for v, w in itertools.combinations_with_replacement(range(len(taps)), 2):
            z, u = _rademacher(taps[w]), _rademacher(taps[v])
            total += (PROBES + POWER_STEPS + 1 + GAP_PROBES) * _seconds(pair.hessian, v, w, z)
            total += POWER_STEPS * _seconds(pair.hessian, w, v, u)
            total += GAP_PROBES * _seconds(pair.gauss_newton, v, w, z)
    return total


def _seconds(product: Callable[[int, int, Tensor], Tensor], v: int, w: int, z: Tensor) -> float:
    times = []
    for _ in range(2):
        start = time.process_time()
        product(v, w, z)
        times.append(time.process_time() - start)
    return min(times)


def _rademacher(like: Tensor) -> Tensor:
    return torch.randint(2, like.shape).to(like) * 2 - 1


def _mean_square(image: Callable[[Tensor], Tensor], like: Tensor, probes: int) -> float:
    return sum(image(_rademacher(like)).double().square().sum().item() for _ in range(probes)) / probes


def _power_iteration(pair: _Pair, v: int, w: int, like: Tensor) -> float:
    z = torch.randn_like(like)
    for _ in range(POWER_STEPS):
        z = pair.hessian(w, v, pair.hessian(v, w, z / z.norm()))
    return pair.hessian(v, w, z / z.norm()).norm().item()


def _gap(pair: _Pair, v: int, w: int, like: Tensor) -> float:
    remainder = gauss_newton = 0.0
    for _ in range(GAP_PROBES):
        z = _rademacher(like)
        known = pair.gauss_newton(v, w, z)
        remainder += (pair.hessian(v, w, z) - known).double().square().sum().item()
        gauss_newton += known.double().square().sum().item()
    return math.sqrt(remainder / gauss_newton) if gauss_newton else math.nan

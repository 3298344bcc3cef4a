"""The ends of the spectrum of the loss Hessian by the parameters, its trace, and the same for its Gauss-Newton part."""

from __future__ import annotations

import math
import time
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from curvmon.curvature.arguments import check_budget, check_integer
from curvmon.curvature.intervals import small_sample_factor
from curvmon.curvature.lanczos import Lanczos, Product
from curvmon.curvature.parameters import ParameterOperator, open_parameters
from curvmon.curvature.randomness import gaussian
from curvmon.curvature.session import Loss
from curvmon.curvature.stability import stability_limit
from curvmon.errors import InputError
from curvmon.types import Density, Spectrum

EXTRA_VECTORS = 20
"""basis vectors beyond k: what bounds the memory"""
TRACE_PROBES = 10
DENSITY_RUNS, DENSITY_STEPS = 4, 20
FRESH_STEPS = 8
"""products at least before a second start may say that it finds nothing larger"""


def spectrum(
    model: nn.Module,
    batch: Any,
    *,
    loss: Loss,
    k: int = 5,
    ggn: bool = True,
    trace: bool = True,
    density: bool = False,
    start: Spectrum | None = None,
    seed: int = 0,
    optimizer: torch.optim.Optimizer | None = None,
    rtol: float = 1e-4,
    max_hvps: int = 300,
    verify: bool = True,
) -> Spectrum:
    """The k largest eigenvalues of d²L/dθ² and the smallest, the top one of its Gauss-Newton part, and the trace.

    By Lanczos' method with full reorthogonalisation: one Hessian-vector product a step, at most k + 20 vectors of the
    size of the parameters in memory. θ are the parameters that require gradients. The model is as before afterwards; it
    is measured in eval mode, in float32 or better.

    An eigenvalue is `converged` if ‖Hv - λv‖ is below `rtol` times the largest magnitude: then there is an eigenvalue
    that close. A Krylov space holds one copy of a multiple eigenvalue, so with `verify` a second start, orthogonal to
    what was found, looks for others, until it finds none; without, a note says that they were not looked for.

    Args:
        model: any module.
        batch: whatever `loss` takes.
        loss: `loss(model, batch)` returns a scalar tensor.
        k: how many eigenvalues, counted from the largest in value (`Spectrum.largest_magnitude` is another thing).
        ggn: also the top eigenvalue of the Gauss-Newton part, as a rule a few products more.
        trace: also the trace, exactly on the Krylov space and by ten random probes outside.
        density: also the distribution of all eigenvalues, by stochastic Lanczos quadrature: 80 products more.
        start: an earlier result for the same parameters; its eigenvectors are where to begin.
        seed: of the start vector and the probes.
        optimizer: whose limit of stability to compare with; see `stability_limit`. Adam and the like cost some products
            more, for the eigenvalue of the preconditioned Hessian.
        rtol: relative size of a residual that counts as converged.
        max_hvps: stop before this many products for the eigenvalues; what has not converged by then says so.
        verify: look for further copies of the eigenvalues found.

    Example:
        >>> import torch, curvmon
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> batch = torch.randn(64, 4), torch.randn(64, 1)
        >>> s = curvmon.spectrum(net, batch, loss=lambda net, b: torch.nn.functional.mse_loss(net(b[0]), b[1]), k=3)
        >>> s.eigenvalues.shape, s.converged.all().item()
        (torch.Size([3]), True)
    """
    began = time.perf_counter()
    check_budget(rtol, max_hvps, seed)
    check_integer("k", k)
    if k < 1:
        raise InputError(f"k must be at least 1, not {k}")
    notes: list[str] = []
    with open_parameters(model, batch, loss=loss) as operator:
        search = _Search(operator, k, rtol, max_hvps, torch.Generator("cpu").manual_seed(seed))
        space = search.ends(_start(operator, start))
        total, stderr = search.trace(space) if trace else (math.nan, math.nan)
        found, steps = search.extract(space), space.products
        verified = False
        missing = len(found.values) < min(k, operator.size)  # an invariant space that is too small
        if (verify or missing) and found.settled(rtol).all():
            found, verified = search.verify(found, steps)
        converged = found.settled(rtol)
        if not converged.all():
            notes.append(f"{int((~converged).sum())} of {len(converged)} values have not converged to rtol={rtol:g}")
        elif not verified:
            notes.append("multiple eigenvalues were not looked for: one of multiplicity two may be listed once")
        top_ggn = error = math.nan
        if ggn and operator.has_ggn:
            top_ggn = search.top(operator.ggn, found.vectors[0])
            sharpness = found.values[0].item()
            error = abs(sharpness - top_ggn) / abs(sharpness) if sharpness else math.nan
        elif ggn:
            notes.append(
                "ggn_eigenvalue is NaN: the output of the network is not known, or part of the loss does not pass "
                "through it (no torch loss function was seen, or another term is written by hand)"
            )
        limit = ratio = math.nan
        if optimizer is not None:
            limit, ratio, reason = search.stability(optimizer, found)
            notes.append(f"stability limit: {reason}")
        distribution = search.density() if density else None
        if operator.custom_functions:
            notes.append(
                f"custom autograd functions ({', '.join(operator.custom_functions)}): the numbers are right only if "
                f"their backward can be differentiated"
            )
    top = min(k, len(found.values))
    return Spectrum(
        eigenvalues=found.values[:top],
        smallest=found.values[-1].item(),
        residuals=found.residuals[:top],
        converged=converged[:top],
        smallest_converged=bool(converged[-1]),
        eigenvectors=torch.stack(found.vectors[:top], dim=1),
        ggn_eigenvalue=top_ggn,
        ggn_error=error,
        trace=total,
        trace_stderr=stderr,
        density=distribution,
        stability_limit=limit,
        stability_ratio=ratio,
        parameters=operator.names,
        loss=operator.loss,
        hvps=operator.products,
        seconds=time.perf_counter() - began,
        notes=tuple(notes),
    )


def _start(operator: ParameterOperator, earlier: Spectrum | None) -> Tensor | None:
    if earlier is None:
        return None
    if earlier.parameters != operator.names or len(earlier.eigenvectors) != operator.size:
        raise InputError("start= is the spectrum of another model, or of other parameters; leave it out")
    return earlier.eigenvectors.to(operator.template).sum(1)


class Found(NamedTuple):
    """Eigenvalues from the top, largest first, and the smallest as the last one; with vectors and residuals."""

    values: Tensor
    residuals: Tensor
    vectors: list[Tensor]

    def settled(self, rtol: float) -> Tensor:
        return self.residuals <= rtol * self.values.abs().max()


class _Search:
    """Looks for the ends of the spectrum with several Krylov spaces, one after the other.

    In memory at any time: k + 1 eigenvectors, and the vectors of one space.
    """

    def __init__(
        self, operator: ParameterOperator, k: int, rtol: float, limit: int, generator: torch.Generator
    ) -> None:
        self._operator = operator
        self._k = min(k, operator.size)
        self._rtol = rtol
        self._limit = limit
        self._generator = generator

    def random(self) -> Tensor:
        return gaussian(self._operator.template.expand(self._operator.size), 1, self._generator).squeeze(1)

    def ends(self, start: Tensor | None) -> Lanczos:
        """A Krylov space that holds the k largest eigenvalues and the smallest one, as far as the limit allows."""
        first = self.random()
        if start is not None:
            # a new direction may have come up since: keep some chance for it
            first = start / torch.linalg.vector_norm(start) + 0.1 * first / torch.linalg.vector_norm(first)
        space = Lanczos(self._operator.hessian, first, capacity=self._k + EXTRA_VECTORS - 3)
        while not space.exhausted and space.products < self._limit:
            space.step(self._k + 3, 2)
            ritz = space.ends(self._k, 1)
            enough = len(space.basis) > self._k
            if enough and (ritz.residuals <= self._rtol * ritz.values.abs().max()).all():
                break
        return space

    def extract(self, space: Lanczos) -> Found:
        ritz = space.ends(self._k, 1)
        return Found(ritz.values, ritz.residuals, space.reduce(self._k, 1))

    def verify(self, found: Found, steps: int) -> tuple[Found, bool]:
        """Look for what a Krylov space cannot hold, a further copy of an eigenvalue; add what belongs to the ends.

        A second start, orthogonal to what was found, has the same chances as the first: `steps` products.
        """
        while len(found.values) < self._operator.size and self._operator.products < self._limit:
            few = len(found.values) <= self._k
            space = Lanczos(self._operator.hessian, self.random(), capacity=EXTRA_VECTORS - 6, locked=found.vectors)
            scale = found.values.abs().max().item() * self._rtol
            while not space.exhausted and self._operator.products < self._limit:
                space.step(3, 2)
                ritz = space.ends(1, 1)
                high, low = ritz.values[0].item(), ritz.values[-1].item()
                above = high > found.values[: self._k][-1].item() + scale
                below = low < found.values[-1].item() - scale
                unsettled = (ritz.residuals > scale).tolist()
                if space.products < min(FRESH_STEPS, steps):
                    continue
                if few or above or below:
                    if not unsettled[0] and not unsettled[-1]:
                        break
                elif space.products >= steps or not any(unsettled):
                    break
            if not space.basis:
                break
            ritz = space.ends(1, 1)
            found, changed = self._merged(found, Found(ritz.values, ritz.residuals, space.reduce(1, 1)), few, scale)
            if not changed:
                return found, True
        return found, len(found.values) == self._operator.size

    def _merged(self, found: Found, fresh: Found, few: bool, scale: float) -> tuple[Found, bool]:
        """The ends of both together, and whether the second one changed anything."""
        values = torch.cat([found.values, fresh.values])
        residuals = torch.cat([found.residuals, fresh.residuals])
        vectors = [*found.vectors, *fresh.vectors]
        order = values.argsort(descending=True, stable=True).tolist()
        kept = [*order[: self._k], *order[self._k :][-1:]]
        merged = Found(values[kept], residuals[kept], [vectors[i] for i in kept])
        if few:
            return merged, len(kept) > len(found.values)
        return merged, bool(((merged.values - found.values).abs() > scale).any())

    def top(self, product: Product, start: Tensor) -> float:
        """The largest eigenvalue of another operator, from a vector that should be close to its own."""
        space = Lanczos(product, start + 1e-3 * self.random() / math.sqrt(len(start)), capacity=EXTRA_VECTORS - 6)
        while not space.exhausted and space.products < self._limit:
            space.step(3, 0)
            ritz = space.ends(1, 0)
            if ritz.residuals[0] <= self._rtol * ritz.values.abs().max():
                break
        return space.ends(1, 0).values[0].item()

    def stability(self, optimizer: torch.optim.Optimizer, found: Found) -> tuple[float, float, str]:
        """The limit, λ_1 over it, and which limit it is; for a preconditioner P, λ_1 is that of P^-1/2 H P^-1/2."""
        rule = stability_limit(optimizer)
        if math.isnan(rule.limit) or rule.preconditioner is None:
            return rule.limit, found.values[0].item() / rule.limit, rule.reason
        # a parameter that the optimizer does not move cannot make it unstable
        root = self._operator.flat(rule.preconditioner, math.inf).rsqrt()
        start = found.vectors[0] / root.clamp_min(torch.finfo(root.dtype).tiny)
        start = torch.where(root > 0, start, 0.0)
        top = self.top(lambda z: root * self._operator.hessian(root * z), start / torch.linalg.vector_norm(start))
        return rule.limit, top / rule.limit, rule.reason

    def density(self) -> Density:
        """Gauss quadrature of the spectral measure of random vectors: Ritz values with squared first components."""
        values, weights = [], []
        for _ in range(DENSITY_RUNS):
            space = Lanczos(self._operator.hessian, self.random(), capacity=DENSITY_STEPS)
            while not space.exhausted and space.products < DENSITY_STEPS:
                space.step(1, 1)
            nodes, vectors = torch.linalg.eigh(space.projected)
            values.append(nodes)
            weights.append(vectors[0].square() / DENSITY_RUNS)
        return Density(torch.cat(values), torch.cat(weights))

    def trace(self, space: Lanczos) -> tuple[float, float]:
        """tr T + d E u^T H u, u a random unit vector outside the basis, where there are d dimensions."""
        known = space.projected.trace().item()
        dimensions = self._operator.size - len(space.basis)
        if dimensions == 0:
            return known, 0.0
        probes: list[Tensor] = []
        samples = []
        for _ in range(min(TRACE_PROBES, dimensions)):
            probe, _ = space.outside(self.random())
            for earlier in [*probes, *probes]:  # orthogonal to each other: sampling without replacement
                probe = probe - earlier.dot(probe) * earlier
            probe = probe / torch.linalg.vector_norm(probe)
            samples.append(probe.dot(self._operator.hessian(probe)).item())
            probes.append(probe)
        values = torch.tensor(samples, dtype=torch.float64, device="cpu")
        total = known + dimensions * values.mean().item()
        if len(values) == dimensions:
            return total, 0.0
        spread = values.std().item() * math.sqrt((1 - len(values) / dimensions) / len(values))
        return total, dimensions * spread * small_sample_factor(len(values) - 1)

"""Estimates of the metrics of all pairs from factors, bases and probes, with standard errors by the delta method.

‖H[v, w]‖_F² = captured by the bases + ‖P_v H[v, w] P_w‖_F² by probes, with GN as a control variate
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from curvmon.errors import DifferencesError
from curvmon.operators.node_blocks import Part
from curvmon.pairs.gauss_newton import GaussNewtonPart
from curvmon.pairs.gauss_newton_factors import OutsideFactors
from curvmon.pairs.images import Images
from curvmon.pairs.pair_metrics import Matrices, Norms, metrics_of_norms
from curvmon.pairs.random_probes import RestSamples, Term
from curvmon.pairs.shared_basis import PARTS, PartNorms, SharedBasis
from curvmon.pairs.spectral_norm import SpectralNorm
from curvmon.records import Metric

RelativeError = Callable[[int, int, float, float, float], float]
"""of products with H[v, w], from v, w and the norms of H, T and GN"""
LARGEST_ERROR = 0.1
"""of products with a diagonal block, above which they are not products with a Hessian"""
NEGLIGIBLE = 1e-3
"""share of the largest block, below which its products may have any error"""


def exact_products(v: int, w: int, hessian: float, remainder: float, gauss_newton: float) -> float:
    return 0.0


class RestEstimate(NamedTuple):
    """An estimate of ‖P_v A P_w‖_F², linear in the norms from probes and in the one of GN from factors.

    With GN as a control variate: estimate(H) = probes(H) - probes(GN) + factors(GN).
    """

    value: float
    probe_terms: tuple[tuple[float, Part], ...]
    """(slope, part)"""
    factor_slope: float


class Assembler:
    """Computes the metrics from the finished bases and the samples so far."""

    def __init__(
        self,
        images: Images,
        basis: SharedBasis,
        rest: RestSamples,
        part: GaussNewtonPart,
        names: tuple[str, ...],
        dimensions: Sequence[int],
        eps: float,
        relative_error: RelativeError = exact_products,
    ) -> None:
        self._relative_error = relative_error
        self._errors_of_products: dict[tuple[int, int], float] = {}
        self._images = images
        self._dimensions = dimensions
        self._basis = basis
        self._rest = rest
        self._part = part
        self._names = names
        self._eps = eps
        self._pairs = [(v, w) for v in range(len(names)) for w in range(v, len(names))]
        self._blocks: dict[tuple[int, int], PartNorms] = {
            (v, w): basis.captured(v, w) for v, w in self._pairs if not part.gives_hessian(v, w)
        }
        self._asymmetries: dict[tuple[int, int], float] = {}
        self._factors: OutsideFactors | None = None
        """P_v GN[v, w] P_w from factors"""
        if self._blocks and part.factors is not None and part.factors.rows is not None:
            self._factors = part.factors.outside({v: basis.vectors(v) for v in images.nodes})
        self._spectral_norms: dict[tuple[int, int], SpectralNorm] = {}
        self._rest_estimates: dict[tuple[Part, int, int], RestEstimate] = {}

    def notes(self, matrices: Matrices, rtol: float) -> list[str]:
        return [*self._asymmetry_notes(), *self._rank_notes(matrices, rtol)]

    def _rank_notes(self, matrices: Matrices, rtol: float) -> list[str]:
        """Spectral norms that did not converge within the budget for the bases; probes do not help there."""
        unconverged = [
            f"{self._names[v]}--{self._names[w]}"
            for v, w in self._blocks
            if matrices.get("stderr/stable_rank", v, w) > 2 * rtol * matrices.get("stable_rank", v, w)
        ]
        if not unconverged:
            return []
        where = ", ".join(unconverged) if len(unconverged) <= 6 else f"{len(unconverged)} of {len(self._pairs)} pairs"
        return [f"stable_rank has not converged for {where} (a flat spectrum); a larger max_hvps would help"]

    def _asymmetry_notes(self) -> list[str]:
        """An asymmetry far above rounding: a backward pass between the nodes and the loss is wrong to second order."""
        limit = 30 * math.sqrt(self._eps)
        worst = max(self._asymmetries, key=lambda pair: self._asymmetries[pair], default=None)
        if worst is None or self._asymmetries[worst] < limit:
            return []
        v, w = (self._names[node] for node in worst)
        return [
            f"suspect: H[{v}, {w}] is not symmetric (by {self._asymmetries[worst]:.1g} of its size); its "
            f"precision does not resolve it, or a custom autograd function has a wrong second derivative"
        ]

    def matrices(self) -> Matrices:
        self._rest_estimates.clear()
        if self._blocks:
            extended = SharedBasis(self._images, self._rest.kept())
            self._asymmetries = {pair: extended.asymmetry(*pair) for pair in self._blocks}
            self._spectral_norms = dict(zip(self._blocks, extended.spectral_norms(list(self._blocks)).norms))
        matrices = Matrices(self._names)
        norms = {(v, w): self._norms(v, w) for v, w in self._pairs}
        self._errors_of_products = {pair: self._error_of_products(*pair, norms[pair]) for pair in self._blocks}
        self._check_products(norms)
        for (v, w), pair in norms.items():
            own = norms[v, v].hessian, norms[w, w].hessian
            matrices.put_metrics(v, w, metrics_of_norms(pair, *own, self._eps, diagonal=v == w), pair)
            for metric, error in self._errors(v, w, pair, *own).items():
                matrices.put_error(metric, v, w, error)
        return matrices

    def _error_of_products(self, v: int, w: int, norms: Norms) -> float:
        hessian, gauss_newton, remainder = (math.sqrt(max(x, 0.0)) for x in norms[:3])
        return self._relative_error(v, w, hessian, remainder, gauss_newton)

    def _check_products(self, norms: Mapping[tuple[int, int], Norms]) -> None:
        """Raises `DifferencesError` where products with diagonal blocks are not what a Hessian gives."""
        least = NEGLIGIBLE**2 * max((norms[v, w].hessian for v, w in self._blocks if v == w), default=0.0)
        errors = {v: e for (v, w), e in self._errors_of_products.items() if v == w and norms[v, v].hessian > least}
        v = max(errors, key=lambda node: errors[node], default=None)
        if v is not None and errors[v] > LARGEST_ERROR:
            raise DifferencesError(
                f"at {self._names[v]}, differences of gradients over two step sizes disagree by {errors[v]:.0%}: the "
                f"loss has kinks or jumps there, or rounding hides its curvature"
            )

    def _norms(self, v: int, w: int) -> Norms:
        if self._part.gives_hessian(v, w):
            assert self._part.factors is not None
            norm = self._part.factors.norm_squared(v, w)
            return Norms(norm, norm, 0.0, self._spectral(v, w)[0])
        hessian, gauss_newton, remainder = (
            captured + self._rest_estimate(part, v, w).value for part, captured in zip(PARTS, self._blocks[v, w])
        )
        hessian, gauss_newton = max(hessian, 0.0), max(gauss_newton, 0.0)
        return Norms(hessian, gauss_newton, remainder, min(self._spectral(v, w)[0], math.sqrt(hessian)))

    def _spectral(self, v: int, w: int) -> tuple[float, float]:
        """‖H[v, w]‖_2 and its standard error."""
        if self._part.gives_hessian(v, w):
            assert self._part.factors is not None
            return self._part.factors.spectral_norm(v, w), 0.0
        lower, upper = self._rest.spectral_norms(v, w)
        norm, error = self._spectral_norms[v, w].corrected(lower, upper)
        if norm >= lower:
            return norm, error
        # according to the probes, the rest has a larger norm than the part in the bases
        return lower, max(error, lower - norm, 0.1 * lower)

    def _rest_estimate(self, part: Part, v: int, w: int) -> RestEstimate:
        if (part, v, w) not in self._rest_estimates:
            self._rest_estimates[part, v, w] = self._best_estimate(part, v, w)
        return self._rest_estimates[part, v, w]

    def _best_estimate(self, part: Part, v: int, w: int) -> RestEstimate:
        """From the probes alone or with the factors, whichever has the smaller standard error."""
        probed = RestEstimate(self._rest.mean(part, v, w), ((1.0, part),), 0.0)
        complete = self._basis.is_complete(v) or self._basis.is_complete(w)
        if part == "remainder" or self._factors is None or complete:
            return probed
        gauss_newton = self._factors.norm_squared(v, w)
        if gauss_newton <= 2 * self._factors.standard_error([(1.0, v, w)]) and not math.isnan(probed.value):
            return probed  # within the error of the sketch; it may even be negative
        if part == "gauss_newton" or {v, w} & self._part.linear_nodes:
            mixed = RestEstimate(gauss_newton, (), 1.0)
        else:
            value = probed.value + gauss_newton - self._rest.mean("gauss_newton", v, w)
            mixed = RestEstimate(value, ((1.0, part), (-1.0, "gauss_newton")), 1.0)
        better = self._standard_error([(1.0, mixed, v, w)]) <= self._standard_error([(1.0, probed, v, w)])
        return mixed if better or math.isnan(probed.value) else probed

    def _standard_error(self, terms: list[tuple[float, RestEstimate, int, int]]) -> float:
        """Standard error of Σ slope · estimate over (slope, estimate, v, w), from the probes and from the factors."""
        probed: list[Term] = [
            (slope * own, part, v, w) for slope, estimate, v, w in terms for own, part in estimate.probe_terms
        ]
        error = self._rest.standard_error(probed)
        factored = [(slope * e.factor_slope, v, w) for slope, e, v, w in terms if e.factor_slope]
        if not factored or self._factors is None:
            return error
        return math.hypot(error, self._factors.standard_error(factored))

    def _errors(self, v: int, w: int, norms: Norms, row: float, col: float) -> dict[Metric, float]:
        """Standard errors by the delta method, plus rounding."""

        def noise(*terms: Term) -> float:
            return self._standard_error(
                [(s, self._rest_estimate(p, i, j), i, j) for s, p, i, j in terms if not self._part.gives_hessian(i, j)]
            )

        rounding = self._rounding(v, w)
        if norms.hessian == 0:
            least = math.sqrt(noise((1.0, "hessian", v, w)))
            return {"resonance": least, "coupling": math.nan, "stable_rank": math.nan, "gn_gap": math.nan}
        resonance = math.sqrt(norms.hessian)
        relative = noise((0.5 / norms.hessian, "hessian", v, w))
        rank = norms.hessian / norms.spectral**2 if norms.spectral else math.nan
        missing = self._spectral(v, w)[1] / norms.spectral if norms.spectral else math.nan
        errors: dict[Metric, float] = {
            "resonance": resonance * math.hypot(relative, rounding),
            "coupling": 0.0,
            "stable_rank": rank * 2 * math.hypot(relative, missing, rounding),
            "gn_gap": math.nan,
        }
        if v != w and row > 0 and col > 0:
            relative = noise(
                (0.5 / norms.hessian, "hessian", v, w),
                (-0.25 / row, "hessian", v, v),
                (-0.25 / col, "hessian", w, w),
            )
            errors["coupling"] = resonance / (row * col) ** 0.25 * math.hypot(relative, rounding)
        if norms.gauss_newton > 0:
            gap = math.sqrt(norms.remainder / norms.gauss_newton)
            terms: list[Term] = [(-0.5 * gap / norms.gauss_newton, "gauss_newton", v, w)]
            if gap > 0:
                terms.append((0.5 * gap / norms.remainder, "remainder", v, w))
            errors["gn_gap"] = math.hypot(
                noise(*terms), rounding * (1 + gap + resonance / math.sqrt(norms.gauss_newton))
            )
        return errors

    def _rounding(self, v: int, w: int) -> float:
        """Relative rounding error: from the dimensions, and as observed in the asymmetry of the blocks.

        Or of their products, where these are differences.
        """
        size = max(self._dimensions[v], self._dimensions[w])
        if self._part.gives_hessian(v, w) and self._part.factors is not None:
            # the product of nearly orthogonal factors suffers from cancellation
            return (4 + math.sqrt(size)) * self._eps * math.sqrt(self._part.factors.orthogonality(v, w))
        pairs = {(v, v), (v, w), (w, w)}
        asymmetries = [self._asymmetries.get(pair, 0.0) for pair in pairs]
        differences = [self._errors_of_products.get(pair, 0.0) for pair in pairs]
        return max((4 + math.sqrt(size)) * self._eps, *asymmetries, *differences)

"""From what factors, bases and probes know to the four metrics of all pairs, with their standard errors."""

from __future__ import annotations

import math
from typing import NamedTuple

from curvmon.pairs.gauss_newton import Knowledge
from curvmon.pairs.pair_metrics import Matrices, Norms, pair_metrics
from curvmon.pairs.random_probes import PARTS, Part, RestSamples, Term
from curvmon.pairs.shared_basis import Leading, PerPart, SharedBasis
from curvmon.records import Metric


class Block(NamedTuple):
    """What the bases know of one pair v <= w."""

    captured: PerPart
    asymmetry: float


class Mixture(NamedTuple):
    """‖P_v A P_w‖_F² = by_probes + share · (known - the probes' own estimate) of GN: a control variate."""

    value: float
    probed: tuple[tuple[float, Part], ...]
    """(slope, part) that the probes contribute"""
    share: float
    """slope of the norm that the factors know"""


class Assembler:
    """Reads finished bases and the samples so far; can be asked again when there are more."""

    def __init__(
        self, basis: SharedBasis, rest: RestSamples, known: Knowledge, names: tuple[str, ...], eps: float
    ) -> None:
        self._basis = basis
        self._rest = rest
        self._known = known
        self._names = names
        self._eps = eps
        self._pairs = [(v, w) for v in range(len(names)) for w in range(v, len(names))]
        self._blocks = {
            (v, w): Block(basis.captured(v, w), basis.asymmetry(v, w))
            for v, w in self._pairs
            if not self._is_known(v, w)
        }
        self._leading: dict[tuple[int, int], Leading] = {}
        self._mixtures: dict[tuple[Part, int, int], Mixture] = {}

    def _is_known(self, v: int, w: int) -> bool:
        """H = GN there, and GN is known exactly."""
        return self._known.is_exact and bool({v, w} & self._known.flat)

    def notes(self, matrices: Matrices, rtol: float) -> list[str]:
        return [*self._asymmetry_notes(), *self._rank_notes(matrices, rtol)]

    def _rank_notes(self, matrices: Matrices, rtol: float) -> list[str]:
        """Spectral norms that the budget for the bases did not settle; probes do not help there."""
        unsettled = [
            f"{self._names[v]}--{self._names[w]}"
            for v, w in self._blocks
            if matrices.get("stderr/stable_rank", v, w) > 2 * rtol * matrices.get("stable_rank", v, w)
        ]
        if not unsettled:
            return []
        where = ", ".join(unsettled) if len(unsettled) <= 6 else f"{len(unsettled)} of {len(self._pairs)} pairs"
        return [f"stable_rank is not settled for {where} (a flat spectrum); a larger max_hvps would help"]

    def _asymmetry_notes(self) -> list[str]:
        """Far more than rounding: some backward pass between the nodes and the loss is wrong to second order."""
        limit = 30 * math.sqrt(self._eps)
        worst = max(self._blocks, key=lambda pair: self._blocks[pair].asymmetry, default=None)
        if worst is None or self._blocks[worst].asymmetry < limit:
            return []
        v, w = (self._names[node] for node in worst)
        return [
            f"suspect: H[{v}, {w}] is not symmetric (by {self._blocks[worst].asymmetry:.1g} of its size); its "
            f"precision does not resolve it, or a custom autograd function has a wrong second derivative"
        ]

    def matrices(self) -> Matrices:
        self._mixtures.clear()
        everything = self._basis.with_more(self._rest.directions())
        self._leading = {(v, w): everything.leading(v, w) for v, w in self._blocks}
        matrices = Matrices(self._names)
        norms = {(v, w): self._norms(v, w) for v, w in self._pairs}
        for (v, w), pair in norms.items():
            own = norms[v, v].hessian, norms[w, w].hessian
            matrices.put_metrics(v, w, pair_metrics(pair, *own, self._eps, diagonal=v == w), pair)
            for metric, error in self._errors(v, w, pair, *own).items():
                matrices.put_error(metric, v, w, error)
        return matrices

    def _norms(self, v: int, w: int) -> Norms:
        if self._is_known(v, w):
            assert self._known.factors is not None
            norm = self._known.factors.norm_squared(v, w)
            return Norms(norm, norm, 0.0, self._spectral(v, w)[0])
        block = self._blocks[v, w]
        hessian, gauss_newton, remainder = (
            captured + self._mixture(part, v, w).value for part, captured in zip(PARTS, block.captured)
        )
        hessian, gauss_newton = max(hessian, 0.0), max(gauss_newton, 0.0)
        return Norms(hessian, gauss_newton, remainder, min(self._spectral(v, w)[0], math.sqrt(hessian)))

    def _spectral(self, v: int, w: int) -> tuple[float, float]:
        """‖H[v, w]‖_2 and its standard error."""
        if self._is_known(v, w):
            assert self._known.factors is not None
            return self._known.factors.spectral_norm(v, w), 0.0
        at_least, at_most = self._rest.spectral_norms(v, w)
        norm, error = self._leading[v, w].corrected(at_least, at_most)
        if norm >= at_least:
            return norm, error
        # what the bases missed altogether is stronger than what they hold, as far as few probes can tell
        return at_least, max(error, at_least - norm, 0.1 * at_least)

    def _mixture(self, part: Part, v: int, w: int) -> Mixture:
        """Let the factors bear what they know better than the probes do."""
        if (part, v, w) not in self._mixtures:
            self._mixtures[part, v, w] = self._new_mixture(part, v, w)
        return self._mixtures[part, v, w]

    def _new_mixture(self, part: Part, v: int, w: int) -> Mixture:
        probed = Mixture(self._rest.mean(part, v, w), ((1.0, part),), 0.0)
        factors = self._known.factors
        complete = self._basis.is_complete(v) or self._basis.is_complete(w)
        if part == "remainder" or factors is None or factors.rows is None or complete:
            return probed
        known = factors.rest(v, w, self._basis.vectors)
        if known <= 2 * factors.standard_error([(1.0, v, w)], self._basis.vectors) and not math.isnan(probed.value):
            return probed  # too little for a sketch to see: it may even come out negative
        if part == "gauss_newton" or {v, w} & self._known.flat:
            mixed = Mixture(known, (), 1.0)
        else:
            value = probed.value + known - self._rest.mean("gauss_newton", v, w)
            mixed = Mixture(value, ((1.0, part), (-1.0, "gauss_newton")), 1.0)
        better = self._noise([(1.0, mixed, v, w)]) <= self._noise([(1.0, probed, v, w)])
        return mixed if better or math.isnan(probed.value) else probed

    def _noise(self, terms: list[tuple[float, Mixture, int, int]]) -> float:
        """Standard error of Σ slope · mixture, from the probes and from the factors."""
        probed: list[Term] = [
            (slope * own, part, v, w) for slope, mixture, v, w in terms for own, part in mixture.probed
        ]
        error = self._rest.standard_error(probed)
        known = [(slope * mixture.share, v, w) for slope, mixture, v, w in terms if mixture.share]
        if not known or self._known.factors is None:
            return error
        return math.hypot(error, self._known.factors.standard_error(known, self._basis.vectors))

    def _errors(self, v: int, w: int, norms: Norms, row: float, col: float) -> dict[Metric, float]:
        """Standard errors by the delta method, plus rounding."""

        def noise(*terms: tuple[float, Part, int, int]) -> float:
            return self._noise([(s, self._mixture(p, i, j), i, j) for s, p, i, j in terms if not self._is_known(i, j)])

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
        """Relative error from floating-point arithmetic, as it shows in the asymmetry of the blocks."""
        size = max(self._basis.dimension(node) for node in (v, w))
        if self._is_known(v, w) and self._known.factors is not None:
            # nearly orthogonal factors leave little of themselves
            return (4 + math.sqrt(size)) * self._eps * math.sqrt(self._known.factors.orthogonality(v, w))
        asymmetries = [self._blocks[pair].asymmetry for pair in {(v, v), (v, w), (w, w)} if pair in self._blocks]
        return max((4 + math.sqrt(size)) * self._eps, *asymmetries, 0.0)

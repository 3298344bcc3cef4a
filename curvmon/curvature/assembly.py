"""From what bases and probes know to the four metrics of all pairs, with their standard errors."""

from __future__ import annotations

import math
from typing import NamedTuple

from curvmon.curvature.metrics import Matrices, Norms, pair_metrics
from curvmon.curvature.probes import PARTS, RestSamples, Term
from curvmon.curvature.subspace import Leading, PerPart, SharedBasis
from curvmon.types import Metric


class Block(NamedTuple):
    """What the bases know of one pair v <= w."""

    captured: PerPart
    leading: Leading
    asymmetry: float


class Assembler:
    """Reads a finished basis and the samples so far; can be asked again when there are more."""

    def __init__(self, basis: SharedBasis, rest: RestSamples, names: tuple[str, ...], eps: float) -> None:
        self._basis = basis
        self._rest = rest
        self._names = names
        self._eps = eps
        self._blocks = {
            (v, w): Block(basis.captured(v, w), basis.leading(v, w), basis.asymmetry(v, w))
            for v in range(len(names))
            for w in range(v, len(names))
        }

    def notes(self, matrices: Matrices, rtol: float) -> list[str]:
        return [*self._asymmetry_notes(), *self._rank_notes(matrices, rtol)]

    def _rank_notes(self, matrices: Matrices, rtol: float) -> list[str]:
        """Spectral norms that the budget for the bases did not settle; probes do not help there."""
        unsettled = [
            f"{self._names[v]}--{self._names[w]}"
            for v, w in self._blocks
            if matrices.get("stderr/stable_rank", v, w) > rtol * matrices.get("stable_rank", v, w)
        ]
        return (
            [f"stable_rank is not settled for {', '.join(unsettled)}; a larger max_hvps would help"]
            if unsettled
            else []
        )

    def _asymmetry_notes(self) -> list[str]:
        """Far more than rounding: some backward pass between the nodes and the loss is wrong to second order."""
        limit = 30 * math.sqrt(self._eps)
        worst = max(self._blocks, key=lambda pair: self._blocks[pair].asymmetry)
        if self._blocks[worst].asymmetry < limit:
            return []
        v, w = (self._names[node] for node in worst)
        return [
            f"suspect: H[{v}, {w}] is not symmetric (by {self._blocks[worst].asymmetry:.1g} of its size); a custom "
            f"autograd function between the nodes and the loss has a wrong second derivative"
        ]

    def _norms(self, v: int, w: int) -> Norms:
        block = self._blocks[v, w]
        hessian, gauss_newton, remainder = (
            captured + self._rest.mean(part, v, w) for part, captured in zip(PARTS, block.captured)
        )
        # what the bases missed altogether can still be stronger than what they hold
        return Norms(hessian, gauss_newton, remainder, max(block.leading.norm, self._rest.spectral_norms(v, w)[0]))

    def matrices(self) -> Matrices:
        matrices = Matrices(self._names)
        norms = {(v, w): self._norms(v, w) for v, w in self._blocks}
        for (v, w), pair in norms.items():
            own = norms[v, v].hessian, norms[w, w].hessian
            matrices.put_metrics(v, w, pair_metrics(pair, *own, self._eps, diagonal=v == w), pair)
            for metric, error in self._errors(v, w, pair, *own).items():
                matrices.put_error(metric, v, w, error)
        return matrices

    def _errors(self, v: int, w: int, norms: Norms, row: float, col: float) -> dict[Metric, float]:
        """Standard errors by the delta method, plus rounding."""
        noise, rounding = self._rest.standard_error, self._rounding(v, w)
        if norms.hessian == 0:
            return {"resonance": 0.0, "coupling": math.nan, "stable_rank": math.nan, "gn_gap": math.nan}
        resonance = math.sqrt(norms.hessian)
        relative = noise([(0.5 / norms.hessian, "hessian", v, w)])
        rank = norms.hessian / norms.spectral**2 if norms.spectral else math.nan
        errors: dict[Metric, float] = {
            "resonance": resonance * math.hypot(relative, rounding),
            "coupling": 0.0,
            "stable_rank": rank * math.hypot(2 * relative, self._rank_bias(v, w) / 1.96, 2 * rounding),
            "gn_gap": math.nan,
        }
        if v != w and row > 0 and col > 0:
            terms: list[Term] = [
                (0.5 / norms.hessian, "hessian", v, w),
                (-0.25 / row, "hessian", v, v),
                (-0.25 / col, "hessian", w, w),
            ]
            errors["coupling"] = resonance / (row * col) ** 0.25 * math.hypot(noise(terms), rounding)
        if norms.gauss_newton > 0:
            gap = math.sqrt(norms.remainder / norms.gauss_newton)
            terms = [(-0.5 * gap / norms.gauss_newton, "gauss_newton", v, w)]
            if gap > 0:
                terms.append((0.5 * gap / norms.remainder, "remainder", v, w))
            # T = H - GN inherits the rounding of both, however small it is itself
            rounding *= 1 + gap + resonance / math.sqrt(norms.gauss_newton)
            errors["gn_gap"] = math.hypot(noise(terms), rounding)
        return errors

    def _rounding(self, v: int, w: int) -> float:
        """Relative error from floating-point arithmetic, as it shows in the asymmetry of the blocks."""
        size = max(self._basis.dimension(node) for node in (v, w))
        asymmetry = max(self._blocks[pair].asymmetry for pair in {(v, v), (v, w), (w, w)})
        return max((4 + math.sqrt(size)) * self._eps, asymmetry)

    def _rank_bias(self, v: int, w: int) -> float:
        """By which share D may be too high: the spectral norm can only be too low. Half the width of an interval."""
        return float(1 - (1 + self._spectral_error(v, w)) ** -2)

    def _spectral_error(self, v: int, w: int) -> float:
        """Relative error of ‖H[v, w]‖_2; where the rest is stronger than what the bases hold, its known range."""
        leading = self._blocks[v, w].leading
        at_least, at_most = self._rest.spectral_norms(v, w)
        if leading.norm <= at_least:
            return at_most / at_least - 1 if at_least else 0.0
        return leading.error(at_most / leading.norm)

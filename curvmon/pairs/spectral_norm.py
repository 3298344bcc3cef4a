"""The spectral norm of a block from a few Ritz values, and what they lack on average."""

from __future__ import annotations

import math
from typing import NamedTuple


class RitzValue(NamedTuple):
    """A singular value of A - P_v A P_w, as an approximation to one of A.

    ε_v and ε_w are the lengths of P_v x and P_w y, the parts of its singular vectors x, y outside the bases. Adding
    these parts to the bases is one step of a Krylov method (Golub & Van Loan, Matrix Computations, 4th ed., ch. 10.4).
    """

    value: float
    """the singular value, relative to the largest one"""
    outside: float
    """½(ε_v² + ε_w²)"""
    row: float
    """ε_v²"""
    col: float
    """ε_w²"""


class SpectralNorm(NamedTuple):
    """Estimate of ‖A‖_2 from the bases: the largest of a few Ritz values."""

    norm: float
    ritz: list[RitzValue]
    """largest first; empty where a basis is complete: then the norm is exact"""

    def corrected(self, lower: float, upper: float) -> tuple[float, float]:
        """The norm, corrected for its bias, and a standard error, for lower <= ‖P_v A P_w‖_2 <= upper.

        A Ritz value does not contain the rest and is too low: to first order by x^T P_v A P_w y, to second order
        because its residual mixes it with other singular values. Neither can be computed from the bases; the formula
        was fitted to dense blocks with many kinds of spectra and to networks (docs/accuracy.md).
        """
        if not self.ritz or not self.norm:
            return self.norm, 0.0
        low, high = lower / self.norm, upper / self.norm
        rest = math.sqrt(low * min(high, 1.0))
        biases = [_bias(ritz, rest) for ritz in self.ritz]
        values = [ritz.value * (1 + bias * (1 - ritz.outside) ** 2) for ritz, bias in zip(self.ritz, biases)]
        best, errors = max(values), []
        # another Ritz value may actually be the largest: its error counts as far as it exceeds the best
        for i, (ritz, bias, value) in enumerate(zip(self.ritz, biases, values)):
            mixed = residual = math.sqrt(2 * ritz.outside) * high
            gap = 1 - self.ritz[1].value if i == 0 and len(self.ritz) > 1 else 0.0
            if gap > 0:
                mixed = min(residual, residual**2 / (2 * gap))
            errors.append(value + math.hypot(bias, 0.05 * mixed) - best)
        return self.norm * best, self.norm * max(0.0, *errors)

    def largest_bias(self) -> float:
        """Relative bias of the norm if ‖P_v A P_w‖_2 is as large as the norm itself."""
        return max((ritz.value * (1 + _bias(ritz, 1.0)) for ritz in self.ritz), default=1.0) - 1

    def least_converged(self) -> int:
        """Index of the Ritz value that attains `largest_bias`."""
        return max(range(len(self.ritz)), key=lambda i: self.ritz[i].value * (1 + _bias(self.ritz[i], 1.0)))


def _bias(ritz: RitzValue, rest: float) -> float:
    """Relative bias of a Ritz value if ‖P_v A P_w‖_2 is `rest` times the norm."""
    return rest * (0.4 + rest) * ritz.outside

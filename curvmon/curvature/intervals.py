"""Intervals from few samples."""

from __future__ import annotations

import math

# Student's t at 97.5 % over 1.96, for one to four degrees of freedom; a series takes over from five.
_STUDENT = (6.4829, 2.1953, 1.6237, 1.4166)


def small_sample_factor(freedom: int) -> float:
    """What to multiply a standard error with so that ± 1.96 of it covers 95 % although it comes from few probes."""
    if freedom < 1:
        return math.inf
    if freedom <= len(_STUDENT):
        return _STUDENT[freedom - 1]
    z, n = 1.959964, float(freedom)
    # Cornish-Fisher expansion of the quantile in 1/n
    terms = (
        (z**2 + 1) / (4 * n),
        (5 * z**4 + 16 * z**2 + 3) / (96 * n**2),
        (3 * z**6 + 19 * z**4 + 17 * z**2 - 15) / (384 * n**3),
    )
    return 1 + sum(terms)

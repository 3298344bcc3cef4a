"""Where a loss along a step is again what it was before: the first t > 0 with f(t) = f(0).

    φ(t) = (f(t) - f(0)) / t,    φ(0) = f'(0) = -g^T u,    φ'(0) = f''(0) / 2 = u^T H u / 2

φ is linear where f is quadratic, so that the first value tried, 2 g^T u / u^T H u, is the crossing. Elsewhere a
parabola through three values of φ gives the next one: with those on both sides of zero it has one root between them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

TOLERANCE = math.log(1.05)
"""of log t, between the last value tried and the root of the parabola through it, which is closer to the crossing"""
MOST_TRIES = 8
RANGE = 64.0
"""largest factor between the crossing of a quadratic loss and that of this one"""
REACH = 64.0
"""longest first try, in steps: a quadratic of almost no curvature has a crossing where losses are not finite"""
LARGEST_FACTOR = 4.0
"""from one value tried to the next"""
NEAR_ZERO = 1e-3
"""of the first value tried: where the model through φ(0) and φ'(0) stands for φ"""
LEAST_FALL = 1e-5
"""what the loss is to fall to first order, relative to f(0), up to the crossing of a quadratic: a hundred times its
rounding in single precision"""

Point = tuple[float, float]
"""t and φ(t)"""


def first_crossing(
    f: Callable[[float], float],
    at: float,
    gain: float,
    curvature: float,
    tolerance: float = TOLERANCE,
    reach: float = REACH,
) -> float:
    """t; infinite where the loss is lower still at RANGE times the crossing of a quadratic, NaN where it does not fall.

    One value of f on a quadratic (more beyond `reach`), about three on networks. None is further away than
    LARGEST_FACTOR times one at which the loss is lower than before, apart from the first. A crossing and its return
    between two values are missed.

    Args:
        f: the loss after t times the step; what is not finite has risen.
        at: f(0).
        gain: g^T u.
        curvature: u^T H u.
        tolerance: of log t.
        reach: the first t that is tried is at most this.
    """
    if not (gain > 0 and math.isfinite(gain) and math.isfinite(curvature)):
        return math.nan
    quadratic = 2 * gain / curvature if curvature > 0 else 1.0
    if gain * quadratic < LEAST_FALL * abs(at):
        return math.nan
    t = first = min(quadratic, reach)
    near = NEAR_ZERO * first
    points = [(0.0, -gain), (near, curvature / 2 * near - gain)]
    for _ in range(MOST_TRIES):
        value = f(t)
        points = sorted([*points, (t, (value - at) / t if math.isfinite(value) else math.inf)])
        above = next((i for i, (_, phi) in enumerate(points) if phi >= 0), len(points))
        root = _root(points, above)
        if root is None and above == len(points):
            root = 2 * t
        else:
            root = root or _between(points[above - 1][0], points[above][0])
            if abs(math.log(root / t)) <= tolerance:
                return root
        t = min(max(root, t / LARGEST_FACTOR), t * LARGEST_FACTOR)
        if not first / RANGE <= t <= quadratic * RANGE:
            return math.inf if t > first else math.nan
    return math.inf if above == len(points) else t


def _between(low: float, high: float) -> float:
    """Halfway on a logarithmic scale."""
    return math.sqrt(max(low, high / LARGEST_FACTOR**2) * high)


def _root(points: Sequence[Point], above: int) -> float | None:
    """Of the parabola through three neighbouring points, the first root beyond the last one with φ < 0.

    Args:
        points: by t; the first two have φ < 0.
        above: index of the first one with φ >= 0.
    """
    low, *beyond = points[above - 1 :]
    if beyond and not math.isfinite(beyond[0][1]):
        return None
    neighbours = (point for point in (*beyond[:2], *points[above - 2 :: -1]) if math.isfinite(point[1]))
    second, third, *_ = neighbours
    slopes = [(other[1] - low[1]) / (other[0] - low[0]) for other in (second, third)]
    bend = (slopes[1] - slopes[0]) / (third[0] - second[0])
    slope = slopes[0] - bend * (second[0] - low[0])
    discriminant = slope**2 - 4 * bend * low[1]
    divisor = slope + math.sqrt(max(discriminant, 0.0))
    return low[0] - 2 * low[1] / divisor if discriminant >= 0 and divisor > 0 else None

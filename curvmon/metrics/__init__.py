"""The metric registry, and `MeanCurvature`, the mean of several measurements as a torchmetrics Metric."""

from typing import TYPE_CHECKING, Any

from curvmon.metrics.definitions import COUPLING, GN_GAP, RESONANCE, SCALARS, STABLE_RANK
from curvmon.metrics.registry import (
    AlertSpec,
    MetricSpec,
    PairMetric,
    ScalarMetric,
    register,
    register_built_in,
    unregister,
)

if TYPE_CHECKING:
    from curvmon.metrics.mean_curvature import MeanCurvature

__all__ = ["AlertSpec", "MeanCurvature", "MetricSpec", "PairMetric", "ScalarMetric", "register", "unregister"]

register_built_in((RESONANCE, COUPLING, STABLE_RANK, GN_GAP, *SCALARS))


def __getattr__(name: str) -> Any:
    """`MeanCurvature` on first use: `import curvmon` does not need torchmetrics."""
    if name == "MeanCurvature":
        from curvmon.metrics.mean_curvature import MeanCurvature

        return MeanCurvature
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

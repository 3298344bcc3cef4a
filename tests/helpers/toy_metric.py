"""A fifth pair metric, as a user would add one: this file and one call of `register`."""

from __future__ import annotations

from torch import Tensor

from curvmon import Measurement
from curvmon.metrics import AlertSpec, PairMetric


def spectral_norm(measurement: Measurement) -> tuple[Tensor, Tensor]:
    """‖H[v, w]‖_2, with a standard error of one percent."""
    return measurement.spectral_norm, 0.01 * measurement.spectral_norm


TOY = PairMetric(
    name="toy",
    title="toy metric",
    symbol="Y",
    meaning="the largest singular value of a block",
    good="any",
    bad="none",
    action="nothing",
    log_scale=True,
    chart="toy metric by distance",
    compute=spectral_norm,
    alert=AlertSpec(
        threshold=8.0,
        smallest_change=0.25,
        rise="the toy metric rises in tests only",
        fall="the toy metric falls in tests only",
    ),
)

"""One number for all pairs of layers: a pair metric in the headline of a run.

Functions of a measurement, of the (n, n) values of a pair metric and of their standard errors; they return the number
and its standard error. Errors of pairs that share probes are correlated: their mean is an upper bound of the error of
the mean.
"""

from __future__ import annotations

import torch
from torch import Tensor

from curvmon.records import Measurement


def mean_over_pairs(measurement: Measurement, values: Tensor, stderr: Tensor) -> tuple[float, float]:
    """Mean of x(v, w) over the pairs v < w of different nodes; x(v, v) for one node alone. Only finite values count."""
    n = len(measurement.nodes)
    pairs = torch.triu_indices(n, n, offset=1 if n > 1 else 0).unbind()
    defined = values[pairs].isfinite()
    return values[pairs][defined].mean().item(), stderr[pairs][defined].mean().item()


def pooled_gap(measurement: Measurement, values: Tensor, stderr: Tensor) -> tuple[float, float]:
    """Γ = Σ ‖T(v, w)‖_F / Σ ‖GN(v, w)‖_F over the pairs v ≤ w; ‖T‖ = gap ‖GN‖, and R where GN = 0.

    A pair counts by its share of the curvature: the mean of the gaps is dominated by pairs where GN is small.
    """
    n = len(measurement.nodes)
    pairs = torch.triu_indices(n, n).unbind()
    gauss_newton = measurement.gn_norm[pairs]
    tensor = (values[pairs] * gauss_newton).where(gauss_newton > 0, measurement.resonance[pairs])
    error = (stderr[pairs] * gauss_newton).where(gauss_newton > 0, measurement.stderr["resonance"][pairs])
    defined = tensor.isfinite() & gauss_newton.isfinite()
    total = gauss_newton[defined].sum()
    return (tensor[defined].sum() / total).item(), (error[defined].sum() / total).item()

"""The names under which numbers appear in a logger, the same in all of them; slashes group them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Literal

import torch

from curvmon.records import METRICS, Measurement, Metric, Snapshot, Spectrum

MOST_NODES_IN_PAIRS = 6
"""above this, pairs are not logged one by one: hundreds of charts freeze a dashboard"""
Pairs = bool | Literal["auto"]
_NOT_EVERYWHERE = re.compile(r"[^A-Za-z0-9_/. -]")
"""what MLFlowLogger would drop from a key, with a warning every time; a ModuleDict may have any name in it"""


def scalars(snapshot: Snapshot, *, metrics: Sequence[Metric] = METRICS, pairs: Pairs = "auto") -> dict[str, float]:
    """All finite numbers of a snapshot by their key; what is not defined (NaN) has no key."""
    values: dict[str, float] = {}
    if snapshot.measurement is not None:
        values.update(_of_measurement(snapshot.measurement, metrics, pairs))
    if snapshot.spectrum is not None:
        values.update(_of_spectrum(snapshot.spectrum))
    values["curvmon/seconds"] = snapshot.seconds
    values["curvmon/overhead"] = snapshot.overhead
    values["curvmon/hvps"] = float(snapshot.hvps)
    values["curvmon/loss"] = snapshot.loss
    values["curvmon/skipped"] = float(snapshot.skipped)
    values["curvmon/alerts"] = float(snapshot.alerts)
    return {key: value for key, value in values.items() if math.isfinite(value)}


def _of_measurement(found: Measurement, metrics: Sequence[Metric], pairs: Pairs) -> dict[str, float]:
    values: dict[str, float] = {}
    one_by_one = pairs if isinstance(pairs, bool) else len(found.nodes) <= MOST_NODES_IN_PAIRS
    index = {name: i for i, name in enumerate(found.nodes)}
    for metric in metrics:
        matrix, error = getattr(found, metric), found.stderr[metric]
        means = found.by_distance(metric)
        for d, mean in enumerate(means.tolist()):
            if metric == "coupling" and d == 0:
                continue  # one, always
            values[f"{metric}/mean_d{d}"] = mean
            values[f"{metric}/mean_d{d}_stderr"] = _error_of_mean(matrix, error, d)
        if one_by_one:
            for pair in found.pairs():
                if metric != "coupling" or pair.row != pair.col:
                    name = _NOT_EVERYWHERE.sub("_", str(pair))
                    values[f"{metric}/{name}"] = matrix[index[pair.row], index[pair.col]].item()
    return values


def _error_of_mean(matrix: torch.Tensor, error: torch.Tensor, d: int) -> float:
    """Errors of pairs that share probes are correlated: their mean is the cautious choice."""
    counted = torch.diagonal(matrix, d).isfinite()
    return torch.diagonal(error, d)[counted].mean().item()


def _of_spectrum(found: Spectrum) -> dict[str, float]:
    values = {f"hessian/lambda_{i + 1}": value for i, value in enumerate(found.eigenvalues.tolist())}
    return {
        **values,
        "hessian/lambda_min": found.smallest,
        "hessian/ggn_lambda_1": found.ggn_eigenvalue,
        "hessian/ggn_error": found.ggn_error,
        "hessian/trace": found.trace,
        "hessian/trace_stderr": found.trace_stderr,
        "hessian/stability_ratio": found.stability_ratio,
    }

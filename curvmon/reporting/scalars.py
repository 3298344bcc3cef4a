"""A snapshot as numbers by logger key, the same in all loggers; slashes group them.

`Keys` is the only place that applies `log_key_prefix`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from torch import Tensor

from curvmon.metrics.definitions import PULSE_SCALARS
from curvmon.metrics.registry import PairMetric, pair_metric, pair_metric_names, scalar_metrics
from curvmon.records import Measurement, PulseRecord, Snapshot

Value = TypeVar("Value")
ALERT = "curvmon/alert"
BY_DISTANCE, EIGENVALUES = "by_distance", "spectrum"
"""pictures, apart from the heatmaps"""


@dataclass(frozen=True)
class Keys:
    """The keys of one monitor.

    Attributes:
        prefix: `log_key_prefix` of the monitor, `"fold1/"`; two monitors in one Trainer need different ones.
    """

    prefix: str = ""

    def __call__(self, name: str) -> str:
        return f"{self.prefix}{name}"

    def named(self, values: Mapping[str, Value]) -> dict[str, Value]:
        """The values with the prefix before each key."""
        return {self(name): value for name, value in values.items()}

    def pattern(self, names: str) -> str:
        """Regular expression for the keys whose names match a regular expression; matches to the end of the key."""
        return f"{re.escape(self.prefix)}{names}$"


def heatmap_key(metric: str) -> str:
    return f"heatmap/{metric}"


def picture_keys() -> tuple[str, ...]:
    """All pictures that a monitor can log."""
    return (*(heatmap_key(metric) for metric in pair_metric_names()), BY_DISTANCE, EIGENVALUES)


def groups() -> tuple[str, ...]:
    """Glob patterns that together match every key."""
    scalar_groups = dict.fromkeys(spec.key.split("/")[0] for spec in scalar_metrics())
    return (*(f"{group}/*" for group in (*pair_metric_names(), *scalar_groups, "heatmap")), BY_DISTANCE, EIGENVALUES)


MAX_NODES_IN_PAIRS = 6
"""with more nodes, pairs are not logged one by one: hundreds of charts freeze a dashboard"""
Pairs = bool | Literal["auto"]
_NOT_EVERYWHERE = re.compile(r"[^A-Za-z0-9_/. -]")
"""what MLFlowLogger would drop from a key, with a warning every time; a ModuleDict may have any name in it"""


def scalars(snapshot: Snapshot, *, metrics: Sequence[str] | None = None, pairs: Pairs = "auto") -> dict[str, float]:
    """All finite numbers of a snapshot by their key; what is not defined (NaN) has no key.

    Args:
        snapshot: pairs of layers, spectrum, or both.
        metrics: names of pair metrics; None: all that are registered.
        pairs: every pair as a number of its own; "auto": up to six nodes. Means by distance are always there.
    """
    values: dict[str, float] = {}
    if snapshot.measurement is not None:
        for name in pair_metric_names() if metrics is None else metrics:
            values.update(_by_distance(snapshot.measurement, pair_metric(name)))
            if pairs is True or (pairs == "auto" and len(snapshot.measurement.nodes) <= MAX_NODES_IN_PAIRS):
                values.update(_one_by_one(snapshot.measurement, pair_metric(name)))
    for spec in scalar_metrics():
        values.update(spec.scalars(snapshot))
    return {key: value for key, value in values.items() if math.isfinite(value)}


def pulse_scalars(record: PulseRecord) -> dict[str, float]:
    """The finite numbers of a pulse by their key."""
    values = {spec.key: getattr(record, spec.name) for spec in PULSE_SCALARS}
    return {key: value for key, value in values.items() if math.isfinite(value)}


def _by_distance(measurement: Measurement, spec: PairMetric) -> dict[str, float]:
    matrix, stderr = spec.values(measurement), spec.stderr(measurement)
    values: dict[str, float] = {}
    for d, mean in enumerate(spec.by_distance(measurement).tolist()):
        if d > 0 or not spec.unit_diagonal:
            values[f"{spec.name}/mean_d{d}"] = mean
            values[f"{spec.name}/mean_d{d}_stderr"] = _stderr_of_mean(matrix, stderr, d)
    return values


def _stderr_of_mean(matrix: Tensor, stderr: Tensor, d: int) -> float:
    """Errors of pairs that share probes are correlated: their mean is an upper bound of the error of the mean."""
    defined = matrix.diagonal(d).isfinite()
    return stderr.diagonal(d)[defined].mean().item()


def _one_by_one(measurement: Measurement, spec: PairMetric) -> dict[str, float]:
    index = {name: i for i, name in enumerate(measurement.nodes)}
    matrix = spec.values(measurement)
    return {
        f"{spec.name}/{_NOT_EVERYWHERE.sub('_', str(pair))}": matrix[index[pair.row], index[pair.col]].item()
        for pair in measurement.pairs()
        if pair.row != pair.col or not spec.unit_diagonal
    }

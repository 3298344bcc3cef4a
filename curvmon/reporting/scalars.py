"""A snapshot as numbers by logger key, and which of them go where. Slashes group the keys:

    curvmon/lambda_1                         the headline: at most 14 numbers, one for each metric
    curvmon_spectrum/lambda_2                further eigenvalues
    curvmon_distance/resonance/1             means over the pairs of layers that are d = 0, 1, … apart
    curvmon_pairs/resonance/stem--layer4     single pairs, with `log_pairs=True`
    curvmon_pictures/resonance               heatmaps and curves
    curvmon_detail/resonance_stderr          standard errors and bookkeeping

`Scalars.for_logger` is the only place that decides where a number goes, `Keys` the only one that applies
`log_key_prefix`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from torch import Tensor

from curvmon.metrics.registry import (
    SPECTRUM,
    MetricSpec,
    PairMetric,
    ScalarMetric,
    pair_metric,
    pair_metric_names,
    scalar_metrics,
)
from curvmon.metrics.step_metrics import STEP_METRICS
from curvmon.records import Measurement, PulseRecord, Snapshot

Value = TypeVar("Value")
HEADLINE = "curvmon/"
_SPECTRUM, _DISTANCE, _PAIRS, _PICTURES, _DETAIL = (
    f"curvmon_{group}/" for group in ("spectrum", "distance", "pairs", "pictures", "detail")
)
ALERT = f"{HEADLINE}alert"
"""of texts"""
BY_DISTANCE, EIGENVALUES = f"{_PICTURES}by_distance", f"{_PICTURES}eigenvalues"
"""pictures, apart from the heatmaps"""
_NOT_EVERYWHERE = re.compile(r"[^A-Za-z0-9_/. -]")
"""what MLFlowLogger would drop from a key, with a warning every time; a ModuleDict may have any name in it"""


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
    return f"{_PICTURES}{metric}"


def picture_keys() -> tuple[str, ...]:
    """All pictures that a monitor can log."""
    return (*(heatmap_key(metric) for metric in pair_metric_names()), BY_DISTANCE, EIGENVALUES)


def distance_key(metric: str, distance: int | str) -> str:
    return f"{_DISTANCE}{metric}/{distance}"


def stderr_key(key: str) -> str:
    """`curvmon/trace` has its standard error in `curvmon_detail/trace_stderr`."""
    return f"{_DETAIL}{re.sub(r'^curvmon(_[a-z]+)?/', '', key)}_stderr"


def log10_key(key: str, spec: MetricSpec) -> str | None:
    """Key of the logarithm of a number, for dashboards without logarithmic axes; None if it has none there.

    It belongs to distances and eigenvalues: the headline stays small.
    """
    if not spec.log_scale or spec.detail:
        return None
    if key.startswith(_DISTANCE):
        return key.replace(_DISTANCE, f"{_DISTANCE}log10_", 1)
    if isinstance(spec, ScalarMetric) and spec.section == SPECTRUM:
        return f"{_SPECTRUM}log10_{key.split('/', 1)[-1]}"
    return None


def groups() -> tuple[str, ...]:
    """Glob patterns that together match every key of a dashboard."""
    own = [re.sub(r"(/|\{\}).*", lambda cut: "/*" if cut[1] == "/" else "*", spec.key) for spec in scalar_metrics()]
    ours = (f"{group}*" for group in (HEADLINE, _SPECTRUM, _DISTANCE, _PAIRS, _PICTURES))
    return tuple(group for group in dict.fromkeys((*ours, *own)) if not group.startswith(_DETAIL))


class Scalars(NamedTuple):
    """Finite numbers by key.

    Attributes:
        shown: on dashboards.
        detail: in files alone.
        log10: logarithms of some that are shown, for dashboards that cannot have logarithmic axes.
    """

    shown: Mapping[str, float]
    detail: Mapping[str, float]
    log10: Mapping[str, float]

    def for_logger(self, kind: str) -> dict[str, float]:
        """What a logger gets: all of it in a file, what fits on a dashboard elsewhere. `kind`: name of its class."""
        if kind == "CSVLogger":
            return self.for_callbacks()
        return {**self.shown, **(self.log10 if kind == "TensorBoardLogger" else {})}

    def for_callbacks(self) -> dict[str, float]:
        """What EarlyStopping and ModelCheckpoint can watch: everything that is measured."""
        return {**self.shown, **self.detail}

    def named(self, keys: Keys) -> Scalars:
        return Scalars(*(keys.named(values) for values in self))


def scalars(
    snapshot: Snapshot, *, metrics: Sequence[str] | None = None, pairs: bool = False, distances: bool = True
) -> Scalars:
    """All finite numbers of a snapshot; what is not defined (NaN) has no key.

    Args:
        snapshot: pairs of layers, spectrum, or both.
        metrics: names of pair metrics; None: all that are registered.
        pairs: every pair as a number of its own.
        distances: means by distance, which take most of the time.
    """
    shown: dict[str, float] = {}
    detail: dict[str, float] = {}
    log10: dict[str, float] = {}
    metrics = pair_metric_names() if metrics is None else metrics
    for key, value, stderr, spec in _numbers(snapshot, metrics, pairs, distances):
        if not math.isfinite(value):
            continue
        (detail if spec.detail else shown)[key] = value
        if math.isfinite(stderr):
            detail[stderr_key(key)] = stderr
        logarithm = log10_key(key, spec)
        if logarithm is not None and value > 0:
            log10[logarithm] = math.log10(value)
    return Scalars(shown, detail, log10)


def pulse_scalars(record: PulseRecord) -> Scalars:
    """The finite numbers of a pulse."""
    shown: dict[str, float] = {}
    detail: dict[str, float] = {}
    for spec in STEP_METRICS:
        value = float(getattr(record, spec.name))
        if math.isfinite(value):
            (detail if spec.detail else shown)[spec.key] = value
    return Scalars(shown, detail, {})


class _Number(NamedTuple):
    key: str
    value: float
    stderr: float
    """NaN if there is none"""
    spec: MetricSpec


def _numbers(snapshot: Snapshot, metrics: Sequence[str], pairs: bool, distances: bool) -> Iterator[_Number]:
    if snapshot.measurement is not None:
        for spec in map(pair_metric, metrics):
            yield _Number(f"{HEADLINE}{spec.name}", *spec.summary(snapshot.measurement), spec)
            if distances:
                yield from _by_distance(snapshot.measurement, spec)
            if pairs:
                yield from _one_by_one(snapshot.measurement, spec)
    for scalar in scalar_metrics():
        errors = scalar.errors(snapshot)
        for key, value in scalar.scalars(snapshot).items():
            yield _Number(key, value, errors.get(key, math.nan), scalar)


def _by_distance(measurement: Measurement, spec: PairMetric) -> Iterator[_Number]:
    matrix, stderr = spec.values(measurement), spec.stderr(measurement)
    for d, mean in enumerate(spec.by_distance(measurement).tolist()):
        if d > 0 or not spec.unit_diagonal:
            yield _Number(distance_key(spec.name, d), mean, _stderr_of_mean(matrix, stderr, d), spec)


def _stderr_of_mean(matrix: Tensor, stderr: Tensor, d: int) -> float:
    """Errors of pairs that share probes are correlated: their mean is an upper bound of the error of the mean."""
    defined = matrix.diagonal(d).isfinite()
    return stderr.diagonal(d)[defined].mean().item()


def _one_by_one(measurement: Measurement, spec: PairMetric) -> Iterator[_Number]:
    index = {name: i for i, name in enumerate(measurement.nodes)}
    matrix, stderr = spec.values(measurement).tolist(), spec.stderr(measurement).tolist()
    for pair in measurement.pairs():
        i, j = index[pair.row], index[pair.col]
        constant = (i == j and spec.unit_diagonal) or (spec.zero_is_constant and matrix[i][j] == 0)
        if not constant:
            key = f"{_PAIRS}{spec.name}/{_NOT_EVERYWHERE.sub('_', str(pair))}"
            yield _Number(key, matrix[i][j], stderr[i][j], spec)

"""The metric registry: one specification per quantity, read by loggers, dashboards, figures, alerts and the README.

The built-in metrics are in `definitions.py`. A further one needs a file of its own and one call of `register`, before
the monitor is constructed; loggers, dashboards, figures, the console and alerts then include it.

A pair metric is a function of the matrices of a `Measurement`: it cannot add a quantity that is not measured. The
methods of `Measurement` do not include it: `by_distance("my_metric")` raises, and `print(measurement)` does not show
it. Use `PairMetric.by_distance(measurement)`.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from curvmon.errors import InputError, warn
from curvmon.isolation.model_state import random_state
from curvmon.records import METRICS, Measurement, Snapshot, mean_by_distance

SPECTRUM, LAYERS = "spectrum of the Hessian", "by distance between layers"
"""sections of a dashboard, below that of the headline"""
_OF_ALERTS = ("level", "profile", "contrast", "hessian", "rate", "weights", "statistics", "zeros")
_RESERVED_NAMES = (*_OF_ALERTS, "by_distance", "eigenvalues")
"""features that alerts watch, and the metric of alerts on λ₁, in `curvmon.alerts`; pictures that are no heatmaps"""


@dataclass(frozen=True, kw_only=True)
class AlertSpec:
    """When a change of log(value + offset) is significant, and what it means.

    Values that are not positive after the offset is added have no logarithm and are skipped.

    Attributes:
        smallest_change: smaller |Δ log(value + offset)| count in proportion.
        rise: meaning of an increase, one clause of the alert's message.
        fall: meaning of a decrease, one clause.
        threshold: of a metric that you register: a value so many standard deviations off its forecast is an alert. The
            metrics of curvmon have none; a change of them is judged together with everything else.
        offset: number added before the logarithm; values well below it count as zero.
        per_pair: whether every pair is a feature; False for resonance alone, which `alerts.features` decomposes first.
    """

    smallest_change: float
    rise: str
    fall: str
    threshold: float = 10.0
    offset: float = 0.0
    per_pair: bool = True


@dataclass(frozen=True, kw_only=True)
class MetricSpec:
    """Fields that pair metrics and scalar metrics share.

    Attributes:
        name: unique identifier, `"resonance"`.
        title: display name, `"stable rank"`.
        symbol: mathematical symbol, `"D"`; empty if it has none.
        meaning: one clause for the README's table; empty for quantities that are not in it.
        good: values to expect in a healthy run.
        bad: values to worry about.
        action: what to do about bad values.
        log_scale: whether charts and colours are logarithmic.
        section: section of a dashboard.
        chart: title of its chart in that section; empty for none. Metrics with the same title share a chart. Numbers
            of the headline, `curvmon/…`, have a chart of their own in any case.
        detail: bookkeeping: to files (CSV) and `callback_metrics`, not to dashboards.
        alert: how changes are detected; None if they are not.
    """

    name: str
    title: str
    symbol: str = ""
    meaning: str = ""
    good: str = ""
    bad: str = ""
    action: str = ""
    log_scale: bool = False
    section: str = ""
    chart: str = ""
    detail: bool = False
    alert: AlertSpec | None = None

    @property
    def label(self) -> str:
        """`stable rank D`."""
        return f"{self.title} {self.symbol}".strip()


@dataclass(frozen=True, kw_only=True)
class PairMetric(MetricSpec):
    """A number for every pair of nodes. It also has the fields of `MetricSpec`: name, title, alert, ….

    Where `compute` raises or returns something else than two (n, n) matrices, the metric is NaN, with one warning.

    Attributes:
        compute: function from a measurement to two (n, n) matrices, values and their standard errors; called once per
            measurement, on a copy, with random generators that are restored. None only for the built-in metrics, which
            are fields of `Measurement`.
        headline: function from a measurement, values and standard errors to one number and its error, `curvmon/<name>`:
            `curvmon.metrics.pair_summaries.mean_over_pairs`, say. None: the headline has no number of it.
        zero_is_constant: an exact zero holds for any weights: such pairs are not logged one by one.
        unit_diagonal: whether the diagonal is 1 by definition; it is not logged then.
        figure_title: title of heatmaps and curves; `title` by default.
        color_range: lowest colour of a linear scale, and the value that its highest colour reaches at least.
        axis_max: least upper end of the axis of a linear curve, which starts at 0; None: fitted to the values.
    """

    compute: Callable[[Measurement], tuple[Tensor, Tensor]] | None = None
    headline: Callable[[Measurement, Tensor, Tensor], tuple[float, float]] | None = None
    zero_is_constant: bool = False
    unit_diagonal: bool = False
    figure_title: str = ""
    color_range: tuple[float, float] = (0.0, 1.0)
    axis_max: float | None = None
    section: str = LAYERS
    _latest: list[tuple[weakref.ref[Measurement], Tensor, Tensor]] = field(
        default_factory=list, init=False, repr=False, compare=False
    )
    """the latest measurement with its matrices: loggers, figures and alerts ask for the same one in turn"""

    def values(self, measurement: Measurement) -> Tensor:
        """(n, n), float64 on the CPU, in the order of the nodes; NaN where undefined, or if `compute` raises."""
        return self._matrices(measurement)[0]

    def stderr(self, measurement: Measurement) -> Tensor:
        """Standard errors of `values`."""
        return self._matrices(measurement)[1]

    def _matrices(self, measurement: Measurement) -> tuple[Tensor, Tensor]:
        if self.compute is None:
            return getattr(measurement, self.name), measurement.stderr[self.name]
        for reference, values, stderr in self._latest:
            if reference() is measurement:
                return values, stderr
        n = len(measurement.nodes)
        try:
            with random_state(0):
                matrices = self.compute(copy.deepcopy(measurement))
            values, stderr = (_real_matrix(matrix, n) for matrix in matrices)
        except Exception as error:  # a user's function must not stop a run
            _warn_of(error, self.name)
            values = stderr = torch.full((n, n), math.nan, dtype=torch.float64, device="cpu")
        self._latest[:] = [(weakref.ref(measurement), values, stderr)]
        return values, stderr

    def by_distance(self, measurement: Measurement) -> Tensor:
        """Mean over the pairs at distance d = 0, 1, …, n-1; only finite entries count."""
        return mean_by_distance(self.values(measurement))

    def summary(self, measurement: Measurement) -> tuple[float, float]:
        """One number for all pairs, and its standard error; NaN without `headline`, or if it raises."""
        try:
            if self.headline is not None and not (self.unit_diagonal and len(measurement.nodes) == 1):
                value, stderr = self.headline(measurement, self.values(measurement), self.stderr(measurement))
                return float(value), float(stderr)
        except Exception as error:  # a user's function must not stop a run
            _warn_of(error, self.name)
        return math.nan, math.nan

    @property
    def heading(self) -> str:
        return self.figure_title or self.title


@dataclass(frozen=True, kw_only=True)
class ScalarMetric(MetricSpec):
    """A number, or a numbered list of them, for every snapshot. It also has the fields of `MetricSpec`: name, title, ….

    Where `read` or `stderr` raises or returns something else than numbers, there is no value, with one warning.

    Attributes:
        key: logger key, `curvmon/…` for the headline; `{}` stands for the number of a value in a list.
        read: function from a snapshot to the values, `lambda snapshot: [snapshot.loss]`; empty where not measured.
        stderr: function from a snapshot to the standard errors, used by alerts; None: the values are exact.
        first: number of the first value of a list.
    """

    key: str
    read: Callable[[Snapshot], Sequence[float]]
    stderr: Callable[[Snapshot], Sequence[float]] | None = None
    first: int = 1

    def scalars(self, snapshot: Snapshot) -> dict[str, float]:
        """The values by their logger keys."""
        return self._by_key(self.read, snapshot)

    def errors(self, snapshot: Snapshot) -> dict[str, float]:
        """Standard errors by logger key; a missing one is 0."""
        return {} if self.stderr is None else self._by_key(self.stderr, snapshot)

    def _by_key(self, read: Callable[[Snapshot], Sequence[float]], snapshot: Snapshot) -> dict[str, float]:
        try:
            return {self.key.format(i): float(value) for i, value in enumerate(read(snapshot), self.first)}
        except Exception as error:  # a user's function must not stop a run
            _warn_of(error, self.name)
            return {}


def _real_matrix(matrix: Any, n: int) -> Tensor:
    tensor = torch.as_tensor(matrix, device="cpu").detach()
    if tensor.is_complex():
        raise InputError("compute returned complex numbers")
    return tensor.double().reshape(n, n)


def _warn_of(error: Exception, name: str) -> None:
    """From one place, so that Python shows the same message once per run."""
    warn(f"metric {name!r} could not be computed ({type(error).__name__}: {error}); training goes on")


Spec = TypeVar("Spec", bound=MetricSpec)
_REGISTRY: dict[str, MetricSpec] = {}
_BUILT_IN: set[str] = set()


def register(spec: Spec) -> Spec:
    """Add a metric to loggers, figures, dashboards, the console and alerts. Call it before a monitor is constructed.

    A metric is a function of what was measured. `Measurement.by_distance` and `print(measurement)` do not include it.
    Returns `spec`.

    Args:
        spec: a `PairMetric`, one number per pair of layers, or a `ScalarMetric`, one or several numbers per snapshot.

    Raises:
        InputError: the name is taken or reserved, a pair metric has no `compute`, or its alert has `per_pair=False`.

    Example:
        >>> from curvmon.metrics import AlertSpec, PairMetric, register, unregister
        >>> def spectral_norm(measurement):  # values and their standard errors
        ...     return measurement.spectral_norm, 0.01 * measurement.spectral_norm
        >>> alert = AlertSpec(threshold=10.0, smallest_change=0.4,
        ...                   rise="one direction curves more strongly", fall="one direction became flatter")
        >>> metric = register(PairMetric(name="spectral_norm", title="spectral norm", symbol="S", log_scale=True,
        ...                              chart="spectral norm by distance", compute=spectral_norm, alert=alert))
        >>> import torch, curvmon
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
        >>> measurement = curvmon.measure(net, torch.randn(16, 4), loss=lambda net, x: net(x).square().mean())
        >>> bool((metric.values(measurement) == measurement.spectral_norm).all())
        True
        >>> monitor = curvmon.CurvatureMonitor(metrics=["coupling", "spectral_norm"])
        >>> unregister("spectral_norm")
    """
    if not isinstance(spec, (PairMetric, ScalarMetric)):
        raise InputError(f"register takes a PairMetric or a ScalarMetric, not {type(spec).__name__}")
    if spec.name in _REGISTRY:
        raise InputError(f"a metric named {spec.name!r} is registered already")
    if spec.name in _RESERVED_NAMES:
        raise InputError(f"the name {spec.name!r} is reserved; alerts use it for something else")
    if isinstance(spec, PairMetric) and spec.compute is None and spec.name not in METRICS:
        raise InputError(
            f"metric {spec.name!r} needs compute, a function from a measurement to (values, standard errors): "
            f"only {', '.join(METRICS)} are fields of a measurement"
        )
    if spec.alert is not None and not spec.alert.per_pair and spec.name != "resonance":
        raise InputError(f"the alert of metric {spec.name!r} has per_pair=False, which is for resonance alone")
    _REGISTRY[spec.name] = spec
    return spec


def register_built_in(specs: Iterable[MetricSpec]) -> None:
    """Register metrics that cannot be unregistered."""
    for spec in specs:
        _BUILT_IN.add(register(spec).name)


def unregister(name: str) -> None:
    """Undo `register`.

    Args:
        name: name of a metric that is not built-in.

    Raises:
        InputError: there is none of that name, or it is built-in.
    """
    if name in _BUILT_IN:
        raise InputError(f"metric {name!r} is built-in and cannot be unregistered")
    del _REGISTRY[get(name).name]


def get(name: str) -> MetricSpec:
    """The metric of that name.

    Raises:
        InputError: there is none.
    """
    if name not in _REGISTRY:
        raise InputError(f"no metric {name!r}; the metrics are {', '.join(_REGISTRY)}")
    return _REGISTRY[name]


def all_metrics() -> tuple[MetricSpec, ...]:
    """All of them, pair metrics first, otherwise in the order of registration."""
    return (*pair_metrics(), *scalar_metrics())


def pair_metrics() -> tuple[PairMetric, ...]:
    return tuple(spec for spec in _REGISTRY.values() if isinstance(spec, PairMetric))


def scalar_metrics() -> tuple[ScalarMetric, ...]:
    return tuple(spec for spec in _REGISTRY.values() if isinstance(spec, ScalarMetric))


def pair_metric(name: str) -> PairMetric:
    """The pair metric of that name.

    Raises:
        InputError: there is none.
    """
    names = pair_metric_names()
    if name not in names:
        raise InputError(f"no metric {name!r}; the metrics are {', '.join(names)}")
    return pair_metrics()[names.index(name)]


def pair_metric_names() -> tuple[str, ...]:
    """What the argument `metrics` of a monitor accepts."""
    return tuple(spec.name for spec in pair_metrics())


def markdown_table() -> str:
    """The table of the README: what each number means."""
    rows = [("number", "what it says", "good", "bad", "what to do"), ("---",) * 5]
    rows += [(spec.label, spec.meaning, spec.good, spec.bad, spec.action) for spec in all_metrics() if spec.meaning]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)

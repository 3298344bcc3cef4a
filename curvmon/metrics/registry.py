"""The metric registry: one specification per quantity, read by loggers, dashboards, figures, alerts and the README.

To add a pair metric, write its `PairMetric` in a file of its own and add it to the list in
`curvmon/metrics/__init__.py`. Outside curvmon, pass it to `register` before the monitor is constructed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from curvmon.errors import InputError, warn
from curvmon.records import Measurement, Snapshot, mean_by_distance

LAYERS, SPECTRUM, ALERTS, COST = "curvature between layers", "spectrum of the Hessian", "alerts", "cost"
"""sections of a dashboard"""


@dataclass(frozen=True, kw_only=True)
class AlertSpec:
    """When a change of log(value + offset) is significant, and what it means.

    Attributes:
        threshold: of the largest deviation among all features of the metric, in standard deviations.
        family_threshold: of the root mean square deviation of all features, in standard deviations.
        smallest_change: |Δ log(value + offset)| below which a change is never reported.
        rise: what an increase means, in a clause.
        fall: what a decrease means.
        offset: added before the logarithm; values well below it count as zero.
        per_pair: every pair is a feature; False for resonance, which `alerts.features` decomposes first.
    """

    threshold: float
    family_threshold: float
    smallest_change: float
    rise: str
    fall: str
    offset: float = 0.0
    per_pair: bool = True


@dataclass(frozen=True, kw_only=True)
class MetricSpec:
    """What is the same for every quantity.

    Attributes:
        name: unique identifier, `"resonance"`.
        title: how people call it, `"stable rank"`.
        symbol: `"D"`; empty if it has none.
        meaning: one clause for the README's table; empty for quantities that are not in it.
        good: values to expect in a healthy run.
        bad: values to worry about.
        action: what to do about them.
        log_scale: charts and colours are logarithmic.
        section: of a dashboard.
        chart: title of its chart in a dashboard; empty for none. Metrics with the same title share a chart.
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
    alert: AlertSpec | None = None

    @property
    def label(self) -> str:
        """`stable rank D`."""
        return f"{self.title} {self.symbol}".strip()

    @property
    def chart_keys(self) -> str:
        """Regular expression of the logger keys that are the lines of its chart."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class PairMetric(MetricSpec):
    """A number for every pair of nodes.

    Attributes:
        compute: the (n, n) matrices of values and of standard errors of a measurement; None: its fields of that name.
        unit_diagonal: 1 on the diagonal by definition, which is not logged.
        figure_title: above heatmaps and curves; the title by default.
        color_range: lowest colour of a linear scale, and the value that its highest colour reaches at least.
        axis_max: the axis of a linear curve starts at 0 and reaches at least this; None: fitted to the values.
    """

    compute: Callable[[Measurement], tuple[Tensor, Tensor]] | None = None
    unit_diagonal: bool = False
    figure_title: str = ""
    color_range: tuple[float, float] = (0.0, 1.0)
    axis_max: float | None = None
    section: str = LAYERS

    def values(self, measurement: Measurement) -> Tensor:
        """(n, n), float64 on the CPU, in the order of the nodes; NaN where undefined, or if `compute` raises."""
        return self._matrices(measurement)[0]

    def stderr(self, measurement: Measurement) -> Tensor:
        """Standard errors of `values`."""
        return self._matrices(measurement)[1]

    def _matrices(self, measurement: Measurement) -> tuple[Tensor, Tensor]:
        if self.compute is None:
            return getattr(measurement, self.name), measurement.stderr[self.name]
        n = len(measurement.nodes)
        try:
            values, stderr = (torch.as_tensor(m, dtype=torch.float64, device="cpu") for m in self.compute(measurement))
            return values.reshape(n, n), stderr.reshape(n, n)
        except Exception as error:  # a user's function must not stop a run
            warn(f"metric {self.name!r} could not be computed ({type(error).__name__}: {error}); training goes on")
            undefined = torch.full((n, n), math.nan, dtype=torch.float64, device="cpu")
            return undefined, undefined

    def by_distance(self, measurement: Measurement) -> Tensor:
        """Mean over the pairs at distance d = 0, 1, …, n-1; only finite entries count."""
        return mean_by_distance(self.values(measurement))

    @property
    def heading(self) -> str:
        return self.figure_title or self.title

    @property
    def chart_keys(self) -> str:
        return rf"{self.name}/mean_d\d+"


@dataclass(frozen=True, kw_only=True)
class ScalarMetric(MetricSpec):
    """A number, or a numbered list of them, for every snapshot.

    Attributes:
        key: under which it is logged; `{}` stands for the number of a value in a list.
        read: its values; empty where it was not measured.
        first: number of the first value of a list.
    """

    key: str
    read: Callable[[Snapshot], Sequence[float]]
    first: int = 1

    def scalars(self, snapshot: Snapshot) -> dict[str, float]:
        """The values by their logger keys."""
        return {self.key.format(i): value for i, value in enumerate(self.read(snapshot), self.first)}

    @property
    def chart_keys(self) -> str:
        return self.key.format(r"\d+")


Spec = TypeVar("Spec", bound=MetricSpec)
_REGISTRY: dict[str, MetricSpec] = {}


def register(spec: Spec) -> Spec:
    """Make a metric known to loggers, figures, dashboards and alerts.

    Raises:
        InputError: the name is taken.
    """
    if spec.name in _REGISTRY:
        raise InputError(f"a metric named {spec.name!r} is registered already")
    _REGISTRY[spec.name] = spec
    return spec


def unregister(name: str) -> None:
    """Undo `register`."""
    del _REGISTRY[name]


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

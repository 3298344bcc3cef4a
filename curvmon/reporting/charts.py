"""Which charts a dashboard has, and in which order: the user's own first, then the headline, then what is behind it.

From the metric registry: a metric that is registered has its charts without a change here.
"""

from __future__ import annotations

import re
from typing import NamedTuple, cast

from curvmon.metrics.registry import LAYERS, SPECTRUM, MetricSpec, PairMetric, ScalarMetric, all_metrics, get
from curvmon.reporting.scalars import HEADLINE, distance_key, log10_key

OWN, SUMMARY = "loss, accuracy, alerts", "curvmon"
"""the first sections"""
ORDER = (
    "lambda_1", "stability_ratio", "step_ratio", "critical_lr", "resonance", "coupling", "stable_rank", "gn_gap",
    "lambda_min", "trace", "ggn_error", "overhead",
)  # fmt: skip
"""of the charts in the headline; others follow in the order of their registration"""

_STAGE = "((train|training|val|valid|validation|test|eval|loss|losses|metrics)/)?"
_LOSS = f"{_STAGE}[^/]*[Ll]oss[^/]*(/[^/]*)?"
_ACCURACY = f"{_STAGE}[^/]*([Aa]cc|[Ff]1|AUROC|auroc|[Ii]o[Uu])[^/]*(/[^/]*)?"
"""usual names of what a LightningModule logs: train_loss, val/loss, loss/train, val_acc_epoch, MulticlassAccuracy"""


class Chart(NamedTuple):
    """One chart of a dashboard; keys that match its regular expressions are its lines.

    Attributes:
        title: title above it.
        names: keys of the monitor, without `log_key_prefix`.
        log_scale: whether the y-axis is logarithmic.
        logarithms: keys of their logarithms, for a dashboard without such axes; empty where there are none.
        own: keys that the user's module logs.
    """

    title: str
    names: str
    log_scale: bool = False
    logarithms: str = ""
    own: str = ""


def sections() -> dict[str, list[Chart]]:
    """The charts of a dashboard by section; metrics with one chart title share a chart."""
    arranged: dict[str, dict[str, Chart]] = {
        # two charts fit into one row of a small screen, where the headline has to be seen below them
        OWN: {
            "loss": Chart("loss", _headline_keys(get("loss")), own=_LOSS),
            "alerts": Chart("accuracy, alerts so far", _headline_keys(get("alerts")), own=_ACCURACY),
        },
        SUMMARY: {spec.name: Chart(spec.label, _headline_keys(spec), spec.log_scale) for spec in headline_metrics()},
        SPECTRUM: {},
        LAYERS: {},
    }
    for spec in all_metrics():
        if spec.chart and not spec.detail:
            charts = arranged.setdefault(spec.section, {})
            charts[spec.chart] = _with_lines(charts.get(spec.chart), spec)
    return {section: list(charts.values()) for section, charts in arranged.items() if charts}


def headline_metrics() -> list[MetricSpec]:
    """Metrics whose numbers are in the headline, but for those in the first section, in their order."""
    specs = [spec for spec in all_metrics() if _headline_keys(spec) and spec.name not in ("loss", "alerts")]
    return sorted(specs, key=lambda spec: ORDER.index(spec.name) if spec.name in ORDER else len(ORDER))


def headline_labels() -> dict[str, str]:
    """What a reader looks at first, key -> label: the loss of the probe batch, then the headline without the cost."""
    specs = [get("loss"), *(spec for spec in headline_metrics() if spec.name != "overhead")]
    return {spec.key if isinstance(spec, ScalarMetric) else f"{HEADLINE}{spec.name}": spec.label for spec in specs}


def _headline_keys(spec: MetricSpec) -> str:
    """Regular expression; empty if there are none."""
    if isinstance(spec, PairMetric):
        return re.escape(f"{HEADLINE}{spec.name}") if spec.headline is not None and not spec.detail else ""
    lines = _keys(spec)
    return lines if lines.startswith(HEADLINE) and not spec.detail else ""


def _keys(spec: MetricSpec) -> str:
    """Regular expression of the keys that are the lines of its chart."""
    key = distance_key(spec.name, "{}") if isinstance(spec, PairMetric) else cast(ScalarMetric, spec).key
    return re.escape(key).replace(r"\{\}", r"\d+")


def _with_lines(chart: Chart | None, spec: MetricSpec) -> Chart:
    lines = _keys(spec)
    logarithms = log10_key(lines, spec) or ""
    if chart is None:
        return Chart(spec.chart, lines, spec.log_scale, logarithms)
    both = f"({chart.logarithms}|{logarithms})" if chart.logarithms and logarithms else ""
    return chart._replace(names=f"({chart.names}|{lines})", logarithms=both)

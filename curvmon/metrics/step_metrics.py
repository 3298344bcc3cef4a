"""Metrics of the optimizer's steps, from pulses. They are logged at the pulses' own steps, not with a snapshot."""

from __future__ import annotations

from collections.abc import Sequence

from curvmon.metrics.registry import ScalarMetric
from curvmon.records import Snapshot


def _nothing(snapshot: Snapshot) -> Sequence[float]:
    return ()


STEP_RATIO = ScalarMetric(
    name="step_ratio",
    title="step ratio",
    key="curvmon/step_ratio",
    read=_nothing,
    meaning="curvature along the optimizer's own steps over twice their gain: to second order, the share of the "
    "critical learning rate that is used",
    good="about 0.05 to 0.5, and steady",
    bad="twice its usual value; from 1 on, a step does not lower the loss of its own batch",
    action="lower the learning rate below half of the critical one, use a longer warm-up",
    log_scale=True,
)
CRITICAL_LR = ScalarMetric(
    name="critical_lr",
    title="critical learning rate",
    key="curvmon/critical_lr",
    read=_nothing,
    meaning="the learning rate at which a step would leave the loss of its own batch as it is, measured",
    good="two to twenty times the learning rate",
    bad="it falls towards the learning rate",
    action="keep the learning rate below half of it",
    log_scale=True,
)
ATTENTION_LARGEST_LOGIT = ScalarMetric(
    name="attention_largest_logit",
    title="largest logit of all attentions",
    key="curvmon_detail/attention_largest_logit",
    read=_nothing,
    detail=True,
)
ATTENTION_LOWEST_ENTROPY = ScalarMetric(
    name="attention_lowest_entropy",
    title="lowest entropy of all attentions",
    key="curvmon_detail/attention_lowest_entropy",
    read=_nothing,
    detail=True,
)
STEP_METRICS = (STEP_RATIO, CRITICAL_LR, ATTENTION_LARGEST_LOGIT, ATTENTION_LOWEST_ENTROPY)

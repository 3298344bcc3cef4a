"""What an alert of a change says."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch

from curvmon import Alert
from curvmon.alerts.context import Cause
from curvmon.alerts.detector import Change
from curvmon.alerts.features import FeatureDeviation
from curvmon.alerts.forecast import Deviation
from curvmon.alerts.messages import ReportedChange, _mean, alert_of_change
from curvmon.alerts.rate_growth import RateGrowth
from curvmon.records import Snapshot
from tests.helpers.synthetic_snapshots import NODES, snapshot

RATE = Cause("learning rate", "", "x 20", 9.0, True, 0.1, 2.0)
WEIGHT = Cause("weights", "b.weight", "x 0.5", 9.0, True, 2.0, 1.0)
HEAD = WEIGHT._replace(name="head.weight", after=4.0)
LOSS = Cause("training loss", "", "x 3", 9.0, True, 0.2, 0.6)
VARIANCE = Cause("statistics", "b.running_var", "x 2", 8.0, True, 1.0, 2.0)
MEAN = Cause("statistics", "b.running_mean", "x 2", 7.0, True, 3.0, 6.0)
GROWTH = RateGrowth(0.02, 0.31, 5)
CUT = Cause("operations", "b", "1 fewer Add", math.inf, True)


def alert(
    *causes: Cause,
    sizes: dict[str, float] | None = None,
    loss: float = 1.0,
    names: str = "",
    growth: RateGrowth | None = None,
) -> Alert:
    """The resonance of b tripled. `names`: what the names of the layers begin with."""
    rng = random.Random(0)
    before, now = (named(s, names) for s in (snapshot(0, rng), snapshot(1, rng, {"b": 3.0})))
    assert now.measurement is not None
    now = replace(now, measurement=replace(now.measurement, loss=loss))
    deviations = [
        FeatureDeviation("profile", f"{names}{name}", Deviation(size, 10 * size, 0.0))
        for name, size in {**dict.fromkeys(NODES, 0.1), "b": 1.0, **(sizes or {})}.items()
    ]
    significance = {"profile": 2.0}
    if loss != 1.0:
        deviations.append(FeatureDeviation("loss", "", Deviation(math.log(loss), 9.0, 0.0)))
        significance["loss"] = 1.0
    return alert_of_change(Change("jump", deviations, 1), significance, causes, before, now, growth)


def named(snapshot: Snapshot, prefix: str) -> Snapshot:
    assert snapshot.measurement is not None
    names = tuple(f"{prefix}{name}" for name in snapshot.measurement.nodes)
    return replace(snapshot, measurement=replace(snapshot.measurement, nodes=names))


def test_the_message_says_what_where_why_and_what_to_do() -> None:
    raised = alert(WEIGHT)
    assert raised.headline == "Weights of b shrank: curvature (resonance) rose, step 1"
    assert raised.evidence == (
        "resonance a--b: 0.12 → 0.28 (the loss curves more strongly between these layers, optimizer steps overshoot "
        "sooner)",
        "at the same time: norm of b.weight 2 → 1 (x 0.5)",
    )
    assert raised.suggestion == "Check what changed the weights of b between steps 0 and 1."
    lines = [*(f"- {point}" for point in raised.evidence), raised.suggestion]
    assert raised.message.splitlines() == [raised.headline, *(f"  {line}" for line in lines)]
    assert str(raised) == raised.message


@pytest.mark.parametrize(
    ("causes", "headline", "suggestion"),
    [
        ((), "Curvature (resonance) rose at a → b", "Check what changed in b between steps 0 and 1: its weights"),
        ((RATE,), "Learning rate x 20: curvature (resonance) rose throughout the network", "Check why the learning"),
        ((LOSS,), "Curvature (resonance) rose at a → b", "Check the data and the labels of the training batches"),
        ((VARIANCE,), "Running statistics changed: curvature (resonance) rose at a → b", "Check what changed the run"),
        (
            (CUT,),
            "Forward pass of b changed: curvature (resonance) rose",
            "Check what changed in the forward pass of b",
        ),
        ((HEAD,), "head.weight grew: curvature (resonance) rose at a → b", "Check what changed head.weight between"),
        ((RATE._replace(lowers_threshold=False),), "Curvature (resonance) rose at a → b", "Check what changed in b"),
    ],
)
def test_headline_and_suggestion_follow_the_cause(causes: tuple[Cause, ...], headline: str, suggestion: str) -> None:
    raised = alert(*causes)
    assert raised.headline == f"{headline}, step 1"
    assert raised.suggestion.startswith(suggestion)


@pytest.mark.parametrize("causes", [(), (WEIGHT,), (HEAD, VARIANCE), (LOSS, WEIGHT)])
def test_a_learning_rate_that_grew_slowly_is_checked_before_norms_and_data(causes: tuple[Cause, ...]) -> None:
    raised = alert(*causes, growth=GROWTH)
    assert raised.headline == "Curvature (resonance) rose at a → b, step 1"
    assert raised.evidence[1] == "learning rate: 0.02 → 0.31 within 5 validations"
    assert [point for point in raised.evidence if point.startswith("at the same time: ")] == list(
        alert(*causes).evidence[1:2] if causes else ()
    )
    assert raised.suggestion == "Check the learning rate."


@pytest.mark.parametrize("cause", [CUT, RATE])
def test_clearer_causes_come_before_a_learning_rate_that_grew_slowly(cause: Cause) -> None:
    raised, without = alert(cause, growth=GROWTH), alert(cause)
    assert (raised.headline, raised.suggestion) == (without.headline, without.suggestion)
    assert "learning rate: 0.02 → 0.31 within 5 validations" in raised.evidence


def test_a_learning_rate_that_jumped_is_listed_once() -> None:
    assert alert(RATE, growth=RateGrowth(0.1, 2.0, 1)).evidence == alert(RATE).evidence


def test_an_uncertain_place_is_said_to_be_uncertain() -> None:
    assert alert(sizes={"c": 0.9}).headline == "Curvature (resonance) rose around b, step 1"
    assert alert(sizes={"b": 0.1}).headline == "Curvature (resonance) rose throughout the network, step 1"


def test_a_loss_that_jumped_leads_unless_a_layer_stands_out() -> None:
    raised = alert(RATE, loss=63.7)
    assert raised.headline == "Learning rate x 20: the loss jumped from 1 to 63.7, step 1"
    assert (raised.metric, raised.before, raised.after) == ("loss", 1.0, 63.7)
    assert raised.suggestion == (
        "Lower the learning rate, and go back to a checkpoint of the validation at step 0, or an earlier one."
    )
    assert alert(loss=63.7).metric == "resonance" and "loss of the probe batch: 1 → 63.7" in alert(loss=63.7).evidence


def test_long_names_are_shortened_in_the_headline_alone() -> None:
    raised = alert(names="transformer.encoder.layers.with.absurdly.long.names.of.modules." * 3)
    assert len(raised.headline) < 80 and raised.headline.endswith("b, step 1") and "…" in raised.headline
    assert raised.where in raised.evidence[0] and "…" not in "".join(raised.evidence) + raised.suggestion


def test_the_name_of_the_metric_is_shortened_before_those_of_layers() -> None:
    raised = alert(CUT._replace(name="encoder.layers.eleven.b"), names="encoder.layers.eleven.")
    assert raised.headline == "Forward pass of encoder.layers.eleven.b changed: resonance rose, step 1"


def test_a_loss_that_hardly_changed_is_evidence_if_there_is_no_other() -> None:
    assert alert().evidence[1:] == ("loss of the probe batch: 1 → 1, hardly changed",)


def test_many_causes_are_listed_and_counted() -> None:
    assert alert(VARIANCE, MEAN, WEIGHT, LOSS, RATE).evidence[1] == (
        "at the same time: learning rate 0.1 → 2 (x 20), training loss 0.2 → 0.6 (x 3), "
        "norm of b.weight 2 → 1 (x 0.5) and 2 more"
    )


def test_visible_changes() -> None:
    change = ReportedChange("coupling", "a--b", 1.0, 1.1)
    assert not change.is_visible
    assert change._replace(after=1.3).is_visible and change._replace(after=0.5).is_visible
    assert change._replace(before=math.nan).is_visible


def test_a_value_that_was_not_measured_before_is_replaced_by_its_forecast() -> None:
    rng = random.Random(0)
    now = snapshot(1, rng)
    deviations = [FeatureDeviation("loss", "", Deviation(math.log(2), 12.0, 0.0))]
    raised = alert_of_change(Change("drift", deviations, 1), {"loss": 2.0}, (), None, replace(now))
    assert raised.kind == "drift"
    assert raised.after == now.loss and raised.before == pytest.approx(now.loss / 2)
    assert raised.evidence == (
        "loss of the probe batch: expected 0.5 → 1 (the network is forgetting what it had learned)",
    )


def test_mean_over_all_pairs_is_geometric_on_a_logarithmic_scale() -> None:
    """Zeros do not count, unless there is nothing else."""
    now = snapshot(0, random.Random(0))
    assert now.measurement is not None
    gap = torch.tensor([1.0, 100.0, 1.0, 100.0, 0.0]).double().expand(5, 5)
    for metric, expected in (("gn_gap", 10.0), ("stable_rank", 40.4)):
        changed = replace(now, measurement=replace(now.measurement, **{metric: gap}))
        assert _mean(changed, metric) == pytest.approx(expected)
    assert _mean(replace(now, measurement=replace(now.measurement, gn_gap=0 * gap)), "gn_gap") == 0

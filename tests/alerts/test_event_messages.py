"""Alerts of events and drifts: short headlines, facts first, a suggestion that says since when."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from curvmon.alerts.drift import Drift
from curvmon.alerts.event_detector import HAND, Event
from curvmon.alerts.event_messages import ADVICE, INTENDED, alert_of_drift, alert_of_event
from curvmon.alerts.evidence import family_scores
from curvmon.alerts.family_wording import in_words, metric_of, wording_of
from curvmon.alerts.features import FeatureDeviation
from curvmon.alerts.forecast import Deviation
from curvmon.alerts.signatures import UNCLEAR
from curvmon.metrics.registry import all_metrics
from curvmon.records import Alert, Snapshot, Spectrum
from tests.helpers.synthetic_records import synthetic_spectrum

BEFORE, NOW = Snapshot(250, 10), Snapshot(298, 11)
LONG = "model.transformer.encoder.layers.11.attention.self.output.dense.parametrizations"
NAMES = ["blocks.1.conv1", LONG, "a{b}.c", "{}" * 60, "層" * 90]


def deviation(family: str, where: str, factor: float, score: float = 30.0) -> FeatureDeviation:
    return FeatureDeviation(family, where, Deviation(math.log(factor), score, 0.0))


def event(cause: str, place: str = "b", share: float = 0.9, **options: Any) -> Event:
    deviations = options.pop("deviations", [deviation("weights", f"{place}.weight", 3.0)])
    others = [other for other in (UNCLEAR, "labels", "inputs") if other != cause][:2]
    causes = ((cause, share), *((other, (1 - share) / 2) for other in others))
    return Event(9.0, causes, ((place, 0.95),), deviations, family_scores(deviations), {}, 1, **options)


def assert_well_formed(alert: Alert, facts: int = 0) -> None:
    assert len(alert.headline) < 80 and "\n" not in alert.headline
    assert alert.headline.endswith(f", step {alert.step}") and alert.headline[0].strip()
    assert 1 <= len(alert.evidence) <= 4 and alert.suggestion.endswith((".", "?"))
    assert Alert.from_dict(alert.to_dict()) == alert


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
@pytest.mark.parametrize("cause", ADVICE)
def test_alerts_are_short_whatever_the_names_are(cause: str, name: str) -> None:
    losses = [deviation("validation loss", name, 4.0, 50.0), deviation("rate", "", 20.0)]
    for deviations in ([deviation("weights", f"{name}.weight", 3.0)], losses):
        facts = [f"{name}.p: 0.1 → 0.9", f"{name}.q: 1 → 2", f"{name}.r: 3 → 4"]
        for given in (facts, []):
            assert_well_formed(alert_of_event(event(cause, name, deviations=deviations), given, BEFORE, NOW))


def test_facts_come_first_then_what_deviates_most_then_the_causes() -> None:
    deviations = [
        deviation("weights", "b.weight", 1.4, 8.0),
        deviation("validation loss", "val_loss", 3.0, 30.0),
        deviation("training loss", "", 2.0, 20.0),
        deviation("update level", "", 1.3, 1.2),  # noise
    ]
    alert = alert_of_event(event("dropout", deviations=deviations), ["a.p: 0.1 → 0.9"], BEFORE, NOW)
    assert alert.evidence == (
        "a.p: 0.1 → 0.9",
        "val_loss: 1 → 3",
        "training loss: 1 → 2",
        "most likely cause: dropout (90%), then unclear (5%)",
    )
    alert = alert_of_event(event("dropout", deviations=deviations[:1] + deviations[3:]), [], BEFORE, NOW)
    assert alert.evidence[:1] == ("norm of b.weight: 1 → 1.4",) and len(alert.evidence) == 2
    assert (alert.kind, alert.level, alert.score) == ("jump", "warning", pytest.approx(8.0))


def test_headlines_name_cause_place_and_damage() -> None:
    loss = deviation("validation loss", "val_loss", 3.0, 20.0)
    weights = deviation("weights", "b.weight", 3.0)

    def headline(cause: str, *deviations: FeatureDeviation, **options: Any) -> str:
        return alert_of_event(event(cause, deviations=list(deviations), **options), [], BEFORE, NOW).headline

    assert headline("weights grown", weights) == "Weights of b grew, step 298"
    assert headline("weights grown", weights, loss) == "Weights of b grew: val_loss 1 → 3, step 298"
    assert headline("learning rate", deviation("rate", "", 20.0)) == "Learning rate x 20, step 298"
    assert headline("labels", loss) == "Labels no longer fit: val_loss 1 → 3, step 298"
    assert headline(UNCLEAR, weights) == "Norm of b.weight 1 → 3, step 298"
    assert headline("weights grown", weights, share=0.4) == "Norm of b.weight 1 → 3, step 298"  # not clear enough


@pytest.mark.parametrize("cause", sorted(ADVICE.keys() - HAND))
def test_suggestions_say_since_when(cause: str) -> None:
    template = ADVICE[cause].suggestion
    for before, since in ((BEFORE, "between steps 250 and 298"), (None, "before step 298")):
        suggestion = alert_of_event(event(cause), [], before, NOW).suggestion
        assert since in suggestion or "{since}" not in template
        assert "{" not in suggestion
        if "{checkpoint}" in template:
            wanted = "a checkpoint from before step 298" if before is None else "the validation at step 250"
            assert wanted in suggestion


@pytest.mark.parametrize("cause", sorted(HAND))
def test_what_is_intended_is_a_notice_without_a_cause_to_look_for(cause: str) -> None:
    notice = alert_of_event(event(cause), ["a.weight.requires_grad: False → True"], BEFORE, NOW)
    assert (notice.kind, notice.level, notice.suggestion) == ("intervention", "info", INTENDED)
    assert not any("cause" in point for point in notice.evidence)
    alert = alert_of_event(event(cause, suffers=True), [], BEFORE, NOW)
    assert (alert.kind, alert.level) == ("jump", "warning")


@pytest.mark.parametrize(("score", "level"), [(8.0, "info"), (40.0, "warning")])
def test_an_unclear_change_that_did_no_damage_is_an_alert_only_if_it_is_large(score: float, level: str) -> None:
    deviations = [deviation("profile", "b", 2.0, score)]
    assert alert_of_event(event(UNCLEAR, deviations=deviations), [], BEFORE, NOW).level == level
    assert alert_of_event(event(UNCLEAR, deviations=deviations, is_own=True), [], BEFORE, NOW).level == "warning"
    damaging = [*deviations, deviation("training loss", "", 2.0, 8.0)]
    assert alert_of_event(event(UNCLEAR, deviations=damaging), [], BEFORE, NOW).level == "warning"


def test_pairs_that_deviate_are_listed() -> None:
    pairs = [deviation("coupling", f"a--{name}", 0.3, score) for name, score in (("b", 9.0), ("c", 20.0), ("d", 1.0))]
    assert alert_of_event(event(UNCLEAR, deviations=pairs), [], BEFORE, NOW).others == ("a--c", "a--b")


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
@pytest.mark.parametrize("family", ["rate", "weights", "training loss"])
def test_drifts(family: str, name: str) -> None:
    drift = Drift(family, f"{name}.weight" if family == "weights" else "", 0.0, math.log(2.0), 4)
    alert = alert_of_drift(drift, (("learning rate", 0.8), (UNCLEAR, 0.2)), BEFORE, NOW)
    assert_well_formed(alert)
    assert "keeps growing: " in alert.headline and alert.evidence[0].endswith("in 4 validations")
    assert alert.evidence[1] == "it grows by 19% from one to the next"
    assert (alert.before, alert.after) == (1.0, pytest.approx(2.0))


def test_a_growing_rate_says_when_it_reaches_the_limit() -> None:
    def points(ratio: float) -> list[str]:
        drift = Drift("rate", "", 0.0, math.log(4.0), 4)
        spectrum: Spectrum = synthetic_spectrum(torch.tensor([9.0]), stability_limit=1.0, stability_ratio=ratio)
        now = Snapshot(298, 11, spectrum=spectrum)
        return [p for p in alert_of_drift(drift, (("learning rate", 1.0),), BEFORE, now).evidence if "limit" in p]

    # 0.2 sqrt(2)^n reaches 1 with n = 4.6
    assert points(0.2) == [
        "at this rate the stability limit is reached in about 5 validations, at the present sharpness"
    ]
    assert points(1.5) == [] == points(math.nan)


def test_values_read_as_the_user_knows_them() -> None:
    assert in_words("validation error", "val_acc", math.log(0.22), math.log(0.52)) == "val_acc: 0.8 → 0.5"
    assert in_words("zeros", "a.weight", 0.0, 0.5) == "share of zeros in a.weight: 0 → 0.5"
    assert in_words("weights", "a{0}.weight", 0.0, math.log(3)) == "norm of a{0}.weight: 1 → 3"
    gap = in_words("gn_gap", "a--b", math.log(0.12), math.log(0.52))
    assert gap.startswith("GN-Gap a--b: 0.1 → 0.5 (Gauss-Newton misses more")
    assert "no longer carries" in in_words("coupling", "a--b", math.log(0.8), math.log(0.3))


def test_every_metric_with_alerts_has_a_wording_and_a_meaning() -> None:
    for spec in all_metrics():
        if spec.alert is not None:
            assert wording_of("level" if spec.name == "resonance" else spec.name).text
            assert spec.alert.rise and spec.alert.fall
    assert {metric_of(family) for family in ("level", "profile", "contrast")} == {"resonance"}
    assert metric_of("training loss") == "training_loss"

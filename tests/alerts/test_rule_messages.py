"""What the alerts of rules say: values before and after, and what to do."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from curvmon import Alert, AlertRules, Measurement
from curvmon.alerts.context import Cause
from curvmon.alerts.rule_checker import RuleChecker
from curvmon.alerts.rule_messages import TEXTS, alert_of_divergence
from curvmon.records import PROBE_LOSS, Snapshot, VitalSigns
from tests.helpers.synthetic_records import synthetic_spectrum

NODES = ("encoder.stem", "encoder.layer1", "encoder.layer2")
RATE = Cause("learning rate", "", "x 300", 9.0, 0.001, 0.3)


def measurement(coupling: float = 0.5, rank: float = 3.0, gap: float = 0.1, loss: float = 1.0) -> Measurement:
    full = torch.ones(3, 3, dtype=torch.float64)
    c = coupling * full
    c.fill_diagonal_(1.0)
    errors = {name: 0.01 * full for name in ("resonance", "coupling", "stable_rank", "gn_gap")}
    return Measurement(NODES, full, c, rank * full, gap * full, errors, full, full, loss=loss, hvps=1, seconds=0.0)


def spectrum(ratio: float = 0.5, smallest: float = -0.1, loss: float = 1.0) -> Any:
    values = torch.tensor([10 * ratio], dtype=torch.float64)
    return synthetic_spectrum(values, smallest=10 * ratio * smallest, stability_ratio=ratio, loss=loss)


FINE: dict[str, Any] = dict(measurement=measurement(), spectrum=spectrum())
DEAD = replace(
    measurement(loss=2.3), coupling=torch.full((3, 3), math.nan).double(), resonance=torch.zeros(3, 3).double()
)


def raised(*parts: dict[str, Any], causes: tuple[Cause, ...] = ()) -> Alert:
    """The alert of the last of some snapshots, a hundred steps apart."""
    checker, past, alerts = RuleChecker(AlertRules(gn_gap_above=2.0)), [], []
    for i, part in enumerate(parts):
        snapshot = Snapshot(step=100 * i, epoch=i, **part)
        alerts = checker.update(snapshot, past, causes if i == len(parts) - 1 else ())
        past.append(snapshot)
    return alerts[-1]


EXPECTED = {
    "loss_explosion": (
        [dict(measurement=measurement(loss=x)) for x in (2.3, 0.5, 0.1, 6.0)],
        "The loss jumped from 0.1 to 6, step 300",
        ["loss of the probe batch: 0.1 → 6 (what the network had learned is lost)"],
        "Go back to a checkpoint of the validation at step 200, or an earlier one, with a lower learning rate.",
    ),
    "dead_network": (
        [FINE, dict(measurement=DEAD)],
        "The network is dead: its layers no longer affect the loss, step 100",
        [
            "couplings between layers: none is defined any more, as where all ReLUs are off or all outputs saturate",
            "largest resonance of all pairs: 1 → 0",
            "loss of the probe batch: 1 → 2.3",
        ],
        "Go back to a checkpoint of the validation at step 0, or an earlier one, with a lower learning rate or a "
        "longer warm-up.",
    ),
    "edge_of_stability": (
        [FINE, *3 * [dict(spectrum=spectrum(ratio=1.5))]],
        "Sharpness reached the optimizer's stability limit, 1.5 times it, step 300",
        [
            "λ_1 over the largest stable sharpness of the optimizer, on the probe batch: 0.5 → 1.5, above 1 in 3 "
            "measurements in a row",
            "sharpness λ_1: 5 → 15",
        ],
        "Do nothing while the loss falls (most runs train at this edge of stability); otherwise lower the learning "
        "rate.",
    ),
    "far_beyond_stability": (
        3 * [dict(spectrum=spectrum(ratio=30.0))],
        "Sharpness is 30 times the optimizer's stability limit, step 200",
        [
            "λ_1 over the largest stable sharpness of the optimizer, on the probe batch: 30, above 20 in 3 "
            "measurements in a row"
        ],
        "Lower the learning rate, or warm it up longer, unless the loss keeps falling.",
    ),
    "coupling_above": (
        [FINE, *3 * [dict(measurement=measurement(coupling=1.2, gap=0.9))]],
        "Coupling is 1.2 at encoder.stem → encoder.layer1, beyond Gauss-Newton, step 300",
        [
            "coupling encoder.stem--encoder.layer1: 0.5 → 1.2, above 1.05 in 3 measurements in a row",
            "GN-Gap encoder.stem--encoder.layer1: 0.1 → 0.9 (curvature that K-FAC and Fisher miss)",
        ],
        "Look at the GN-Gap before relying on Gauss-Newton, K-FAC or Fisher between these layers.",
    ),
    "saddle": (
        [*3 * [FINE], *3 * [dict(spectrum=spectrum(smallest=-0.8, loss=0.998))]],
        "The loss stalls where the curvature is negative: a saddle point, step 500",
        [
            "smallest eigenvalue over the largest: -0.1 → -0.8, below -0.5 in 3 measurements in a row",
            "loss of the probe batch: 1 → 0.998",
        ],
        "Raise the learning rate or the momentum, or use smaller batches, to escape it.",
    ),
    "rank_collapse": (
        [FINE, *3 * [dict(measurement=measurement(rank=1.01))]],
        "Curvature collapsed to a single direction, stable rank 1.01, step 300",
        ["mean stable rank between layers: 3 → 1.01", "loss of the probe batch: 1 → 1, hardly changed"],
        "Do nothing if the network has learned its data; otherwise look for collapsed representations, or one sample "
        "that dominates the loss.",
    ),
    "gn_gap_above": (
        [FINE, *3 * [dict(measurement=measurement(gap=3.0))]],
        "GN-Gap is 3 at encoder.stem, above 2, step 300",
        [
            "GN-Gap encoder.stem--encoder.stem: 0.1 → 3, above 2 in 3 measurements in a row",
            "loss of the probe batch: 1 → 1, hardly changed",
        ],
        "Do not rely on Gauss-Newton, K-FAC or Fisher between these layers.",
    ),
}


@pytest.mark.parametrize("rule", EXPECTED)
def test_texts(rule: str) -> None:
    parts, headline, evidence, suggestion = EXPECTED[rule]
    alert = raised(*parts)
    assert alert.kind == rule
    assert (alert.headline, list(alert.evidence), alert.suggestion) == (headline, evidence, suggestion)
    assert len(alert.headline) < 80


def test_a_loss_that_rises_is_evidence_at_the_edge_of_stability() -> None:
    alert = raised(FINE, *3 * [dict(spectrum=spectrum(ratio=1.5, loss=2.0))])
    assert alert.kind == "edge_of_stability" and "loss of the probe batch: 1 → 2" in alert.evidence


def vitals(rate: float) -> dict[str, VitalSigns]:
    return dict(vitals=VitalSigns(learning_rate=rate))


@pytest.mark.parametrize("rule", ["loss_explosion", "dead_network", "far_beyond_stability"])
def test_a_learning_rate_that_grew_is_evidence(rule: str) -> None:
    parts, headline, evidence, suggestion = EXPECTED[rule]
    *early, last = [{**part, **vitals(0.02)} for part in parts]
    alert = raised(*early, {**last, **vitals(2.0)})
    assert (alert.kind, alert.headline, alert.suggestion) == (rule, headline, suggestion)
    assert set(alert.evidence) == {*evidence, "learning rate: 0.02 → 2"}
    assert set(raised(*early, {**last, **vitals(0.03)}).evidence) <= {*evidence, "learning rate: 0.02 → 0.03"}


def test_a_learning_rate_that_grew_slowly_is_evidence_where_values_are_not_finite() -> None:
    past = [Snapshot(step=i, epoch=0, **vitals(0.01 * 1.3**i)) for i in range(5)]
    now = Snapshot(step=5, epoch=0, **vitals(0.01 * 1.3**5))
    (alert,) = RuleChecker(AlertRules()).diverged("the reason", now, past)
    assert alert.evidence == ("the reason", "learning rate: 0.01 → 0.0371 within 5 validations")


def test_every_rule_has_a_text() -> None:
    assert set(TEXTS) == set(EXPECTED)


def test_a_learning_rate_that_rose_leads_the_headline() -> None:
    parts, *_ = EXPECTED["loss_explosion"]
    alert = raised(*parts, causes=(RATE,))
    assert alert.headline == "Learning rate x 300: the loss jumped from 0.1 to 6, step 300"
    assert alert.evidence[1] == "at the same time: learning rate 0.001 → 0.3 (x 300)"


BEFORE = Snapshot(step=100, epoch=1, vitals=VitalSigns(loss=0.3, weight_norm=2.0, learning_rate=0.1))
TENSORS = ("a.weight", "a.bias", "b.weight", "b.bias", "c.weight")


@pytest.mark.parametrize(
    ("signs", "headline", "evidence"),
    [
        (
            VitalSigns(not_finite=TENSORS, weight_norm=math.inf, learning_rate=0.4),
            "NaN or infinity in a.weight and 4 more tensors, step 200",
            [
                "the reason",
                "tensors that are not finite: 0 → 5, also a.bias, b.weight, b.bias, …",
                "loss of the probe batch: 0.3 at step 100, the last finite one",
                "learning rate: 0.1 → 0.4",
            ],
        ),
        (
            VitalSigns(not_finite=(TENSORS[0], PROBE_LOSS)),
            "NaN or infinity in a.weight, step 200",
            ["the reason", "loss of the probe batch: 0.3 at step 100, the last finite one"],
        ),
        (
            VitalSigns(not_finite=(PROBE_LOSS,)),
            "The loss is NaN or infinite, step 200",
            ["the reason", "loss of the probe batch: 0.3 at step 100, the last finite one"],
        ),
        (
            VitalSigns(loss=0.4),
            "The curvature is NaN or infinite, step 200",
            ["the reason", "loss of the probe batch: 0.3 → 0.4"],
        ),
    ],
)
def test_what_is_not_finite(signs: VitalSigns, headline: str, evidence: list[str]) -> None:
    alert = alert_of_divergence("the reason", Snapshot(step=200, epoch=2, vitals=signs), BEFORE)
    assert (alert.headline, list(alert.evidence), alert.level) == (headline, evidence, "error")
    assert alert.suggestion.startswith("Go back to a checkpoint of the validation at step 100, or an earlier one, ")
    first = alert_of_divergence("the reason", Snapshot(step=200, epoch=2, vitals=signs), None)
    assert first.suggestion.startswith("Go back to a checkpoint from before step 200, ")

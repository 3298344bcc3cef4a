"""Headlines are short whatever the names are; verbs and numbers say how large a change is."""

from __future__ import annotations

import math

import pytest

from curvmon.alerts.wording import MAX_HEADLINE, before_after, headline, shorten, times, verb

LONG = "model.transformer.encoder.layers.11.attention.self.output.dense.parametrizations"


def test_headline_has_its_names_and_its_step() -> None:
    assert headline("Coupling collapsed at {} → {}", "layer3", "layer4", step=298) == (
        "Coupling collapsed at layer3 → layer4, step 298"
    )
    assert headline("The value rose") == "The value rose"


@pytest.mark.parametrize(
    "names",
    [
        (LONG, LONG.replace("11", "12")),
        ("a", LONG),
        (LONG, "layer4"),
        (10 * LONG, "{}" * 200),
        ("層" * 300, "\n\t layer \n" * 50),
        ("", ""),
    ],
)
@pytest.mark.parametrize("step", [0, 298, 10**12])
def test_headline_is_below_80_characters(names: tuple[str, str], step: int) -> None:
    text = headline("Forward pass of {} changed: curvature (resonance) collapsed at {}", *names, step=step)
    assert len(text) <= MAX_HEADLINE < 80 and "\n" not in text and text.endswith(f", step {step}")


def test_the_longest_names_are_shortened_first_in_the_middle() -> None:
    text = headline("Coupling collapsed at {} → {}", LONG, "layer4", step=298)
    assert len(text) == MAX_HEADLINE
    name = text.removeprefix("Coupling collapsed at ").removesuffix(" → layer4, step 298")
    start, end = name.split("…")
    assert LONG.startswith(start) and LONG.endswith(end) and abs(len(start) - len(end)) <= 1


def test_a_text_that_is_too_long_is_cut_as_well() -> None:
    text = headline("x" * 200, step=3)
    assert len(text) == MAX_HEADLINE and text.endswith(", step 3")
    assert shorten("model.encoder.layers.11", 15) == "model.e…yers.11" and shorten("short", 15) == "short"


@pytest.mark.parametrize(
    ("metric", "before", "after", "word"),
    [
        ("coupling", 0.82, 0.31, "collapsed"),
        ("coupling", 0.8, 0.6, "fell"),
        ("resonance", 1.0, 0.001, "vanished"),
        ("resonance", 1.0, 2.0, "rose"),
        ("resonance", 1.0, 5.0, "jumped"),
        ("loss", 2.4, 0.02, "fell"),
        ("loss", 0.02, 2.4, "jumped"),
        ("hessian", 12.0, 0.1, "fell"),
        ("gn_gap", 0.0, 0.5, "jumped"),
        ("size", -1.0, 0.5, "rose"),
    ],
)
def test_verbs_follow_direction_and_size(metric: str, before: float, after: float, word: str) -> None:
    assert verb(metric, before, after) == word


def test_numbers_have_three_digits() -> None:
    assert before_after(0.0123456, 2412.3) == "0.0123 → 2412"
    assert before_after(math.nan, 0.31) == "0.31" and before_after(0.31, math.nan) == "0.31 → NaN"
    assert before_after(-math.inf, math.inf) == "-infinity → infinity"
    assert [times(0.001, after) for after in (0.3, 0.00071, 12.0)] == ["x 300", "x 0.71", "x 12000"]

"""Makes curvmon/alerts/signature_table.py from recorded runs of all families.

    python -m benchmarks.alert_fit --cache runs/alerts

Noise: Student's t, fitted to the scores of quiet runs. Shares: how often an event raises or lowers a family at the
first measurement after it. What users do on purpose may move anything: one share for all families.
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.alert_recording import Recorded, load
from curvmon.alerts.context_features import context_features
from curvmon.alerts.event_detector import HAND, HAND_SIGNS
from curvmon.alerts.evidence import EXACT, SOFT, FamilyScore, Forecasts, LossStart, certain_signs, family_scores
from curvmon.alerts.features import features_of
from curvmon.alerts.setting_changes import SettingChanges, kind_of
from curvmon.alerts.signatures import QUIET, UNCLEAR, Noise, Shares, Signatures

TABLE = Path(__file__).parents[1] / "curvmon" / "alerts" / "signature_table.py"
SCALES = (0.5, 0.6, 0.8, 1.0, 1.2, 1.5, 2.0, 2.5, 3.0)
FREEDOMS = (3.0, 4.0, 6.0)
FIRST = 4
"""measurements of a run without forecasts"""
AFFECTED = 3.0
"""times the scale of the noise, plus one: a score beyond is one of an affected family"""
ON_PURPOSE, ANYTHING = Shares(0.2, 0.15), Shares(0.12, 0.08)
"""shares of all families for what users do on purpose, and for a cause that is not in the table"""
INTENDED = {
    "learning rate": "schedule",
    "batch size": "batch size",
    "weight decay": "weight decay setting",
    "frozen parameters": "trained parameters",
}
"""causes of what users do on purpose"""
EVENTS_EXPECTED, UNCLEAR_EXPECTED = 0.02, 0.005
"""share of measurements after an event"""
TEMPER = 0.5
WIDTH = 120
"""of a line of the table"""


class Row(NamedTuple):
    """One measurement: quiet, or the first one after an event."""

    cause: str
    scores: dict[str, FamilyScore]
    signs: frozenset[str]


def rows_of(run: Recorded) -> Iterator[Row]:
    """Of a quiet run all measurements, of another one the first after its event."""
    forecasts, settings, start = Forecasts(), SettingChanges(), LossStart()
    operations: object = None
    at = run.happened[0].at if run.happened else None
    for i, seen in enumerate(run.measured[: None if at is None else at + 1]):
        features = [*features_of(seen.snapshot), *context_features(seen.context)]
        deviations = forecasts.deviations(features, seen.snapshot.step)
        changed = settings.update(seen.context.settings)
        is_high = start.update(features)
        signs = {kind_of(name, seen.context.settings) for name in changed}
        if seen.context.operations:
            signs |= {"operations"} if operations not in (None, seen.context.operations) else set()
            operations = seen.context.operations
        forecasts.append(features, seen.snapshot.step)
        if i == at and seen.not_finite:
            return
        if i == at or (at is None and i >= FIRST):
            scores = family_scores(deviations)
            yield Row(_cause(run) if i == at else QUIET, scores, certain_signs(scores, deviations) | is_high | signs)


def _cause(run: Recorded) -> str:
    cause = run.happened[0].cause
    return INTENDED[cause] if run.role == "hand" else cause


def fit(rows: Sequence[Row]) -> Signatures:
    noise = _noise([row for row in rows if row.cause == QUIET and not row.signs & HAND_SIGNS])
    events: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row.cause != QUIET:
            events[row.cause].append(row)
    shares = {cause: _shares(cause, of_cause, noise) for cause, of_cause in sorted(events.items())}
    return Signatures(
        noise,
        {**shares, UNCLEAR: dict.fromkeys(noise, ANYTHING)},
        {
            **{cause: EVENTS_EXPECTED / len(events) for cause in shares},
            UNCLEAR: UNCLEAR_EXPECTED,
            QUIET: 1 - EVENTS_EXPECTED - UNCLEAR_EXPECTED,
        },
        {
            **{cause: _signs(cause, of_cause) for cause, of_cause in sorted(events.items())},
            QUIET: _soft_signs([row for row in rows if row.cause == QUIET]),
        },
        TEMPER,
    )


def _noise(quiet: Iterable[Row]) -> dict[str, Noise]:
    scores: dict[str, list[float]] = defaultdict(list)
    for row in quiet:
        for family in row.scores.keys() - EXACT:
            scores[family].append(row.scores[family].score)
    candidates = [Noise(scale, freedom) for scale in SCALES for freedom in FREEDOMS]
    return {
        family: max(candidates, key=lambda noise: sum(noise.log_density(value) for value in values))
        for family, values in sorted(scores.items())
    }


def _shares(cause: str, events: Iterable[Row], noise: dict[str, Noise]) -> dict[str, Shares]:
    if cause in HAND:
        return dict.fromkeys(noise, ON_PURPOSE)
    seen: dict[str, list[float]] = defaultdict(list)
    for row in events:
        for family in row.scores.keys() & noise.keys():
            seen[family].append(row.scores[family].score)
    shares = {}
    for family, values in sorted(seen.items()):
        limit, count = AFFECTED * noise[family].scale + 1, len(values) + 0.6
        up, down = sum(value > limit for value in values), sum(value < -limit for value in values)
        shares[family] = Shares((up + 0.1) / count, (down + 0.1) / count)
    return shares


def _signs(cause: str, events: Sequence[Row]) -> dict[str, float]:
    """Soft ones are only likely; the others come with their cause or do not."""
    counts = Counter(sign for row in events for sign in row.signs)
    signs = {}
    for sign, count in sorted(counts.items()):
        if sign in HAND_SIGNS and cause not in HAND:  # by coincidence
            continue
        if sign.endswith(SOFT):
            signs[sign] = 0.2 if cause in HAND else (count + 0.3) / (len(events) + 0.6)
        elif cause not in HAND or count > 1:
            signs[sign] = (count + 0.02) / (len(events) + 0.04)
    return signs


def _soft_signs(quiet: Sequence[Row]) -> dict[str, float]:
    counts = Counter(sign for row in quiet for sign in row.signs if sign.endswith(SOFT))
    return {sign: (count + 0.3) / (len(quiet) + 0.6) for sign, count in sorted(counts.items())}


def used(runs: Iterable[Recorded]) -> list[Recorded]:
    """Quiet runs and single events. The first measurement of a slow change shows little."""
    return [
        run
        for run in runs
        if run.role in ("quiet", "event", "hand") or (run.role == "drift" and run.happened[0].cause == "weight decay")
    ]


def left_out(runs: Iterable[Recorded]) -> dict[str, Signatures]:
    """For every family, fitted to the runs of the others."""
    rows: dict[str, list[Row]] = defaultdict(list)
    for run in used(runs):
        rows[run.family] += rows_of(run)
    return {family: fit([row for other in rows if other != family for row in rows[other]]) for family in rows}


def source(signatures: Signatures) -> str:
    """The table as Python."""
    lines = [
        '"""What events look like in runs of twelve families of networks. Made by `python -m benchmarks.alert_fit`."""',
        "",
        "# fmt: off",
        "from curvmon.alerts.signatures import Noise, Shares, Signatures",
        "",
        "SIGNATURES = Signatures(",
        "    noise={",
        *_packed({name: f"Noise({noise.scale:g}, {noise.freedom:g})" for name, noise in signatures.noise.items()}, 8),
        "    },",
        "    shares={",
    ]
    for cause, families in signatures.shares.items():
        shares = {name: f"Shares({share.up:.3g}, {share.down:.3g})" for name, share in families.items()}
        lines += [f"        {cause!r}: {{", *_packed(shares, 12), "        },"]
    lines += ["    },", "    priors={"]
    lines += _packed({cause: f"{prior:.3g}" for cause, prior in signatures.priors.items()}, 8)
    lines += ["    },", "    exact={"]
    for cause, signs in signatures.exact.items():
        lines += [f"        {cause!r}: {{", *_packed({sign: f"{p:.4g}" for sign, p in signs.items()}, 12), "        },"]
    return "\n".join([*lines, "    },", f"    temper={signatures.temper:g},", ")", ""])


def _packed(entries: Mapping[str, str], indent: int) -> list[str]:
    """As many entries a line as fit."""
    lines = [" " * indent]
    for name, value in entries.items():
        entry = f"{name!r}: {value},"
        if len(lines[-1]) + len(entry) >= WIDTH and lines[-1].strip():
            lines[-1] = lines[-1].rstrip()
            lines.append(" " * indent)
        lines[-1] += f"{entry} "
    return [*lines[:-1], lines[-1].rstrip()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, default=Path("runs/alerts"))
    arguments = parser.parse_args()
    runs = used(load(arguments.cache))
    rows = [row for run in runs for row in rows_of(run)]
    TABLE.write_text(source(fit(rows)).replace("'", '"'))
    print(f"{len(rows)} measurements of {len(runs)} runs")


if __name__ == "__main__":
    main()

"""The watch over all series, with measurements made up of known factors."""

from __future__ import annotations

import random
from dataclasses import replace

import torch

from curvmon import AlertRules, Measurement
from curvmon.alerts.context import Circumstances
from curvmon.alerts.manager import Alarms
from curvmon.records import Snapshot

NODES = ("stem", "a", "b", "c", "d")


def snapshot(
    step: int, rng: random.Random, factors: dict[str, float] | None = None, cut: str | None = None
) -> Snapshot:
    """A quiet level that swings by 20 percent, a profile that is steady to 3 percent, couplings to 1 percent."""
    n = len(NODES)
    level = 2.0 ** rng.gauss(0, 0.3)
    scale = [4.0**-i * level * (factors or {}).get(name, 1.0) * 2 ** rng.gauss(0, 0.04) for i, name in enumerate(NODES)]
    coupling = torch.ones(n, n, dtype=torch.float64)
    for i in range(n):
        for j in range(i):
            across = cut is not None and j < NODES.index(cut) <= i
            coupling[i, j] = coupling[j, i] = (0.3 if across else 0.8) * (1 + 0.01 * rng.gauss(0, 1))
    root = torch.tensor(scale, dtype=torch.float64).sqrt()
    resonance = coupling * root[:, None] * root[None, :]
    ones = torch.ones(n, n, dtype=torch.float64)
    errors = {name: 0.005 * ones for name in ("coupling", "stable_rank", "gn_gap")} | {"resonance": 0.005 * resonance}
    found = Measurement(NODES, resonance, coupling, 2 * ones, 0.1 * ones, errors, ones, ones, 1.0, 1, 0.0)
    return Snapshot(step=step, epoch=step, measurement=found)


def run(seed: int, points: int, **event: object) -> list[tuple[int, object]]:
    rng, alarms, past, found = random.Random(seed), Alarms(), [], []
    for i in range(points):
        now = snapshot(i, rng, **(event if i >= 15 else {}))  # type: ignore[arg-type]
        found += [(i, alert) for alert in alarms.update(now, past) if alert.level != "info"]
        past.append(now)
    return found


def test_quiet_runs_are_silent() -> None:
    assert sum(len(run(seed, 40)) for seed in range(20)) == 0


def test_one_layer_that_changes_is_named_once() -> None:
    for seed in range(8):
        ((at, alert),) = run(seed, 30, factors={"b": 3.0})
        assert at == 15
        assert alert.metric == "resonance" and "b" in alert.where.split("--")  # type: ignore[attr-defined]
        assert "; at b (also" in alert.message  # type: ignore[attr-defined]


def test_an_unclear_change_waits_for_the_next_and_is_compared_with_what_was_before() -> None:
    for seed in (2, 3, 4):
        rng = random.Random(seed)
        values = [snapshot(i, rng, {"b": 1.35} if i >= 15 else None) for i in range(17)]
        ((at, alert),) = run(seed, 30, factors={"b": 1.35})
        assert at == 16 and alert.where == "a--b"  # type: ignore[attr-defined]
        before, after = (values[i].measurement.resonance[1, 2].item() for i in (14, 16))  # type: ignore[union-attr]
        assert (alert.before, alert.after) == (before, after)  # type: ignore[attr-defined]


def test_pairs_across_a_cut_are_one_alert() -> None:
    for seed in range(8):
        ((at, alert),) = run(seed, 30, cut="c")
        assert at == 15 and alert.metric == "coupling"  # type: ignore[attr-defined]
        assert alert.before > 0.6 > alert.after  # type: ignore[attr-defined]


def test_the_alarms_go_through_a_checkpoint() -> None:
    """Stopped at every point: the rest of the run tells the same."""
    whole = [i for i, _ in run(3, 30, factors={"b": 3.0})]
    for stop in (5, 14, 15, 16, 20):
        rng, alarms, past, found = random.Random(3), Alarms(), [], []
        for i in range(30):
            if i == stop:
                state = alarms.state_dict()
                alarms = Alarms()
                alarms.load_state_dict(state)
            now = snapshot(i, rng, {"b": 3.0} if i >= 15 else None)
            found += [i for alert in alarms.update(now, past) if alert.level != "info"]
            past.append(now)
        assert found == whole


def test_causes_are_named() -> None:
    rng, alarms, past, messages = random.Random(0), Alarms(), [], []
    for i in range(20):
        now = snapshot(i, rng, {"b": 3.0} if i >= 15 else None)
        rate = {"learning rate": 0.1 if i < 15 else 2.0, "size of a.weight": 1.0 + 0.001 * i}
        messages += [alert.message for alert in alarms.update(now, past, Circumstances(rate))]
        past.append(now)
    (message,) = messages
    assert "learning rate x 20" in message and "check the learning rate" in message and "size of" not in message


def test_other_nodes_start_anew() -> None:
    rng, alarms = random.Random(0), Alarms()
    for i in range(40):
        now = snapshot(i, rng, dict.fromkeys(NODES, 50.0 if i >= 20 else 1.0))
        assert now.measurement is not None
        names = tuple(f"{name}{i >= 20}" for name in NODES)
        alerts = alarms.update(replace(now, measurement=replace(now.measurement, nodes=names)))
        assert not [alert for alert in alerts if alert.level != "info"]


def test_what_was_not_measured_before_is_what_was_expected() -> None:
    """The snapshot before has other nodes, so no value for the pair: the direction is right all the same."""
    rng, alarms, found = random.Random(1), Alarms(), []
    for i in range(20):
        now = snapshot(i, rng, {"b": 3.0} if i >= 15 else None)
        found += [alert for alert in alarms.update(now, [Snapshot(step=i, epoch=i)]) if alert.level != "info"]
    (alert,) = found
    assert 0 < alert.before < alert.after and " rose from " in alert.message


def test_sensitivity_is_a_factor() -> None:
    def told(sensitivity: float) -> int:
        rng, alarms, found = random.Random(2), Alarms(AlertRules(sensitivity=sensitivity)), 0
        for i in range(20):
            alerts = alarms.update(snapshot(i, rng, {"b": 1.4} if i >= 15 else None))
            found += sum(alert.level != "info" for alert in alerts)
        return found

    assert told(0.4) == 0 and told(2.0) == 1


def test_nothing_is_told_after_a_gap() -> None:
    """Measurements were left out before the level rose: it may have done so little by little."""
    for skipped, told in ((0, 1), (7, 0)):
        rng, alarms, past, found = random.Random(0), Alarms(), [], 0
        for i in range(20):
            now = snapshot(i, rng, {"b": 3.0} if i >= 15 else None)
            now = replace(now, skipped=skipped if i >= 15 else 0)
            found += sum(alert.level != "info" for alert in alarms.update(now, past))
            past.append(now)
        assert found == told

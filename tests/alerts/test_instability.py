"""Warnings before training becomes unstable: synthetic pulses of known truth, an exact quadratic, and a real run."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import curvmon
from curvmon.alerts.instability import HALF, REARM, Instability, InstabilityDetector
from curvmon.records import PulseRecord

NOISES = (0.1, 0.3, 0.6)
"""standard deviations of the logarithm of a single ratio, from a large batch to a small one"""


def pulses(
    rates: Sequence[float],
    ratio: Callable[[int, float], float],
    noise: float = 0.3,
    seed: int = 0,
    every: int = 2,
    loss: Callable[[int], float] = lambda i: 1.0,
    gain: Callable[[int], float] = lambda i: 1.0,
) -> list[PulseRecord]:
    """One for every learning rate; `ratio` of pulse i at its rate, with noise in gain and curvature."""
    rng = random.Random(seed)
    records = []
    for i, rate in enumerate(rates):
        g = rate * gain(i) * math.exp(rng.gauss(-(noise**2) / 2, noise))  # of mean 1
        c = 2 * g * ratio(i, rate) * math.exp(rng.gauss(-(noise**2) / 2, noise))
        records.append(PulseRecord(every * i, 0, g, c, rate, loss(i) * math.exp(rng.gauss(0, 0.05))))
    return records


def reported(
    records: Sequence[PulseRecord], detector: InstabilityDetector | None = None
) -> list[tuple[int, Instability]]:
    """What is reported, and at which pulse."""
    detector = detector or InstabilityDetector()
    return [(i, event) for i, record in enumerate(records) if (event := detector.update(record)) is not None]


def proportional(at: float = 0.1, rate: float = 1.0) -> Callable[[int, float], float]:
    """Ratios of a fixed curvature, `at` a learning rate."""
    return lambda i, r: at * r / rate


def cosine(steps: int) -> list[float]:
    return [0.5 * (1 + math.cos(math.pi * i / steps)) for i in range(steps)]


def one_cycle(steps: int) -> list[float]:
    rising = [1 - 0.96 * (1 + math.cos(math.pi * i / (0.3 * steps))) / 2 for i in range(int(0.3 * steps))]
    return [*rising, *cosine(steps - len(rising))]


def warmup(steps: int, then: int = 200) -> list[float]:
    return [*((i + 1) / steps for i in range(steps)), *cosine(then)]


SCHEDULES = {
    "constant": [1.0] * 1000,
    "cosine": cosine(600),
    "one cycle, short": one_cycle(100),
    "one cycle, long": one_cycle(3000),
    "warmup of 10": warmup(10),
    "warmup of 100": warmup(100),
    "warmup of 2000": warmup(2000),
    "quadratic warmup": [((i + 1) / 500) ** 2 for i in range(500)],
    "search for a learning rate": [1e-6 * 1.05**i for i in range(280)],
    "warmup in epochs": [min(1.0, (1 + i // 30) / 5) for i in range(400)],
    "warmup at a tenth": [0.1] * 60 + [1.0] * 300,
    "step decay": [0.1 ** (i // 100) for i in range(400)],
    "triangles": [abs((i % 200) - 100) / 100 + 0.01 for i in range(1000)],
}


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_are_quiet(name: str, noise: float) -> None:
    for seed in range(5):
        for largest in (0.03, 0.1, 0.3):
            assert reported(pulses(SCHEDULES[name], proportional(largest), noise, seed)) == []


@pytest.mark.parametrize("noise", NOISES)
def test_warm_restarts_are_quiet_although_curvature_grew_at_low_rates(noise: float) -> None:
    rates = [0.01 + 0.99 * rate for rate in cosine(100) * 5]
    for seed in range(5):
        records = pulses(rates, lambda i, rate: 0.3 * rate * rate**-0.4, noise, seed)
        assert reported(records) == []


@pytest.mark.parametrize("noise", [0.1, 0.3])
def test_the_edge_of_stability_is_quiet(noise: float) -> None:
    """Full-batch gradient descent: the ratio rises to about 1 and stays there."""
    for seed in range(10):
        records = pulses([1.0] * 1000, lambda i, rate: min(1.0, 0.2 + i / 300), noise, seed)
        assert reported(records) == []


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("usual", [0.03, 0.1, 0.3])
@pytest.mark.parametrize("growth", [1.02, 1.04, 1.1])
def test_growing_learning_rates_are_reported_once_before_the_limit(growth: float, usual: float, noise: float) -> None:
    for seed in range(5):
        rates = [1.0] * 150 + [growth**i for i in range(1, 200)]
        events = reported(pulses(rates, proportional(usual), noise, seed))
        limit = 150 + math.log(1 / usual) / math.log(growth)
        assert len(events) == 1 and 150 < events[0][0] < limit
        event = events[0][1]
        assert event.kind == "approaching_instability" and event.cause in ("learning_rate", "step_ratio")
        assert event.usual == pytest.approx(usual, rel=0.6)
        assert event.suggested_lr < event.learning_rate == rates[events[0][0]]


def test_a_growing_learning_rate_that_the_curvature_follows_is_quiet() -> None:
    rates = [1.0] * 150 + [1.02**i for i in range(150)]
    assert reported(pulses(rates, lambda i, rate: 0.1, 0.2)) == []


@pytest.mark.parametrize("noise", [0.1, 0.3])
@pytest.mark.parametrize("usual", [0.1, 0.5, 0.9])
def test_unstable_steps_at_a_constant_rate_are_reported(usual: float, noise: float) -> None:
    """Curvature grows by 3 % a pulse."""
    for seed in range(5):
        records = pulses([1.0] * 300, lambda i, rate: usual * 1.03 ** max(0, i - 150), noise, seed)
        (at, event), *more = reported(records)
        assert more == [] and at > 150 and event.cause == "step_ratio"
        assert event.step_ratio > max(1, 2 * event.usual) and event.suggested_lr < HALF


def test_a_rate_far_above_the_critical_one_is_reported_at_the_first_pulse() -> None:
    (at, event), *_ = reported(pulses([1.0] * 100 + [20.0] * 10, proportional(0.1), 0.2))
    assert at == 100 and event.step_ratio == pytest.approx(2, rel=0.3) and event.suggested_lr < 10


def test_spikes_of_single_ratios_are_quiet() -> None:
    for seed in range(10):
        rng = random.Random(seed)
        spikes = {i: math.exp(rng.uniform(1, 4)) for i in range(1000) if rng.random() < 0.03}
        ratios = [0.1 * spikes.get(i, 1.0) for i in range(1000)]
        assert reported(pulses([1.0] * 1000, lambda i, rate, ratios=ratios: ratios[i], 0.3, seed)) == []


def test_what_is_not_finite_is_ignored() -> None:
    records = pulses([1.0] * 150 + [1.03**i for i in range(100)], proportional(0.1))
    expected = reported(records)
    odd = [PulseRecord(0, 0, *values, 1.0, 1.0) for values in ((math.nan, 1.0), (1.0, math.inf), (-math.inf, math.nan))]
    mixed = [part for record in records for part in (record, *odd)]
    assert [event for _, event in reported(mixed)] == [event for _, event in expected] != []
    detector = InstabilityDetector()
    assert reported([*odd, PulseRecord(0, 0, 0.0, 0.0, 0.0, 1.0)], detector) == []
    assert math.isnan(detector.step_ratio) and math.isnan(detector.critical_lr)


def test_short_steps_at_the_end_of_a_schedule_do_not_count() -> None:
    """Their u is rounding: curvature / η² is huge."""
    detector = InstabilityDetector()
    reported(pulses([1.0] * 100, proportional(0.2), 0.1), detector)
    noise = [PulseRecord(200 + i, 0, 1e-7, 1e-3, 1e-6, 1.0) for i in range(50)]
    assert reported([*noise, *pulses([1.0] * 100, proportional(0.2), 0.1)], detector) == []


def test_single_steps_uphill_are_quiet_and_many_are_not() -> None:
    rng = random.Random(0)
    uphill = {i for i in range(400) if rng.random() < 0.1}
    sign = lambda i: -1.0 if i in uphill else 1.0  # noqa: E731
    assert reported(pulses([1.0] * 400, lambda i, rate: 0.1 * sign(i), 0.3, gain=sign)) == []
    always = lambda i: -1.0 if i >= 200 else 1.0  # noqa: E731
    (at, event), *more = reported(pulses([1.0] * 250, lambda i, rate: 0.1 * always(i), 0.3, gain=always))
    assert more == [] and 200 < at < 225 and event.step_ratio > 1 and event.suggested_lr < 1


def test_negative_curvature_has_no_critical_learning_rate() -> None:
    detector = InstabilityDetector()
    assert reported(pulses([1.0] * 100, lambda i, rate: -0.1, 0.2), detector) == []
    assert detector.step_ratio < 0 and detector.critical_lr == math.inf


def test_every_episode_is_reported_once() -> None:
    """Three of them; the last begins before the second has been over for long enough."""

    def ratio(i: int, rate: float) -> float:
        return 2.0 if 100 <= i < 150 or 250 <= i < 300 or 300 + REARM // 2 <= i < 350 else 0.1

    events = reported(pulses([1.0] * 400, ratio, 0.1))
    assert [100 < at < 115 for at, _ in events] == [True, False] and 250 < events[1][0] < 265


def test_a_growing_gain_is_reported_unless_the_loss_falls() -> None:
    """As where batches repeat the same samples: steps fit their own batch, and the loss of others does not fall."""
    grows = lambda i: 1.03 ** max(0, min(i, 250) - 200)  # noqa: E731
    (at, event), *more = reported(pulses([1.0] * 300, lambda i, rate: 0.1, 0.3, gain=grows))
    assert more == [] and 210 < at < 250 and event.cause == "gain" and event.factor > 2
    assert 0.3 < event.suggested_lr < 0.75
    falls = lambda i: 0.97 ** max(0, i - 200)  # noqa: E731
    assert reported(pulses([1.0] * 300, lambda i, rate: 0.1, 0.3, gain=grows, loss=falls)) == []


def test_headroom_is_reported_once_and_at_the_largest_rate_only() -> None:
    (at, event), *more = reported(pulses([1.0] * 500, lambda i, rate: 0.002, 0.3))
    assert more == [] and at >= 100 and event.kind == "rate_headroom" and event.suggested_lr == pytest.approx(4)
    assert reported(pulses([1.0] * 50 + [0.01] * 500, proportional(0.2), 0.3)) == []


def test_learning_rates_between_pulses_are_enough() -> None:
    """A pulse every 50 steps: the rate has outgrown before the next one."""
    detector, raised_at = InstabilityDetector(), []
    records = pulses([1.0] * 40, proportional(0.1), 0.2, every=50)
    for step in range(1999):
        rate = 1.0 if step < 1960 else 1.05 ** (step - 1960)
        event = detector.advance(step, rate) if step % 50 else detector.update(records[step // 50])
        raised_at += [step] if event else []
    assert len(raised_at) == 1 and 1970 < raised_at[0] < 1980
    assert detector.step_ratio == pytest.approx(0.1 * 1.05**38, rel=0.4)
    fresh = InstabilityDetector()
    assert [fresh.advance(step, 1.1**step) for step in range(50)] == [None] * 50


@pytest.mark.parametrize("every", [1, 2, 5])
def test_a_rate_that_is_set_in_every_few_steps_grows_all_the_same(every: int) -> None:
    detector, ratio = InstabilityDetector(), proportional(0.1)
    for record in pulses([1.0] * 120, ratio):
        assert detector.update(record) is None
    seen = [detector.advance(240 + i, 1.01 ** (i // every * every)) for i in range(200)]
    at = next(i for i, event in enumerate(seen) if event is not None)
    assert 68 <= at <= 80  # twice the settled rate after 70 steps


def test_the_ratio_follows_the_learning_rate_without_delay() -> None:
    detector = InstabilityDetector()
    reported(pulses([1.0] * 50 + [1.7], proportional(0.2), 0.0), detector)
    assert detector.step_ratio == pytest.approx(0.34) and detector.critical_lr == pytest.approx(5)
    assert detector.usual_range() == (pytest.approx(0.2), pytest.approx(0.2))


def measured(records: Sequence[PulseRecord], correction: float) -> list[PulseRecord]:
    """Every third has a crossing, so many times further away than on a quadratic."""
    return [r if i % 3 else replace(r, critical=correction / r.ratio) for i, r in enumerate(records)]


@pytest.mark.parametrize("correction", [0.4, 2.5])
def test_crossings_correct_the_critical_rate_and_not_what_is_reported(correction: float) -> None:
    records = pulses([1.0] * 150 + [1.03**i for i in range(100)], proportional(0.1))
    plain, detector = InstabilityDetector(), InstabilityDetector()
    expected, events = reported(records, plain), reported(measured(records, correction), detector)
    same = ("kind", "step_ratio", "usual", "learning_rate", "cause", "factor")
    assert [at for at, _ in events] == [at for at, _ in expected] != []
    assert [[getattr(e, name) for name in same] for _, e in events] == [
        [getattr(e, name) for name in same] for _, e in expected
    ]
    assert detector.step_ratio == plain.step_ratio
    assert detector.critical_lr == pytest.approx(correction * plain.critical_lr, rel=1e-6)
    (_, event), (_, uncorrected) = events[0], expected[0]
    assert event.suggested_lr <= uncorrected.suggested_lr and event.suggested_lr <= HALF * event.critical_lr


def test_a_smaller_critical_rate_is_what_a_warning_goes_by() -> None:
    """Steps raise the loss from a ratio of 0.1 on already: to go back to the usual ratio would not be enough."""
    records = pulses([1.0] * 300, lambda i, rate: 0.5 * 1.03 ** max(0, i - 150), 0.1)
    (_, plain), *_ = reported(records)
    (_, event), *_ = reported(measured(records, 0.1))
    assert event.critical_lr < 0.2 * event.learning_rate / event.step_ratio
    assert event.suggested_lr == pytest.approx(HALF * event.critical_lr) and event.suggested_lr < plain.suggested_lr / 2
    (_, larger), *_ = reported(measured(records, 10.0))
    assert larger.suggested_lr == min(
        larger.learning_rate / factor for factor in (2 * larger.step_ratio, larger.factor)
    )


def test_between_pulses_the_ratio_is_quadratic_whatever_crossings_say() -> None:
    detector = InstabilityDetector()
    reported(measured(pulses([1.0] * 60, proportional(0.2), 0.0), 3.0), detector)
    detector.advance(121, 1.1)
    assert detector.step_ratio == pytest.approx(0.22) and detector.critical_lr == pytest.approx(15)


def test_the_critical_rate_is_zero_where_steps_go_uphill() -> None:
    detector = InstabilityDetector()
    records = measured(pulses([1.0] * 40, proportional(0.2), 0.1), 2.0)
    reported([*records, *(replace(r, gain=-r.gain, critical=math.nan) for r in records)], detector)
    assert detector.step_ratio == math.inf and detector.critical_lr == 0


def test_an_unknown_learning_rate_leaves_the_ratio() -> None:
    detector = InstabilityDetector()
    records = pulses([1.0] * 300, lambda i, rate: 0.1 if i < 200 else 3.0, 0.2)
    unknown = [PulseRecord(r.step, 0, r.gain, r.curvature, loss=r.loss) for r in records]
    assert len(reported(unknown, detector)) == 1
    assert detector.step_ratio == pytest.approx(3, rel=0.3) and math.isnan(detector.critical_lr)


@pytest.mark.parametrize("at", [0, 3, 90, 149, 160, 180])
def test_a_restored_detector_goes_on_as_if_nothing_had_happened(at: int) -> None:
    records = measured(pulses([1.0] * 150 + [1.02**i for i in range(100)], proportional(0.1)), 1.5)
    detector = InstabilityDetector()
    reported(records[:at], detector)
    state = detector.state_dict()
    stored = json.loads(json.dumps(state))
    rest = reported(records[at:], detector)
    restored = InstabilityDetector()
    restored.load_state_dict(stored)
    assert reported(records[at:], restored) == rest
    assert restored.state_dict() == detector.state_dict()
    assert at == 0 or state != detector.state_dict()


def test_the_critical_learning_rate_of_a_quadratic_leaves_its_loss_unchanged() -> None:
    """Momentum in float64; a step with the critical rate, along the direction of the last step."""
    torch.manual_seed(0)
    net, x, y = nn.Linear(6, 3).double(), torch.randn(50, 6).double(), torch.randn(50, 3).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)

    def square(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(model(batch[0]), batch[1])

    for i in range(5):
        before = [p.detach().clone() for p in net.parameters()]
        loss = square(net, (x, y))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        u = [a - b.detach() for a, b in zip(before, net.parameters())]
        twin = copy.deepcopy(net)
        with torch.no_grad():
            for parameter, value in zip(twin.parameters(), before):
                parameter.copy_(value)
        pulse = curvmon.pulse(twin, (x, y), loss=square, step=u)
        detector = InstabilityDetector()
        for _ in range(5):
            detector.update(PulseRecord(i, 0, pulse.gain, pulse.curvature, 0.05, pulse.loss))
        with torch.no_grad():
            for parameter, part in zip(twin.parameters(), u):
                parameter.sub_(detector.critical_lr / 0.05 * part)
        assert square(twin, (x, y)).item() == pytest.approx(loss.item(), rel=1e-13)


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_a_real_run_is_warned_before_its_loss_rises(name: str) -> None:
    """A multilayer perceptron on digits; after 200 quiet steps, the learning rate grows by 3 % per step."""
    torch.manual_seed(0)
    digits = load_digits()
    x, y = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 8 - 1, torch.tensor(digits.target)
    net = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    rate = {"SGD": 0.1, "AdamW": 1e-3}[name]
    make = {"SGD": torch.optim.SGD, "AdamW": torch.optim.AdamW}[name]
    optimizer = make(net.parameters(), lr=rate)

    def entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    detector, warned_at, losses, mean = InstabilityDetector(), [], [], math.nan
    for step in range(600):
        chosen = torch.randint(len(x), (64,))
        lr = optimizer.param_groups[0]["lr"] = rate * 1.03 ** max(0, step - 200)
        before = [p.detach().clone() for p in net.parameters()]
        optimizer.zero_grad()
        loss = entropy(net, (x[chosen], y[chosen]))
        loss.backward()
        optimizer.step()
        mean = loss.item() if step == 0 else 0.95 * mean + 0.05 * loss.item()
        losses.append(mean)
        if step > 200 and not mean < 1.5 * min(losses):  # twice the noise of the mean at this loss
            break
        if step % 4 == 0:
            u = [a - p.detach() for a, p in zip(before, net.parameters())]
            twin = copy.deepcopy(net)
            twin.load_state_dict(dict(zip(twin.state_dict(), before)))
            pulse = curvmon.pulse(twin, (x[chosen], y[chosen]), loss=entropy, step=u)
            if detector.update(PulseRecord(step, 0, pulse.gain, pulse.curvature, lr, pulse.loss)):
                warned_at.append(step)
    assert len(warned_at) == 1 and 200 < warned_at[0] < step - 20 and step < 599

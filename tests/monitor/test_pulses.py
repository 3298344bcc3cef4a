"""Pulses in a plain training loop, without Lightning."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvmon
from curvmon.alerts.critical_rate import CriticalRate
from curvmon.graph import attention_statistics
from curvmon.monitor import pulse_taker
from curvmon.monitor.budget import Budget
from curvmon.monitor.process_group import Ranks
from curvmon.monitor.pulse_schedule import SHORTEST, SOON, START, PulseSchedule
from curvmon.monitor.pulse_taker import CLOSE, CROSSING_EVERY
from curvmon.monitor.pulses import Pulses
from curvmon.monitor.target import Target
from curvmon.operators import loss_differences
from curvmon.operators.loss_crossing import MOST_TRIES
from curvmon.records import PulseRecord
from tests.helpers.fake_clock import FakeClock

Batch = tuple[Tensor, Tensor]


class Network(nn.Module):
    """Batch norm, ReLU and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.dropout(F.relu(self.norm(self.first(x))), 0.3, self.training))


def loss(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def batches(count: int, size: int = 16) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, 6, generator=generator), torch.randint(3, (size,), generator=generator))
        for _ in range(count)
    ]


class Loop:
    """Trains; keeps what happened at every pulse."""

    def __init__(
        self,
        every: int = 4,
        model: nn.Module | None = None,
        loss: Callable[..., Tensor] = loss,
        optimizer: Callable[..., Any] = lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        size: int = 100,
    ) -> None:
        torch.manual_seed(0)
        self.model = Network() if model is None else model
        self.loss = loss
        self.optimizer = optimizer([p for p in self.model.parameters() if p.requires_grad])
        self.pulses = Pulses(PulseSchedule(every, None), Budget(None, clock=FakeClock()), size)
        self.befores: dict[int, nn.Module] = {}
        self.steps: dict[int, list[Tensor]] = {}
        self.warnings: list[str] = []

    def run(self, data: list[Batch], loss: Callable[..., Tensor] | None = None) -> Loop:
        for step, batch in enumerate(data, 1):
            self.pulses.before_step(self.model, batch)
            before = copy.deepcopy(self.model)
            self.optimizer.zero_grad()
            (loss or self.loss)(self.model, batch).backward()
            self.optimizer.step()
            if self.pulses.is_prepared:
                self.befores[step] = before
                self.steps[step] = [
                    b.detach() - a.detach()
                    for b, a in zip(before.parameters(), self.model.parameters())
                    if b.requires_grad
                ]
            self.pulses.after_step(
                Target(self.model, self.loss, torch.device("cpu")),
                Ranks(1),
                step=step,
                epoch=0,
                learning_rate=0.1,
                warn=lambda text, key=None: self.warnings.append(text),
            )
        return self


def agrees(record: PulseRecord, loop: Loop, batch: Any, rel: float = 0.03) -> None:
    exact = curvmon.pulse(loop.befores[record.step], batch, loss=loop.loss, step=loop.steps[record.step])
    assert record.loss == pytest.approx(exact.loss, rel=1e-5)
    assert record.gain == pytest.approx(exact.gain, rel=rel)
    assert record.curvature == pytest.approx(exact.curvature, rel=rel)


OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_records_are_the_pulses_of_their_steps(name: str) -> None:
    data = batches(21)
    loop = Loop(optimizer=OPTIMIZERS[name]).run(data)
    assert [record.step for record in loop.pulses.records] == [4, 8, 12, 16, 20]
    for record in loop.pulses.records:
        agrees(record, loop, data[record.step - 1])
        assert record.learning_rate == 0.1
    smoothed = CriticalRate()
    for record in loop.pulses.records:
        smoothed.update(0.1, record.gain, record.curvature, record.critical)
    assert loop.pulses.records[-1].critical_lr == smoothed.value > 0
    assert loop.warnings == []


def test_training_is_the_same_bit_by_bit() -> None:
    data = batches(30)
    loop, plain = Loop(every=1).run(data), Loop(every=1000).run(data)
    assert len(loop.pulses.records) == 30 and not plain.pulses.records
    for a, b in zip(loop.model.state_dict().values(), plain.model.state_dict().values()):
        assert torch.equal(a, b)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(loop.model.parameters(), plain.model.parameters()))


def test_a_large_batch_is_sliced() -> None:
    data = batches(8, size=100)
    loop = Loop().run(data)
    for record in loop.pulses.records:
        agrees(record, loop, tuple(part[: pulse_taker.SLICE] for part in data[record.step - 1]))


def test_copies_are_kept_around_pulses_only() -> None:
    loop = Loop().run(batches(5))
    assert not loop.pulses.is_prepared and loop.pulses._taker._before == {} and loop.pulses._taker._batch is None


def test_the_latest_are_kept() -> None:
    assert [record.step for record in Loop(every=2, size=3).run(batches(12)).pulses.records] == [8, 10, 12]


def test_accumulated_gradients_use_the_last_batch() -> None:
    loop, data = Loop(every=1), batches(6)
    for i, batch in enumerate(data):
        loop.pulses.before_step(loop.model, batch)
        if i % 3 == 0:
            before = copy.deepcopy(loop.model)
            loop.optimizer.zero_grad()
        (loss(loop.model, batch) / 3).backward()
        if i % 3 < 2:
            continue
        loop.optimizer.step()
        step = [b.detach() - a.detach() for b, a in zip(before.parameters(), loop.model.parameters())]
        loop.pulses.after_step(
            Target(loop.model, loss, torch.device("cpu")), Ranks(1), step=i, epoch=0, learning_rate=0.1, warn=print
        )
        exact = curvmon.pulse(before, batch, loss=loss, step=step)
        assert loop.pulses.records[-1].gain == pytest.approx(exact.gain, rel=0.03)
        assert loop.pulses.records[-1].curvature == pytest.approx(exact.curvature, rel=0.03)
    assert len(loop.pulses.records) == 2


def test_frozen_and_shared_parameters() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
            self.again = nn.Linear(8, 8)
            self.again.weight = self.inner.weight
            self.first.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.tanh(self.again(torch.tanh(self.inner(self.first(x))))))

    torch.manual_seed(0)
    data = batches(9)
    loop = Loop(model=Tied()).run(data)
    assert len(loop.pulses.records) == 2
    for record in loop.pulses.records:
        agrees(record, loop, data[record.step - 1])


def test_parameters_that_are_frozen_meanwhile() -> None:
    """The step is no longer one of the parameters that were copied: that pulse is skipped."""
    loop, data = Loop(every=2), batches(4)
    loop.run(data[:1])
    loop.pulses.before_step(loop.model, data[1])
    loop.model.first.requires_grad_(False)
    target = Target(loop.model, loss, torch.device("cpu"))
    loop.pulses.after_step(target, Ranks(1), step=2, epoch=0, learning_rate=0.1, warn=print)
    assert not loop.pulses.records
    loop.run(data[2:])
    assert len(loop.pulses.records) == 1


def test_a_step_that_does_not_move_is_no_pulse() -> None:
    """As where a gradient scaler has found infinities: the next step is due again."""
    loop, data = Loop(every=3), batches(4)
    rates = [0.1, 0.1, 0.0, 0.1]
    for rate, batch in zip(rates, data):
        loop.optimizer.param_groups[0].update(lr=rate, momentum=0.0)
        loop.run([batch])
    assert len(loop.pulses.records) == 1 and loop.pulses._schedule._last == 4


# ---- crossings ----


def test_one_in_three_pulses_finds_its_crossing_with_few_forward_passes() -> None:
    passes = []

    def counted(model: Any, batch: Any) -> Tensor:
        passes.append(1)
        return loss(model, batch)

    loop, data, taken, exact = Loop(every=1, loss=counted), batches(30), [], []
    for batch in data:
        passes.clear()
        loop.run([batch], loss=loss)
        taken.append(len(passes))
        exact.append(curvmon.pulse(loop.befores[1], batch, loss=loss, step=loop.steps[1], critical=True))
    records, looks = loop.pulses.records, [i % CROSSING_EVERY == 0 for i in range(30)]
    assert [not math.isnan(record.critical) for record in records] == looks
    assert {count for count, look in zip(taken[2:], looks[2:]) if not look} == {3}
    more = [count - 3 for count, look in zip(taken[2:], looks[2:]) if look]
    assert min(more) >= 1 and sum(more) / len(more) <= 3 and max(more) <= MOST_TRIES
    for record, pulse in list(zip(records, exact))[::CROSSING_EVERY]:
        assert abs(math.log(record.critical / pulse.critical)) < CLOSE


def test_of_quadratic_losses_the_critical_rate_is_exact() -> None:
    """In float64, along a direction that stays the same: 2 / curvature, at every pulse."""

    def bowl(model: Any, batch: Any) -> Tensor:
        return model.weight.square().sum() + 0 * batch[0].sum()

    loop = Loop(1, nn.Linear(3, 1, bias=False).double(), bowl, lambda p: torch.optim.SGD(p, lr=0.1)).run(batches(10))
    for record in loop.pulses.records[3:]:
        assert record.step_ratio == pytest.approx(0.1, rel=1e-5) and record.critical_lr == pytest.approx(1.0, rel=1e-5)
    assert [record.critical for record in loop.pulses.records[::3]] == pytest.approx([10.0] * 4, rel=1e-5)


# ---- attention ----


class Attending(nn.Module):
    """Two layers with dropout in their attentions, and an attention of another kind between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(1, 8)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True) for _ in range(2)
        )
        self.pool, self.last = nn.MultiheadAttention(8, 4, dropout=0.1, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.unsqueeze(-1))
        for layer in self.layers:
            x = layer(x)
        pooled, weights = self.pool(x, x, x)
        return self.last(pooled.mean(1)) + weights.mean()


ATTENTIONS = ["layers.0.self_attn", "layers.1.self_attn", "pool"]


def test_attentions_are_those_before_the_step() -> None:
    data = batches(9)
    loop = Loop(model=Attending()).run(data)
    assert len(loop.pulses.records) == 2 and loop.warnings == []
    for record in loop.pulses.records:
        agrees(record, loop, data[record.step - 1])
        assert [signs.name for signs in record.attention] == ATTENTIONS
        first = loop.befores[record.step].layers[0].self_attn
        x = loop.befores[record.step].embed(data[record.step - 1][0][: attention_statistics.SAMPLES, :, None])
        q, k, _ = F.linear(x, first.in_proj_weight, first.in_proj_bias).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        logits = (q @ k.mT / 2).detach()
        entropies = torch.distributions.Categorical(logits=logits).entropy().mean((0, 2)) / math.log(6)
        assert record.attention[0].largest_logit == pytest.approx(logits.abs().max().item(), rel=1e-5)
        assert record.attention[0].lowest_entropy == pytest.approx(entropies.min().item(), rel=1e-5)
        assert record.attention_largest_logit == max(signs.largest_logit for signs in record.attention)
        assert record.attention_lowest_entropy == min(signs.lowest_entropy for signs in record.attention) < 1


def test_training_with_attention_is_the_same_bit_by_bit() -> None:
    data = batches(12)
    loop, plain = Loop(every=1, model=seeded(Attending)).run(data), Loop(every=99, model=seeded(Attending)).run(data)
    assert all(record.attention for record in loop.pulses.records) and len(loop.pulses.records) == 12
    for a, b in zip(loop.model.state_dict().values(), plain.model.state_dict().values()):
        assert torch.equal(a, b)
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in loop.model.modules())


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def test_pulses_are_the_same_with_and_without_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    data = batches(8)
    looked = Loop(model=seeded(Attending)).run(data).pulses.records
    loop = Loop(model=seeded(Attending))
    loop.pulses._taker.has_attention = False
    blind = loop.run(data).pulses.records
    assert [replace(record, attention=()) for record in looked] == [replace(record) for record in blind]


def test_a_model_without_attention_is_looked_at_once() -> None:
    loop = Loop().run(batches(9))
    assert not loop.pulses._taker.has_attention
    for record in loop.pulses.records:
        assert record.attention == () and math.isnan(record.attention_largest_logit)


def test_attention_where_second_derivatives_are_used() -> None:
    """The loss is another one in every pass."""

    def noisy(model: Any, batch: Any) -> Tensor:
        return loss(model, batch) * (1 + 0.1 * torch.rand((), generator=NOISE))

    loop = Loop(model=Attending(), loss=noisy).run(batches(9))
    assert not loop.pulses._taker.from_losses and len(loop.pulses.records) == 2
    for record in loop.pulses.records:
        assert [signs.name for signs in record.attention] == ATTENTIONS


def test_records_with_attention_survive_a_checkpoint() -> None:
    loop = Loop(model=Attending()).run(batches(9))
    state = json.loads(json.dumps(loop.pulses.state_dict()))
    again = Loop()
    again.pulses.load_state_dict(state)
    kept = [record.attention for record in again.pulses.records]
    assert all(kept) and kept == [record.attention for record in loop.pulses.records]


# ---- which way ----


def count_of(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what is computed by second derivatives."""
    calls: list[str] = []
    original = pulse_taker.pulse_at

    def pulse_at(*args: Any, **kwargs: Any) -> Any:
        calls.append("second derivatives")
        return original(*args, **kwargs)

    monkeypatch.setattr(pulse_taker, "pulse_at", pulse_at)
    return calls


def test_second_derivatives_only_check(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count_of(monkeypatch)
    loop = Loop(every=1).run(batches(12))
    assert len(loop.pulses.records) == 12 and len(calls) == 1 and loop.pulses._taker.from_losses


def straight_through(model: Any, batch: Any) -> Tensor:
    """Rounded in the forward pass, and not in the backward pass: differences of losses see steps."""
    hidden = model.first(batch[0])
    hidden = hidden + (hidden.round() - hidden).detach()
    return F.cross_entropy(model.last(torch.tanh(hidden)), batch[1])


def own_noise(model: Any, batch: Any) -> Tensor:
    return loss(model, batch) * (1 + 0.1 * torch.rand((), generator=NOISE))


NOISE = torch.Generator().manual_seed(0)


@pytest.mark.parametrize("loss", [straight_through, own_noise])
def test_where_losses_do_not_tell_second_derivatives_do(loss: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count_of(monkeypatch)
    data = batches(9)
    loop = Loop(loss=loss).run(data)
    assert not loop.pulses._taker.from_losses and len(calls) >= 2 and loop.warnings == []
    if loss is not own_noise:
        for record in loop.pulses.records:
            exact = curvmon.pulse(
                loop.befores[record.step], data[record.step - 1], loss=loss, step=loop.steps[record.step]
            )
            assert (record.gain, record.curvature) == pytest.approx((exact.gain, exact.curvature), rel=1e-4, abs=1e-9)
    has_crossings = any(not math.isnan(record.critical) for record in loop.pulses.records)
    assert has_crossings == (loss is straight_through)  # its values repeat, those of the other do not


class Bags(nn.Module):
    """An EmbeddingBag, whose weights have no second derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.last = nn.EmbeddingBag(10, 8, mode="mean"), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        words = x.abs().mul(2).long().clamp(max=9)
        return self.last(torch.tanh(self.bag(words)))


def test_no_double_backward_is_needed() -> None:
    data = batches(9)
    loop = Loop(model=Bags()).run(data)
    assert len(loop.pulses.records) == 2 and loop.pulses._taker.from_losses and loop.warnings == []
    for record in loop.pulses.records:
        before = loop.befores[record.step]
        gradient = torch.autograd.grad(loss(before, data[record.step - 1]), list(before.parameters()))
        gain = sum((g * u).sum().item() for g, u in zip(gradient, loop.steps[record.step]))
        assert record.gain == pytest.approx(gain, rel=0.02) and record.curvature != 0


# ---- failures ----


def failing(error: BaseException, from_pass: int = 0) -> Callable[..., Tensor]:
    """Fails where gradients are not wanted by training: in pulses alone."""
    calls = []

    def computed(model: Any, batch: Any) -> Tensor:
        calls.append(1)
        if len(calls) > from_pass:
            raise error
        return loss(model, batch)

    return computed


def test_what_cannot_be_computed_is_said_once() -> None:
    loop = Loop(every=1, loss=failing(ValueError("no"))).run(batches(12), loss=loss)
    assert loop.warnings[0] == "a pulse failed: ValueError: no; training goes on"
    assert len(loop.warnings) == 3 and loop.warnings[-1].startswith("no pulses in this run")
    assert not loop.pulses.records and not loop.pulses.is_prepared


def test_a_reason_that_lasts_ends_pulses_at_once() -> None:
    loop = Loop(every=1, loss=failing(curvmon.InputError("draws from an iterator"))).run(batches(12), loss=loss)
    assert loop.warnings == ["no pulses in this run: InputError: draws from an iterator; training goes on"]


def test_divergence_is_left_to_vital_signs() -> None:
    def lost(model: Any, batch: Any) -> Tensor:
        return loss(model, batch) * math.nan

    loop = Loop(every=1, loss=lost).run(batches(12), loss=loss)
    assert loop.warnings == [] and not loop.pulses.records


def test_out_of_memory_halves_the_slice() -> None:
    def large(model: Any, batch: Any) -> Tensor:
        if len(batch[0]) > 4:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return loss(model, batch)

    data = batches(5)
    loop = Loop(every=1, loss=large).run(data, loss=loss)
    assert [record.step for record in loop.pulses.records] == [3, 4, 5] and loop.warnings == []
    agrees(loop.pulses.records[0], loop, tuple(part[:4] for part in data[2]))


class OtherRankCannotSlice(Ranks):
    """This rank of two; the other one has a batch whose samples cannot be counted."""

    def gather(self, value: Any) -> list[Any]:
        return [value, 0 if isinstance(value, int) else value]


def test_ranks_take_fewer_samples_together_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that went on while another stops its pulses would wait for it forever."""

    def never(model: Any, batch: Any) -> Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    loop = Loop(every=1, loss=never)
    monkeypatch.setitem(Loop.run.__globals__, "Ranks", OtherRankCannotSlice)
    loop.run(batches(12), loss=loss)
    assert loop.pulses._taker.samples is None and not loop.pulses.records
    assert len(loop.warnings) >= 1 and loop.warnings[-1].startswith("no pulses in this run")


def test_steps_that_do_not_move_are_not_copied_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    prepare = pulse_taker.PulseTaker.prepare
    monkeypatch.setattr(
        pulse_taker.PulseTaker, "prepare", lambda self, *arguments: made.append(1) or prepare(self, *arguments)
    )
    loop = Loop(every=10, optimizer=lambda p: torch.optim.SGD(p, lr=0.0)).run(batches(100))
    assert not loop.pulses.records and len(made) <= 12


def test_a_run_starts_without_what_an_earlier_one_has_prepared() -> None:
    loop = Loop(every=1)
    loop.pulses.before_step(loop.model, batches(1)[0])
    assert loop.pulses.is_prepared
    loop.pulses.start()
    assert not loop.pulses.is_prepared


@pytest.mark.parametrize("at", range(1, 8))
def test_an_interrupt_leaves_no_trace(at: int) -> None:
    """Also in the middle of a pulse: the parameters are those after the step."""
    plain = Loop(every=1000).run(batches(3))
    loop = Loop(every=3, loss=failing(KeyboardInterrupt(), from_pass=at))
    with pytest.raises(KeyboardInterrupt):
        loop.run(batches(3), loss=loss)
    for a, b in zip(loop.model.state_dict().values(), plain.model.state_dict().values()):
        assert torch.equal(a, b)
    assert loop.model.training and not loop.pulses.is_prepared


# ---- fewer samples ----


def test_samples_are_halved_until_a_pulse_is_affordable_every_fifty_steps() -> None:
    """A pulse takes as long as a training step; at 1 % that is every hundred steps."""
    clock = FakeClock()

    def timed(model: Any, batch: Any) -> Tensor:
        clock.advance(len(batch[0]) / 16 / 3)
        return loss(model, batch)

    loop = Loop(loss=timed)
    loop.pulses = Pulses(PulseSchedule(True, 0.05), Budget(0.05, clock=clock), 1000)
    loop.pulses.budget.start_training()
    for batch in batches(4) * 100:
        clock.advance(1.0)
        loop.run([batch], loss=loss)
    taker, schedule = loop.pulses._taker, loop.pulses._schedule
    assert taker.samples == 8 and 50 <= schedule._regular(400.0) <= 62
    # the first one says whether losses will do, and is paid for by the free seconds
    assert len(loop.pulses.records) >= 5


# ---- suspicion ----


def test_pulses_come_soon_where_one_is_unusual() -> None:
    """Inputs of five times the scale: a gain of 25 times the usual one."""
    data = batches(10)
    loop = Loop(model=nn.Linear(6, 3))
    loop.pulses = Pulses(PulseSchedule(True, None), Budget(None, clock=FakeClock()), 1000)
    loop.run(data * 30)
    schedule = loop.pulses._schedule
    assert {b.step - a.step for a, b in pairwise(loop.pulses.records[:START])} == {SHORTEST}
    before = len(loop.pulses.records)
    loop.run([(5 * x, y) for x, y in data] * 2)
    assert schedule.interval == SOON and len(loop.pulses.records) >= before + 5
    assert loop.warnings == []


def test_the_first_pulses_are_not_those_of_the_whole_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The budget of full measurements forecasts pulses from those that come at the usual interval."""
    monkeypatch.setattr(pulse_taker, "CROSSING_EVERY", 10**9)  # three forward passes each
    clock = FakeClock()

    def timed(model: Any, batch: Any) -> Tensor:
        clock.advance(0.1)
        return loss(model, batch)

    loop = Loop(loss=timed)
    loop.pulses = Pulses(PulseSchedule(True, 0.05), Budget(0.05, clock=clock), 1000)
    budget = loop.pulses.budget
    budget.start_training()
    for batch in batches(4) * 60:
        clock.advance(1.0)
        loop.run([batch], loss=loss)
    first = 0.1 * 3 * START
    assert budget.starting_pulses == pytest.approx(first, rel=0.1)
    assert len(loop.pulses.records) > START and 0 < budget._steady < first / 2


# ---- state ----


def test_state() -> None:
    data = batches(20)
    whole = Loop(every=2).run(data)
    first = Loop(every=2).run(data[:9])
    second = Loop(every=2)
    second.model.load_state_dict(first.model.state_dict())
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    second.pulses.load_state_dict(copy.deepcopy(first.pulses.state_dict()))
    noise = torch.get_rng_state()
    Loop(every=2).run(data[:9])
    assert not torch.equal(noise, torch.get_rng_state())
    second.run(data[9:])
    assert [r.step for r in second.pulses.records[4:]] == [1, 3, 5, 7, 9, 11]  # counted from the resume on
    assert len(second.pulses.records) == len(whole.pulses.records) == 10
    for a, b in zip(second.pulses.records, whole.pulses.records):
        assert a.gain == pytest.approx(b.gain, rel=1e-3) and a.step_ratio == pytest.approx(b.step_ratio, nan_ok=True)
        assert a.critical == pytest.approx(b.critical, rel=1e-2, nan_ok=True)
        assert a.critical_lr == pytest.approx(b.critical_lr, rel=1e-2, nan_ok=True)


def test_state_that_cannot_be_read_changes_nothing() -> None:
    loop = Loop(every=2).run(batches(6))
    state = copy.deepcopy(loop.pulses.state_dict())
    for part in ("schedule", "taker", "detector", "suspicion", "records"):
        with pytest.raises(Exception):  # noqa: B017 - whatever reading it raises
            loop.pulses.load_state_dict({**state, part: {"no": 1}})
        assert loop.pulses.state_dict() == state
    assert loss_differences.TARGET < loss_differences.LARGEST

"""After a measurement, however it ended, the model and the process are exactly as before."""

from __future__ import annotations

import functools
import gc
import random
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn.utils import spectral_norm, weight_norm
from torch.nn.utils.parametrizations import weight_norm as new_weight_norm
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

import curvmon
from curvmon import operators
from curvmon.isolation import open_isolations
from curvmon.operators import parameter_hessian
from tests.helpers.time_limits import PATIENCE

Batch = tuple[Tensor, Tensor]
both = pytest.mark.parametrize("run", [curvmon.measure, curvmon.exact])


class Stateful(nn.Module):
    """Everything that a forward pass can change."""

    def __init__(self) -> None:
        super().__init__()
        self.first = spectral_norm(nn.Linear(6, 8))
        self.bn = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.5)
        self.old = weight_norm(nn.Linear(8, 8))
        self.new = new_weight_norm(nn.Linear(8, 8))
        self.head = nn.Linear(8, 3)
        self.frozen = nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.accuracy = MulticlassAccuracy(3)
        self.mean = MeanMetric()
        self.calls = 0
        self.seen: list[Any] = []
        self.cache: dict[str, Tensor] = {"last": torch.zeros(3)}
        self.generator = torch.Generator().manual_seed(1)
        self.running = torch.zeros(3)
        self.register_buffer("ema", torch.zeros(8))
        self.bn.eval()  # a mixture of flags

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = self.dropout(self.bn(torch.tanh(self.first(x))))
        h = torch.tanh(self.frozen(self.new(self.old(h))))
        h = h + 1e-3 * torch.randn(h.shape, generator=self.generator).to(h) + 1e-3 * torch.randn_like(h)
        self.ema.mul_(0.9).add_(h.detach().mean(0))
        out = self.head(h)
        self.running += out.detach().mean(0)
        self.seen.append(out)
        self.cache["last"] = out
        self.mean(out.mean().detach())
        return out


def loss(model: Any, batch: Batch) -> Tensor:
    random.random(), np.random.rand(), torch.rand(1)
    batch[0].mul_(2)
    with torch.no_grad():
        model.head.weight.mul_(1.0001)
    out = model(batch[0])
    model.accuracy(out.softmax(-1), batch[1])
    return F.cross_entropy(out, batch[1])


def failing(model: Any, batch: Batch) -> Tensor:
    loss(model, batch)
    raise RuntimeError("the step failed")


def interrupted(model: Any, batch: Batch) -> Tensor:
    loss(model, batch)
    raise KeyboardInterrupt


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Identities and values of everything in reach."""
    state: dict[str, Any] = {}
    for name, p in model.named_parameters():
        state[f"parameter {name}"] = (
            id(p),
            p.data_ptr(),
            p._version,
            p.requires_grad,
            p.detach().clone(),
            None if p.grad is None else (id(p.grad), p.grad.clone()),
            list((p._backward_hooks or {}).items()),
        )
    for name, b in model.named_buffers():
        state[f"buffer {name}"] = id(b), b.data_ptr(), b.clone()
    for name, module in model.named_modules():
        for key, value in module.__dict__.items():
            contents = value.clone() if isinstance(value, Tensor) else None
            if isinstance(value, (dict, list, set)):
                contents = [id(item) for item in (value.values() if isinstance(value, dict) else value)]
            if isinstance(value, torch.Generator):
                contents = value.get_state()
            simple = value if isinstance(value, (bool, int, float, str)) else None
            state[f"attribute {name}.{key}"] = id(value), contents, simple
        state[f"order {name}"] = list(module.__dict__)
    state["process"] = process()
    return state


def process() -> tuple[Any, ...]:
    """What a measurement changes, and all threads share."""
    return (
        random.getstate(),
        [np.asarray(part) for part in np.random.get_state()[1:]],
        torch.get_rng_state(),
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.backends.mha.get_fastpath_enabled(),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        torch.backends.cudnn.enabled,
        id(torch.utils.checkpoint.CheckpointFunction),
        id(torch.utils.checkpoint._checkpoint_without_reentrant_generator),
        torch.amp.autocast_mode.autocast.__enter__,
        torch._weight_norm,
        sys.modules["torch.nn.utils.weight_norm"]._weight_norm,
        torch.get_deterministic_debug_mode(),
    )


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return bool(np.array_equal(a, b))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b))
    return bool(a == b)


def assert_unchanged(before: dict[str, Any], after: dict[str, Any]) -> None:
    changed = [key for key in before if key not in after or not same(before[key], after[key])]
    assert not changed and before.keys() == after.keys(), changed


@pytest.fixture
def batch() -> Batch:
    g = torch.Generator().manual_seed(0)
    return torch.randn(10, 6, generator=g), torch.randint(3, (10,), generator=g)


@pytest.fixture
def model(batch: Batch) -> Stateful:
    torch.manual_seed(0)
    model = Stateful().train()
    model.bn.eval()
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    model.head.weight.register_hook(lambda grad: pytest.fail("a gradient hook fired"))
    model.old.register_full_backward_hook(lambda *args: pytest.fail("a backward hook fired"))
    model.new.register_forward_hook(lambda module, args, out: None)
    return model


@both
@pytest.mark.parametrize(
    ("step", "error"),
    [(loss, None), (failing, RuntimeError), (interrupted, KeyboardInterrupt)],
    ids=["returns", "raises", "interrupted"],
)
def test_state_is_restored(
    run: Callable[..., Any], step: Callable[..., Tensor], error: type | None, model: Stateful, batch: Batch
) -> None:
    before, copies = snapshot(model), [t.clone() for t in batch]
    if error is None:
        run(model, batch, loss=step, nodes=["first", "old"])
    else:
        with pytest.raises(error):
            run(model, batch, loss=step, nodes=["first", "old"])
    assert_unchanged(before, snapshot(model))
    assert same(copies, list(batch))


@pytest.mark.parametrize(
    "context",
    [
        functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16),
        torch.no_grad,
        torch.inference_mode,
        torch.enable_grad,
    ],
    ids=["autocast", "no_grad", "inference_mode", "enable_grad"],
)
def test_caller_context_is_irrelevant_and_kept(context: Callable[[], Any], model: Stateful, batch: Batch) -> None:
    plain = curvmon.measure(model, batch, loss=loss, nodes=["first", "old"])
    with context():
        before = snapshot(model)
        inside = curvmon.measure(model, tuple(t.clone() for t in batch), loss=loss, nodes=["first", "old"])
        assert_unchanged(before, snapshot(model))
    assert torch.equal(plain.resonance, inside.resonance)


def test_same_seed_same_numbers(model: Stateful, batch: Batch) -> None:
    one, two = (curvmon.measure(model, batch, loss=loss, nodes=["first", "old"]) for _ in range(2))
    assert torch.equal(one.resonance, two.resonance) and torch.equal(one.gn_gap, two.gn_gap)


def test_pending_backward_still_works(batch: Batch) -> None:
    """forward, measure, backward: nothing that autograd saved was touched."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    pending = F.cross_entropy(model(batch[0]), batch[1])
    for run in (curvmon.measure, curvmon.exact):
        run(model, batch, loss=lambda m, b: F.cross_entropy(m(b[0]), b[1]))
    pending.backward()
    assert all(p.grad is not None for p in model.parameters())


class Criterion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(3)

    def forward(self, out: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.bn(out), target)


class Owner:
    """A trainer of the user's own."""

    def __init__(self) -> None:
        self.criterion = Criterion()

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return self.criterion(model(batch[0]), batch[1])

    __call__ = loss


CRITERION = Criterion()


def global_loss(model: nn.Module, batch: Batch) -> Tensor:
    return CRITERION(model(batch[0]), batch[1])


@both
@pytest.mark.parametrize(
    "how", ["method", "object", "closure", "dict", "partial", "global", "helper", "hidden in list"]
)
def test_criterion_modules_are_restored_wherever_they_are(run: Callable[..., Any], how: str, batch: Batch) -> None:
    owner = Owner()
    criterion = CRITERION if how == "global" else owner.criterion
    held = {"criterion": criterion}

    def helper(out: Tensor, target: Tensor) -> Tensor:
        return criterion(out, target)

    losses: dict[str, Any] = {
        "method": owner.loss,
        "object": owner,
        "closure": lambda m, b: criterion(m(b[0]), b[1]),
        "dict": lambda m, b: held["criterion"](m(b[0]), b[1]),
        "partial": functools.partial(lambda c, m, b: c(m(b[0]), b[1]), criterion),
        "global": global_loss,
        "helper": lambda m, b: helper(m(b[0]), b[1]),
        "hidden in list": lambda m, b: m.hidden[0](m(b[0]), b[1]),
    }
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    model.hidden = [criterion] if how == "hidden in list" else []  # type: ignore[assignment]
    before = snapshot(criterion)
    run(model, batch, loss=losses[how], nodes=["0"])
    assert_unchanged(before, snapshot(criterion))


@pytest.mark.parametrize("with_kwargs", [False, True])
def test_hook_that_removes_itself_is_restored(with_kwargs: bool, batch: Batch) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    fired: list[int] = []

    def once(*args: Any) -> None:
        fired.append(len(args))
        handle.remove()

    handle = model[1].register_forward_hook(once, with_kwargs=with_kwargs)
    curvmon.measure(model, batch, loss=lambda m, b: F.cross_entropy(m(b[0]), b[1]))
    assert list(model[1]._forward_hooks.values()) == [once]
    fired.clear()
    model(batch[0])
    assert fired == [4 if with_kwargs else 3]


class Scaled(nn.Parameter):
    """A parameter class of the user's own."""


def test_parameter_classes_and_named_tuples_are_copied(batch: Batch) -> None:
    class State(NamedTuple):
        total: Tensor

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.state, self.head = Scaled(torch.ones(6)), State(torch.ones(1)), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            self.state.total.add_(1)
            with torch.no_grad():
                self.weight.mul_(2)
            assert isinstance(self.weight, Scaled)
            return self.head(x * self.weight)

    model = Model()
    for run in (curvmon.measure, curvmon.exact):
        run(model, batch, loss=lambda m, b: F.cross_entropy(m(b[0]), b[1]), nodes=["head"])
    assert torch.equal(model.weight, torch.ones(6)) and model.state.total.item() == 1


def test_features_collected_by_user_hooks_are_tapped(batch: Batch) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    features: dict[str, Tensor] = {}
    model[0].register_forward_hook(lambda module, args, out: features.update(x=out))
    options: dict[str, Any] = {"nodes": ["0"], "output": ""}
    collected = curvmon.exact(
        model, batch, loss=lambda m, b: F.cross_entropy(m(b[0]), b[1]) + features["x"].pow(2).mean(), **options
    )

    def direct(m: Any, b: Batch) -> Tensor:
        hidden = m[0](b[0])
        return F.cross_entropy(m[2](m[1](hidden)), b[1]) + hidden.pow(2).mean()

    assert collected.resonance.item() == pytest.approx(
        curvmon.exact(model, batch, loss=direct, nodes=["0"]).resonance.item()
    )


def in_thread(target: Callable[[], Any]) -> threading.Thread:
    """A daemon: should the lock be held for ever, the test fails instead of hanging."""
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    return thread


def assert_ends(*threads: threading.Thread) -> None:
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def plain_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def sharpness(model: nn.Module, batch: Batch, loss: Callable[..., Tensor]) -> float:
    return curvmon.spectrum(model, batch, loss=loss, k=1).sharpness


def resonance(model: nn.Module, batch: Batch, loss: Callable[..., Tensor]) -> float:
    return curvmon.measure(model, batch, loss=loss, nodes=["0"]).resonance.item()


def exact_resonance(model: nn.Module, batch: Batch, loss: Callable[..., Tensor]) -> float:
    return curvmon.exact(model, batch, loss=loss, nodes=["0"]).resonance.item()


class ObservedLock:
    """A lock that sets an event before a thread has to wait for it."""

    def __init__(self, lock: Any, blocked: threading.Event) -> None:
        self._lock = lock
        self._event = blocked
        self.blocked = False

    def acquire(self) -> None:
        if not self._lock.acquire(blocking=False):
            self.blocked = True
            self._event.set()
            self._lock.acquire()

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("number", [sharpness, resonance, exact_resonance])
@pytest.mark.slow
def test_second_thread_waits_for_first(
    number: Callable[..., float], shared: bool, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A waits until B is blocked or inside, B for A to end. If they overlapped, B would restore what A replaced."""
    first_inside, second_inside, second_stopped, first_left, met = (threading.Event() for _ in range(5))
    lock = ObservedLock(open_isolations.one_at_a_time, second_stopped)
    for module in (open_isolations, parameter_hessian):
        monkeypatch.setattr(module, "one_at_a_time", lock)

    def first_loss(model: nn.Module, batch: Batch) -> Tensor:
        if not first_inside.is_set():
            first_inside.set()
            assert second_stopped.wait(PATIENCE)
            if second_inside.is_set():
                met.set()
        return plain_loss(model, batch)

    def second_loss(model: nn.Module, batch: Batch) -> Tensor:
        second_inside.set()
        second_stopped.set()
        first_left.wait(PATIENCE)
        return plain_loss(model, batch)

    one = network()
    other = one if shared else network()
    alone = number(one, batch, plain_loss), number(other, batch, plain_loss)
    result: dict[str, float] = {}

    def first() -> None:
        try:
            result["first"] = number(one, batch, first_loss)
        finally:
            first_left.set()

    def second() -> None:
        first_inside.wait(PATIENCE)
        result["second"] = number(other, batch, second_loss)

    before = process()
    assert_ends(in_thread(first), in_thread(second))
    assert same(before, process())
    assert lock.blocked and not met.is_set() and second_inside.is_set()
    assert (result["first"], result["second"]) == alone
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert one(batch[0]).dtype == torch.bfloat16


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, curvmon.InputError])
def test_failure_in_one_thread_releases_the_lock(error: type[BaseException], batch: Batch) -> None:
    def failing(model: nn.Module, batch: Batch) -> Tensor:
        raise error

    model = nn.Sequential(nn.LazyLinear(3)) if error is curvmon.InputError else network()

    def fail() -> None:
        with pytest.raises(error):
            curvmon.measure(model, batch, loss=failing)
        failed.set()

    failed, result = threading.Event(), []
    before = process()
    assert_ends(in_thread(fail))
    assert failed.is_set() and same(before, process())
    assert_ends(in_thread(lambda: result.append(resonance(network(), batch, plain_loss))))
    assert result


def test_measurement_inside_a_loss(batch: Batch) -> None:
    model, inner = network(), network()

    def measuring(model: nn.Module, batch: Batch) -> Tensor:
        return plain_loss(model, batch) * resonance(inner, batch, plain_loss)

    result: list[float] = []
    before = process()
    assert_ends(in_thread(lambda: result.append(sharpness(model, batch, measuring))))
    assert same(before, process())
    factor = resonance(inner, batch, plain_loss)
    assert result == [pytest.approx(factor * sharpness(model, batch, plain_loss), rel=1e-4)]


ORDERS = [(0, 1), (1, 0), (0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1)]


def opened_generator(model: nn.Module, batch: Batch) -> Iterator[Any]:
    with operators.hessian(model, batch, loss=plain_loss) as H:
        yield H


def assert_trains(model: nn.Module, batch: Batch) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    plain_loss(model, batch).backward()
    optimizer.step()
    assert all(not torch.equal(p, b) for p, b in zip(model.parameters(), before))


@pytest.mark.parametrize("order", ORDERS)
def test_operators_closed_in_any_order(order: tuple[int, ...], model: Stateful, batch: Batch) -> None:
    before = snapshot(model)
    contexts = [operators.hessian(model, batch, loss=loss) for _ in order]
    for context in contexts:
        context.__enter__()
    for index in order:
        contexts[index].__exit__(None, None, None)
    assert_unchanged(before, snapshot(model))
    assert_ends(in_thread(lambda: resonance(network(), batch, plain_loss)))


def test_inner_operator_outlives_the_outer_one(batch: Batch) -> None:
    model = network()
    with operators.hessian(model, batch, loss=plain_loss) as H:
        v = torch.ones(H.size)
        expected = H.matvec(v)
    before = snapshot(model)
    outer, inner = (operators.hessian(model, batch, loss=plain_loss) for _ in range(2))
    outer.__enter__()
    H = inner.__enter__()
    outer.__exit__(None, None, None)
    torch.testing.assert_close(H.matvec(v), expected)
    inner.__exit__(None, None, None)
    assert_unchanged(before, snapshot(model))


@pytest.mark.parametrize("collect", [False, True], ids=["closed", "collected"])
def test_generators_that_end_in_the_order_they_began(collect: bool, batch: Batch) -> None:
    model = network()
    before = snapshot(model)
    generators: list[Any] = [opened_generator(model, batch) for _ in range(2)]
    assert all([next(generator).size for generator in generators])
    for _ in range(2):
        if not collect:
            generators[0].close()
        del generators[0]
        gc.collect()
    assert_unchanged(before, snapshot(model))
    assert_trains(model, batch)


def test_error_in_the_outer_operator(model: Stateful, batch: Batch) -> None:
    before = snapshot(model)
    outer, inner = (operators.hessian(model, batch, loss=loss) for _ in range(2))
    outer.__enter__(), inner.__enter__()
    error = KeyError()
    assert not outer.__exit__(KeyError, error, None)
    inner.__exit__(None, None, None)
    assert_unchanged(before, snapshot(model))


@pytest.mark.parametrize("order", [(0,), (0, 1), (1, 0)])
def test_operators_closed_in_another_thread(order: tuple[int, ...], model: Stateful, batch: Batch) -> None:
    before = snapshot(model)
    contexts = [operators.hessian(model, batch, loss=loss) for _ in order]
    for context in contexts:
        context.__enter__()
    messages: list[str] = []
    modes: list[bool] = []

    def close() -> None:
        with torch.no_grad():
            for index in order:
                with pytest.raises(curvmon.InputError) as error:
                    contexts[index].__exit__(None, None, None)
                messages.append(str(error.value))
            modes.append(torch.is_grad_enabled())

    assert_ends(in_thread(close))
    assert len(messages) == len(order) and all("another thread" in message for message in messages)
    assert modes == [False]
    assert_unchanged(before, snapshot(model))
    assert_ends(in_thread(lambda: resonance(network(), batch, plain_loss)))

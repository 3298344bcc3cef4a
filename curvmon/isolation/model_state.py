"""Leave no trace: work on copies of a model's state, put the originals back by reference; restore random states.

Inside `isolated(...)` the model is in eval mode, each of its tensors is a copy that requires no gradient, and torch is
set up so that everything can be differentiated twice. On exit, also by an exception or an interrupt, all of it is
exactly as before: the original tensors were never touched, so nothing is copied back.
"""

from __future__ import annotations

import copy
import operator
import random
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from curvmon.errors import InputError
from curvmon.isolation.open_isolations import OpenIsolation
from curvmon.isolation.patches import (
    BACKWARD_HOOKS,
    FORWARD_HOOKS,
    GRADIENT_SYNC,
    is_loader_iterator,
    own_copy_of_parameter,
    patched,
)
from curvmon.isolation.reachable_objects import Reachable, reachable
from curvmon.isolation.sharding import refuse_sharded


@contextmanager
def random_state(seed: int) -> Iterator[None]:
    """Seed the generators of Python, numpy and torch (all devices in use); restore their states on exit."""
    python_state = random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy else None
    accelerators = _initialized_accelerators()
    torch_state = torch.default_generator.get_state()
    device_states = [[module.get_rng_state(i) for i in range(module.device_count())] for module in accelerators]
    mps_state = torch.mps.get_rng_state() if torch.backends.mps.is_available() else None
    try:
        reseed(seed)
        yield
    finally:
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
        torch.default_generator.set_state(torch_state)
        for module, states in zip(accelerators, device_states):
            for i, state in enumerate(states):
                module.set_rng_state(state, i)
        if mps_state is not None:
            torch.mps.set_rng_state(mps_state)


def reseed(seed: int) -> None:
    """Seed every global generator in use, so that a model that draws noise draws the same in every forward pass.

    Not by `torch.manual_seed`, which would also queue a seed for devices that are not initialised yet.
    """
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    for module in _initialized_accelerators():
        module.manual_seed_all(seed)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(seed)


def _initialized_accelerators() -> list[Any]:
    """Only those in use: asking another for its state would initialise it. One may be from outside torch."""
    current = torch.accelerator.current_accelerator()
    kinds = {"cuda", "xpu", "cpu" if current is None else current.type} - {"cpu", "mps"}
    accelerators: list[Any] = [torch.get_device_module(kind) for kind in sorted(kinds)]
    return [module for module in accelerators if module.is_initialized()]


_HALF = (torch.float16, torch.bfloat16)
_LOGGING_HOOKS = ("wandb.integration.torch.wandb_torch",)
"""modules whose forward hooks only log: `wandb.watch(log="all")` does so"""


def to_dtype(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A detached copy: floating tensors in `dtype`; if that is None, half precision in float32."""
    target = tensor.dtype
    if tensor.is_floating_point() and (dtype is not None or tensor.dtype in _HALF):
        target = dtype or torch.float32
    elif tensor.is_complex() and dtype == torch.float64:
        target = torch.complex128
    return tensor.detach().to(target, copy=True)


def own_copy(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A copy of a tensor in the batch, which the loss may change. Inference tensors cannot be saved for backward."""
    return to_dtype(tensor, dtype).requires_grad_(tensor.requires_grad)


class Isolation:
    """An open isolation.

    Attributes:
        notes: protections that the installed torch does not allow, and what that means.
    """

    def __init__(self, notes: list[str]) -> None:
        self.notes = notes
        self._trainable: list[Tensor] = []

    def add(self, parameter: Tensor) -> None:
        """Remember the copy of a trainable parameter."""
        self._trainable.append(parameter)

    def require_gradients(self) -> None:
        """Let these copies require gradients: for a loss that takes them itself (MAML, gradient penalties)."""
        for parameter in self._trainable:
            parameter.requires_grad_()


@contextmanager
def isolated(
    model: nn.Module, loss: Callable[..., Any], *, seed: int, dtype: torch.dtype | None, own_modes: bool = False
) -> Iterator[Isolation]:
    """Run a measurement of `model` under `loss` without a trace; `dtype` as in `to_dtype`.

    `own_modes`: modules that are in training mode stay in it.

    One thread at a time: others wait here, so `loss` must not wait for a measurement in another thread. Enter and exit
    in the same thread. Isolations that are exited in another order than innermost first are restored innermost first.
    """
    opened = OpenIsolation()
    try:
        stack = opened.contexts
        held = reachable(model, loss)  # under the lock, or it would see the copies of another thread's measurement
        modules = held.modules
        refuse_sharded(modules)
        devices = {p.device.type for module in modules for p in module.parameters(recurse=False)} | {"cpu"}
        # In Trainer.validate hooks run in inference mode: "Inference tensors cannot be saved for backward".
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(_default_dtype(dtype))
        stack.enter_context(random_state(seed))
        for device in sorted(devices):
            if torch.amp.is_autocast_available(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        isolation = Isolation(stack.enter_context(patched(modules, devices)))
        stack.enter_context(_working_copies(held, dtype, isolation, own_modes))
        yield isolation
    finally:
        opened.close()


@contextmanager
def _default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    before = torch.get_default_dtype()
    try:
        if dtype is not None:
            torch.set_default_dtype(dtype)
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _working_copies(
    held: Reachable, dtype: torch.dtype | None, isolation: Isolation, own_modes: bool
) -> Iterator[None]:
    """Give every module copies of its parameters, buffers and attributes; drop them on exit.

    The same for every plain object that the model holds. A container that is not copied (it is in a closure, or of a
    class of its own) gets its entries back.
    """
    modules = held.modules
    backward_hooks, forward_hooks, gradient_sync = (
        {symbol.attribute for symbol in symbols} for symbols in (BACKWARD_HOOKS, FORWARD_HOOKS, GRADIENT_SYNC)
    )
    for module in modules:
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if torch.nn.parameter.is_lazy(tensor):
                raise InputError("the model has lazy parameters without a shape yet; run it once before measuring")
    scripted = [module for module in modules if isinstance(module, torch.jit.ScriptModule)]
    attributes = [
        (module.__dict__, dict(module.__dict__)) for module in modules if not isinstance(module, torch.jit.ScriptModule)
    ]
    of_objects = [(item.__dict__, dict(item.__dict__)) for item in held.objects]
    # a hook that removes itself does so from the original dict, to which its handle refers
    contents = [(container, _entries(container)) for container in held.containers]
    memo: dict[int, Any] = {id(module): module for module in modules}
    with _script_state_restored(scripted, own_modes):
        try:
            for live, before in attributes:
                for name, value in before.items():
                    live[name] = OrderedDict() if name in backward_hooks else _copy(value, dtype, memo, isolation)
                    if name in forward_hooks and isinstance(value, dict):
                        _remove_logging_hooks(live[name])
                if not own_modes:
                    live["training"] = False
                live.update((name, False) for name in gradient_sync if name in before)
            for live, before in of_objects:
                live.update((name, _copy(value, dtype, memo, isolation)) for name, value in before.items())
            yield
        finally:
            for live, before in (*attributes, *of_objects):
                live.clear()
                live.update(before)
            for container, entries in contents:
                _refill(container, entries)


def _remove_logging_hooks(hooks: dict[int, Any]) -> None:
    """They would log a measurement's passes as the user's."""
    for key in [key for key, hook in hooks.items() if getattr(hook, "__module__", None) in _LOGGING_HOOKS]:
        del hooks[key]


def _entries(container: Any) -> list[Any]:
    return list(container.items() if isinstance(container, dict) else container)


def _refill(container: Any, entries: list[Any]) -> None:
    """Restore the entries if any has changed, by the builtin methods: a subclass may override them."""
    now = _entries(container)
    if isinstance(container, dict):
        now, before = [part for pair in now for part in pair], [part for pair in entries for part in pair]
    else:
        before = entries
    if len(now) == len(before) and all(map(operator.is_, now, before)):
        return
    kind: Any = next(kind for kind in (OrderedDict, dict, list, deque, set) if isinstance(container, kind))
    kind.clear(container)
    (kind.extend if kind in (list, deque) else kind.update)(container, entries)


@contextmanager
def _script_state_restored(scripted: list[torch.jit.ScriptModule], own_modes: bool) -> Iterator[None]:
    """A scripted module keeps its state in C++: only values can be saved and restored."""
    flags = [(module, module.training) for module in scripted]
    buffers = [(buffer, buffer.clone()) for module in scripted for buffer in module.buffers(recurse=False)]
    try:
        for module in scripted:
            module.training = own_modes and module.training
        yield
    finally:
        for module, training in flags:
            module.training = training
        for buffer, before in buffers:
            buffer.data.copy_(before)


def _copy(value: Any, dtype: torch.dtype | None, memo: dict[int, Any], isolation: Isolation) -> Any:
    """Copy tensors, arrays, generators and builtin containers, share everything else; `memo` keeps aliases aliases.

    A parameter becomes one new parameter everywhere: `_flat_weights` of an LSTM and `_parameters` hold the same object.
    """
    if id(value) in memo:
        return memo[id(value)]
    result = value
    if isinstance(value, nn.Parameter):
        result = own_copy_of_parameter(value, to_dtype(value.data, dtype))
        result.__dict__.update(value.__dict__)
        if value.requires_grad:
            isolation.add(result)
    elif isinstance(value, Tensor):
        result = to_dtype(value, dtype)
    elif isinstance(value, torch.Generator):
        result = torch.Generator(value.device).set_state(value.get_state())
    elif _is_copied_by_value(value):
        result = copy.deepcopy(value)
    elif _is_iterator(value):
        result = _RefusingIterator()
    elif type(value) in (dict, OrderedDict, defaultdict):
        result = memo[id(value)] = value.copy()
        for key, item in value.items():
            result[key] = _copy(item, dtype, memo, isolation)
    elif type(value) in (list, deque):
        result = memo[id(value)] = value.copy()
        for index, item in enumerate(value):
            result[index] = _copy(item, dtype, memo, isolation)
    elif type(value) is set:
        result = value.copy()
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        result = type(value)(*(_copy(item, dtype, memo, isolation) for item in value))
    elif type(value) is tuple:
        result = tuple(_copy(item, dtype, memo, isolation) for item in value)
    memo[id(value)] = result
    return result


def _is_copied_by_value(value: Any) -> bool:
    """Arrays, and the random generators of Python and numpy."""
    numpy: Any = sys.modules.get("numpy")
    if isinstance(value, random.Random):
        return not isinstance(value, random.SystemRandom)  # which has no state
    return numpy is not None and isinstance(value, (numpy.ndarray, numpy.random.Generator, numpy.random.RandomState))


def _is_iterator(value: Any) -> bool:
    """A generator, an iterator of Python's own, or one over a DataLoader."""
    if isinstance(value, types.GeneratorType) or is_loader_iterator(value):
        return True
    return isinstance(value, Iterator) and type(value).__module__ in ("builtins", "itertools")


class _RefusingIterator:
    """In place of an iterator: it cannot be copied, and the training would miss what a measurement draws from it."""

    def __iter__(self) -> _RefusingIterator:
        return self

    def __next__(self) -> Any:
        raise InputError(
            "the training step draws from an iterator that the model holds, and would miss what a measurement takes; "
            "pass loss= a function that does not"
        )

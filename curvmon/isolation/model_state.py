"""Leave no trace: a measurement works on copies of a model's state, and puts the originals back by reference.

Inside `isolated(...)` the model is in eval mode, every tensor it owns is a copy that requires no gradient, and the
process is set up so that everything can be differentiated twice. On exit, also by an exception or an interrupt, all of
it is exactly as before: the original tensors were never touched, so there is nothing to copy back.
"""

from __future__ import annotations

import copy
import operator
import random
import sys
import threading
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data.dataloader import _BaseDataLoaderIter

from curvmon.errors import InputError
from curvmon.isolation.random_state import random_state
from curvmon.isolation.reachable import Reachable, reachable

_HALF = (torch.float16, torch.bfloat16)
# Gradient hooks are not part of the function; `wandb.watch` would log our products as the user's gradients.
_BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")
_FORWARD_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
# `wandb.watch(log="all")` logs parameters from a forward hook.
_OBSERVERS = ("wandb.integration.torch.wandb_torch",)
_GLOBAL_BACKWARD_HOOKS = ("_global_backward_hooks", "_global_backward_pre_hooks")
# DistributedDataParallel would prepare its reducer for a backward pass that never comes.
_DISTRIBUTED_SYNC = ("require_backward_grad_sync", "require_forward_param_sync")
# Most of what is replaced belongs to the process (autocast, checkpoints, kernels, default dtype, random generators). Of
# two measurements in threads that overlap, the second would save the first one's replacements as the originals, and put
# them back for good after the first has left. Re-entrant, since a loss may measure as well.
one_at_a_time = threading.RLock()


def to_dtype(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A detached copy; floating tensors in `dtype`, or where it is None, half precision raised to float32."""
    target = tensor.dtype
    if tensor.is_floating_point() and (dtype is not None or tensor.dtype in _HALF):
        target = dtype or torch.float32
    elif tensor.is_complex() and dtype == torch.float64:
        target = torch.complex128
    return tensor.detach().to(target, copy=True)


def own_copy(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A copy of a batch's tensor the loss may do anything with. An inference tensor could not be saved for backward."""
    return to_dtype(tensor, dtype).requires_grad_(tensor.requires_grad)


class Isolation:
    """An open isolation; `thaw` lets the copies of trainable parameters require gradients after all."""

    def __init__(self) -> None:
        self._trainable: list[Tensor] = []

    def add(self, parameter: Tensor) -> None:
        self._trainable.append(parameter)

    def thaw(self) -> None:
        """For a loss that differentiates by the parameters itself (MAML, gradient penalties)."""
        for parameter in self._trainable:
            parameter.requires_grad_()


@contextmanager
def isolated(
    model: nn.Module, loss: Callable[..., Any], *, seed: int, dtype: torch.dtype | None
) -> Iterator[Isolation]:
    """Run a measurement of `model` under `loss` without a trace; `dtype` as in `to_dtype`.

    One thread at a time: others wait here, so `loss` must not wait for a measurement in another thread. Enter and leave
    in the same thread.
    """
    with one_at_a_time, ExitStack() as stack:
        found = reachable(model, loss)  # not before: it would find the copies of another thread's measurement
        modules = found.modules
        devices = {p.device.type for module in modules for p in module.parameters(recurse=False)} | {"cpu"}
        # In Trainer.validate hooks run in inference mode: "Inference tensors cannot be saved for backward".
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(_default_dtype(dtype))
        stack.enter_context(random_state(seed))
        for device in sorted(devices):
            if torch.amp.is_autocast_available(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        stack.enter_context(_replaced(torch.amp.autocast_mode.autocast, __enter__=_enter_in_full_precision))
        stack.enter_context(_twice_differentiable(modules, devices))
        yield stack.enter_context(_working_copies(found, dtype))


_enter_autocast: Any = torch.amp.autocast_mode.autocast.__enter__


def _enter_in_full_precision(self: Any) -> Any:
    """`with torch.autocast(...)` in a step or a model has no effect: products of products need float32."""
    wanted, self._enabled = self._enabled, False
    try:
        return _enter_autocast(self)
    finally:
        self._enabled = wanted


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
def _replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Attributes of `owner` set for the life of the context."""
    before = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


@contextmanager
def _twice_differentiable(modules: list[nn.Module], devices: set[str]) -> Iterator[None]:
    """Kernels and settings under which every operation that has a double backward shows it."""
    with ExitStack() as stack:
        # "derivative for aten::_scaled_dot_product_flash_attention_for_cpu_backward is not implemented"
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        # The fused inference path of nn.TransformerEncoder calls no submodules: its taps would never fire.
        stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
        if "torch._dynamo" in sys.modules:
            # "torch.compile with aot_autograd does not currently support double backward"
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        if "cuda" in devices:
            cudnn: Any = torch.backends.cudnn
            # TF32 would hide T = 0 behind a relative error of 1e-3
            matmul: Any = torch.backends.cuda.matmul
            if hasattr(matmul, "fp32_precision"):
                for backend in (matmul, cudnn.conv, cudnn.rnn):
                    stack.enter_context(_replaced(backend, fp32_precision="ieee"))
            else:  # before torch 2.9
                stack.enter_context(_replaced(matmul, allow_tf32=False))
                stack.enter_context(_replaced(cudnn, allow_tf32=False))
            if any(isinstance(module, nn.RNNBase) for module in modules):
                # "the derivative for '_cudnn_rnn_backward' is not implemented"
                stack.enter_context(_replaced(cudnn, enabled=False))
        # `checkpoint` is imported by name everywhere, so replace what it looks up when it is called.
        stack.enter_context(
            _replaced(
                torch.utils.checkpoint,
                CheckpointFunction=_DirectCall,
                _checkpoint_without_reentrant_generator=_no_checkpoint,
            )
        )
        for owner in _WEIGHT_NORM_OWNERS:
            stack.enter_context(_replaced(owner, _weight_norm=_plain_weight_norm))
        no_hooks: dict[str, Any] = {name: OrderedDict() for name in _GLOBAL_BACKWARD_HOOKS}
        stack.enter_context(_replaced(torch.nn.modules.module, **no_hooks))
        yield


# The parametrization looks it up in `torch`, the old hook in its own module, which a function of that name hides.
_WEIGHT_NORM_OWNERS = [
    owner for owner in (torch, sys.modules.get("torch.nn.utils.weight_norm")) if hasattr(owner, "_weight_norm")
]


def _plain_weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """g v / ‖v‖, the norm over all dimensions but `dim`, over all where it is -1.

    For the first and the last dimension torch has a fused kernel whose backward takes ‖v‖ for a constant when it is
    differentiated itself: a Hessian that is wrong, not even symmetric, and raises nothing (torch 2.13).
    """
    return v * (g / torch.norm_except_dim(v, 2, dim))


class _DirectCall:
    """Stands in for the reentrant checkpoint: "Checkpointing is not compatible with .grad()"."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        return function(*args)


def _no_checkpoint(*args: Any, **kwargs: Any) -> Iterator[None]:
    """Stands in for the other kind, which would run the taps a second time during the backward pass."""
    yield


@contextmanager
def _working_copies(found: Reachable, dtype: torch.dtype | None) -> Iterator[Isolation]:
    """Give every module copies of its parameters, buffers and attributes; drop them on exit.

    Likewise every plain object that the model holds. A container that is not copied (it is in a closure, or of a class
    of its own) gets back what it held.
    """
    modules = found.modules
    for module in modules:
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if torch.nn.parameter.is_lazy(tensor):
                raise InputError("the model has lazy parameters without a shape yet; run it once before measuring")
    scripted = [module for module in modules if isinstance(module, torch.jit.ScriptModule)]
    attributes = [
        (module.__dict__, dict(module.__dict__)) for module in modules if not isinstance(module, torch.jit.ScriptModule)
    ]
    of_objects = [(item.__dict__, dict(item.__dict__)) for item in found.objects]
    # Also for a hook that removes itself: it takes itself out of the original dict, which its handle knows.
    contents = [(container, _entries(container)) for container in found.containers]
    isolation = Isolation()
    memo: dict[int, Any] = {id(module): module for module in modules}
    with _script_state_restored(scripted):
        try:
            for live, before in attributes:
                for name, value in before.items():
                    live[name] = OrderedDict() if name in _BACKWARD_HOOKS else _copy(value, dtype, memo, isolation)
                    if name in _FORWARD_HOOKS:
                        _send_off_observers(live[name])
                live["training"] = False
                live.update((name, False) for name in _DISTRIBUTED_SYNC if name in before)
            for live, before in of_objects:
                live.update((name, _copy(value, dtype, memo, isolation)) for name, value in before.items())
            yield isolation
        finally:
            for live, before in (*attributes, *of_objects):
                live.clear()
                live.update(before)
            for container, entries in contents:
                _refill(container, entries)


def _send_off_observers(hooks: dict[int, Any]) -> None:
    """Those that only look on, and would take our passes for the user's."""
    for key in [key for key, hook in hooks.items() if getattr(hook, "__module__", None) in _OBSERVERS]:
        del hooks[key]


def _entries(container: Any) -> list[Any]:
    return list(container.items() if isinstance(container, dict) else container)


def _refill(container: Any, entries: list[Any]) -> None:
    """Put back what was in it, past methods of a class of its own, if anything has changed."""
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
def _script_state_restored(scripted: list[torch.jit.ScriptModule]) -> Iterator[None]:
    """A scripted module keeps its state in C++: only its values can be saved and put back."""
    flags = [(module, module.training) for module in scripted]
    buffers = [(buffer, buffer.clone()) for module in scripted for buffer in module.buffers(recurse=False)]
    try:
        for module in scripted:
            module.training = False
        yield
    finally:
        for module, training in flags:
            module.training = training
        for buffer, before in buffers:
            buffer.data.copy_(before)


def _copy(value: Any, dtype: torch.dtype | None, memo: dict[int, Any], isolation: Isolation) -> Any:
    """Copy tensors, arrays, generators and builtin containers, share everything else; `memo` keeps aliases aliases.

    A parameter becomes a new parameter, everywhere: an LSTM's `_flat_weights` holds the same object as `_parameters`.
    Assigning `.data` in another dtype instead would cut the hooks of DistributedDataParallel off for good.
    """
    if id(value) in memo:
        return memo[id(value)]
    result = value
    if isinstance(value, nn.Parameter):
        result = torch.Tensor._make_subclass(type(value), to_dtype(value.data, dtype), False)
        result.__dict__.update(value.__dict__)
        if value.requires_grad:
            isolation.add(result)
    elif isinstance(value, Tensor):
        result = to_dtype(value, dtype)
    elif isinstance(value, torch.Generator):
        result = torch.Generator(value.device).set_state(value.get_state())
    elif _is_copied_by_value(value):
        result = copy.deepcopy(value)
    elif _is_drawn_from(value):
        result = _Withheld()
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


def _is_drawn_from(value: Any) -> bool:
    """An iterator of Python's own, or of a DataLoader."""
    if isinstance(value, (types.GeneratorType, _BaseDataLoaderIter)):
        return True
    return isinstance(value, Iterator) and type(value).__module__ in ("builtins", "itertools")


class _Withheld:
    """Stands in for an iterator: what a measurement takes from it the training would miss, and it cannot be copied."""

    def __iter__(self) -> _Withheld:
        return self

    def __next__(self) -> Any:
        raise InputError(
            "the training step draws from an iterator that the model holds, and would miss what a measurement takes; "
            "pass loss= a function that does not"
        )

"""Leave no trace: a measurement works on copies of a model's state, and puts the originals back by reference.

Inside `isolated(...)` the model is in eval mode, nothing of it requires a gradient, every tensor it owns is a copy, and
the process is set up so that everything can be differentiated twice. On exit, also by an exception or an interrupt,
all of it is exactly as before: the original tensors were never touched, so there is nothing to copy back.
"""

from __future__ import annotations

import functools
import random
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from curvmon.errors import InputError

_HALF = (torch.float16, torch.bfloat16)
# Gradient hooks are not part of the function; `wandb.watch` would log our products as the user's gradients.
_BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")


def to_dtype(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A detached copy; floating tensors in `dtype`, or where it is None, half precision raised to float32."""
    target = tensor.dtype
    if tensor.is_floating_point() and (dtype is not None or tensor.dtype in _HALF):
        target = dtype or torch.float32
    elif tensor.is_complex() and dtype == torch.float64:
        target = torch.complex128
    return tensor.detach().to(target, copy=True)


@contextmanager
def isolated(model: nn.Module, loss: Callable[..., Any], *, seed: int, dtype: torch.dtype | None) -> Iterator[None]:
    """Run a measurement of `model` under `loss` without a trace; `dtype` as in `to_dtype`."""
    modules = _all_modules([model, *_modules_behind(loss)])
    devices = {tensor.device.type for module in modules for tensor in module.parameters(recurse=False)} | {"cpu"}
    with ExitStack() as stack:
        # In Trainer.validate hooks run in inference mode: "Inference tensors cannot be saved for backward".
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(_default_dtype(dtype))
        stack.enter_context(random_state(seed))
        for device in sorted(devices):
            if torch.amp.is_autocast_available(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        stack.enter_context(_twice_differentiable(modules, devices))
        stack.enter_context(_working_copies(modules, dtype))
        yield


@contextmanager
def random_state(seed: int) -> Iterator[None]:
    """Seed python, numpy and torch (all devices in use) inside, restore their states on exit."""
    python_state = random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy else None
    accelerators = _initialized_accelerators()
    torch_state = torch.default_generator.get_state()
    device_states = [module.get_rng_state_all() for module in accelerators]
    mps_state = torch.mps.get_rng_state() if torch.backends.mps.is_available() else None
    try:
        reseed(seed)
        yield
    finally:
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
        torch.default_generator.set_state(torch_state)
        for module, state in zip(accelerators, device_states):
            module.set_rng_state_all(state)
        if mps_state is not None:
            torch.mps.set_rng_state(mps_state)


def reseed(seed: int) -> None:
    """Seed every global generator in use, so that a model with noise of its own draws the same in every forward pass.

    Not `torch.manual_seed`: that queues a seed for devices that are not initialised yet, a trace.
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
    """Only those that already run: asking a sleeping device for its state would wake it up."""
    accelerators: list[Any] = [torch.cuda, torch.xpu]
    return [module for module in accelerators if module.is_initialized()]


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
def _twice_differentiable(modules: list[nn.Module], devices: set[str]) -> Iterator[None]:
    """Kernels and settings under which every operation that has a double backward shows it."""
    with ExitStack() as stack:
        # "derivative for aten::_scaled_dot_product_flash_attention_for_cpu_backward is not implemented"
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        # The fused inference path of nn.TransformerEncoder calls no submodules: its taps would never fire.
        fastpath = torch.backends.mha.get_fastpath_enabled()
        stack.callback(torch.backends.mha.set_fastpath_enabled, fastpath)
        torch.backends.mha.set_fastpath_enabled(False)
        if "torch._dynamo" in sys.modules:
            # "torch.compile with aot_autograd does not currently support double backward"
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        if "cuda" in devices:
            cudnn: Any = torch.backends.cudnn
            backends: list[Any] = [
                torch.backends.cuda.matmul,
                getattr(cudnn, "conv", None),
                getattr(cudnn, "rnn", None),
            ]
            for backend in backends:
                if hasattr(backend, "fp32_precision"):  # TF32 would hide T = 0 behind a relative error of 1e-3
                    stack.callback(setattr, backend, "fp32_precision", backend.fp32_precision)
                    backend.fp32_precision = "ieee"
            if any(isinstance(module, nn.RNNBase) for module in modules):
                # "the derivative for '_cudnn_rnn_backward' is not implemented"
                stack.callback(setattr, torch.backends.cudnn, "enabled", torch.backends.cudnn.enabled)
                torch.backends.cudnn.enabled = False
        stack.enter_context(_checkpoints_bypassed())
        yield


class _DirectCall:
    """Stands in for the reentrant checkpoint: "Checkpointing is not compatible with .grad()"."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        return function(*args)


def _no_checkpoint(*args: Any, **kwargs: Any) -> Iterator[None]:
    """Stands in for the other kind, which would run the taps a second time during the backward pass."""
    yield


@contextmanager
def _checkpoints_bypassed() -> Iterator[None]:
    """`checkpoint` is imported by name everywhere, so replace what it looks up when it is called."""
    module: Any = torch.utils.checkpoint
    before = module.CheckpointFunction, module._checkpoint_without_reentrant_generator
    try:
        module.CheckpointFunction, module._checkpoint_without_reentrant_generator = _DirectCall, _no_checkpoint
        yield
    finally:
        module.CheckpointFunction, module._checkpoint_without_reentrant_generator = before


@contextmanager
def _working_copies(modules: list[nn.Module], dtype: torch.dtype | None) -> Iterator[None]:
    """Give every module copies of its parameters, buffers and attributes; drop them on exit."""
    parameters = list(dict.fromkeys(p for module in modules for p in module.parameters(recurse=False)))
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in parameters):
        raise InputError("the model has lazy parameters without a shape yet; run it once before measuring")
    originals = [(p, p.data, p.grad, p.requires_grad) for p in parameters]
    attributes = [(module, module.__dict__, dict(module.__dict__)) for module in modules]
    memo: dict[int, Any] = {id(module): module for module in modules}
    try:
        for parameter, data, _, _ in originals:
            parameter.grad = None
            parameter.requires_grad_(False)
            parameter.data = to_dtype(data, dtype)
        for module, live, before in attributes:
            if isinstance(module, torch.jit.ScriptModule):
                continue  # its state lives in C++; parameters are copied above, buffers below
            for name, value in before.items():
                live[name] = OrderedDict() if name in _BACKWARD_HOOKS else _copy(value, dtype, memo)
            live["training"] = False
        with _script_buffers_restored(modules):
            yield
    finally:
        for _, live, before in attributes:
            live.clear()
            live.update(before)
        for parameter, data, grad, requires_grad in originals:
            parameter.data = data
            parameter.requires_grad_(requires_grad)
            parameter.grad = grad


@contextmanager
def _script_buffers_restored(modules: list[nn.Module]) -> Iterator[None]:
    scripted = [module for module in modules if isinstance(module, torch.jit.ScriptModule)]
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


def _copy(value: Any, dtype: torch.dtype | None, memo: dict[int, Any]) -> Any:
    """Copy tensors and builtin containers, share everything else; `memo` keeps aliases aliases.

    Parameters are shared: their data was replaced, and an LSTM's `_flat_weights` must stay the same objects.
    """
    if id(value) in memo:
        return memo[id(value)]
    result = value
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        result = to_dtype(value, dtype)
    elif type(value) in (dict, OrderedDict, defaultdict):
        result = memo[id(value)] = value.copy()
        for key, item in value.items():
            result[key] = _copy(item, dtype, memo)
    elif type(value) in (list, deque):
        result = memo[id(value)] = value.copy()
        for index, item in enumerate(value):
            result[index] = _copy(item, dtype, memo)
    elif type(value) is set:
        result = value.copy()
    elif type(value) is tuple:
        result = tuple(_copy(item, dtype, memo) for item in value)
    memo[id(value)] = result
    return result


def _all_modules(owners: list[nn.Module]) -> list[nn.Module]:
    """The modules below `owners`, also those kept in plain lists and dicts (the usual way to hide a teacher)."""
    found: dict[nn.Module, None] = {}
    seen: set[int] = set()
    queue: list[Any] = list(owners)
    while queue:
        item = queue.pop(0)
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, nn.Module):
            found[item] = None
            queue.extend(item.children())
            queue.extend(item.__dict__.values())
        elif type(item) in (dict, OrderedDict, defaultdict):
            queue.extend(item.values())
        elif type(item) in (list, deque, tuple):
            queue.extend(item)
    return list(found)


def _modules_behind(function: Any) -> list[nn.Module]:
    """Modules that a loss function carries with it: its own, bound, partial, in its closure, or globals it names."""
    if isinstance(function, nn.Module):
        return [function]
    if isinstance(function, functools.partial):
        held = [function.func, *function.args, *function.keywords.values()]
        return [module for item in held for module in _modules_behind(item)]
    found = [getattr(function, "__self__", None)]
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if code is not None:
        found += [_contents(cell) for cell in function.__closure__ or ()]
        names = function.__globals__
        found += [names[name] for name in code.co_names if name in names]
        found += function.__defaults__ or ()
    return [item for item in found if isinstance(item, nn.Module)]


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet: nothing to restore
        return None

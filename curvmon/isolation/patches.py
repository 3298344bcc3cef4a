"""Every private name of torch that curvmon uses, and every function of torch that is replaced, in one table.

Settings with a public context manager are restored where they are set, in `model_state` and `monitor/measurement.py`.
`TABLE` says for each name why it is needed and what is lost without it. `patched(...)` walks the table: it makes the
replacements, and yields a note for every name that the installed torch does not have. No other module below curvmon/
uses private names of torch or assigns to its attributes; tests/isolation/test_patches.py checks that, row by row.
"""

from __future__ import annotations

import inspect
import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn.attention import SDPBackend

from curvmon.isolation.torch_symbols import Symbol, Target


@contextmanager
def patched(modules: Collection[nn.Module], devices: Collection[str]) -> Iterator[list[str]]:
    """All replacements of the table, for the life of the context.

    Yields a note for every name that is missing or cannot be replaced.
    """
    target = Target(modules, devices)
    notes: list[str] = []
    with ExitStack() as stack:
        for symbol in TABLE:
            if symbol.applies(target):
                try:
                    stack.enter_context(symbol.patched())
                except Exception as error:  # torch has changed: measure all the same
                    notes.append(symbol.note(error))
        yield notes


def _on_cuda(target: Target) -> bool:
    return "cuda" in target.devices


def _rnn_on_cuda(target: Target) -> bool:
    return _on_cuda(target) and any(isinstance(module, nn.RNNBase) for module in target.modules)


def _several_processes(target: Target) -> bool:
    # not the names in torch.distributed, which are replaced during a measurement
    group: Any = getattr(torch.distributed, "distributed_c10d", None)
    return group is not None and bool(group.is_initialized()) and group.get_world_size() > 1


def _in_full_precision(enter: Any) -> Any:
    def enter_disabled(self: Any) -> Any:
        wanted, self._enabled = getattr(self, "_enabled", True), False
        try:
            return enter(self)
        finally:
            self._enabled = wanted

    return enter_disabled


@contextmanager
def _no_fastpath(set_enabled: Callable[[bool], None]) -> Iterator[None]:
    before = torch.backends.mha.get_fastpath_enabled()
    set_enabled(False)
    try:
        yield
    finally:
        set_enabled(before)


def _ieee(setting: Any) -> Any:
    """From torch 2.9 on the setting is a string, before a flag for TF32."""
    return "ieee" if isinstance(setting, str) else False


class _DirectCall:
    """In place of a reentrant checkpoint."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        return function(*args)


def _no_checkpoint(*args: Any, **kwargs: Any) -> Iterator[None]:
    """In place of a checkpoint that is not reentrant."""
    yield


def _composed_weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """g v / ‖v‖, the norm over all dimensions but `dim`, over all where it is -1."""
    return v * (g / torch.norm_except_dim(v, 2, dim))


_TF32 = "TF32 has a relative error of 1e-3, which hides that T = 0"
_CHECKPOINT = "models with activation checkpoints of this kind cannot be measured"
_WEIGHT_NORM = (
    "torch has a fused kernel for the first and the last dimension; its backward takes ‖v‖ for a constant when it is "
    "differentiated again: the Hessian is wrong, not even symmetric, without any error"
)
_WRONG_WEIGHT_NORM = "the Hessian of models with weight norm may be wrong"
_OWN_HOOKS = "hooks for gradients fire during a measurement, as if its gradients were those of the training"

PATCHES = [
    Symbol(
        "torch.amp.autocast_mode:autocast.__enter__",
        why="second derivatives need float32, also where the model or the step calls torch.autocast itself",
        missing="parts of the model that call torch.autocast are measured in low precision",
        replacement=_in_full_precision,
    ),
    Symbol(
        "torch.nn.attention:sdpa_kernel",
        why="derivative for aten::_scaled_dot_product_flash_attention_for_cpu_backward is not implemented",
        missing="models with fused attention cannot be measured",
        context=lambda sdpa_kernel: sdpa_kernel(SDPBackend.MATH),
    ),
    Symbol(
        "torch.backends.mha:set_fastpath_enabled",
        why="the fused inference path of nn.TransformerEncoder calls no submodules, so their hooks do not fire",
        missing="layers within nn.TransformerEncoder may not be found",
        context=_no_fastpath,
    ),
    Symbol(
        "torch.compiler:set_stance",
        why="torch.compile with aot_autograd does not currently support double backward",
        missing="compiled models cannot be measured",
        context=lambda set_stance: set_stance("force_eager"),
        applies=lambda target: "torch._dynamo" in sys.modules,
    ),
    Symbol(
        "torch.backends.cuda:matmul.fp32_precision",
        why=_TF32,
        missing="matrix products may be in TF32, with a relative error of 1e-3",
        versions="2.13; new in 2.9",
        older="torch.backends.cuda:matmul.allow_tf32",
        replacement=_ieee,
        applies=_on_cuda,
    ),
    Symbol(
        "torch.backends.cudnn:conv.fp32_precision",
        why=_TF32,
        missing="convolutions may be in TF32, with a relative error of 1e-3",
        versions="2.13; new in 2.9",
        older="torch.backends.cudnn:allow_tf32",
        replacement=_ieee,
        applies=_on_cuda,
    ),
    Symbol(
        "torch.backends.cudnn:rnn.fp32_precision",
        why=_TF32,
        missing="recurrent layers may be in TF32, with a relative error of 1e-3",
        versions="2.13; new in 2.9",
        older="torch.backends.cudnn:allow_tf32",
        replacement=_ieee,
        applies=_on_cuda,
    ),
    Symbol(
        "torch.backends.cudnn:enabled",
        why="the derivative for '_cudnn_rnn_backward' is not implemented",
        missing="recurrent layers cannot be measured on a GPU",
        replacement=lambda enabled: False,
        applies=_rnn_on_cuda,
    ),
    # `checkpoint` is imported by name everywhere, so what it looks up at each call is replaced
    Symbol(
        "torch.utils.checkpoint:CheckpointFunction",
        why="Checkpointing is not compatible with .grad()",
        missing=_CHECKPOINT,
        replacement=lambda function: _DirectCall,
    ),
    Symbol(
        "torch.utils.checkpoint:_checkpoint_without_reentrant_generator",
        why="the forward pass would run again, with all its hooks, during each backward pass",
        missing=_CHECKPOINT,
        replacement=lambda generator: _no_checkpoint,
    ),
    # the parametrization looks it up in `torch`, the older hook in its own module
    *(
        Symbol(
            f"{module}:_weight_norm",
            why=_WEIGHT_NORM,
            missing=_WRONG_WEIGHT_NORM,
            replacement=lambda fused: _composed_weight_norm,
        )
        for module in ("torch", "torch.nn.utils.weight_norm")
    ),
    *(
        Symbol(
            f"torch.nn.modules.module:{name}",
            why="hooks for gradients are not part of the function",
            missing=_OWN_HOOKS,
            replacement=lambda hooks: OrderedDict(),
        )
        for name in ("_global_backward_hooks", "_global_backward_pre_hooks")
    ),
]
"""what is replaced or set during a measurement, in this order"""

AUTOCAST_ENABLED = Symbol(
    "torch.amp.autocast_mode:autocast._enabled",
    why="what the replacement of __enter__ turns off",
    missing="parts of the model that call torch.autocast are measured in low precision",
)
BACKWARD_HOOKS = tuple(
    Symbol(
        f"torch.nn:Module.{name}",
        why="empty during a measurement: wandb.watch would log its gradients as the user's",
        missing=_OWN_HOOKS,
    )
    for name in ("_backward_hooks", "_backward_pre_hooks")
)
FORWARD_HOOKS = tuple(
    Symbol(
        f"torch.nn:Module.{name}",
        why="hooks that only log are removed during a measurement; a layer with other hooks counts as not linear",
        missing="wandb.watch may log a measurement's forward passes, and the trace takes random probes",
    )
    for name in ("_forward_hooks", "_forward_pre_hooks")
)
GRADIENT_SYNC = tuple(
    Symbol(
        f"torch.nn.parallel:DistributedDataParallel.{name}",
        why="off during a measurement: the reducer would prepare for a backward pass that never comes",
        missing="DistributedDataParallel may take a measurement for a training step",
    )
    for name in ("require_backward_grad_sync", "require_forward_param_sync")
)
MAKE_SUBCLASS = Symbol(
    "torch:Tensor._make_subclass",
    why="copies a parameter with its class; assigning `.data` would break the hooks of DistributedDataParallel",
    missing="parameters are copied by Tensor.as_subclass instead",
    is_valid=callable,
)
LOADER_ITERATOR = Symbol(
    "torch.utils.data.dataloader:_BaseDataLoaderIter",
    why="recognises iterators over a DataLoader that the model holds: a measurement must not draw from them",
    missing="a model that draws from an iterator over a DataLoader misses the batches that a measurement takes",
    is_valid=inspect.isclass,
)
NATIVE_FUNCTIONS = Symbol(
    "torch:_C._nn",
    why="activations and losses that torch.nn.functional passes on to",
    missing="activations or losses that are called by their native names are not recognised",
    is_valid=inspect.ismodule,
)
FUNCTORCH_STACK = Symbol(
    "torch:_C._functorch.peek_interpreter_stack",
    why="tells whether a function runs under torch.func, where the efficient operations do not work",
    missing="torch's own second derivatives of convolutions and activations are used, which are slower",
    is_valid=callable,
)
FORWARD_LEVEL = Symbol(
    "torch.autograd.forward_ad:_current_level",
    why="tells whether a function runs in forward mode, where the efficient operations do not work",
    missing="torch's own second derivatives of convolutions and activations are used, which are slower",
    is_valid=lambda value: isinstance(value, int),
)
CONVOLUTION_BACKWARD, BATCH_NORM_BACKWARD, LAYER_NORM_BACKWARD, SOFTMAX_BACKWARD = (
    Symbol(
        f"torch:ops.aten.{name}_backward{'_data' if name == '_softmax' else ''}",
        why="single derivatives of an operation, without the others",
        missing="torch's own second derivatives of convolutions, normalisations and attention are used: slower",
        is_valid=callable,
    )
    for name in ("convolution", "native_batch_norm", "native_layer_norm", "_softmax")
)
TENSOR_VERSION = Symbol(
    "torch:Tensor._version",
    why="tells whether a tensor was changed in place between the logits and the loss",
    missing="logits behind a loss of probabilities are not found",
    is_valid=inspect.isdatadescriptor,
)
TENSOR_BASE = Symbol(
    "torch:Tensor._base",
    why="recognises a view of a node's output that enters the loss",
    missing="the automatic choice of nodes may include the output itself",
    is_valid=inspect.isdatadescriptor,
)
DEFAULT_GROUP = Symbol(
    "torch.distributed.distributed_c10d:_get_default_group",
    why="where a collective that was imported by name asks for its group",
    missing="a training step with collectives that were imported by name may wait for other processes for ever",
    applies=_several_processes,
    is_valid=callable,
)
GROUP_OR_DEFAULT = Symbol(
    "torch.distributed.distributed_c10d:_group_or_default_group",
    why="stands between a collective and DEFAULT_GROUP",
    missing="a training step with collectives that were imported by name may wait for other processes for ever",
    applies=_several_processes,
)

TABLE = [
    *PATCHES,
    AUTOCAST_ENABLED, *BACKWARD_HOOKS, *FORWARD_HOOKS, *GRADIENT_SYNC, MAKE_SUBCLASS, LOADER_ITERATOR, NATIVE_FUNCTIONS,
    FUNCTORCH_STACK, FORWARD_LEVEL, CONVOLUTION_BACKWARD, BATCH_NORM_BACKWARD, LAYER_NORM_BACKWARD, SOFTMAX_BACKWARD,
    TENSOR_VERSION, TENSOR_BASE, DEFAULT_GROUP, GROUP_OR_DEFAULT,
]  # fmt: skip
COLLECTIVES = (
    "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_gather_single",
    "all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "batch_isend_irecv",
    "broadcast", "broadcast_object_list", "gather", "gather_object", "irecv", "isend", "monitored_barrier", "new_group",
    "recv", "recv_object_list", "reduce", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor", "scatter",
    "scatter_object_list", "send", "send_object_list",
)  # fmt: skip
"""functions of torch.distributed that wait for other processes; those that a version lacks cannot be called either"""
ERROR_NODE = "torch::autograd::Error"
"""name of the node that stands for a missing second derivative (@once_differentiable)"""
CONVOLUTION_NODE = "Convolution"
"""part of the name of every convolution's node"""


def own_copy_of_parameter(parameter: nn.Parameter, data: Tensor) -> Tensor:
    """A new parameter of the same class with this data, that requires no gradient."""
    make = MAKE_SUBCLASS.get()
    copy: Tensor = data.as_subclass(type(parameter)) if make is None else make(type(parameter), data, False)
    return copy


def is_loader_iterator(value: Any) -> bool:
    return isinstance(value, LOADER_ITERATOR.get(()))


def is_transformed() -> bool:
    """Under torch.func or in forward mode; also where that cannot be found out."""
    stack, level = FUNCTORCH_STACK.get(), FORWARD_LEVEL.get()
    return stack is None or level is None or stack() is not None or level >= 0


def version(tensor: Tensor) -> int | None:
    """Counts changes in place; None where torch does not tell."""
    count = getattr(tensor, TENSOR_VERSION.attribute, None)
    return count if isinstance(count, int) else None


def is_view_of(tensor: Tensor, base: Tensor) -> bool:
    return getattr(tensor, TENSOR_BASE.attribute, None) is base


def has_forward_hooks(module: nn.Module) -> bool:
    """Also where that cannot be found out."""
    return any(getattr(module, hooks.attribute, True) for hooks in FORWARD_HOOKS)

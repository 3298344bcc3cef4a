"""An accelerator in pure Python: tensors on `accel:0` whose numbers lie in the memory of the host.

`register()` makes the device, for the rest of the process and before its first backward pass: use it in a process of
its own. As on a GPU, tensors have
strides and share storages, operations that mix them with host tensors raise, backward passes run in a thread of their
own, and the device has its own random generator. Every kernel is the CPU's, so results agree with the CPU's bit by bit
wherever curvmon computes the same on both; `KernelCounts(DEVICE)` counts kernels.

Not pretended: streams, autocast, and a memory of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from pytorch_lightning.accelerators import Accelerator
from pytorch_lightning.strategies import SingleDeviceStrategy
from torch import Tensor
from torch.utils import backend_registration

NAME = "accel"
KEY = "PrivateUse1"
INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_")
"""operations that take indices from the host"""
COPIES = ("copy_", "_to_copy", "_copy_from")
"""made by torch of the last one"""

_libraries: list[torch.library.Library] = []
"""registrations end with these objects"""


def unavailable() -> str | None:
    """Why the installed torch cannot make such a device; None if it can."""
    if hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        return None
    return f"torch {torch.__version__} cannot make a device in Python"


def register() -> torch.device:
    """Makes the device, once."""
    if not _libraries:
        backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_DeviceModule())
        operations = torch.library.Library("aten", "IMPL")
        _libraries.append(operations)
        operations.impl("_copy_from", _copy, KEY)
        for op, kernel in _kernels():
            operations.impl(op._schema.name.removeprefix("aten::") + _suffix(op), kernel, KEY)
        _without_bytes("__deepcopy__", _deep_copy)
        _without_bytes("__reduce_ex__", _reduce)
    return torch.device(NAME, 0)


def strategy() -> SingleDeviceStrategy:
    """Of a Trainer whose model and batches are on the device."""
    return SingleDeviceStrategy(device=register(), accelerator=_Accelerator())


class _DeviceModule:
    """torch.accel, as torch.cuda"""

    def __init__(self) -> None:
        self.generator = torch.Generator()

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """The CPU's kernels draw from the device's generator."""
        of_host = torch.default_generator.get_state()
        torch.default_generator.set_state(self.generator.get_state())
        try:
            yield
        finally:
            self.generator.set_state(torch.default_generator.get_state())
            torch.default_generator.set_state(of_host)

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None: ...

    def synchronize(self, device: Any = None) -> None: ...

    def empty_cache(self) -> None: ...

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def manual_seed_all(self, seed: int) -> None:
        self.generator.manual_seed(seed)

    manual_seed = manual_seed_all

    def get_rng_state(self, device: Any = None) -> Tensor:
        return self.generator.get_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        self.generator.set_state(state)


class _Accelerator(Accelerator):
    def setup_device(self, device: torch.device) -> None: ...

    def teardown(self) -> None: ...

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        return devices

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device(NAME, 0)]

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return NAME

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {}


def _host(tensor: Tensor) -> Tensor:
    """The same numbers as a host tensor."""
    memory: Tensor = tensor.untyped_storage().memory  # type: ignore[attr-defined]
    return memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _device(host: Tensor, storages: dict[int, Tensor]) -> Tensor:
    """On the device; shares the storage of the device tensor whose host tensor has the same.

    A storage of the device has no bytes. Its memory is a flat host tensor that lives as long as the storage.
    """
    whole = host.untyped_storage()
    base = storages.get(whole._cdata)
    if base is None or base.dtype != host.dtype:
        base = torch._C._acc.create_empty_tensor((0,), host.dtype)
        base.untyped_storage().memory = torch.empty(0, dtype=host.dtype).set_(whole)  # type: ignore[attr-defined, call-overload]
    return _strided(base, host.shape, host.stride(), host.storage_offset())


def _copy(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """From the host to the device, back, or between tensors of the device."""
    source, written = (_host(tensor) if tensor.device.type == NAME else tensor for tensor in (source, target))
    written.copy_(source)
    return target


META = torch._C.DispatchKeySet(torch._C.DispatchKey.Meta)
"""kernels that look at shapes and strides only: right for a storage without bytes"""


def _strided(base: Tensor, *geometry: Any) -> Tensor:
    result: Tensor = torch.ops.aten.as_strided.default.redispatch(META, base, *geometry)
    return result


def _view(op: Any) -> Callable[..., Tensor]:
    def run(*args: Any) -> Tensor:
        result: Tensor = op.redispatch(META, *args)
        return result

    return run


def _kernel(op: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: _run(op, *args, **kwargs)


def _run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """The CPU's kernel on the same numbers."""
    name = op.overloadpacket.__name__
    storages: dict[int, Tensor] = {}
    originals: dict[int, Tensor] = {}

    def to_host(value: Any) -> Any:
        if isinstance(value, torch.device) and value.type == NAME:
            return torch.device("cpu")
        if not isinstance(value, Tensor):
            return value
        if value.device.type != NAME:
            _check_mixed(name, value)
            return value
        host = _host(value)
        originals[id(host)] = storages[host.untyped_storage()._cdata] = value
        return host

    def to_device(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return originals[id(value)] if id(value) in originals else _device(value, storages)

    host_args = [_mapped(value, to_host) for value in args]
    host_kwargs = {key: _mapped(value, to_host) for key, value in kwargs.items()}
    random = torch.Tag.nondeterministic_seeded in op.tags
    with torch.no_grad(), torch.get_device_module(NAME).drawing() if random else nullcontext():
        result = op(*host_args, **host_kwargs)
    made_on_host = kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cpu"
    return result if made_on_host else _mapped(result, to_device)


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    return type(value)(map(change, value)) if isinstance(value, (list, tuple)) else change(value)


def _check_mixed(name: str, tensor: Tensor) -> None:
    if tensor.ndim and name not in INDEXING:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but {name} got one on {NAME}:0 and "
            f"one of shape {tuple(tensor.shape)} on {tensor.device}"
        )


def _kernels() -> Iterator[tuple[Any, Callable[..., Any]]]:
    """Of all operations that the CPU has a kernel of, and of composite ones, as on a GPU; composite views stay so.

    Each is registered: a fallback for all of them fails while a `TorchDispatchMode` is active but disabled, as it is in
    `torch.tensor`.
    """
    of_cpu, *composite = (
        set(torch._C._dispatch_get_registrations_for_dispatch_key(key))
        for key in ("CPU", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
    )
    for name in sorted(of_cpu.union(*composite)):
        namespace, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        op = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
        if namespace == "aten" and op is not None and packet not in COPIES and (name in of_cpu or not op.is_view):
            yield op, (_view if op.is_view else _kernel)(op)


def _without_bytes(method: str, replacement: Callable[..., Any]) -> None:
    """torch copies and pickles the bytes of a storage; those of the device have none."""
    original = getattr(Tensor, method)

    def chosen(self: Tensor, *args: Any) -> Any:
        ours = type(self) is Tensor and self.device.type == NAME
        return (replacement if ours else original)(self, *args)

    setattr(Tensor, method, chosen)


def _deep_copy(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    return memo.setdefault(id(tensor), tensor.detach().clone().requires_grad_(tensor.requires_grad))


def _reduce(tensor: Tensor, protocol: int) -> Any:
    rebuild = torch._utils._rebuild_device_tensor_from_cpu_tensor
    return rebuild, (tensor.detach().cpu(), tensor.dtype, str(tensor.device), tensor.requires_grad)


def _suffix(op: Any) -> str:
    return f".{op._schema.overload_name}" if op._schema.overload_name else ""

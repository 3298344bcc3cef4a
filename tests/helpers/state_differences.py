"""Everything that a run leaves behind, bit by bit, and where two runs differ."""

from __future__ import annotations

import random
import tempfile
import types
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import Logger
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction

PREFIX = "monitor|"
"""of the keys that the monitor logs in these tests"""
State = dict[str, Any]
_PLAIN = (bool, int, str, bytes, type(None), torch.dtype, torch.device, torch.Size, range, type)
_OPAQUE = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType, weakref.ref)
_NUMBERED = ("_torchdynamo_wrapper_id",)
"""attributes that count the objects of a process"""
_LIGHTNING = ("lightning", "pytorch_lightning", "lightning_fabric")


def flat(value: Any, name: str, into: State, seen: dict[int, Any]) -> None:
    """Every leaf below `value` by its path: tensors as their bytes, objects by what they hold, aliases as aliases."""
    if isinstance(value, _PLAIN):
        into[name] = value
    elif isinstance(value, (float, complex, np.generic)):
        into[name] = type(value).__name__, np.asarray(value).tobytes()  # NaN is NaN, and 0.0 is not -0.0
    elif isinstance(value, _OPAQUE):
        into[name] = getattr(value, "__qualname__", type(value).__name__)
    elif id(value) in seen and not isinstance(value, tuple):
        into[name] = f"the same as {seen[id(value)][0]}"
    else:
        seen[id(value)] = name, value  # held, or its id would be given to another
        into[name] = f"{type(value).__module__}.{type(value).__qualname__}"
        for part, held in _parts(value, name):
            flat(held, f"{name}{part}", into, seen)


def _parts(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Tensor):
        yield " kind", (str(value.dtype), str(value.device), value.requires_grad, value.is_leaf)
        yield " shape", value.shape
        yield " bytes", _bytes(value)
        yield " grad", value.grad if value.is_leaf else None
        yield " hooks", list((value._backward_hooks or {}).values())
        yield " attributes", value.__dict__
    elif isinstance(value, np.ndarray):
        yield " array", (str(value.dtype), str(value.shape), value.tobytes())
    elif isinstance(value, torch.Generator):
        yield " state", value.get_state()
    elif isinstance(value, random.Random):
        yield " state", value.getstate()
    elif isinstance(value, np.random.Generator):
        yield " state", value.bit_generator.state
    elif isinstance(value, Mapping):
        # handles number all hooks of a process, ours too: only their order counts
        named = "_hooks" not in name and all(isinstance(key, str) or _is_number(key) for key in value)
        keys = tuple(value) if named else tuple(range(len(value)))
        yield " keys", keys
        yield from ((f"[{key!r}]", held) for key, held in zip(keys, value.values()))
    elif isinstance(value, (list, tuple, deque)):
        yield " length", len(value)
        yield from ((f"[{i}]", held) for i, held in enumerate(value))
    elif isinstance(value, (set, frozenset)):
        yield " members", tuple(sorted(map(repr, value)))
    if hasattr(value, "__dict__") and not isinstance(value, Tensor) and not _belongs_to_lightning(value):
        yield " order", tuple(value.__dict__)
        yield from ((f".{key}", held) for key, held in value.__dict__.items() if key not in _NUMBERED)


def _is_number(key: Any) -> bool:
    return isinstance(key, int) and key < 2**32  # above, it is the id of something


def _belongs_to_lightning(value: Any) -> bool:
    """A Trainer, a loop, a connector: they hold clocks and each other."""
    return not isinstance(value, nn.Module) and type(value).__module__.split(".")[0] in _LIGHTNING


def _bytes(tensor: Tensor) -> bytes:
    flattened = tensor.detach().reshape(-1).clone()
    return bytes(flattened.view(torch.uint8).numpy().tobytes()) if len(flattened) else b""


def flattened(**values: Any) -> State:
    into: State = {}
    seen: dict[int, Any] = {}
    for name, value in values.items():
        flat(value, name, into, seen)
    return into


def process() -> dict[str, Any]:
    """What a measurement sets for its own time."""
    hooks = {name: len(held) for name, held in vars(nn.modules.module).items() if name.endswith("_hooks")}
    return {
        "python": random.getstate(),
        "numpy": list(np.random.get_state()),
        "torch": torch.get_rng_state(),
        "modes": (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.get_default_dtype(),
            torch.is_autocast_enabled("cpu"),
            torch.backends.mha.get_fastpath_enabled(),
            torch.backends.cuda.flash_sdp_enabled(),
            torch.are_deterministic_algorithms_enabled(),
            torch.get_num_threads(),
        ),
        "checkpoint": CheckpointFunction.__name__ + torch.utils.checkpoint.CheckpointFunction.__name__,
        "global hooks": hooks,
    }


def state_of(trainer: Any, module: Any) -> State:
    """All of a run at this moment. `trainer.callback_metrics` is a property that computes metrics: not asked here."""
    connector = trainer._logger_connector
    metrics = {
        kind: {key: value for key, value in getattr(connector, kind).items() if not key.startswith(PREFIX)}
        for kind in ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
    }
    results = trainer._results
    return flattened(
        module=module,
        optimizers=[{"state": optimizer.state, "groups": optimizer.param_groups} for optimizer in trainer.optimizers],
        schedulers=[config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        metrics=metrics,
        results={} if results is None else {key: vars(value) for key, value in results.items()},
        loops=trainer.fit_loop.state_dict(),
        loggers=len(trainer.loggers),
        process=process(),
    )


def differences(one: State, other: State) -> list[str]:
    return [key for key in one.keys() | other.keys() if one.get(key, "absent") != other.get(key, "absent")]


class Spy(pl.Callback):
    """Looks at the run at the same moments as the monitor, right after it if it is behind it in the list."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, State]] = []

    def _look(self, hook: str, trainer: Any, module: Any) -> None:
        self.seen.append((hook, state_of(trainer, module)))

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self._look("on_train_batch_start", trainer, pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self._look("on_train_batch_end", trainer, pl_module)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._look("on_validation_epoch_end", trainer, pl_module)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._look("on_validation_end", trainer, pl_module)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._look("on_train_epoch_end", trainer, pl_module)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._look("on_train_end", trainer, pl_module)


class Experiment:
    """What `self.logger.experiment` gives: any call is written down."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def add(self, *args: Any) -> None:
        self.calls.append(args)


_FOLDER = tempfile.TemporaryDirectory()
"""the same for two runs that are compared"""


class RecordingLogger(Logger):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[dict[str, Any], int | None]] = []
        self._experiment = Experiment()

    @property
    def save_dir(self) -> str:
        return _FOLDER.name

    @property
    def name(self) -> str:
        return "recording"

    @property
    def version(self) -> str:
        return "0"

    @property
    def experiment(self) -> Experiment:
        return self._experiment

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        return None

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((dict(metrics), step))

    def others(self) -> list[Any]:
        """All rows but the monitor's, which hold its keys and the epoch and nothing else."""
        kept = []
        for metrics, step in self.rows:
            ours = {key for key in metrics if key.startswith(PREFIX)}
            assert not ours or metrics.keys() - ours == {"epoch"}, metrics
            if not ours:
                kept.append((metrics, step))
        return kept

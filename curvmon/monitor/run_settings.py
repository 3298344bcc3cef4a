"""What a user sets, and may change during a run: of modules, of parameters and of optimizers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

NOT_SET = {"training", "lr", "initial_lr", "max_lr", "min_lr"}
"""attributes and entries of parameter groups that change by themselves, or are watched elsewhere"""


def run_settings(model: nn.Module, optimizers: Iterable[Any] = ()) -> dict[str, str]:
    """`{"dropout.p": "0.1", "head.activation": "ReLU", "stem.weight.requires_grad": "True", …}`

    Numbers of modules, classes of modules without children, which parameters are trained, and numbers of the
    optimizers' parameter groups, except learning rates.
    """
    settings: dict[str, str] = {}
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        if not any(True for _ in module.children()):
            settings[f"{prefix}class"] = type(module).__name__
        for key, value in vars(module).items():
            if not key.startswith("_") and key not in NOT_SET and type(value) in (bool, int, float, str):
                settings[prefix + key] = repr(value)
    for name, parameter in model.named_parameters():
        settings[f"{name}.requires_grad"] = str(parameter.requires_grad)
    for i, optimizer in enumerate(optimizers):
        for j, group in enumerate(getattr(optimizer, "param_groups", ())):
            for key, value in group.items():
                if key not in NOT_SET and _is_setting(value):
                    settings[f"optimizer {i}, group {j}, {key}"] = repr(value)
            settings[f"optimizer {i}, group {j}, parameters"] = str(len(group["params"]))
    return settings


def _is_setting(value: Any) -> bool:
    if isinstance(value, Tensor):  # which may be on a device
        return False
    if isinstance(value, tuple):
        return all(type(each) in (bool, int, float) for each in value)
    return type(value) in (bool, int, float)

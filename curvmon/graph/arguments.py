"""Check the user's arguments before anything runs."""

from __future__ import annotations

import numbers
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from curvmon.errors import InputError
from curvmon.graph.pytree import named_tensors

CRITERION = (
    "loss takes the model and the batch, not predictions and targets: "
    "pass loss=lambda model, batch: criterion(model(batch[0]), batch[1])"
)


def check_arguments(model: Any, loss: Any, nodes: Any, output: Any, batch_dim: Any) -> list[str] | None:
    """Names or patterns of nodes, None for the automatic choice; `InputError` for arguments that cannot be used."""
    if not isinstance(model, nn.Module):
        raise InputError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if _is_criterion(loss):
        raise InputError(CRITERION)
    if not callable(loss):
        raise InputError("loss must be a callable loss(model, batch) that returns a scalar tensor")
    if output is not None and not isinstance(output, str):
        raise InputError(f"output must be the name of a module, not {type(output).__name__}")
    check_integer("batch_dim", batch_dim)
    if nodes is None:
        return None
    names = [nodes] if isinstance(nodes, str) or not isinstance(nodes, Iterable) else list(nodes)
    if not names:
        raise InputError("nodes is empty; pass module names or patterns, or None for an automatic choice")
    for name in names:
        if not isinstance(name, str):
            raise InputError(f"nodes must be names of submodules or glob patterns, not {type(name).__name__}")
    return names


def _is_criterion(loss: Any) -> bool:
    """A loss of torch.nn or torch.nn.functional, or a subclass."""
    of_class = any(base.__module__ == "torch.nn.modules.loss" for base in type(loss).__mro__)
    return of_class or getattr(loss, "__module__", "") == "torch.nn.functional"


def check_budget(rtol: Any, max_hvps: Any, seed: Any) -> None:
    check_number("rtol", rtol, "positive")
    if rtol == 0:
        raise InputError(f"rtol must be positive, not {rtol!r}")
    if max_hvps is not None:
        check_integer("max_hvps", max_hvps)
    check_integer("seed", seed)
    if not 0 <= seed < 2**63:
        raise InputError(f"seed must be in [0, 2**63), not {seed}")


def check_integer(name: str, value: Any, expected: str = "an integer", minimum: int | None = None) -> None:
    """Raises `InputError`, "{name} must be {expected}". bool is a subclass of int, but no integer here."""
    wrong_type = not isinstance(value, numbers.Integral) or isinstance(value, bool)
    if wrong_type or (minimum is not None and value < minimum):
        raise InputError(f"{name} must be {expected}, not {value!r}")


def check_number(name: str, value: Any, expected: str) -> None:
    """Raises `InputError`, "{name} must be {expected}", for negative numbers, NaN, bool and everything else."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not float(value) >= 0:
        raise InputError(f"{name} must be {expected}, not {value!r}")


def has_dimension(shape: Sequence[int], dim: int) -> bool:
    return -len(shape) <= dim < len(shape)


def batch_size(batch: Any, batch_dim: int) -> int | None:
    """The number of samples, by a majority vote of the tensors in the batch; None for a batch without tensors.

    `batch_dim` is a dimension of the nodes' outputs. Targets often count samples along their only dimension, and a
    model that is sequence-first inside may take batch-first input, so dimension 0 has a vote too.
    """
    # a nested tensor may have no shape
    tensors = [(path, tensor) for path, tensor in named_tensors(batch) if not tensor.is_nested]
    votes: Counter[int] = Counter()
    for _, tensor in tensors:
        if tensor.ndim == 1:
            votes[tensor.shape[0]] += 1
        elif tensor.ndim > 1:
            dims = {d % tensor.ndim for d in (batch_dim, 0) if has_dimension(tensor.shape, d)}
            votes.update(tensor.shape[d] for d in sorted(dims, reverse=True))
    if not tensors:
        return None
    if not any(has_dimension(tensor.shape, batch_dim) for _, tensor in tensors):
        shapes = ", ".join(f"{path} has shape {tuple(tensor.shape)}" for path, tensor in tensors[:3])
        raise InputError(f"batch_dim={batch_dim} does not exist: {shapes}")
    samples = votes.most_common(1)[0][0]
    if samples == 0:
        raise InputError("the batch is empty: no samples along batch_dim, so there is no loss to differentiate")
    return samples


def why_not_finite(batch: Any, model: nn.Module) -> str:
    """Where the first NaN is. Infinite inputs are legal: attention masks hold -inf."""
    for path, tensor in named_tensors(batch):
        dense = tensor.layout is torch.strided and not tensor.is_nested
        if dense and tensor.is_floating_point() and torch.isnan(tensor).any():
            return f": {path} contains NaN; clean the input or skip this batch"
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            return f": parameter {name!r} is not finite; training has diverged"
    return " although inputs and parameters are finite; look for log or division by zero, or overflow"


def explained(run: Callable[[], Any], model: nn.Module, dtype: torch.dtype | None, batch: Any) -> Any:
    """Run the loss for the first time; the most likely mistakes become an `InputError` with a remedy."""
    try:
        return run()
    except TypeError as error:
        if f"must be Tensor, not {type(model).__name__}" not in str(error):
            raise
        raise InputError(CRITERION) from error
    except RuntimeError as error:
        text = str(error)
        devices, others = _devices(model.parameters()), _devices(tensor for _, tensor in named_tensors(batch))
        if devices and others and not devices & others:
            raise InputError(
                f"{text.splitlines()[0]}. The model is on {', '.join(sorted(devices))}, the batch on "
                f"{', '.join(sorted(others))}: move one of them, or let loss(model, batch) move the batch"
            ) from error
        if not any(words in text for words in ("same dtype", "expected scalar type", "mixed dtype", "dtype mismatch")):
            raise
        raise InputError(
            f"{text.splitlines()[0]}. The measurement computes in {dtype or torch.float32}: parameters, buffers and "
            f"the tensors in the batch are converted, others cannot be. Put other tensors that the loss uses "
            f"(class weights, say) into the batch or a buffer, or convert them where they are used with .to(x.dtype)"
        ) from error


def _devices(tensors: Iterable[Tensor]) -> set[str]:
    return {str(tensor.device) for tensor in tensors}

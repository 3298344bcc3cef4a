"""From what the user passes to a tapped graph: check the input, find the nodes, run the loss, and leave no trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from curvmon.curvature.isolation import isolated, reseed, to_dtype
from curvmon.curvature.nodes import Call, choose, labelled, record_calls, resolve
from curvmon.curvature.operators import GraphOperator
from curvmon.curvature.taps import TappedGraph, tapped_forward
from curvmon.curvature.trees import map_tensors, named_tensors
from curvmon.errors import InputError, LossError, NodeError

Loss = Callable[[Any, Any], Tensor]


class Session(NamedTuple):
    """An open measurement: products of a tapped graph, and what was done to make it possible."""

    operator: GraphOperator
    names: tuple[str, ...]
    loss: float
    notes: list[str]


@contextmanager
def open_session(
    model: nn.Module,
    batch: Any,
    *,
    loss: Loss,
    nodes: Sequence[str] | str | None,
    output: str | None,
    batch_dim: int,
    seed: int,
    dtype: torch.dtype | None,
) -> Iterator[Session]:
    """Tap `model` under `loss` for the life of the context; the model is as before when it ends, however it ends."""
    if not isinstance(model, nn.Module):
        raise InputError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if not callable(loss):
        raise InputError("loss must be a callable loss(model, batch) that returns a scalar tensor")
    samples = _batch_size(batch, batch_dim)
    with isolated(model, loss, seed=seed, dtype=dtype):

        def run() -> Any:
            reseed(seed)
            return loss(model, map_tensors(batch, lambda tensor: _own(tensor, dtype)))

        calls = record_calls(model, run)
        out = labelled(calls, resolve(model, calls, [output], "output")) if output is not None else None

        def tap(chosen: list[Call]) -> TappedGraph:
            graph = tapped_forward(labelled(calls, chosen), run, batch_dim=batch_dim, output=out)
            if not torch.isfinite(graph.loss):
                raise LossError(f"the loss is {graph.loss.item()}{_why_not_finite(batch, model)}")
            return graph

        if nodes is None:
            operator = _automatic(model, calls, tap, samples, batch_dim)
        else:
            wanted = [nodes] if isinstance(nodes, str) else list(nodes)
            if not wanted:
                raise InputError("nodes is empty; pass module names or patterns, or None for an automatic choice")
            operator = GraphOperator(tap(resolve(model, calls, wanted)))
        graph = operator.graph
        notes = [*_output_notes(operator), *_size_notes(graph, samples, batch_dim), *_precision_notes(graph, dtype)]
        yield Session(operator, tuple(node.label for node in graph.nodes), graph.loss.item(), notes)


def _own(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A copy the loss may do anything with. An inference tensor could not be saved for backward."""
    return to_dtype(tensor, dtype).requires_grad_(tensor.requires_grad)


def _batch_size(batch: Any, batch_dim: int) -> int | None:
    """The usual size along `batch_dim` of the tensors in the batch; None for a batch without tensors."""
    tensors = list(named_tensors(batch))
    sizes = [t.shape[batch_dim] for _, t in tensors if -t.ndim <= batch_dim < t.ndim]
    if tensors and not sizes:
        shapes = ", ".join(f"{path} has shape {tuple(t.shape)}" for path, t in tensors[:3])
        raise InputError(f"batch_dim={batch_dim} does not exist: {shapes}")
    if not sizes:
        return None
    samples = Counter(sizes).most_common(1)[0][0]
    if samples == 0:
        raise InputError("the batch is empty: no samples along batch_dim, so there is no loss to differentiate")
    return samples


def _why_not_finite(batch: Any, model: nn.Module) -> str:
    """Where the first NaN comes from. Infinite inputs are legal: attention masks hold -inf."""
    for path, tensor in named_tensors(batch):
        if tensor.is_floating_point() and torch.isnan(tensor).any():
            return f": {path} contains NaN; clean the input or skip this batch"
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            return f": parameter {name!r} is not finite; training has diverged"
    return " although inputs and parameters are finite; look for log or division by zero, or overflow"


def _automatic(
    model: nn.Module, calls: list[Call], tap: Callable[[list[Call]], TappedGraph], samples: int | None, batch_dim: int
) -> GraphOperator:
    """Choose nodes, leaving out those that the loss does not depend on and the output itself."""
    left_out: set[tuple[nn.Module, int]] = set()

    def usable(call: Call) -> bool:
        shape = call.shape
        if shape is None or (call.module, call.call) in left_out or not -len(shape) <= batch_dim < len(shape):
            return False
        return samples is None or shape[batch_dim] == samples

    unrelated: LossError | None = None
    while chosen := choose(model, calls, usable):
        graph = tap(chosen)
        try:
            operator = GraphOperator(graph)
        except LossError as error:  # another part of the model may still have a say
            unrelated = error
            left_out.update((node.module, node.call) for node in graph.nodes)
            continue
        unfit = {
            (node.module, node.call)
            for i, node in enumerate(graph.nodes)
            if operator.gradients[i] is None or _is_output(graph, i)
        }
        if not unfit or len(chosen) - len(unfit) < 2:
            return operator
        left_out |= unfit
    raise unrelated or NodeError(
        "no module with parameters returned a floating tensor with the batch's samples along "
        f"batch_dim={batch_dim}; pass nodes=[...] or the right batch_dim"
    )


def _is_output(graph: TappedGraph, i: int) -> bool:
    """The node's output enters the loss, directly or through a view: no layer is between it and the loss."""
    tapped = graph.tapped[i]
    return any(out is tapped or out._base is tapped for out in graph.outputs)


def _output_notes(operator: GraphOperator) -> list[str]:
    if operator.has_gauss_newton:
        return []
    return [
        "gn_gap is NaN: no torch loss function (F.cross_entropy, F.mse_loss, …) was seen between nodes and loss, "
        'so the output of the network is not known; pass output="name of the module that returns the predictions" '
        '(output="" for the model itself)'
    ]


def _size_notes(graph: TappedGraph, samples: int | None, batch_dim: int) -> list[str]:
    notes = []
    for node, tapped in zip(graph.nodes, graph.tapped):
        size = tapped.shape[batch_dim]
        if samples is not None and size != samples:
            notes.append(
                f"{node.label} has {size} entries along batch_dim={batch_dim}, the batch has {samples} samples; "
                f"its perturbation is shared by all {size}"
            )
    return notes


def _precision_notes(graph: TappedGraph, dtype: torch.dtype | None) -> list[str]:
    """Models that cast inside their forward pass cannot be computed in the precision that was asked for."""
    wanted = dtype or torch.float32
    low = [
        node.label
        for node, tapped in zip(graph.nodes, graph.tapped)
        if torch.finfo(tapped.dtype).eps > torch.finfo(wanted).eps
    ]
    return [f"{', '.join(low)}: computed in less than {wanted} because the model casts its activations"] if low else []

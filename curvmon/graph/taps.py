"""The tapped forward pass: one zero perturbation per node, added to its output by a forward hook.

    L(e) = loss with f_v + e_v in place of f_v for every node v,    H[v, w] = d²L / de_v de_w  at e = 0

e_v has the shape of the node's output without the batch dimension: all samples share it. `f_v + e_v` is a new tensor,
so an in-place activation after the node changes the sum and not a tensor that autograd has saved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from curvmon.errors import InputError, LossError
from curvmon.graph.arguments import has_dimension
from curvmon.graph.efficient_operations import EfficientOperations
from curvmon.graph.model_output import OutputFinder, output_leaf
from curvmon.graph.nodes import Node
from curvmon.graph.pytree import replace_first_floating


@dataclass(frozen=True)
class TappedGraph:
    """A loss as a function of the taps, with its autograd graph."""

    nodes: list[Node]
    loss: Tensor
    taps: list[Tensor]
    """e_v, one per node; zero leaves"""
    sample_taps: list[Tensor]
    """e_v expanded over the batch: the derivative w.r.t. it has a row per sample"""
    tapped: list[Tensor]
    """f_v + e_v, the input of the rest of the network"""
    outputs: list[Tensor]
    """the tensors that enter the loss, together `out`; empty if there is none"""
    output_taps: list[Tensor]
    """zero leaves added to the outputs: d²L / de_out² is the loss's own curvature"""
    losses: list[str]
    """names of the torch loss functions that were called"""
    unlinked: list[str]
    """those of them that take probabilities and whose logits were not found"""
    operations: EfficientOperations
    """those that the graph was made with"""


def tapped_forward(
    nodes: list[Node],
    run: Callable[[], Tensor],
    *,
    batch_dim: int,
    output: list[Node] | None = None,
    at: Mapping[str, Tensor] | None = None,
    outputs_at: Sequence[Tensor] = (),
    efficient: bool | Literal["loss"] = True,
) -> TappedGraph:
    """Run the loss with a tap on every node, and on the output: the one given, else what enters a loss function.

    Args:
        nodes: in execution order.
        run: computes the loss.
        batch_dim: the dimension of the nodes' outputs that counts samples.
        output: the nodes that are the output; None: what enters a torch loss function.
        at: values of the taps on nodes by label; those without one are zero.
        outputs_at: values of the taps on the outputs; none: zeros.
        efficient: use `EfficientOperations`, unless the loss itself takes gradients; "loss": those of the loss alone.
    """
    taps: dict[str, Tensor] = {}
    spread: dict[str, Tensor] = {}
    tapped: dict[str, Tensor] = {}
    outputs: list[tuple[Tensor, Tensor]] = []

    def tap_node(node: Node, tensor: Tensor) -> Tensor:
        dim = batch_axis(tensor, batch_dim, node.label)
        shape = [size for axis, size in enumerate(tensor.shape) if axis != dim]
        given = (at or {}).get(node.label)
        value = tensor.new_zeros(shape) if given is None else given.to(tensor).clone()
        taps[node.label] = value.requires_grad_()
        spread[node.label] = taps[node.label].unsqueeze(dim).expand_as(tensor)
        tapped[node.label] = tensor + spread[node.label]
        return tapped[node.label]

    def tap_output(node: Node, tensor: Tensor) -> Tensor:
        outputs.append((tensor, output_leaf(tensor, outputs_at, len(outputs))))
        return tensor + outputs[-1][1]

    finder, operations = OutputFinder(outputs_at), EfficientOperations(loss_only=efficient == "loss")
    with ExitStack() as stack:
        # the later a hook is prepended, the earlier it runs: a node that is the output is tapped as a node first
        for node in output or ():
            stack.callback(_hook(node, tap_output).remove)
        for node in nodes:
            stack.callback(_hook(node, tap_node).remove)
        if efficient:
            stack.enter_context(operations)
        if output is None:
            stack.enter_context(finder)  # inside the other: it sees and replays the user's calls
        loss = run()
    if operations.loss_differentiates or operations.stale:
        return tapped_forward(
            nodes, run, batch_dim=batch_dim, output=output, at=at, outputs_at=outputs_at, efficient=False
        )
    missing = [node.label for node in nodes if node.label not in taps]
    if missing:
        raise LossError(f"the forward pass is not repeatable: {', '.join(missing)} ran once and not the second time")
    if output is None:
        outputs = list(zip(finder.outputs, finder.taps))
    return TappedGraph(
        nodes=nodes,
        loss=loss,
        taps=[taps[node.label] for node in nodes],
        sample_taps=[spread[node.label] for node in nodes],
        tapped=[tapped[node.label] for node in nodes],
        outputs=[tensor for tensor, _ in outputs],
        output_taps=[tap for _, tap in outputs],
        losses=finder.losses,
        unlinked=finder.unlinked,
        operations=operations,
    )


def batch_axis(tensor: Tensor, batch_dim: int, where: str) -> int:
    """`batch_dim` as a non-negative axis of `tensor`."""
    if not has_dimension(tensor.shape, batch_dim):
        raise InputError(
            f"batch_dim={batch_dim} does not exist at {where}, which has shape {tuple(tensor.shape)}; "
            f"pass the dimension that counts samples"
        )
    return batch_dim % tensor.ndim


def _hook(node: Node, tap: Callable[[Node, Tensor], Tensor]) -> Any:
    """Register `tap` on the node's call of its module, for the first floating tensor of the output."""
    count: Counter[str] = Counter()

    def hook(module: nn.Module, args: Any, result: Any) -> Any:
        count["calls"] += 1
        if count["calls"] - 1 != node.call:
            return None
        return replace_first_floating(result, lambda tensor: tap(node, tensor))

    # before all other hooks: features that a user's hook collects for the loss are tapped too
    return node.module.register_forward_hook(hook, prepend=True)


def checked_scalar(loss: Any) -> Tensor:
    """The loss as a scalar tensor; `LossError` for anything else."""
    if not isinstance(loss, Tensor):
        hints = {
            "dict": "return its loss entry",
            "NoneType": "did you forget the return?",
            "tuple": "return one of them",
        }
        hint = hints.get(type(loss).__name__, "remove .item() or float()")
        raise LossError(f"loss(model, batch) must return a scalar tensor, not {type(loss).__name__}: {hint}")
    if loss.numel() != 1:
        raise LossError(
            f"loss(model, batch) must return a scalar tensor; it returned shape {tuple(loss.shape)}: "
            f"reduce it, for example with .mean()"
        )
    if not loss.is_floating_point():
        raise LossError(f"loss(model, batch) must return a floating tensor; it returned {loss.dtype}")
    return loss.reshape(()).as_subclass(Tensor)  # from a batch in a tensor subclass (images, say)

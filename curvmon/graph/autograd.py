"""`autograd.grad` for Hessian-vector products: graphs are kept, missing paths give zeros, errors say what to do."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from curvmon.errors import DoubleBackwardError, LossError
from curvmon.graph.efficient_operations import is_efficient_operation, torch_names
from curvmon.isolation.patches import CONVOLUTION_NODE, ERROR_NODE


def product(
    functions: Sequence[Tensor | None],
    variables: Sequence[Tensor],
    cotangents: Sequence[Tensor],
    batched: bool = False,
) -> list[Tensor]:
    """d/dx_j Σ_i <c_i, f_i> for every variable x_j: a vector-Jacobian product; zeros where the graph has no path.

    With `batched`, cotangents and results have one more dimension in front: one product for each index along it. One
    backward pass.
    """
    pairs = [(f, c) for f, c in zip(functions, cotangents) if f is not None and f.requires_grad]
    results: Sequence[Tensor | None] = [None] * len(variables)
    if pairs:
        results = differentiate([f for f, _ in pairs], variables, [c for _, c in pairs], batched=batched)
    leading = cotangents[0].shape[:1] if batched else ()
    return [v.new_zeros((*leading, *v.shape)) if r is None else r.detach() for r, v in zip(results, variables)]


def differentiate(
    functions: Sequence[Tensor],
    variables: Sequence[Tensor],
    cotangents: Sequence[Tensor] | None = None,
    create_graph: bool = False,
    batched: bool = False,
    keep_graph: bool = True,
) -> list[Tensor | None]:
    """`autograd.grad` that keeps the graph; None where the graph has no path and the derivative is zero."""
    if not variables or not any(f.requires_grad for f in functions):
        return [None] * len(variables)
    unused: list[int] = []

    def gradients(cotangents: Sequence[Tensor] | None) -> tuple[Tensor, ...]:
        results = torch.autograd.grad(functions, variables, cotangents, keep_graph, create_graph, allow_unused=True)
        unused[:] = (i for i, result in enumerate(results) if result is None)
        return tuple(result for result in results if result is not None)

    try:
        # `is_grads_batched` would run most operations in a loop
        results: list[Tensor | None] = [
            *(vmap(gradients)(tuple(cotangents or ())) if batched else gradients(cotangents))
        ]
    except RuntimeError as error:
        raise _explained(error) from error
    for i in unused:
        results.insert(i, None)
    return results


def _explained(error: RuntimeError) -> Exception:
    """Name the operation that has no second derivative, and a remedy; other errors are returned as they are."""
    text = str(error)
    if "backward through the graph a second time" in text:
        return LossError("the graph of the loss is gone: loss(model, batch) must not call backward() itself")
    if match := re.search(r"derivative for '?(?:aten::)?(\w+?)(_backward)?'? is not implemented", text):
        operation = match.group(1).strip("_")
        remedies = (remedy for name, remedy in _REMEDIES.items() if operation.startswith(name))
        remedy = next(remedies, "replace it by operations that have a double backward")
    elif match := re.search(r"backward through (\S+) but no autograd formula was registered", text):
        operation, remedy = match.group(1), "register_autograd for it"  # of torch.library
    elif "double backward" in text or "backward twice" in text or "twice differentiable" in text:
        operation, remedy = "an operation", text.splitlines()[0]
    else:
        return error
    return _no_double_backward(operation, remedy)


def _no_double_backward(operation: str, remedy: str) -> DoubleBackwardError:
    return DoubleBackwardError(
        f"{operation} between the nodes and the loss cannot be differentiated twice: {remedy}, or choose nodes "
        f"that lie behind it (only what is between the nodes and the loss is differentiated)"
    )


_REMEDIES = {
    "ctc_loss": "pass another `loss=` for the measurement",
    "embedding_bag": "use nn.Embedding followed by a sum or mean",
}


def custom_functions(tensors: Sequence[Tensor]) -> list[str]:
    """Names of the user's autograd functions in the graph behind a loss and its gradients.

    Under `once_differentiable` the graph of a gradient ends in an Error node that leads to no variable. `autograd.grad`
    does not reach it, and the derivative would seem to be zero.

    Raises:
        DoubleBackwardError: the graph has such a node.
    """
    names, not_differentiable = set(), False
    for function in _reachable(tensors):
        not_differentiable |= function.name() == ERROR_NODE
        if isinstance(function, torch.autograd.function.BackwardCFunction) and not is_efficient_operation(function):
            names.add(type(function).__name__.removesuffix("Backward"))
    if not_differentiable:
        raise _no_double_backward(
            ", ".join(sorted(names)) or "a custom autograd function",
            "write its backward with differentiable operations and drop @once_differentiable",
        )
    return sorted(names)


def bypassed(loss: Tensor, variables: Sequence[Tensor], gates: Sequence[Tensor]) -> bool:
    """Whether the graph leads from the loss to one of the variables other than through the sums `x + gate`.

    A gradient does not show it: a term may have no gradient here and still have curvature.
    """
    return leads_to([loss], variables, gates)


def leads_to(tensors: Sequence[Tensor], leaves: Sequence[Tensor], gates: Sequence[Tensor] = ()) -> bool:
    """Whether the graph behind the tensors leads to one of the leaves, other than through the sums `x + gate`."""
    wanted = {id(leaf) for leaf in leaves}
    return any(id(getattr(function, "variable", None)) in wanted for function in _reachable(tensors, gates))


def has_convolutions(tensors: Sequence[Tensor]) -> bool:
    """Whether there is one in the graph behind the tensors."""
    return any(CONVOLUTION_NODE in name for function in _reachable(tensors) for name in torch_names(function))


_LEAF_NODE = "AccumulateGrad"


def operations(stages: Sequence[Tensor], taps: Sequence[Tensor] = ()) -> list[Counter[str]]:
    """For each tensor, the operations that it needs and no earlier one does: their names, and how often.

    The sums `x + tap` are not counted, nor what leads from a leaf to its tap.
    """
    leaves, tap_functions = {id(tap) for tap in taps}, {tap.grad_fn for tap in taps} - {None}
    seen: set[Any] = set(_reachable(taps))
    counts = []
    for tensor in stages:
        new = set(_reachable([tensor])) - seen
        seen |= new
        names = []
        for function in new:
            inputs = [source for source, _ in function.next_functions]
            is_tap_sum = any(s in tap_functions or id(getattr(s, "variable", None)) in leaves for s in inputs if s)
            if not is_tap_sum:
                names += [re.sub(r"Backward\d*$", "", name.split("::")[-1]) for name in torch_names(function)]
        counts.append(Counter(name for name in names if name != _LEAF_NODE))
    return counts


def operands(stages: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[int]:
    """For each tensor, how many of those that it is computed from, and no earlier one is, the gradients depend on."""
    forward = set(_reachable(stages))
    behind = set(_reachable(gradients)) - forward
    sources = {source for function in behind for source, _ in function.next_functions} & forward
    counts, seen = [], set[Any]()
    for stage in stages:
        new = set(_reachable([stage])) - seen
        seen |= new
        counts.append(len(new & sources))
    return counts


def _reachable(tensors: Sequence[Tensor], gates: Sequence[Tensor] = ()) -> list[Any]:
    """All nodes of the graph behind the tensors, except those behind a sum `x + gate` with a leaf of `gates`."""
    closed = {id(gate) for gate in gates}
    queue: list[Any] = [t.grad_fn for t in tensors if t.grad_fn is not None]
    seen = set(queue)
    while queue:
        following = [function for function, _ in queue.pop().next_functions if function is not None]
        if any(id(getattr(function, "variable", None)) in closed for function in following):
            continue
        new = set(following) - seen
        seen |= new
        queue += new
    return list(seen)

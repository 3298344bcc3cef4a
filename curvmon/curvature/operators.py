"""Products with the blocks of H and of its Gauss-Newton part, from one tapped graph and `autograd.grad` alone.

    H[:, w] z  = d/de <dL/de_w, z>                         one backward pass serves all rows v
    GN[:, w] z = J^T S J_w z                                forward through the linearised network, the loss's own
                                                            curvature at the output, and one backward pass

with J_v = d out / d e_v and S = d²L / d out². Nothing is stored that is larger than the nodes themselves.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from curvmon.curvature.taps import TappedGraph
from curvmon.errors import DoubleBackwardError, LossError, NonFiniteError

NEGLECTED = 0.05
"""GN is reported as long as no more than this share of the gradient bypasses the outputs."""
Columns = list[Tensor]
"""A product for every row v."""


class Products(NamedTuple):
    """H[v, w] Z and GN[v, w] Z for all rows v, each d_v x k; GN is None where the output is not known."""

    hessian: Columns
    gauss_newton: Columns | None

    @property
    def spent(self) -> int:
        """How many products this is: one per column for H, and one for GN."""
        return self.hessian[0].shape[1] * (1 if self.gauss_newton is None else 2)


class BlockOperator(Protocol):
    """What an estimator needs to know of a network: products with column blocks of H and GN."""

    templates: Sequence[Tensor]
    """a tensor per node with d_v entries, for its dtype and device"""
    has_gauss_newton: bool

    def columns(self, w: int, z: Tensor) -> Products:
        """Products with the columns of z (d_w x k). How they are batched is up to the operator."""


class GraphOperator:
    """The `BlockOperator` of a tapped graph. Valid for any DAG and loss, also where samples interact."""

    def __init__(self, graph: TappedGraph) -> None:
        self.graph = graph
        self.templates: Sequence[Tensor] = graph.taps
        gradients = _differentiate([graph.loss], [*graph.taps, *graph.output_taps], create_graph=True)
        n = len(graph.taps)
        self.gradients, self._output_gradients = gradients[:n], gradients[n:]
        if all(gradient is None for gradient in self.gradients):
            raise LossError(
                "the loss does not depend on any of the nodes "
                f"({', '.join(node.label for node in graph.nodes)}); is it detached, or computed by another model?"
            )
        self.custom_functions = _check_graph([graph.loss, *(g for g in self.gradients if g is not None)])
        self.unexplained = self._unexplained()
        self.has_gauss_newton = self.unexplained < NEGLECTED
        self._cotangents: list[Tensor] = []
        self._pullbacks: list[Tensor | None] = []

    def columns(self, w: int, z: Tensor) -> Products:
        """One double backward pass per column for H, three cheaper ones for GN."""
        tap = self.graph.taps[w]
        vectors = [column.to(tap.dtype).reshape(tap.shape) for column in z.unbind(1)]
        hessian = _stacked([_product([self.gradients[w]], self.graph.taps, [vector]) for vector in vectors])
        if not self.has_gauss_newton:
            return Products(hessian, None)
        return Products(hessian, _stacked([self._gauss_newton(w, vector) for vector in vectors]))

    def _gauss_newton(self, w: int, z: Tensor) -> Columns:
        """GN[v, w] z = J_v^T S J_w z for all v."""
        if not self._pullbacks:
            # J_v^T c as a function of c: linear, so one graph gives J_w z = d/dc <J_w^T c, z> for every z.
            self._cotangents = [torch.zeros_like(output, requires_grad=True) for output in self.graph.outputs]
            self._pullbacks = _differentiate(self.graph.outputs, self.graph.taps, self._cotangents, create_graph=True)
        tangents = _product([self._pullbacks[w]], self._cotangents, [z])
        curved = _product(self._output_gradients, self.graph.output_taps, tangents)
        return _product(self.graph.outputs, self.graph.taps, curved)

    def _unexplained(self) -> float:
        """‖dL/de - J^T dL/d out‖ / ‖dL/de‖: the share of the loss that does not pass through the known outputs."""
        known = [gradient.detach() for gradient in self._output_gradients if gradient is not None]
        if not known:
            return 1.0
        outputs = [o for o, gradient in zip(self.graph.outputs, self._output_gradients) if gradient is not None]
        through = _product(outputs, self.graph.taps, known)
        squares = [
            (norm_squared(g.detach() - t), norm_squared(g.detach()))
            for g, t in zip(self.gradients, through)
            if g is not None
        ]
        difference, whole = (sum(column) for column in zip(*squares))
        return float((difference / whole) ** 0.5) if whole else 0.0


def precise(x: Tensor) -> Tensor:
    """Double precision where the device has it."""
    return x if x.device.type == "mps" else x.double()


def norm_squared(x: Tensor) -> float:
    """‖x‖² in double precision: a loss scaled by 1e-9 must not underflow."""
    return float(torch.linalg.vector_norm(precise(x)).item()) ** 2


def _stacked(images: list[Columns]) -> Columns:
    stacked = [torch.stack([image.reshape(-1) for image in rows], dim=1) for rows in zip(*images)]
    if not all(torch.isfinite(image).all() for image in stacked):
        raise NonFiniteError(
            "a Hessian-vector product is not finite although the loss is; "
            "look for sqrt, norm or log at zero, or overflow in low precision"
        )
    return stacked


def _product(
    functions: Sequence[Tensor | None], variables: Sequence[Tensor], cotangents: Sequence[Tensor]
) -> list[Tensor]:
    """Σ_i <cotangent_i, function_i> differentiated by every variable; zeros where the graph has no path."""
    pairs = [(f, c) for f, c in zip(functions, cotangents) if f is not None and f.requires_grad]
    if not pairs:
        return [torch.zeros_like(variable) for variable in variables]
    results = _differentiate([f for f, _ in pairs], variables, [c for _, c in pairs])
    return [torch.zeros_like(v) if r is None else r.detach() for r, v in zip(results, variables)]


def _differentiate(
    functions: Sequence[Tensor],
    variables: Sequence[Tensor],
    cotangents: Sequence[Tensor] | None = None,
    create_graph: bool = False,
) -> list[Tensor | None]:
    """`autograd.grad` that keeps the graph; None where the graph has no path: there the derivative is zero."""
    if not any(f.requires_grad for f in functions):
        return [None] * len(variables)
    try:
        return list(
            torch.autograd.grad(
                functions, variables, cotangents, retain_graph=True, create_graph=create_graph, allow_unused=True
            )
        )
    except RuntimeError as error:
        raise _explained(error) from error


def _explained(error: RuntimeError) -> Exception:
    """Name the operation that has no second derivative, and a way out; other errors stay as they are."""
    text = str(error)
    if "backward through the graph a second time" in text:
        return LossError("the graph of the loss is gone: loss(model, batch) must not call backward() itself")
    if match := re.search(r"derivative for '?(?:aten::)?(\w+?)(_backward)?'? is not implemented", text):
        operation = match.group(1).strip("_")
        known = (remedy for name, remedy in _REMEDIES.items() if operation.startswith(name))
        remedy = next(known, "replace it by operations that have a double backward")
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
    "ctc_loss": "curvature is not available for CTC; pass another `loss=` for the measurement",
    "embedding_bag": "use nn.Embedding followed by a sum or mean",
}


def _check_graph(tensors: Sequence[Tensor]) -> list[str]:
    """Names of the custom autograd functions behind a loss and its gradients; an error if one cannot go on.

    Under `once_differentiable` a gradient ends in an Error node that leads to no variable. `autograd.grad` never gets
    there and would call the derivative zero.
    """
    names, ends = set(), False
    for function in _reachable(tensors):
        ends |= function.name() == "torch::autograd::Error"
        if isinstance(function, torch.autograd.function.BackwardCFunction):
            names.add(type(function).__name__.removesuffix("Backward"))
    if ends:
        raise _no_double_backward(
            ", ".join(sorted(names)) or "a custom autograd function",
            "write its backward with differentiable operations and drop @once_differentiable",
        )
    return sorted(names)


def _reachable(tensors: Sequence[Tensor]) -> list[Any]:
    """All nodes of the graph behind some tensors."""
    queue: list[Any] = [t.grad_fn for t in tensors if t.grad_fn is not None]
    seen = set(queue)
    while queue:
        for following, _ in queue.pop().next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                queue.append(following)
    return list(seen)

"""Linear operators for users: the Hessian w.r.t. the parameters, and its blocks between the outputs of layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor, nn

from curvmon.errors import InputError, NodeError
from curvmon.graph.nodes import name_hint
from curvmon.operators.node_blocks import GraphOperator, Part
from curvmon.operators.parameter_hessian import open_parameters
from curvmon.operators.protocol import LinearOperator, OperatorState, SymmetricOperator, SymmetricProduct
from curvmon.operators.session import Loss, open_session


def hessian(model: nn.Module, batch: Any, *, loss: Loss) -> AbstractContextManager[SymmetricOperator]:
    """H = d²L / dθ² as a symmetric operator, θ the flat vector of the trainable parameters.

    Cost of a product: one Hessian-vector product, about two gradients. The model is isolated as in `curvmon.measure`
    while the context is open (eval mode, no autocast, no gradients left behind), so do not train inside.

    Args:
        model: any module; half precision is computed in float32.
        batch: whatever `loss` takes.
        loss: `loss(model, batch)` returns a scalar tensor.

    Raises:
        InputError: the model has no trainable parameter.
        LossError: the loss does not depend on them.

    Example:
        >>> import torch, curvmon
        >>> from scipy.sparse.linalg import eigsh
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)).double()
        >>> batch = torch.randn(32, 4).double(), torch.randn(32, 2).double()
        >>> loss = lambda net, b: torch.nn.functional.mse_loss(net(b[0]), b[1])
        >>> with curvmon.operators.hessian(net, batch, loss=loss) as H:
        ...     sharpness = eigsh(H.as_linear_operator(), k=1, which="LA", return_eigenvectors=False)[0]
        >>> bool(abs(sharpness / curvmon.spectrum(net, batch, loss=loss, k=1).eigenvalues[0] - 1) < 0.01)
        True
    """
    return _hessian(model, batch, loss)


@contextmanager
def _hessian(model: nn.Module, batch: Any, loss: Loss) -> Iterator[SymmetricOperator]:
    with open_parameters(model, [batch], loss=loss) as operator:
        yield from _closed_afterwards(SymmetricProduct(operator.size, operator.template, operator.hessian))


def gauss_newton(model: nn.Module, batch: Any, *, loss: Loss) -> AbstractContextManager[SymmetricOperator]:
    """GGN = J^T S J as a symmetric operator, J = d out / dθ and S = d²L / d out².

    `out` is what enters a torch loss function (F.cross_entropy, F.mse_loss, ...). Cost and isolation as for `hessian`.

    Args:
        model: any module; half precision is computed in float32.
        batch: whatever `loss` takes.
        loss: `loss(model, batch)` returns a scalar tensor.

    Raises:
        InputError: the model has no trainable parameter, no torch loss function was called, or part of the loss does
            not pass through one.
        LossError: the loss does not depend on the parameters.
    """
    return _gauss_newton(model, batch, loss)


@contextmanager
def _gauss_newton(model: nn.Module, batch: Any, loss: Loss) -> Iterator[SymmetricOperator]:
    with open_parameters(model, [batch], loss=loss) as operator:
        if not operator.has_ggn:
            raise InputError(
                "no Gauss-Newton part: the output of the network is unknown, or part of the loss does not pass "
                "through it; write all terms of the loss with torch loss functions (F.cross_entropy, F.mse_loss, …)"
            )
        yield from _closed_afterwards(SymmetricProduct(operator.size, operator.template, operator.ggn))


def _closed_afterwards(operator: SymmetricProduct) -> Iterator[SymmetricOperator]:
    try:
        yield operator
    finally:
        operator._close()


class _Block(LinearOperator):
    """A[v, w] for A = H, GN or T. By the symmetry of A, A[v, w]^T = A[w, v].

    One HVP per column; two for T = H - GN where part of the loss bypasses the output.
    """

    def __init__(self, graph: GraphOperator, part: Part, v: int, w: int, state: OperatorState | None = None) -> None:
        row, col = graph.templates[v], graph.templates[w]
        hvps_per_column = 2 if part == "remainder" and not graph.splits else 1
        super().__init__((row.numel(), col.numel()), col, state, hvps_per_column)
        self._graph = graph
        self._part: Part = part
        self._pair = v, w

    def _columns(self, z: Tensor) -> Tensor:
        return self._graph.block(self._part, *self._pair, z)

    @property
    def T(self) -> _Block:
        v, w = self._pair
        return _Block(self._graph, self._part, w, v, self._state)


class Blocks(Mapping[tuple[str, str], LinearOperator]):
    """One operator per pair of node names: `blocks["stem", "layer4"]` maps vectors at layer4 to vectors at stem."""

    def __init__(self, graph: GraphOperator, part: Part, nodes: tuple[str, ...]) -> None:
        indices = range(len(nodes))
        self._nodes = nodes
        self._operators = {(nodes[v], nodes[w]): _Block(graph, part, v, w) for v in indices for w in indices}

    def __getitem__(self, pair: tuple[str, str]) -> LinearOperator:
        if pair in self._operators:
            return self._operators[pair]
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise NodeError(f"blocks are named by two nodes, as in blocks[{self._nodes[0]!r}, {self._nodes[-1]!r}]")
        unknown = next(name for name in pair if name not in self._nodes)
        hint = name_hint(str(unknown), self._nodes, f"there are {', '.join(self._nodes)}")
        raise NodeError(f"{unknown!r} is not among the nodes; {hint}")

    def __contains__(self, pair: object) -> bool:
        return pair in self._operators

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(self._operators)

    def __len__(self) -> int:
        return len(self._operators)

    def _close(self) -> None:
        for operator in self._operators.values():
            operator._close()


class NodeOperators:
    """All blocks between some nodes, H = GN + T.

    Attributes:
        nodes: names in execution order.
        notes: about the nodes and the output, as in `Measurement.notes`.
        hessian: H[v, w] = d²L / de_v de_w, e_v an additive perturbation of the output of v that all samples share.
    """

    def __init__(self, graph: GraphOperator, nodes: tuple[str, ...], notes: Sequence[str]) -> None:
        self._graph = graph
        self.nodes = nodes
        self.notes = tuple(notes)
        self.hessian = Blocks(graph, "hessian", nodes)
        if graph.has_gauss_newton:
            self._gauss_newton = Blocks(graph, "gauss_newton", nodes)
            self._tensor = Blocks(graph, "remainder", nodes)

    @property
    def gauss_newton(self) -> Blocks:
        """GN[v, w] = J_v^T S J_w, J_v = d out / de_v and S = d²L / d out².

        Raises:
            InputError: the output of the network is unknown.
        """
        self._check_output()
        return self._gauss_newton

    @property
    def tensor(self) -> Blocks:
        """T[v, w] = H[v, w] - GN[v, w] = Σ_i dL/d out_i d² out_i / de_v de_w: zero in piecewise-linear networks.

        Raises:
            InputError: the output of the network is unknown.
        """
        self._check_output()
        return self._tensor

    def _close(self) -> None:
        for blocks in (self.hessian, *((self._gauss_newton, self._tensor) if self._graph.has_gauss_newton else ())):
            blocks._close()

    def _check_output(self) -> None:
        if not self._graph.has_gauss_newton:
            raise InputError(f"H has no Gauss-Newton part here. {' '.join(self.notes)}")


def between_nodes(
    model: nn.Module,
    batch: Any,
    *,
    loss: Loss,
    nodes: Sequence[str] | None = None,
    output: str | None = None,
    batch_dim: int = 0,
) -> AbstractContextManager[NodeOperators]:
    """H[v, w], GN[v, w] and T[v, w] = H - GN between the outputs of layers, each as an operator.

    Cost of a product with any of them: one Hessian-vector product (HVP). Where part of the loss bypasses the output, a
    product with T takes two, one with H and one with GN. Isolation as in `curvmon.measure`.

    Args:
        model: any module; half precision is computed in float32.
        batch: whatever `loss` takes.
        loss: `loss(model, batch)` returns a scalar tensor.
        nodes: submodule names or glob patterns; None chooses five to eight blocks.
        output: name of the module whose output is the prediction, "" for the model itself. None: what enters a torch
            loss function. Only GN and T need it.
        batch_dim: the dimension that counts samples in the nodes' outputs.

    Raises:
        InputError: an argument makes no sense, or an operator is used after the context has ended.
        NodeError: a name matches no module, or a module returns no activations.
        LossError: the loss does not depend on the nodes.
        DivergedError: the loss is not finite.
        DoubleBackwardError: an operation between the nodes and the loss cannot be differentiated twice.

    Example:
        >>> import torch, curvmon
        >>> from scipy.sparse.linalg import svds
        >>> linear, net = torch.nn.Linear, torch.nn.Sequential
        >>> model = net(linear(4, 8), torch.nn.Tanh(), linear(8, 9), torch.nn.Tanh(), linear(9, 2)).double()
        >>> batch = torch.randn(32, 4).double(), torch.randn(32, 2).double()
        >>> loss = lambda model, b: torch.nn.functional.mse_loss(model(b[0]), b[1])
        >>> with curvmon.operators.between_nodes(model, batch, loss=loss, nodes=["0", "2"]) as between:
        ...     norm = svds(between.hessian["0", "2"].as_linear_operator(), k=1, return_singular_vectors=False)[0]
        ...     gap = between.tensor["0", "2"].matmat(torch.eye(9)).norm()
        >>> truth = curvmon.exact(model, batch, loss=loss, nodes=["0", "2"])
        >>> bool(abs(norm / torch.linalg.matrix_norm(truth.blocks["0", "2"], 2) - 1) < 1e-6)
        True
        >>> torch.allclose(gap, (truth.blocks["0", "2"] - truth.gauss_newton["0", "2"]).norm())
        True
    """
    return _between_nodes(model, batch, loss, nodes, output, batch_dim)


@contextmanager
def _between_nodes(
    model: nn.Module, batch: Any, loss: Loss, nodes: Sequence[str] | None, output: str | None, batch_dim: int
) -> Iterator[NodeOperators]:
    with open_session(model, batch, loss=loss, nodes=nodes, output=output, batch_dim=batch_dim, dtype=None) as session:
        operators = NodeOperators(session.operator, session.names, session.notes)
        try:
            yield operators
        finally:
            operators._close()

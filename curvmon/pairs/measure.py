"""`curvmon.measure`: the four metrics of all pairs of layers, stochastically."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from curvmon.graph.arguments import check_budget
from curvmon.graph.autograd import operations
from curvmon.operators.batching import Batched
from curvmon.operators.derivative import Derivative, Way, note_that_starts_with, with_fallback
from curvmon.operators.finite_difference_check import WRONG, check_in_double_precision
from curvmon.operators.node_blocks import BlockOperator, Products
from curvmon.operators.session import Loss, open_session
from curvmon.pairs.estimator import FOR_ALL_METRICS, FOR_NORMS, Estimate, PairEstimator
from curvmon.pairs.gauss_newton import gauss_newton_part, with_factors
from curvmon.pairs.pair_metrics import undefined
from curvmon.records import AFTER_LAST_NODE, Measurement


def measure(
    model: nn.Module,
    batch: Any,
    *,
    loss: Loss,
    nodes: Sequence[str] | None = None,
    output: str | None = None,
    batch_dim: int = 0,
    rtol: float = 0.05,
    max_hvps: int | None = None,
    seed: int = 0,
    batched: Batched = "auto",
    derivative: Derivative = "auto",
) -> Measurement:
    """Resonance, coupling, stable rank and GN-Gap of all pairs of layers, each with a standard error.

    R(v, w) = ‖H[v, w]‖_F with H[v, w] = d²L / de_v de_w, e_v an additive perturbation of the output of layer v that
    all samples share; see `Measurement` for the other three. Works on any model without changes to its code.

    Cost: for a piecewise-linear network, as many backward passes as it has outputs per sample and two Hessian-vector
    products (HVPs), and the result is exact; for others 10 to 17 HVPs per node more (docs/cost.md). Memory is two to
    three times that of a training step; no d_v x d_w matrix is ever stored. Afterwards the model, its gradients and all
    random states are exactly as before. It is measured in eval mode, without autocast.

    Args:
        model: any module.
        batch: whatever `loss` takes; tensors in nested containers are copied before each use.
        loss: `loss(model, batch)` returns a scalar tensor.
        nodes: submodule names or glob patterns ("layer*" stays within one level, "**" crosses levels); None chooses
            five to eight blocks. The result is in execution order.
        output: name of the module whose output is the prediction, "" for the model itself. None: what enters a torch
            loss function. Only gn_gap needs it.
        batch_dim: the dimension that counts samples in the nodes' outputs.
        rtol: stop when the standard errors of R, C and the gap are below this share of their values; for a gap below
            rtol, below rtol². Where that of D is not below twice as much, a note says so.
        max_hvps: stop before this many HVPs, products with the Gauss-Newton part included. The backward passes for the
            Gauss-Newton factors are not counted; `notes` has their number.
        seed: seed of the probes; the same seed gives the same numbers. The model's own noise is always the same.
        batched: whether several HVPs are computed in one launch, which takes more memory. "auto": on accelerators, and
            on a CPU for small networks without convolutions.
        derivative: "double": differentiate the gradient. "differences": central differences of gradients, for
            operations that cannot be differentiated twice; of two step sizes, whose difference is part of the standard
            errors. Four forward and backward passes for an HVP. "auto": the first where it works, else the second;
            a note names the operation.

    Raises:
        InputError: an argument makes no sense, or `max_hvps` is too small.
        NodeError: a name matches no module, or a module returns no activations.
        LossError: the loss does not depend on the nodes, or is not a scalar tensor.
        DivergedError: the loss is not finite.
        NonFiniteError: an HVP is not finite although the loss is.
        DifferencesError: with "differences", the two step sizes disagree.
        DoubleBackwardError: an operation between the nodes and the loss cannot be differentiated twice, nor do
            differences replace that: the two step sizes disagree, which kinks make them do.

    Example:
        >>> import torch, curvmon
        >>> net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 16), torch.nn.Tanh(),
        ...                           torch.nn.Linear(16, 3))
        >>> batch = torch.randn(32, 8), torch.randint(3, (32,))
        >>> m = curvmon.measure(net, batch, loss=lambda net, b: torch.nn.functional.cross_entropy(net(b[0]), b[1]))
        >>> m.nodes
        ('0', '2')
        >>> m.resonance.shape
        torch.Size([2, 2])
    """
    return run_measurement(
        model,
        batch,
        loss=loss,
        nodes=nodes,
        output=output,
        batch_dim=batch_dim,
        rtol=rtol,
        max_hvps=max_hvps,
        seed=seed,
        batched=batched,
        derivative=derivative,
    )


def run_measurement(
    model: nn.Module,
    batch: Any,
    *,
    loss: Loss,
    nodes: Sequence[str] | None,
    output: str | None,
    batch_dim: int,
    rtol: float,
    max_hvps: int | None,
    seed: int,
    batched: Batched = "auto",
    derivative: Derivative = "auto",
    few_directions: bool = False,
    raise_max_hvps: bool = False,
    on_product: Callable[[int], None] | None = None,
) -> Measurement:
    """`measure` for a monitor: `raise_max_hvps` raises too small a `max_hvps` to the smallest possible one.

    `few_directions`: bases as small as R, C and the gap need for `rtol`; the standard error of D is then larger.
    `on_product` is called with the number of HVPs that were just computed.
    """
    start = time.perf_counter()
    check_budget(rtol, max_hvps, seed)
    open_again = functools.partial(
        open_session, model, batch, loss=loss, nodes=nodes, output=output, batch_dim=batch_dim, batched=batched
    )

    def run(way: Way, why: list[str]) -> Measurement:
        with open_again(dtype=None, way=way) as session:
            # a different stream from that of the model's own random numbers, which are seeded as well
            generator = torch.Generator("cpu").manual_seed((seed + 0x9E3779B97F4A7C15) % 2**63)
            graph = session.operator.graph
            counted = operations([*graph.tapped, graph.loss], taps=[*graph.sample_taps, *graph.output_taps])
            del graph
            part = gauss_newton_part(session.operator, batch_dim=batch_dim, rtol=rtol, generator=generator)
            operator = with_factors(session.operator, part)
            estimator = PairEstimator(
                operator if on_product is None else _CountedOperator(operator, on_product),
                session.names,
                rtol=rtol,
                max_hvps=max_hvps,
                generator=generator,
                part=part,
                effort=FOR_NORMS if few_directions else FOR_ALL_METRICS,
                raise_max_hvps=raise_max_hvps,
                relative_error=session.operator.relative_error,
            )
            no_metric = part.rounding == "hessian"
            estimate = Estimate(undefined(session.names), part.hvps, []) if no_metric else estimator.run()
        names, value, functions = session.names, session.loss, session.operator.custom_functions
        notes = [*why, *session.notes, *part.notes]
        del session, part, operator, estimator  # they hold the graph and the factors; another graph may follow
        if functions and way == "double":
            notes += check_in_double_precision(open_again, functions)
        matrices = estimate.matrices
        return Measurement(
            nodes=names,
            **matrices.values(),
            stderr=matrices.errors(),
            loss=value,
            hvps=estimate.hvps,
            seconds=time.perf_counter() - start,
            notes=(*notes, *matrices.notes(), *estimate.notes),
            operations={name: dict(count) for name, count in zip((*names, AFTER_LAST_NODE), counted)},
        )

    measurement: Measurement = with_fallback(run, derivative, note_that_starts_with(WRONG))
    return measurement


class _CountedOperator:
    """Calls `on_product` with the number of HVPs after every product."""

    def __init__(self, operator: BlockOperator, on_product: Callable[[int], None]) -> None:
        self._operator = operator
        self._on_product = on_product
        self.templates = operator.templates
        self.hvps_per_column = operator.hvps_per_column

    def columns(self, w: int, z: Tensor) -> Products:
        return self.columns_of({w: z})[w]

    def columns_of(self, requests: Mapping[int, Tensor]) -> dict[int, Products]:
        products = self._operator.columns_of(requests)
        self._on_product(sum(each.spent for each in products.values()))
        return products

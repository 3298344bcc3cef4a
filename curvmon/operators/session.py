"""Open a measurement: find the nodes, run the loss with taps on them, and restore everything afterwards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from curvmon.errors import DivergedError, LossError, NodeError
from curvmon.graph.arguments import batch_size, check_arguments, explained, has_dimension, why_not_finite
from curvmon.graph.autograd import leads_to
from curvmon.graph.fixed_pieces import FixedPieces
from curvmon.graph.nodes import Call, Node, choose, labelled, record_calls, resolve
from curvmon.graph.pytree import map_all_tensors
from curvmon.graph.taps import TappedGraph, checked_scalar, tapped_forward
from curvmon.isolation.fused_attention import fused_attention
from curvmon.isolation.model_state import Isolation, isolated, own_copy, reseed
from curvmon.isolation.patches import is_view_of
from curvmon.operators.batching import Batched
from curvmon.operators.block_differences import BlockDifferences
from curvmon.operators.derivative import Way
from curvmon.operators.node_blocks import GraphOperator

Loss = Callable[[Any, Any], Tensor]
NOISE_SEED = 0
"""Seed for a model that draws random numbers itself: the same in every forward pass and every measurement."""


class NoCallError(LossError, NodeError):
    """No module of the model ran, so there is nothing to tap. The loss may still depend on its parameters."""


class Session(NamedTuple):
    """An open measurement: the products of a tapped graph, and notes for the user."""

    operator: GraphOperator
    names: tuple[str, ...]
    loss: float
    notes: list[str]
    shifted: Callable[[Mapping[str, Tensor]], TappedGraph]
    """the same function at values of the taps other than zero, by node label"""


@contextmanager
def open_session(
    model: nn.Module,
    batch: Any,
    *,
    loss: Loss,
    nodes: Sequence[str] | None,
    output: str | None,
    batch_dim: int,
    dtype: torch.dtype | None,
    efficient: bool = True,
    batched: Batched = "auto",
    way: Way = "double",
) -> Iterator[Session]:
    """Tap `model` under `loss`. When the context ends, with or without an error, the model is exactly as before.

    `efficient`: with operations of curvmon's own, whose second derivatives cost less.
    """
    wanted = check_arguments(model, loss, nodes, output, batch_dim)
    samples = batch_size(batch, batch_dim)
    with isolated(model, loss, seed=NOISE_SEED, dtype=dtype) as isolation:

        def run() -> Tensor:
            reseed(NOISE_SEED)
            return checked_scalar(loss(model, map_all_tensors(batch, lambda tensor: own_copy(tensor, dtype))))

        calls = explained(lambda: _discover(model, run, isolation), model, dtype, batch)
        if not calls:
            raise NoCallError("loss(model, batch) did not call the model that was passed, nor any part of it")
        out = None if output is None else labelled(calls, resolve(model, calls, [output], "output"))

        def tapped(nodes: list[Node], pieces: FixedPieces | None, at: Mapping[str, Tensor], *outputs: Tensor) -> Any:
            with ExitStack() as stack:
                if pieces is not None:
                    stack.enter_context(fused_attention())
                    stack.enter_context(pieces())
                own = efficient and pieces is None
                return tapped_forward(
                    nodes, run, batch_dim=batch_dim, output=out, at=at, outputs_at=outputs, efficient=own
                )

        pieces: FixedPieces | None = None

        def tap(chosen: list[Call]) -> TappedGraph:
            nonlocal pieces
            pieces = FixedPieces() if way == "differences" else None
            graph: TappedGraph = tapped(labelled(calls, chosen), pieces, {})
            if not torch.isfinite(graph.loss):
                raise DivergedError(f"the loss is {graph.loss.item()}{why_not_finite(batch, model)}")
            return graph

        def products(graph: TappedGraph) -> GraphOperator:
            if pieces is None:
                return GraphOperator(graph, batched)
            return BlockDifferences(graph, partial(tapped, graph.nodes, pieces))

        if wanted is None:
            operator, notes = _choose_nodes(model, calls, tap, products, samples, batch_dim)
        else:
            operator, notes = products(tap(resolve(model, calls, wanted))), []
        graph = operator.graph
        notes += [
            *isolation.notes,
            *_output_notes(operator, output),
            *_graph_notes(operator, samples, batch_dim, dtype),
        ]

        def shifted(at: Mapping[str, Tensor]) -> TappedGraph:
            result: TappedGraph = tapped(graph.nodes, None, at)
            return result

        yield Session(operator, tuple(node.label for node in graph.nodes), graph.loss.item(), notes, shifted)


def _discover(model: nn.Module, run: Callable[[], Any], isolation: Isolation) -> list[Call]:
    """The calls of one forward pass; on trainable copies if the loss itself differentiates w.r.t. the parameters."""
    try:
        return record_calls(model, run)
    except RuntimeError as error:
        if not any(words in str(error) for words in ("does not require grad", "doesn't require grad")):
            raise
        isolation.require_gradients()
        return record_calls(model, run)


def _choose_nodes(
    model: nn.Module,
    calls: list[Call],
    tap: Callable[[list[Call]], TappedGraph],
    products: Callable[[TappedGraph], GraphOperator],
    samples: int | None,
    batch_dim: int,
) -> tuple[GraphOperator, list[str]]:
    """Choose nodes, except those that the loss does not depend on and, if two others remain, the output itself."""
    skipped: set[tuple[int, int]] = set()
    unrelated: LossError | None = None

    def has_rows(call: Call) -> bool:
        shape = call.shape
        if shape is None or not has_dimension(shape, batch_dim):
            return False
        return rows is None or shape[batch_dim] == rows

    def usable(call: Call) -> bool:
        return has_rows(call) and call.key not in skipped

    rows = samples
    if not choose(model, calls, usable):
        rows = _rows_of_several(calls, samples, batch_dim) or samples
    while chosen := choose(model, calls, usable):
        graph = tap(chosen)
        outputs = {call.key for i, call in enumerate(chosen) if _is_output(graph, i)}
        others_remain = len(chosen) - len(outputs) >= 2
        if outputs and others_remain and all(leads_to([graph.loss], [leaf]) for leaf in graph.taps):
            skipped.update(outputs)
            del graph  # it holds all activations
            continue
        try:
            operator = products(graph)
        except LossError as error:  # the loss may depend on another part of the model
            unrelated = error
            skipped.update(call.key for call in chosen)
            continue
        dead = {call.key for call, gradient in zip(chosen, operator.gradients) if gradient is None}
        if not dead and not (outputs and others_remain):
            return operator, _shape_notes(calls, chosen, has_rows, rows, batch_dim)
        skipped.update(dead or outputs)
        del graph, operator
    raise unrelated or NodeError(
        "no module with parameters returned a floating tensor with the batch's samples along "
        f"batch_dim={batch_dim}; pass nodes=[...] or the right batch_dim"
    )


def _rows_of_several(calls: list[Call], samples: int | None, batch_dim: int) -> int | None:
    """The multiple of the number of samples that most layers have along `batch_dim`; None if there is none.

    For models in which no layer sees the samples alone: contrastive learning concatenates all views of the samples,
    others their patches or tokens. Where another dimension counts the samples in all these layers, this one counts
    something else: time, in a sequence-first model.
    """
    if samples is None or samples < 2:
        return None
    layers = [c for c in calls if c.shape is not None and next(c.module.parameters(), None) is not None]
    shapes = [c.shape for c in layers if c.shape is not None and has_dimension(c.shape, batch_dim)]
    several = [shape for shape in shapes if shape[batch_dim] > samples and shape[batch_dim] % samples == 0]
    if not several:
        return None
    votes = Counter(shape[batch_dim] for shape in several)
    rows = max(votes, key=lambda size: (votes[size], -size))
    elected = [shape for shape in several if shape[batch_dim] == rows]
    elsewhere = [{d for d, size in enumerate(shape) if size == samples} for shape in elected]
    return None if set.intersection(*elsewhere) else rows


def _is_output(graph: TappedGraph, i: int) -> bool:
    """Whether the node's output enters the loss, directly or through a view, with no layer between them."""
    tapped = graph.tapped[i]
    return any(out is tapped or is_view_of(out, tapped) for out in graph.outputs)


def _shape_notes(
    calls: list[Call],
    chosen: list[Call],
    has_rows: Callable[[Call], bool],
    rows: int | None,
    batch_dim: int,
) -> list[str]:
    """Modules with parameters that were skipped because of their shape: `batch_dim` may be wrong."""
    odd = [
        call
        for call in calls
        if call.name
        and call.shape is not None
        and not has_rows(call)
        and (rows in call.shape or any(call.module is other.module for other in chosen))
        and next(call.module.parameters(), None) is not None
    ]
    if not odd:
        return []
    examples = ", ".join(f"{call.name} {tuple(call.shape or ())}" for call in odd[:2])
    return [
        f"{len(odd)} modules do not have the batch's {rows} samples along batch_dim={batch_dim} and were skipped "
        f"({examples}{', …' if len(odd) > 2 else ''}); pass another batch_dim, or nodes=[...]"
    ]


def _output_notes(operator: GraphOperator, output: str | None) -> list[str]:
    """Whether the Gauss-Newton part is that of the whole loss."""
    advice = (
        'pass output="name of the module that returns the predictions", '
        'or output="" for the model itself, if its first tensor is all that the loss depends on'
    )
    if output is not None:
        advice = "write the other terms with torch loss functions and do not pass output"
    if operator.bypass_fraction == 1.0 and output is not None:
        return [f"gn_gap is NaN: the loss does not depend on the output of {output!r}"]
    if not operator.graph.outputs:
        return [
            "gn_gap is NaN: no torch loss function (F.cross_entropy, F.mse_loss, …) was seen between nodes and loss, "
            f"so the output of the network is unknown; {advice}"
        ]
    share = f"{100 * operator.bypass_fraction:.2g} % of the gradient does not pass through the output"
    where = f"{output!r}" if output is not None else f"the inputs of {', '.join(dict.fromkeys(operator.graph.losses))}"
    if not operator.has_gauss_newton:
        return [f"gn_gap is NaN: {share} ({where}): the loss has another term written by hand; {advice}"]
    notes = []
    if operator.bypass_fraction > 1e-3:
        notes.append(f"gn_gap is approximate: {share} ({where}); its curvature counts as gap; {advice}")
    if operator.graph.unlinked:
        names = ", ".join(dict.fromkeys(operator.graph.unlinked))
        notes.append(
            f'gn_gap splits at the probabilities that enter {names}; for the logits pass output="their module"'
        )
    return notes


def _graph_notes(operator: GraphOperator, samples: int | None, batch_dim: int, dtype: torch.dtype | None) -> list[str]:
    graph, notes = operator.graph, []
    labels = [node.label for node in graph.nodes]
    for size in dict.fromkeys(tapped.shape[batch_dim] for tapped in graph.tapped):
        if samples is not None and size != samples:
            of = [label for label, tapped in zip(labels, graph.tapped) if tapped.shape[batch_dim] == size]
            notes.append(
                f"{', '.join(of)}: {size} entries along batch_dim={batch_dim}, where the batch has {samples} samples; "
                f"a perturbation is shared by all {size}"
            )
    dead = [label for label, gradient in zip(labels, operator.gradients) if gradient is None]
    if dead:
        notes.append(f"the loss does not depend on the (first) tensor that {', '.join(dead)} returns")
    wanted = dtype or torch.float32
    low = [x for x, t in zip(labels, graph.tapped) if torch.finfo(t.dtype).eps > torch.finfo(wanted).eps]
    if low:
        notes.append(f"{', '.join(low)}: computed in less than {wanted} because the model casts its activations")
    return notes

"""The processes of a run: what they tell each other, and how they divide a measurement.

All of it goes through a group of its own (gloo, on the CPU), so that it never mixes with what the strategy sends. Every
process calls the same collectives in the same order; within a measurement, one leads and the others answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from curvmon.curvature.operators import GraphOperator, Products
from curvmon.curvature.teams import Requests
from curvmon.errors import CurvmonError
from curvmon.tracking.recipe import Recipe

# bound at import: a measurement replaces the names in torch.distributed (see `no_collectives`)
_all_gather_object = dist.all_gather_object if dist.is_available() else None
_broadcast_object_list = dist.broadcast_object_list if dist.is_available() else None
_gather_object = dist.gather_object if dist.is_available() else None
_COLLECTIVES = (
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single",
    "barrier", "broadcast", "broadcast_object_list", "gather", "gather_object", "reduce", "reduce_scatter",
    "reduce_scatter_tensor", "scatter", "scatter_object_list", "monitored_barrier",
)  # fmt: skip


Task = tuple[int, int, Tensor]
"""(position among all, node, columns)"""


class RemoteError(CurvmonError, RuntimeError):
    """Another process could not compute what it was asked for."""


class Ranks:
    """All processes, and among them those that divide the products of the pairs of layers.

    The last one looks for eigenvalues at the same time: a search that cannot be divided. Made by all processes at once.
    """

    def __init__(self, *, pairs: bool, spectrum: bool) -> None:
        running = dist.is_available() and dist.is_initialized()
        self.world = dist.get_world_size() if running else 1
        self.rank = dist.get_rank() if running else 0
        apart = pairs and spectrum and self.world > 1
        self.spectrum_rank = self.world - 1 if apart else 0
        self._members = list(range(self.world - 1 if apart else self.world)) if pairs else [0]
        self._all = dist.new_group(backend="gloo") if self.world > 1 else None
        several = len(self._members) > 1
        self._team = dist.new_group(self._members, backend="gloo") if several else None

    @property
    def leads(self) -> bool:
        return self.rank == 0

    @property
    def assists(self) -> bool:
        return self._team is not None and self.rank in self._members and not self.leads

    def gather(self, value: Any) -> list[Any]:
        """The value of every process, on all of them."""
        if self._all is None:
            return [value]
        values: list[Any] = [None] * self.world
        assert _all_gather_object is not None
        _all_gather_object(values, value, group=self._all)
        return values

    def agreed(self, value: Any, source: int = 0) -> Any:
        """What one process says, the first as a rule."""
        if self._all is None:
            return value
        box = [value]
        assert _broadcast_object_list is not None
        _broadcast_object_list(box, src=source, group=self._all)
        return box[0]

    def team(self) -> Crew | None:
        return Crew(self._team, self._members) if self._team is not None and self.leads else None

    def assist(self, recipe: Recipe, module: Any, batches: list[Any], loss: Any) -> None:
        """Answer the leader until it is done with all batches, whatever happens here."""
        served = [0]

        def serve(operator: GraphOperator) -> bool:
            served[0] += 1
            return self.serve(operator)

        try:
            recipe.assist(module, batches, loss, serve)
        except Exception:
            for _ in range(served[0], len(batches)):
                if not self.serve(None):
                    break
            raise

    def serve(self, operator: GraphOperator | None) -> bool:
        """Answer the leader until it is done with this graph; False if it gives up altogether.

        Without an operator (this process could not build its graph) every answer is an error.
        """
        assert _broadcast_object_list is not None and _gather_object is not None
        while True:
            box: list[Any] = [None]
            _broadcast_object_list(box, src=0, group=self._team)
            what, tasks = box[0]
            if what in ("finish", "quit"):
                return bool(what == "finish")
            answer: Any
            try:
                if operator is None:
                    raise RemoteError("it could not run the model")
                answer = _computed(operator, what, tasks[self.rank])
            except Exception as error:
                answer = f"process {self.rank}: {type(error).__name__}: {error}"
            _gather_object(answer, dst=0, group=self._team)


class Crew:
    """The leader's view of a team: divides requests by nodes and columns, and puts the answers together."""

    def __init__(self, group: Any, members: Sequence[int]) -> None:
        self._group = group
        self._members = members
        self._finished = 0

    @contextmanager
    def until(self, batches: int) -> Iterator[None]:
        """If it ends before so many graphs are finished, the others are told to stop waiting."""
        try:
            yield
        finally:
            if self._finished < batches:
                self._tell("quit", None)

    def columns(self, operator: GraphOperator, requests: Requests) -> list[Products]:
        return self._divided(operator, "columns", requests)

    def remainders(self, operator: GraphOperator, requests: Requests) -> list[Products]:
        return self._divided(operator, "remainders", requests)

    def finish(self) -> None:
        self._tell("finish", None)
        self._finished += 1

    def _tell(self, what: str, tasks: Any) -> None:
        assert _broadcast_object_list is not None
        _broadcast_object_list([(what, tasks)], src=0, group=self._group)

    def _divided(self, operator: GraphOperator, what: str, requests: Requests) -> list[Products]:
        if not requests:
            return []
        pieces = _pieces(requests, len(self._members))
        tasks: dict[int, list[Task]] = {member: [] for member in self._members}
        for position, (w, z) in enumerate(piece for some in pieces for piece in some):
            tasks[self._members[position % len(self._members)]].append((position, w, z.cpu()))
        self._tell(what, tasks)
        own: Any
        try:
            own = _computed(operator, what, tasks[0])
        except Exception as error:  # the others are still to be heard
            own = error
        answers: list[Any] = [None] * len(self._members)
        assert _gather_object is not None
        _gather_object(None, answers, dst=0, group=self._group)
        if isinstance(own, Exception):
            raise own
        for answer in answers[1:]:
            if isinstance(answer, str):
                raise RemoteError(answer)
        answers[0] = own
        found = iter(products for _, products in sorted((e for answer in answers for e in answer), key=lambda e: e[0]))
        return [_side_by_side([next(found) for _ in some], some[0][1].device) for some in pieces]


def _pieces(requests: Requests, members: int) -> list[list[tuple[int, Tensor]]]:
    """(node, columns) for every request: one with many columns is cut into a piece for every member."""
    return [[(w, part) for part in torch.split(z, -(-z.shape[1] // members), dim=1)] for w, z in requests]


def _computed(operator: GraphOperator, what: str, tasks: list[Task]) -> list[tuple[int, Products]]:
    image: Callable[[int, Tensor], Products] = getattr(operator, what)
    return [
        (position, _moved(image(w, z.to(operator.templates[w].device)), torch.device("cpu")))
        for position, w, z in tasks
    ]


def _moved(found: Products, device: torch.device) -> Products:
    known = None if found.gauss_newton is None else [x.to(device) for x in found.gauss_newton]
    return Products([x.to(device) for x in found.remainder], known, found.spent)


def _side_by_side(parts: list[Products], device: torch.device) -> Products:
    remainder = [torch.cat(rows, dim=1) for rows in zip(*(part.remainder for part in parts))]
    known = [part.gauss_newton for part in parts if part.gauss_newton is not None]
    gauss_newton = [torch.cat(rows, dim=1) for rows in zip(*known)] if known else None
    return _moved(Products(remainder, gauss_newton, sum(part.spent for part in parts)), device)


@contextmanager
def no_collectives(world: int) -> Iterator[None]:
    """A collective inside a training step would wait for processes that are doing something else: an error instead."""
    if world == 1:
        yield
        return

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise CurvmonError(
            "the training step talks to other processes (a collective of torch.distributed), which a measurement does "
            "not; pass loss= a function without collectives"
        )

    before = {name: getattr(dist, name) for name in _COLLECTIVES if hasattr(dist, name)}
    try:
        for name in before:
            setattr(dist, name, refuse)
        yield
    finally:
        for name, function in before.items():
            setattr(dist, name, function)

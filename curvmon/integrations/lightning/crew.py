"""The products of a measurement divided among processes: one leads, asks and puts the answers together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from curvmon.errors import CurvmonError
from curvmon.operators.node_blocks import GraphOperator, Products
from curvmon.operators.teams import Requests

# bound at import: a measurement replaces the names in torch.distributed; some builds have none of them
all_gather_object: Any = getattr(dist, "all_gather_object", None)
broadcast_object_list: Any = getattr(dist, "broadcast_object_list", None)
gather_object: Any = getattr(dist, "gather_object", None)
Task = tuple[int, int, Tensor]
"""(position among all, node, columns)"""


class RemoteError(CurvmonError, RuntimeError):
    """Another process could not compute what it was asked for."""


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
        broadcast_object_list([(what, tasks)], src=0, group=self._group)

    def _divided(self, operator: GraphOperator, what: str, requests: Requests) -> list[Products]:
        if not requests:
            return []
        pieces = _pieces(requests, len(self._members))
        tasks: dict[int, list[Task]] = {member: [] for member in self._members}
        for position, (w, z) in enumerate(piece for some in pieces for piece in some):
            # a view would take all the columns along
            tasks[self._members[_turn(position, len(self._members))]].append((position, w, z.cpu().contiguous()))
        self._tell(what, tasks)
        own: Any
        try:
            own = computed(operator, what, tasks[0])
        except Exception as error:  # the others are still to be heard
            own = error
        answers: list[Any] = [None] * len(self._members)
        gather_object(None, answers, dst=0, group=self._group)
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


def _turn(position: int, members: int) -> int:
    """0 1 2 2 1 0 0 1 2 …: early nodes cost most, and the first piece of a request is the largest."""
    lap, place = divmod(position, members)
    return members - 1 - place if lap % 2 else place


def computed(operator: GraphOperator, what: str, tasks: list[Task]) -> list[tuple[int, Products]]:
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

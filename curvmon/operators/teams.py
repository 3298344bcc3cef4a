"""Products divided among processes: one leads a measurement, the others compute what it asks for.

Only the leader decides what comes next, so that processes cannot run apart, whatever rounding does on each of them. How
requests and answers travel is not known here: a `Team` is made by whoever knows the processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from curvmon.operators.node_blocks import GraphOperator, Products

Requests = Sequence[tuple[int, Tensor]]
"""(node, columns)"""


class Team(Protocol):
    def columns(self, operator: GraphOperator, requests: Requests) -> list[Products]:
        """T and GN."""

    def remainders(self, operator: GraphOperator, requests: Requests) -> list[Products]:
        """T alone."""

    def finish(self) -> None:
        """Nothing more will be asked of this graph."""


class Alone:
    """A team of one."""

    def columns(self, operator: GraphOperator, requests: Requests) -> list[Products]:
        return [operator.columns(w, z) for w, z in requests]

    def remainders(self, operator: GraphOperator, requests: Requests) -> list[Products]:
        return [operator.remainders(w, z) for w, z in requests]

    def finish(self) -> None:
        pass


ALONE = Alone()


class Counted:
    """A team that tells how many products it has made."""

    def __init__(self, team: Team, tick: Callable[[int], None]) -> None:
        self._team = team
        self._tick = tick

    def columns(self, operator: GraphOperator, requests: Requests) -> list[Products]:
        return self._told(self._team.columns(operator, requests))

    def remainders(self, operator: GraphOperator, requests: Requests) -> list[Products]:
        return self._told(self._team.remainders(operator, requests))

    def finish(self) -> None:
        self._team.finish()

    def _told(self, found: list[Products]) -> list[Products]:
        self._tick(sum(products.spent for products in found))
        return found


class TeamOperator:
    """The `BlockOperator` of a graph whose products a team computes."""

    def __init__(self, operator: GraphOperator, team: Team) -> None:
        self._operator = operator
        self._team = team
        self.templates = operator.templates
        self.hvps_per_column = operator.hvps_per_column

    def columns(self, w: int, z: Tensor) -> Products:
        return self.many([(w, z)])[0]

    def many(self, requests: Requests) -> list[Products]:
        return self._team.columns(self._operator, requests)

"""The processes of a run: what they tell each other, and how they divide a measurement.

All of it goes through a group of its own (gloo, on the CPU), so that it never mixes with what the strategy sends. Every
process calls the same collectives in the same order; within a measurement, one leads and the others answer.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from curvmon.integrations.lightning.crew import (
    Crew,
    RemoteError,
    all_gather_object,
    broadcast_object_list,
    computed,
    gather_object,
)
from curvmon.monitor.batch_samples import fingerprint
from curvmon.monitor.recipe import Recipe
from curvmon.operators.node_blocks import GraphOperator


class Ranks:
    """All processes, and among them those that divide the products of the pairs of layers.

    The last one looks for eigenvalues at the same time: a search that cannot be divided. Made by all processes at once.
    `world` is the number of them that train together: torch.distributed may still be there after a run that has ended.
    """

    def __init__(self, world: int, *, pairs: bool, spectrum: bool) -> None:
        running = world > 1 and dist.is_available() and dist.is_initialized()
        self.world = world if running else 1
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
        all_gather_object(values, value, group=self._all)
        return values

    def agreed(self, value: Any, source: int = 0) -> Any:
        """What one process says, the first as a rule; RemoteError on all of them if it cannot be sent."""
        if self._all is None:
            return value
        box: list[Any] = [None]
        if self.rank == source:
            try:
                box = [pickle.dumps(value)]
            except Exception as error:  # the others are waiting
                box = [f"process {source} cannot send {type(value).__name__}: {type(error).__name__}: {error}"]
        broadcast_object_list(box, src=source, group=self._all)
        if isinstance(box[0], str):
            raise RemoteError(box[0])
        return value if self.rank == source else pickle.loads(box[0])

    def all_or_none(self, error: Exception | None) -> None:
        """RemoteError on all processes if there is an error on any."""
        told = self.gather(None if error is None else f"process {self.rank}: {type(error).__name__}: {error}")
        failed = [one for one in told if one is not None]
        if failed:
            raise RemoteError(failed[0])

    def team(self) -> Crew | None:
        return Crew(self._team, self._members) if self._team is not None and self.leads else None

    def assist(self, recipe: Recipe, module: Any, batches: list[Any], loss: Any) -> None:
        """Answer the leader until it is done with all batches, whatever happens here."""
        left = len(batches)

        def serve(operator: GraphOperator | None) -> bool:
            nonlocal left
            left = left - 1 if self.serve(operator) else 0
            return left > 0

        try:
            recipe.assist(module, batches, loss, serve)
        except Exception:
            while left:
                serve(None)
            raise

    def decline(self, batches: int) -> None:
        """This process cannot take part in the measurement of the pairs: do not keep the others waiting."""
        team = self.team()
        if team is not None:
            with team.until(batches):
                pass
        left = batches if self.assists else 0
        while left:
            left = left - 1 if self.serve(None) else 0

    def serve(self, operator: GraphOperator | None) -> bool:
        """Answer the leader until it is done with this graph; False if it gives up altogether.

        Without an operator (this process could not build its graph) every answer is an error.
        """
        while True:
            box: list[Any] = [None]
            broadcast_object_list(box, src=0, group=self._team)
            what, tasks = box[0]
            if what in ("finish", "quit"):
                return bool(what == "finish")
            answer: Any
            try:
                if operator is None:
                    raise RemoteError("it could not run the model")
                answer = computed(operator, what, tasks[self.rank])
            except Exception as error:
                answer = f"process {self.rank}: {type(error).__name__}: {error}"
            gather_object(answer, dst=0, group=self._team)


@contextmanager
def same_buffers(ranks: Ranks, module: nn.Module) -> Iterator[None]:
    """For the life of the context all processes have the buffers of the first, as parameters are the same anyway.

    Running statistics of BatchNorm differ between processes, and products of different functions do not go together.
    """
    held = [
        (owner._buffers, name, value)
        for owner in module.modules()
        if ranks.world > 1 and not isinstance(owner, torch.jit.ScriptModule)
        for name, value in owner._buffers.items()
        if value is not None
    ]
    marks = ranks.gather([_mark(value) for _, _, value in held])
    odd = [entry for entry, several in zip(held, zip(*marks)) if len(set(several)) > 1]
    first = ranks.agreed([value.detach().cpu() for _, _, value in odd]) if odd else []
    try:
        for (buffers, name, value), other in zip(odd, first):
            if ranks.rank:
                buffers[name] = other.to(value.device)
        yield
    finally:
        for buffers, name, value in odd:
            buffers[name] = value


def _mark(buffer: Tensor) -> str:
    try:
        return fingerprint([buffer])
    except Exception:  # sparse or of another unusual kind: left as it is
        return ""

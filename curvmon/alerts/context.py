"""What a change of the curvature may be explained by: learning rate, loss, weights, statistics, the network itself.

They raise no alert. A change of the curvature that comes with one of them needs less proof, and has found its likely
cause.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from curvmon.alerts.forecast import Expectation
from curvmon.records import REST

RATE, LOSS = "learning rate", "training loss"
WEIGHTS, BUFFERS, OPERATIONS = "size of ", "statistics in ", "operations of "
FEWEST = 8
"""entries of a tensor that is looked at"""
SCORE, SPREAD = 6.0, 0.015
"""a circumstance has changed if it moved by so many standard deviations; nothing is expected more exactly than to 1.5
percent"""
SIZES = {RATE: 0.4, LOSS: 0.4}
SIZE = 0.1
"""and by ten percent; learning rate and training loss by half"""
KNOWN = 3
"""measurements before a circumstance can have changed"""


class Circumstances(NamedTuple):
    """At one measurement: numbers by name, and what each node computes (`Measurement.operations`)."""

    values: Mapping[str, float] = {}
    operations: Mapping[str, Mapping[str, int]] = {}


class Cause(NamedTuple):
    """A circumstance that changed just now."""

    text: str
    """`learning rate x 20`, `size of blocks.1.conv1.weight x 0.71`, `operations of blocks.2: Add 1 less`"""
    source: str
    score: float
    incriminating: bool
    """lets a change be told that is less clear; a learning rate or a loss that falls is no reason to worry"""

    def node(self, nodes: Sequence[str]) -> str | None:
        """The innermost node that it lies in: of a tensor's name, or the node whose operations changed."""
        name = self.source.removeprefix(WEIGHTS).removeprefix(OPERATIONS)
        return max((n for n in nodes if name == n or name.startswith(f"{n}.")), key=len, default=None)


@torch.no_grad()
def circumstances(model: nn.Module, rate: float = math.nan, training_loss: float = math.nan) -> dict[str, float]:
    """`learning rate`, `training loss`, `size of blocks.1.conv1.weight`, `statistics in norm.running_var`, …"""
    found = {name: value for name, value in ((RATE, rate), (LOSS, training_loss)) if math.isfinite(value)}
    named = [
        *((f"{WEIGHTS}{name}", parameter) for name, parameter in model.named_parameters()),
        *((f"{BUFFERS}{name}", buffer) for name, buffer in model.named_buffers()),
    ]
    named = [(name, tensor) for name, tensor in named if _can_be_weighed(tensor) and tensor.numel() >= FEWEST]
    if named:
        norms = [torch.linalg.vector_norm(tensor.detach(), dtype=_exact_enough(tensor)) for _, tensor in named]
        # one transfer for all of them
        found.update(zip((name for name, _ in named), torch.stack([n.to(norms[0]) for n in norms]).tolist()))
    return found


def _can_be_weighed(tensor: Tensor) -> bool:
    """Not one of eight bits, which are promoted to nothing, nor one without data or shape."""
    if (
        is_lazy(tensor)
        or not tensor.is_floating_point()
        or tensor.is_meta
        or tensor.is_nested
        or tensor.layout != torch.strided
    ):
        return False
    return tensor.element_size() > 1


def _exact_enough(tensor: Tensor) -> torch.dtype:
    """Norms of half-precision tensors overflow in their own."""
    return torch.promote_types(tensor.dtype, torch.float32)


class Surroundings:
    """Takes the circumstances of every measurement and says which of them changed, the clearest first."""

    def __init__(self) -> None:
        self._expected: dict[str, Expectation] = {}
        self._operations: dict[str, dict[str, int]] = {}
        self._constant = 0
        """measurements since the network last computed something else"""

    def update(self, now: Circumstances) -> list[Cause]:
        found = [cause for name, value in now.values.items() if (cause := self._moved(name, value)) is not None]
        return sorted([*found, *self._rebuilt(now.operations)], key=lambda cause: -cause.score)

    def _moved(self, name: str, value: float) -> Cause | None:
        if not value > 0 or not math.isfinite(value):
            return None
        held = self._expected.setdefault(name, Expectation(SPREAD))
        surprise = held.look(math.log(value))
        if len(held) < KNOWN or surprise.score <= SCORE or abs(surprise.size) <= SIZES.get(name, SIZE):
            held.accept(math.log(value))
            return None
        held.restart(math.log(value))
        text = f"{name} x {math.exp(surprise.size):.3g}"
        return Cause(text, name, surprise.score, surprise.size > 0 or name not in SIZES)

    def _rebuilt(self, operations: Mapping[str, Mapping[str, int]]) -> list[Cause]:
        """Where the network computes something else than before, unless it often does."""
        before, constant = self._operations, self._constant
        if not operations:
            return []
        self._operations = {node: dict(counts) for node, counts in operations.items()}
        changed = [node for node in operations if node in before and dict(operations[node]) != before[node]]
        self._constant = 0 if changed or before.keys() != operations.keys() else constant + 1
        if constant < KNOWN or before.keys() != operations.keys():
            return []
        found = []
        for node in changed:
            kinds = sorted({*before[node], *operations[node]})
            differences = {kind: operations[node].get(kind, 0) - before[node].get(kind, 0) for kind in kinds}
            listed = [f"{abs(n)} {kind} {'more' if n > 0 else 'less'}" for kind, n in differences.items() if n]
            where = "the loss" if node == REST else node
            found.append(Cause(f"{OPERATIONS}{where}: {', '.join(listed)}", f"{OPERATIONS}{node}", math.inf, True))
        return found

    def state_dict(self) -> dict[str, Any]:
        """Lists, dicts, strings and numbers only."""
        return {
            "expected": {name: held.state_dict() for name, held in self._expected.items()},
            "operations": {node: dict(counts) for node, counts in self._operations.items()},
            "constant": self._constant,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._expected = {}
        for name, saved in state["expected"].items():
            self._expected[name] = Expectation(SPREAD)
            self._expected[name].load_state_dict(saved)
        self._operations = {node: dict(counts) for node, counts in state["operations"].items()}
        self._constant = state["constant"]

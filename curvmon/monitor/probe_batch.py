"""The probe batch of a run: captured once, the same on all processes, the same after a resume."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from curvmon.graph.pytree import map_all_tensors
from curvmon.monitor.batch_samples import Collector, fingerprint, halves, restored, samples_in, stored
from curvmon.monitor.process_group import Ranks

Warn = Callable[[str], None]


class Probe:
    """Collects validation and training batches as they pass, and settles on one kind when it is first asked.

    `prefers` is "val" or "train". A validation batch is used if one has passed on any process; the first training batch
    is kept beside it until a measurement has succeeded, should training_step not take the other.
    """

    def __init__(self, size: int, count: int, prefers: str) -> None:
        self._prefers = prefers
        self._size, self._count = size, count
        self._collectors = {source: Collector(size, count) for source in ("val", "train")}
        self._batches: list[Any] | None = None
        self._source: str | None = None
        self._saved: dict[str, Any] | None = None
        self.notes: tuple[str, ...] = ()
        """what was done to the batch"""
        self.obstacle: str | None = None
        """why a batch that passed could not be kept"""

    def see(self, source: str, batch: Any) -> None:
        """Keep a copy. Whatever is odd about a batch, training goes on with it."""
        if self._batches is None and (source == "train" or self._prefers == "val"):
            try:
                self._collectors[source].add(batch)
            except Exception as error:
                self.obstacle = f"{type(error).__name__}: {error}"

    def begin_validation(self) -> None:
        """The same batches pass again after a sanity check: do not take them twice."""
        if self._batches is None and self._collectors and not self._collectors["val"].complete:
            self._collectors["val"] = Collector(self._size, self._count)

    def batches(self, ranks: Ranks, device: torch.device, warn: Warn) -> list[Any] | None:
        """Those of the first process that has any; None before any batch has passed. Called by all processes.

        RemoteError on all of them if it cannot be sent from one to the others.
        """
        if self._batches is not None:
            return self._batches
        mine = {source: bool(collector.batches) for source, collector in self._collectors.items()}
        everywhere = ranks.gather(mine)
        for source in ("val", "train") if self._prefers == "val" else ("train",):
            owners = [rank for rank, has in enumerate(everywhere) if has[source]]
            if owners:
                own = None
                if ranks.rank == owners[0]:
                    kept = self._collectors[source].batches
                    own = [map_all_tensors(batch, lambda tensor: tensor.cpu()) for batch in kept]
                self._source = source
                if source != self._prefers:
                    self.notes = ("measured on the first training batch: no validation batch had passed by then",)
                self._batches = _received(ranks, own, owners[0], device)
                if self._restore(warn):
                    return self._batches
                self._batches = self._source = None
                self.notes = ()
        return None

    def is_short(self) -> bool:
        """Not half of the validation samples that it is to have have passed, as after a short sanity check."""
        if self._batches is not None or not self._collectors or not self._collectors["val"].batches:
            return False
        sizes = [samples_in(batch) for batch in self._collectors["val"].batches]
        return None not in sizes and 2 * sum(size or 0 for size in sizes) < self._size * self._count

    def position(self) -> tuple[Any, ...]:
        """What an attempt begins with, for `back_to` if it fails altogether."""
        return self._prefers, self._source, self._batches, self.notes

    def back_to(self, position: tuple[Any, ...]) -> None:
        self._prefers, self._source, self._batches, self.notes = position

    def fall_back(self, ranks: Ranks) -> bool:
        """To the training batch, where the validation batch does not work; False if that is none or was the one."""
        collector = self._collectors.get("train")
        there = any(ranks.gather(bool(collector is not None and collector.batches)))
        if self._source != "val" or not there:
            return False
        self._prefers, self._batches, self._source = "train", None, None
        return True

    def settle(self) -> None:
        """A measurement has succeeded: no other batch will be needed."""
        if self._collectors:
            self._collectors, self._saved = {}, None

    def halve(self) -> bool:
        """Keep the first half of the samples; False where there is no half."""
        parts = [halves(batch) for batch in self._batches or ()]
        if not parts or any(part is None for part in parts):
            return False
        self._batches = [part[0] for part in parts if part is not None]
        told = [note for note in self.notes if not note.startswith("out of memory")]
        short = f"out of memory: measured on the first {samples_in(self._batches[0])} samples of the batch"
        self.notes = (*told, short)
        return True

    def state_dict(self) -> dict[str, Any] | None:
        if self._batches is None:
            return self._saved
        return {
            "fingerprint": fingerprint(self._batches),
            "tensors": stored(self._batches),
            "source": self._source,
            "notes": list(self.notes),
        }

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        self._saved = state
        if state is not None and state["source"] == "train":
            self._prefers = "train"  # training_step did not take the validation batch

    def _restore(self, warn: Warn) -> bool:
        """The very batch of the checkpoint if it has it; otherwise say whether this is another.

        False for a training batch of another kind, where it was a validation batch: that has yet to pass.
        """
        saved = self._saved
        if saved is None or self._batches is None:
            return True
        earlier = None if saved["tensors"] is None else restored(self._batches, saved["tensors"])
        if earlier is not None:
            self._batches, self.notes = earlier, tuple(saved["notes"])
        elif self._prefers == saved["source"] == "val" != self._source:
            return False
        elif fingerprint(self._batches) != saved["fingerprint"]:
            warn("the probe batch is not the one of the checkpoint: the series has a break here")
        return True


def _received(ranks: Ranks, own: list[Any] | None, source: int, device: torch.device) -> list[Any]:
    found, failure = [], None
    try:
        sent = ranks.agreed(own, source=source)
        found = [map_all_tensors(batch, lambda tensor: tensor.to(device)) for batch in sent]
    except Exception as error:  # of memory here, say, and nowhere else
        failure = error
    ranks.all_or_none(failure)
    return found

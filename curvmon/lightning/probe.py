"""The probe batch of a run: captured once, the same on all processes, the same after a resume."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from curvmon.curvature.trees import map_tensors
from curvmon.lightning.ranks import Ranks
from curvmon.tracking.batches import Collector, fingerprint, halves, restored, samples_in, stored

Warn = Callable[[str], None]


class Probe:
    """Collects validation and training batches as they pass, and settles on one kind when it is first asked.

    `prefers` is "val" or "train". A validation batch is used if one has passed on any process; the first training batch
    is kept beside it until a measurement has succeeded, should training_step not take the other.
    """

    def __init__(self, size: int, count: int, prefers: str) -> None:
        self._prefers = prefers
        self._collectors = {source: Collector(size, count) for source in ("val", "train")}
        self._batches: list[Any] | None = None
        self._source: str | None = None
        self._saved: dict[str, Any] | None = None
        self.notes: tuple[str, ...] = ()
        """what was done to the batch"""

    def see(self, source: str, batch: Any) -> None:
        if self._batches is None and (source == "train" or self._prefers == "val"):
            self._collectors[source].add(batch)

    def batches(self, ranks: Ranks, device: torch.device, warn: Warn) -> list[Any] | None:
        """Those of the first process that has any; None before any batch has passed. Called by all processes."""
        if self._batches is not None:
            return self._batches
        mine = {source: bool(collector.batches) for source, collector in self._collectors.items()}
        everywhere = ranks.gather(mine)
        for source in ("val", "train") if self._prefers == "val" else ("train",):
            owners = [rank for rank, has in enumerate(everywhere) if has[source]]
            if owners:
                own = None
                if ranks.rank == owners[0]:
                    own = [
                        map_tensors(batch, lambda tensor: tensor.cpu()) for batch in self._collectors[source].batches
                    ]
                found = ranks.agreed(own, source=owners[0])
                self._batches = [map_tensors(batch, lambda tensor: tensor.to(device)) for batch in found]
                self._source = source
                self._restore(warn)
                return self._batches
        return None

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
            self._collectors = {}

    def halve(self) -> bool:
        """Keep the first half of the samples; False where there is no half."""
        parts = [halves(batch) for batch in self._batches or ()]
        if not parts or any(part is None for part in parts):
            return False
        self._batches = [part[0] for part in parts if part is not None]
        self.notes = (f"out of memory: measured on the first {samples_in(self._batches[0])} samples of the batch",)
        return True

    def state_dict(self) -> dict[str, Any] | None:
        if self._batches is None:
            return self._saved
        return {"fingerprint": fingerprint(self._batches), "tensors": stored(self._batches)}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        self._saved = state

    def _restore(self, warn: Warn) -> None:
        """The very batch of the checkpoint if it has it; otherwise say whether this is another."""
        saved, self._saved = self._saved, None
        if saved is None or self._batches is None:
            return
        earlier = None if saved["tensors"] is None else restored(self._batches, saved["tensors"])
        if earlier is not None:
            self._batches = earlier
        elif fingerprint(self._batches) != saved["fingerprint"]:
            warn("the probe batch is not the one of the checkpoint: the series has a break here")

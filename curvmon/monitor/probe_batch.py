"""The probe batch of a run: captured once, the same on all ranks, the same after a resume."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from curvmon.graph.pytree import map_all_tensors
from curvmon.monitor.batch_samples import Collector, fingerprint, halves, sample_count, storable_tensors, with_tensors
from curvmon.monitor.process_group import Ranks

Warn = Callable[[str], None]


@dataclass(frozen=True)
class Choice:
    """Which batches are measured."""

    preferred: str
    """"val" or "train": which kind to choose"""
    source: str | None = None
    """which kind was chosen"""
    batches: list[Any] | None = None
    notes: tuple[str, ...] = ()
    """what was done to them"""


class ProbeBatch:
    """Captures validation and training batches during training, and chooses between them at the first measurement.

    Validation batches are used if any rank has one. The first training batch is kept as well until a measurement has
    succeeded, in case training_step does not accept a validation batch.

    Args:
        size: samples per batch.
        count: number of batches.
        preferred: "val" or "train".

    Attributes:
        capture_error: why a batch could not be copied.
    """

    def __init__(self, size: int, count: int, preferred: str) -> None:
        self._size, self._count = size, count
        self._choice = Choice(preferred)
        self._collectors = {source: Collector(size, count) for source in ("val", "train")}
        self._saved: dict[str, Any] | None = None
        self._training_samples: int | None = None
        self.capture_error: str | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        return self._choice.notes

    def observe(self, source: str, batch: Any) -> None:
        """Keep a copy of a batch. If that fails, training is not affected."""
        if self._choice.batches is None and (source == "train" or self._choice.preferred == "val"):
            try:
                if source == "train":
                    self._training_samples = sample_count(batch)
                self._collectors[source].add(batch)
            except Exception as error:
                self.capture_error = f"{type(error).__name__}: {error}"

    def start_validation(self) -> None:
        """A validation starts again with the same batches as the sanity check: do not capture them twice."""
        if self._choice.batches is None and self._collectors and not self._collectors["val"].complete:
            self._collectors["val"] = Collector(self._size, self._count)

    def batches(self, ranks: Ranks, device: torch.device, warn: Warn) -> list[Any] | None:
        """Those of the first rank that has any; None as long as no rank has. Called by all ranks together.

        Raises RemoteError on all ranks if the batches cannot be sent from one to the others.
        """
        if self._choice.batches is not None:
            return self._choice.batches
        captured = ranks.gather({source: bool(collector.batches) for source, collector in self._collectors.items()})
        preferred = self._choice.preferred
        for source in ("val", "train") if preferred == "val" else ("train",):
            owners = [rank for rank, has in enumerate(captured) if has[source]]
            if owners:
                own = None
                if ranks.rank == owners[0]:
                    collected = self._collectors[source].batches
                    own = [map_all_tensors(batch, lambda tensor: tensor.cpu()) for batch in collected]
                is_substitute = source != preferred
                notes = ("measured on the first training batch: there was no validation batch yet",)
                self._choice = Choice(preferred, source, notes=notes if is_substitute else ())
                received = replace(self._choice, batches=_received(ranks, own, owners[0], device))
                resumed = self._resumed(received, warn)
                self._choice = Choice(preferred) if resumed is None else resumed
                if resumed is not None:
                    return resumed.batches
        return None

    def is_short(self) -> bool:
        """Fewer than half of the wanted validation samples have been captured, as after a short sanity check."""
        if self._choice.batches is not None or not self._collectors or not self._collectors["val"].batches:
            return False
        sizes = [sample_count(batch) for batch in self._collectors["val"].batches]
        return None not in sizes and 2 * sum(size or 0 for size in sizes) < self._size * self._count

    @property
    def description(self) -> str:
        """`32 validation samples`; empty if there is no batch, or their number is not known."""
        sizes = [sample_count(batch) for batch in self._choice.batches or ()]
        if not sizes or None in sizes:
            return ""
        kind = "validation" if self._choice.source == "val" else "training"
        return f"{sum(size or 0 for size in sizes)} {kind} samples"

    @property
    def training_batch(self) -> float:
        """Samples of a training batch, in probe batches; 1 where their number is not known."""
        return 1.0 if self._training_samples is None else self._training_samples / (self._size * self._count)

    def choice(self) -> Choice:
        """For `restore`, if a measurement fails."""
        return self._choice

    def restore(self, choice: Choice) -> None:
        self._choice = choice

    def use_training_batch(self, ranks: Ranks) -> bool:
        """Instead of the validation batch; False if none was captured, or if it is in use. Called by all ranks."""
        collector = self._collectors.get("train")
        captured = any(ranks.gather(bool(collector is not None and collector.batches)))
        if self._choice.source != "val" or not captured:
            return False
        self._choice = Choice("train")
        return True

    def finalize(self) -> None:
        """A measurement has succeeded: drop the batches that are not used."""
        if self._collectors:
            self._collectors, self._saved = {}, None

    def halve(self) -> bool:
        """Keep the first half of the samples; False if they cannot be split."""
        parts = [halves(batch) for batch in self._choice.batches or ()]
        if not parts or any(part is None for part in parts):
            return False
        batches = [part[0] for part in parts if part is not None]
        other_notes = [note for note in self.notes if not note.startswith("out of memory")]
        note = f"out of memory: measured on the first {sample_count(batches[0])} samples of the batch"
        self._choice = replace(self._choice, batches=batches, notes=(*other_notes, note))
        return True

    def state_dict(self) -> dict[str, Any] | None:
        choice = self._choice
        if choice.batches is None:
            return self._saved
        return {
            "fingerprint": fingerprint(choice.batches),
            "tensors": storable_tensors(choice.batches),
            "source": choice.source,
            "notes": list(choice.notes),
        }

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        if state is not None and state["source"] == "train":
            # training_step did not accept the validation batch
            self._choice = replace(self._choice, preferred="train")
        self._saved = state

    def _resumed(self, choice: Choice, warn: Warn) -> Choice | None:
        """With the tensors of the checkpoint if it has any; otherwise warns if these are other ones.

        None for a training batch where the checkpoint has a validation batch of another structure: wait for that.
        """
        saved = self._saved
        if saved is None or choice.batches is None:
            return choice
        tensors = saved["tensors"]
        earlier = None if tensors is None else with_tensors(choice.batches, tensors)
        if earlier is not None:
            return replace(choice, batches=earlier, notes=tuple(saved["notes"]))
        if choice.preferred == saved["source"] == "val" != choice.source:
            return None
        if fingerprint(choice.batches) != saved["fingerprint"]:
            warn("the probe batch differs from that of the checkpoint: values before and after are not comparable")
        return choice


def _received(ranks: Ranks, own: list[Any] | None, source: int, device: torch.device) -> list[Any]:
    received, failure = [], None
    try:
        sent = ranks.broadcast(own, source=source)
        received = [map_all_tensors(batch, lambda tensor: tensor.to(device)) for batch in sent]
    except Exception as error:  # out of memory on this rank alone, for example
        failure = error
    ranks.all_or_none(failure)
    return received

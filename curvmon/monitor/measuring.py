"""A measurement that is tried until it works: on another batch, with fewer samples, or without what cannot be had."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from curvmon.integrations.lightning.crew import RemoteError
from curvmon.integrations.lightning.training_step import step_loss
from curvmon.monitor.probe_batch import Probe
from curvmon.monitor.process_group import Ranks
from curvmon.monitor.recipe import Recipe
from curvmon.monitor.taking import Outcome, take
from curvmon.records import Measurement

MOST_STORED_START = 2**24
"""entries of the vector from which the next search for eigenvalues begins that go into a checkpoint: 64 MiB"""

Warn = Callable[..., None]
"""of a message and its kind; every kind is told once"""


class Measuring:
    """The recipe, the probe batch it is applied to, and the vector from which the next search begins."""

    def __init__(self, recipe: Recipe, probe: Probe, loss: Callable[..., Any] | None) -> None:
        self.recipe = recipe
        self.probe = probe
        self.start: Tensor | None = None
        self._loss = loss

    def outcome(self, trainer: Any, module: Any, ranks: Ranks, share: float, is_first: bool, warn: Warn) -> Outcome:
        """The other kind of batch if this is the first time, fewer samples if memory is short."""
        begun, refused, missing = self.probe.position(), None, None
        wanted = self.recipe.pairs, self.recipe.eigenvalues
        while True:
            outcome, start = self._attempt(trainer, module, ranks, share, warn)
            if outcome.succeeded:
                if outcome.error is not None:
                    outcome, missing = self._without_eigenvalues(outcome, missing, warn)
                self.start = self._known_to_all(start, ranks)
                self.probe.settle()
                if refused is not None:
                    warn(f"measured on the first training batch, not on a validation batch: {refused}")
                if missing is not None:
                    what = "pairs of layers" if missing.part == "pairs" else "eigenvalues"
                    warn(f"{what} are not measured in this run: {missing.error}")
                return replace(outcome, measurement=self._noted(outcome))
            if outcome.kind == "memory" and self.probe.halve():
                continue
            of_batch = outcome.kind in ("input", "passing", "diverged") and is_first
            if of_batch and self.probe.fall_back(ranks):
                refused = outcome.error
                continue
            self.probe.back_to(begun)
            if outcome.kind in ("permanent", "input") and self.recipe.without(outcome.part):
                refused, missing = None, outcome
                continue
            self.recipe.pairs, self.recipe.eigenvalues = wanted
            return outcome

    def _attempt(
        self, trainer: Any, module: Any, ranks: Ranks, share: float, warn: Warn
    ) -> tuple[Outcome, Tensor | None]:
        try:
            batches = self.probe.batches(ranks, module.device, warn)
        except RemoteError as error:
            return Outcome(error=f"the batch cannot be shared among processes ({error})", kind="input"), None
        if batches is None:
            odd = self.probe.obstacle
            reason = "no batch has passed yet" if odd is None else f"the batches that pass cannot be copied ({odd})"
            return Outcome(error=reason, kind="passing"), None
        loss = self._loss or step_loss(module)
        return take(self.recipe, trainer, module, batches, loss, ranks=ranks, share=share, start=self.start)

    def _without_eigenvalues(
        self, outcome: Outcome, missing: Outcome | None, warn: Warn
    ) -> tuple[Outcome, Outcome | None]:
        """The pairs are there. What can never work is not tried again; of anything else a warning and a note tell."""
        if outcome.kind in ("permanent", "input") and self.recipe.without("spectrum"):
            return replace(outcome, error=None), outcome
        warn(
            f"eigenvalues not measured: {outcome.error}. The pairs of layers are; the next validation is tried again",
            f"eigenvalues {outcome.kind}",
        )
        return outcome, missing

    def _known_to_all(self, start: Tensor | None, ranks: Ranks) -> Tensor | None:
        """Another process may look for eigenvalues than the one that writes checkpoints."""
        searcher = ranks.spectrum_rank
        if searcher == 0 or not self.recipe.eigenvalues:
            return start
        told = ranks.agreed(_storable(start), source=searcher)
        return start if ranks.rank == searcher else told

    def _noted(self, outcome: Outcome) -> Measurement | None:
        found = outcome.measurement
        lacking = () if outcome.error is None else (f"no eigenvalues: {outcome.error}",)
        return None if found is None else replace(found, notes=(*self.probe.notes, *found.notes, *lacking))

    def state_dict(self) -> dict[str, Any]:
        return {
            "probe": self.probe.state_dict(),
            "start": _storable(self.start),
            "full_products": self.recipe.full_products,
        }


def _storable(start: Tensor | None) -> Tensor | None:
    return None if start is None or len(start) > MOST_STORED_START else start.cpu()

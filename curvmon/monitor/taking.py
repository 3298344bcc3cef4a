"""One attempt at a measurement, on all processes together: all of them get the result, or the same error."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from curvmon.errors import DivergedError, DoubleBackwardError, InputError, NonFiniteError
from curvmon.integrations.lightning.training_step import Loss, silenced
from curvmon.isolation.collectives import CollectiveError, collectives_refused
from curvmon.isolation.trainer_state import frozen_trainer_state
from curvmon.monitor.process_group import Ranks, same_buffers
from curvmon.monitor.recipe import Part, Recipe, is_out_of_memory, release
from curvmon.operators.teams import ALONE
from curvmon.records import Measurement, Spectrum

Kind = Literal["none", "memory", "permanent", "input", "diverged", "passing"]


MOST_TOLD = 300
"""characters of an error's first line: some of torch's list all their backends in it"""


@dataclass(frozen=True)
class Outcome:
    measurement: Measurement | None = None
    spectrum: Spectrum | None = None
    error: str | None = None
    kind: Kind = "none"
    part: Part = "pairs"
    """where the error is"""

    @property
    def succeeded(self) -> bool:
        """There is something to report: all of it, or the pairs although the search for eigenvalues failed."""
        return self.error is None or self.measurement is not None


def take(
    recipe: Recipe,
    trainer: Any,
    module: Any,
    batches: list[Any],
    loss: Loss,
    *,
    ranks: Ranks,
    share: float,
    start: Tensor | None,
) -> tuple[Outcome, Tensor | None]:
    """What was measured, and on the process that looked for eigenvalues the vector to begin with next time."""
    mine = Outcome()
    measurement: Measurement | None = None
    part: Part = "pairs"
    prepared = False
    try:
        with ExitStack() as stack:
            stack.enter_context(same_buffers(ranks, module))
            stack.enter_context(frozen_trainer_state(trainer))
            stack.enter_context(silenced(trainer, module))
            # Trainer(detect_anomaly=True) would print tracebacks of passes that are tried and given up on purpose
            stack.enter_context(torch.autograd.set_detect_anomaly(False))
            stack.enter_context(collectives_refused(ranks.world))
            prepared = True
            measurement = _pairs(recipe, module, batches, loss, ranks, share)
            spectrum, part = None, "spectrum"
            if recipe.eigenvalues and ranks.rank == ranks.spectrum_rank:
                optimizers = trainer.optimizers
                spectrum, start = recipe.spectrum(
                    module,
                    batches,
                    loss,
                    optimizer=optimizers[0] if len(optimizers) == 1 else None,
                    start=start,
                    share=share,
                )
            mine = Outcome(measurement, spectrum)
    except Exception as error:
        if not prepared and recipe.pairs:
            ranks.decline(len(batches))
        mine = Outcome(measurement, error=_told(error), kind=_kind(error), part=part)
    if mine.kind == "memory":
        release()
    return _common(ranks.gather(mine)), start


def _pairs(
    recipe: Recipe, module: Any, batches: list[Any], loss: Loss, ranks: Ranks, share: float
) -> Measurement | None:
    if not recipe.pairs:
        return None
    if ranks.leads:
        team = ranks.team()
        if team is None:
            return recipe.measure(module, batches, loss, share=share, team=ALONE)
        with team.until(len(batches)):
            return recipe.measure(module, batches, loss, share=share, team=team)
    if ranks.assists:
        ranks.assist(recipe, module, batches, loss)
    return None


def _common(outcomes: list[Outcome]) -> Outcome:
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    measurement = next((o.measurement for o in outcomes if o.measurement is not None), None)
    if failed:
        # a process that only hears of another's failure says less than that one
        told = min(failed, key=lambda outcome: (outcome.kind == "passing", "process" in (outcome.error or "")))
        return replace(told, measurement=measurement if all(o.part == "spectrum" for o in failed) else None)
    return Outcome(measurement, next((o.spectrum for o in outcomes if o.spectrum is not None), None))


def _told(error: Exception) -> str:
    first = (str(error).strip().splitlines() or [""])[0]
    first = first if len(first) <= MOST_TOLD else f"{first[:MOST_TOLD]}…"
    return f"{type(error).__name__}: {first}".rstrip(": ")


def _kind(error: Exception) -> Kind:
    if is_out_of_memory(error):
        return "memory"
    if isinstance(error, (DivergedError, NonFiniteError)):
        return "diverged"
    if isinstance(error, InputError):
        return "input"
    if isinstance(error, (DoubleBackwardError, CollectiveError)):
        return "permanent"
    return "passing"

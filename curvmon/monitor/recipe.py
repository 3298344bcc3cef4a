"""One measurement of a monitor: pairs of layers and spectrum, within a share of the usual products and the memory."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from curvmon.metrics.mean_curvature import combined
from curvmon.monitor.batch_samples import halves
from curvmon.operators.node_blocks import GraphOperator
from curvmon.operators.session import open_session
from curvmon.operators.teams import ALONE, Counted, Team
from curvmon.pairs.measure import run_measurement
from curvmon.records import Measurement, Spectrum
from curvmon.spectrum.spectrum import spectrum

Loss = Callable[[Any, Any], Tensor]
Part = Literal["pairs", "spectrum"]
Result = TypeVar("Result")
SPECTRUM_RTOL = 1e-2
"""of each eigenvalue: what a curve in a dashboard can show"""
MOST_PRODUCTS = 120
"""for the eigenvalues; what has not converged by then is reported with a note"""


def untold(products: int) -> None:
    pass


@dataclass
class Recipe:
    """What to measure, and how much of it; remembers what a full measurement took."""

    pairs: bool = True
    nodes: Sequence[str] | None = None
    output: str | None = None
    rtol: float = 0.05
    eigenvalues: int = 5
    seed: int = 0
    full_products: int | None = None
    """that a measurement of all pairs took"""
    tick: Callable[[int], None] = untold
    """is told how many products were made"""

    def measure(
        self, model: nn.Module, batches: Sequence[Any], loss: Loss, *, share: float = 1.0, team: Team = ALONE
    ) -> Measurement:
        """All pairs of layers, on every batch; with less than the usual products if `share` is below one."""
        most = None
        if share < 1 and self.full_products is not None:
            most = max(1, round(share * self.full_products / len(batches)))

        def one(batch: Any) -> Measurement:
            return run_measurement(
                model,
                batch,
                loss=loss,
                nodes=self.nodes,
                output=self.output,
                batch_dim=0,
                rtol=self.rtol,
                max_hvps=most,
                seed=self.seed,
                clamp=True,
                team=Counted(team, self.tick),
            )

        found = []
        for batch in batches:
            found.append(one(batch))
            team.finish()
        result = combined(found)
        if share >= 1:
            self.full_products = result.hvps
        return result

    def without(self, part: Part) -> bool:
        """Leave out what cannot be measured; False if nothing would remain."""
        if not self.pairs or not self.eigenvalues:
            return False
        self.pairs, self.eigenvalues = part != "pairs", self.eigenvalues if part != "spectrum" else 0
        return True

    def assist(
        self, model: nn.Module, batches: Sequence[Any], loss: Loss, serve: Callable[[GraphOperator], bool]
    ) -> None:
        """The other side of `measure` with a team: for every batch the same graph, whose products are asked for."""
        for batch in batches:
            with open_session(
                model, batch, loss=loss, nodes=self.nodes, output=self.output, batch_dim=0, dtype=None
            ) as session:
                if not serve(session.operator):
                    return

    def spectrum(
        self,
        model: nn.Module,
        batches: Sequence[Any],
        loss: Loss,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        start: Tensor | None = None,
        share: float = 1.0,
    ) -> tuple[Spectrum, Tensor]:
        """The ends of the spectrum and the trace, and the vector from which the next search begins."""
        if start is not None and len(start) != sum(p.numel() for p in model.parameters() if p.requires_grad):
            start = None  # layers were frozen or thawed in the meantime
        if start is not None and not 0 < torch.linalg.vector_norm(start).item() < float("inf"):
            start = None  # no direction to begin with

        def whole(parts: Sequence[Any]) -> Spectrum:
            return spectrum(
                model,
                parts[0],
                more_batches=parts[1:],
                loss=loss,
                k=self.eigenvalues,
                start=start,
                seed=self.seed,
                optimizer=optimizer,
                rtol=SPECTRUM_RTOL,
                max_hvps=max(self.eigenvalues + 5, round(share * MOST_PRODUCTS)),
                verify=False,
                ggn=share >= 1,
                trace=share >= 1,
                on_product=self.tick,
            )

        found = _in_parts(list(batches), whole)
        if share < 1:
            found = replace(found, notes=(*found.notes, "trace and Gauss-Newton eigenvalue left out to save time"))
        # not on the device: training needs the room until then
        return found.without_vectors(), found.start_vector().cpu()


def _in_parts(batches: list[Any], run: Callable[[Sequence[Any]], Result]) -> Result:
    """`run`, and where memory does not suffice, with every batch in halves: the same numbers, in more passes."""
    while True:
        try:
            return run(batches)
        except (RuntimeError, MemoryError) as error:
            parts = [halves(batch) for batch in batches] if is_out_of_memory(error) else None
            if parts is None or all(part is None for part in parts):
                raise
        release()
        batches = [piece for batch, part in zip(batches, parts) for piece in (part or (batch,))]


def release() -> None:
    """What a failed attempt held may still wait for the garbage collector."""
    gc.collect()
    torch.cuda.empty_cache()  # does nothing where there is no device


_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "status_alloc_failed")
"""the last is of cuBLAS and cuDNN, which ask the driver themselves"""


def is_out_of_memory(error: BaseException) -> bool:
    """Of a device, or of the host."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in text for words in _OUT_OF_MEMORY)

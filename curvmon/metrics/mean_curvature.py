"""The mean of measurements over batches and processes: a torchmetrics Metric.

    R² = mean R_b²,   D = mean R_b² / mean ‖H_b‖_2²,   gap² = mean ‖T_b‖_F² / mean ‖GN_b‖_F²

over batches b, and C from R. Takes finished measurements: torchmetrics runs `update` without gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from curvmon.errors import InputError
from curvmon.numerics import small_sample_factor
from curvmon.records import METRICS, Measurement

_SQUARES = ("resonance", "spectral_norm", "gn_norm", "remainder")


class MeanCurvature(Metric):
    """Root mean squares over batches of R, ‖H‖_2, ‖GN‖_F and ‖T‖_F, and the four pair metrics from them.

    Standard errors: for one batch its own; for several from the spread between batches, which includes the errors of
    each. States stay float64 in a module of any precision. Memory: a dozen (n, n) matrices; cost: no products.

    Args:
        nodes: nodes of the measurements to come, in execution order.
        kwargs: arguments of `torchmetrics.Metric`.

    Raises:
        InputError: nodes is empty, or a measurement has other nodes.

    Example:
        >>> import torch, curvmon
        >>> from curvmon.metrics import MeanCurvature
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8), torch.nn.Tanh(),
        ...                           torch.nn.Linear(8, 2))
        >>> metric = MeanCurvature(["0", "2"])
        >>> for _ in range(3):
        ...     batch = torch.randn(16, 4), torch.randn(16, 2)
        ...     metric.update(curvmon.measure(net, batch, nodes=["0", "2"],
        ...                   loss=lambda net, b: torch.nn.functional.mse_loss(net(b[0]), b[1])))
        >>> metric.measurement().nodes
        ('0', '2')
        >>> metric.compute()["coupling"].shape
        torch.Size([2, 2])
    """

    full_state_update = False
    is_differentiable = False
    count: Tensor
    loss: Tensor
    hvps: Tensor
    seconds: Tensor

    def __init__(self, nodes: Sequence[str], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.nodes = (nodes,) if isinstance(nodes, str) else tuple(nodes)
        n = len(self.nodes)
        if not n:
            raise InputError("nodes is empty; pass those of the measurements to come")
        for name in _SQUARES:
            # Σ x² and Σ x⁴
            for moment in ("sum", "sum_of_squares"):
                self.add_state(f"{name}_{moment}", torch.zeros((n, n), dtype=torch.float64), dist_reduce_fx="sum")
        for metric in METRICS:
            self.add_state(f"{metric}_stderr", torch.zeros((n, n), dtype=torch.float64), dist_reduce_fx="sum")
        for name in ("count", "loss", "hvps", "seconds"):
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> MeanCurvature:
        """Follow the module to its device, not to bfloat16 (Trainer(precision="bf16-true")), which loses the errors."""

        def to_device(tensor: Tensor) -> Tensor:
            try:
                converted = fn(tensor)
            except TypeError:  # a device without float64
                return tensor
            return converted if converted.dtype == tensor.dtype else tensor.to(converted.device)

        return super()._apply(to_device, *args, **kwargs)  # type: ignore[return-value]

    def update(self, measurement: Measurement) -> None:
        """Add a measurement of the same nodes."""
        if not isinstance(measurement, Measurement):
            raise InputError(f"MeanCurvature takes what curvmon.measure returns, not {type(measurement).__name__}")
        if measurement.nodes != self.nodes:
            raise InputError(f"a measurement of {measurement.nodes} does not belong to one of {self.nodes}")
        for name, value in _parts(measurement).items():
            for moment, power in (("sum", 2), ("sum_of_squares", 4)):
                state = getattr(self, f"{name}_{moment}")
                state += value.pow(power).to(state.device)
        for metric in METRICS:
            state = getattr(self, f"{metric}_stderr")
            state += measurement.stderr[metric].to(state.device)
        self.count += 1
        self.loss += measurement.loss
        self.hvps += measurement.hvps
        self.seconds += measurement.seconds

    def compute(self) -> dict[str, Tensor]:
        """(n, n) matrices by name, their standard errors as "stderr/resonance" and so on; NaN before any update."""
        return self._matrices()

    def _matrices(self) -> dict[str, Tensor]:
        count = int(self.count.item())
        factor = small_sample_factor(max(1, count - 1))
        mean, error = {}, {}  # of the squares; errors are relative
        for name in _SQUARES:
            total, squares = (getattr(self, f"{name}_{moment}") for moment in ("sum", "sum_of_squares"))
            mean[name] = total / count
            between = (squares / count - mean[name].square()).clamp_min(0) / max(1, count - 1)
            error[name] = factor * between.sqrt() / mean[name].clamp_min(1e-300)
        resonance = mean["resonance"].sqrt()
        own = resonance.diagonal()
        coupling = resonance / (own.unsqueeze(0) * own.unsqueeze(1)).sqrt()
        rank = mean["resonance"] / mean["spectral_norm"]
        gap = (mean["remainder"] / mean["gn_norm"]).sqrt()
        half = {name: value / 2 for name, value in error.items()}  # of a square root: half the relative error
        of_own = half["resonance"].diagonal().square() / 4
        of_coupling = (half["resonance"].square() + of_own.unsqueeze(0) + of_own.unsqueeze(1)).sqrt()
        spread = {
            "resonance": resonance * half["resonance"],
            "coupling": (coupling * of_coupling).fill_diagonal_(0),
            "stable_rank": rank * torch.hypot(error["resonance"], error["spectral_norm"]),
            "gn_gap": gap * torch.hypot(half["remainder"], half["gn_norm"]),
        }
        if count == 1:
            spread = {metric: getattr(self, f"{metric}_stderr").clone() for metric in spread}
        return {
            "resonance": resonance,
            "coupling": coupling,
            "stable_rank": rank,
            "gn_gap": gap,
            "spectral_norm": mean["spectral_norm"].sqrt(),
            "gn_norm": mean["gn_norm"].sqrt(),
            **{f"stderr/{metric}": value for metric, value in spread.items()},
        }

    def plot(self, val: Any = None, ax: Any = None, *, metric: str = "resonance") -> tuple[Any, Any]:
        """`fig, ax` with a heatmap of the mean, as `Measurement.plot`. Needs matplotlib.

        Args:
            val: nothing else than what is measured can be plotted: must be None.
            ax: the heatmap has axes of its own: must be None.
            metric: name of a pair metric.
        """
        if val is not None or ax is not None:
            raise InputError("MeanCurvature.plot draws its own measurement on its own axes; pass metric=... alone")
        return self.measurement().plot(metric)

    def measurement(self) -> Measurement:
        """`compute` as a `Measurement`, with the mean loss and the total of products and seconds over all processes."""
        n, alone = len(self.nodes), self._is_synced or not self.sync_on_compute
        with self.sync_context(dist_sync_fn=self.dist_sync_fn, should_sync=not alone, should_unsync=not alone):
            matrices = {name: value.reshape(n, n).cpu() for name, value in self._matrices().items()}
            count, loss, hvps, seconds = torch.stack([self.count, self.loss, self.hvps, self.seconds]).tolist()
        if not count:
            raise InputError("nothing was measured yet")
        return Measurement(
            nodes=self.nodes,
            **{name: value for name, value in matrices.items() if "/" not in name},
            stderr={metric: matrices[f"stderr/{metric}"] for metric in METRICS},
            loss=loss / count,
            hvps=int(hvps),
            seconds=seconds,
            notes=(f"mean over {int(count)} batches",) if count > 1 else (),
            operations={},
        )


def _parts(m: Measurement) -> dict[str, Tensor]:
    """The norms; ‖T‖_F = gap ‖GN‖_F, or R where GN = 0."""
    return {
        "resonance": m.resonance,
        "spectral_norm": m.spectral_norm,
        "gn_norm": m.gn_norm,
        "remainder": (m.gn_gap * m.gn_norm).where(m.gn_norm > 0, m.resonance),
    }


def combined(measurements: Sequence[Measurement]) -> Measurement:
    """A single measurement unchanged; several as their root mean squares, with the notes of all."""
    if len(measurements) == 1:
        return measurements[0]
    # called on one rank of several: a sum over ranks would wait for the others
    metric = MeanCurvature(measurements[0].nodes, sync_on_compute=False)
    for measurement in measurements:
        metric.update(measurement)
    mean = metric.measurement()
    notes = dict.fromkeys(note for m in measurements for note in m.notes)
    return replace(mean, notes=(*mean.notes, *notes), operations=measurements[0].operations)

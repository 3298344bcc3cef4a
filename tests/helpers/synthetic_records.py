"""Measurements and snapshots made up of numbers that a test can choose."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from curvmon.records import METRICS, Measurement, Snapshot, Spectrum


def synthetic_measurement(n: int, names: list[str] | None = None, **matrices: Tensor) -> Measurement:
    """Falls off with distance, spans some decades; `matrices` replace a metric."""
    generator = torch.Generator().manual_seed(n)
    distance = (torch.arange(n).unsqueeze(1) - torch.arange(n)).abs().double()
    noise = 0.2 * torch.randn(n, n, generator=generator, dtype=torch.float64)
    noise = noise + noise.T
    own = torch.logspace(-2, 0.5, n, dtype=torch.float64)
    resonance = (own.unsqueeze(1) * own).sqrt() * (noise - 0.35 * distance).exp()
    values = {
        "resonance": resonance,
        "coupling": resonance / (resonance.diagonal().unsqueeze(1) * resonance.diagonal()).sqrt(),
        "stable_rank": 3 + noise,
        "gn_gap": 0.1 * (4 * noise).exp(),
        **matrices,
    }
    return Measurement(
        nodes=tuple(names or [f"layer{i + 1}" for i in range(n)]),
        **values,
        stderr={metric: 0.07 * values[metric] for metric in METRICS},
        spectral_norm=resonance,
        gn_norm=resonance,
        loss=1.0,
        hvps=1,
        seconds=0.1,
    )


def synthetic_spectra(
    steps: int, rise: float = 1.0, count: int = 5, ratio: float = 0.5, ggn: float = 0.9
) -> list[Snapshot]:
    """Snapshots without pairs; λ_1 = 5, then `rise` times that of the snapshot before."""
    snapshots = []
    for i in range(steps):
        values = 5 * rise**i / torch.arange(1, count + 1, dtype=torch.float64)
        spectrum = Spectrum(
            eigenvalues=values,
            smallest=-0.4,
            residuals=torch.zeros(count),
            converged=torch.ones(count, dtype=torch.bool),
            smallest_converged=True,
            eigenvectors=torch.zeros(3, 0),
            ggn_eigenvalue=ggn * values[0].item(),
            ggn_error=0.1,
            trace=10.0,
            trace_stderr=0.1,
            density=None,
            stability_limit=math.nan,
            stability_ratio=ratio,
            parameters=("weight",),
            loss=1.0,
            hvps=1,
            seconds=0.1,
        )
        snapshots.append(Snapshot(step=100 * i, epoch=i, spectrum=spectrum))
    return snapshots

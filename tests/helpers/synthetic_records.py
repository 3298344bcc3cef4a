"""Measurements and snapshots made up of numbers that a test can choose."""

from __future__ import annotations

import math
from typing import Any

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


def synthetic_spectrum(eigenvalues: Tensor, **values: Any) -> Spectrum:
    """Converged, with a trace of 10 and without a stability limit; `values` replace other fields."""
    fields: dict[str, Any] = {
        "smallest": -0.4,
        "residuals": torch.zeros_like(eigenvalues),
        "converged": torch.ones(len(eigenvalues), dtype=torch.bool),
        "smallest_residual": 0.0,
        "smallest_converged": True,
        "eigenvectors": torch.zeros(0, 0),
        "smallest_eigenvector": torch.zeros(0),
        "ggn_eigenvalue": 0.9 * eigenvalues[0].item(),
        "ggn_error": 0.1,
        "trace": 10.0,
        "trace_stderr": 0.1,
        "density": None,
        "stability_limit": math.nan,
        "stability_ratio": math.nan,
        "parameters": ("weight",),
        "loss": 1.0,
        "gradient_norm": 1.0,
        "hvps": 1,
        "seconds": 0.1,
        **values,
    }
    return Spectrum(eigenvalues, **fields)


def synthetic_spectra(
    steps: int, rise: float = 1.0, count: int = 5, ratio: float = 0.5, ggn: float = 0.9
) -> list[Snapshot]:
    """Snapshots without pairs; λ_1 = 5, then `rise` times that of the snapshot before."""
    snapshots = []
    for i in range(steps):
        values = 5 * rise**i / torch.arange(1, count + 1, dtype=torch.float64)
        spectrum = synthetic_spectrum(values, ggn_eigenvalue=ggn * values[0].item(), stability_ratio=ratio)
        snapshots.append(Snapshot(step=100 * i, epoch=i, spectrum=spectrum))
    return snapshots

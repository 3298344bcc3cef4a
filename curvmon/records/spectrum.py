"""Eigenvalues, trace and density of the loss Hessian."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from curvmon.records.formatting import to_matrix, with_error


@dataclass(frozen=True, eq=False)
class Density:
    """Eigenvalues and their shares, as stochastic Lanczos quadrature finds them: Σ weights = 1, float64 on the CPU."""

    values: Tensor
    weights: Tensor

    def smoothed(self, points: int = 400, width: float = 0.01) -> tuple[Tensor, Tensor]:
        """A grid and the density on it; every value becomes a normal curve, `width` times the range wide."""
        low, high = self.values.min().item(), self.values.max().item()
        sigma = width * ((high - low) or abs(high) or 1.0)
        grid = torch.linspace(low - 4 * sigma, high + 4 * sigma, points, dtype=torch.float64, device="cpu")
        curves = torch.exp(-0.5 * ((grid.unsqueeze(1) - self.values) / sigma) ** 2) / (sigma * math.sqrt(2 * math.pi))
        return grid, curves @ self.weights


@dataclass(frozen=True, eq=False)
class GroupSpectrum:
    """The ends of the spectrum of a diagonal block H[v, v], v a group of parameters; as in `Spectrum`."""

    eigenvalues: Tensor
    smallest: float
    residuals: Tensor
    converged: Tensor
    verified: bool
    """another random start found nothing else"""
    parameters: tuple[str, ...]
    size: int
    """how many numbers these are"""

    def to_dict(self) -> dict[str, Any]:
        return {
            "eigenvalues": self.eigenvalues.tolist(),
            "smallest": self.smallest,
            "residuals": self.residuals.tolist(),
            "converged": self.converged.tolist(),
            "verified": self.verified,
            "parameters": list(self.parameters),
            "size": self.size,
        }

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> GroupSpectrum:
        known = {name: state[name] for name in ("smallest", "verified", "size")}
        return GroupSpectrum(
            **known,
            eigenvalues=to_matrix(state["eigenvalues"]),
            residuals=to_matrix(state["residuals"]),
            converged=torch.tensor(state["converged"], dtype=torch.bool, device="cpu"),
            parameters=tuple(state["parameters"]),
        )


@dataclass(frozen=True, eq=False, repr=False)
class Spectrum:
    """The ends of the spectrum of H = d²L/dθ², θ the parameters that require gradients, in the order of `parameters`.

    An eigenvalue is converged if its residual ‖Hv - λv‖ is small enough: then one of H lies that close to it.
    """

    eigenvalues: Tensor
    """the largest ones in value, largest first, with multiplicity; float64, on the CPU"""
    smallest: float
    """the smallest eigenvalue: how negative the curvature gets"""
    residuals: Tensor
    converged: Tensor
    smallest_converged: bool
    eigenvectors: Tensor
    """unit columns for `eigenvalues`, on the device of the parameters"""
    ggn_eigenvalue: float
    """the largest one of the Gauss-Newton part J^T S J; NaN where the output of the network is not known"""
    ggn_error: float
    """|λ_1 - ggn_eigenvalue| / λ_1"""
    trace: float
    trace_stderr: float
    density: Density | None
    """how the eigenvalues are distributed, if asked for"""
    stability_limit: float
    """the largest eigenvalue that the optimizer bears, if one was given; NaN where none is known"""
    stability_ratio: float
    """λ_1 over that limit, with the optimizer's preconditioner where it has one: above one, steps overshoot"""
    parameters: tuple[str, ...]
    loss: float
    hvps: int
    """products with H or its Gauss-Newton part that were spent"""
    seconds: float
    notes: tuple[str, ...] = ()
    groups: Mapping[str, GroupSpectrum] = field(default_factory=dict)
    """the diagonal blocks of the groups of parameters that were asked for"""
    phi: float = math.nan
    """Φ = 1 - Σ‖H_vv‖_F² / ‖H‖_F² over those groups: the share of curvature between them"""
    phi_stderr: float = math.nan

    def start_vector(self) -> Tensor:
        """A vector in the span of the eigenvectors, from which a later search begins: all of them alike."""
        return self.eigenvectors.sum(1)

    def without_vectors(self) -> Spectrum:
        """The same without the eigenvectors, which take k times the memory of the parameters."""
        return replace(self, eigenvectors=self.eigenvectors.new_zeros((len(self.eigenvectors), 0), device="cpu"))

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Spectrum:
        """What `to_dict` wrote; the eigenvectors and the density are not part of it."""
        known = {name: value for name, value in state.items() if name not in ("eigenvalues", "residuals", "converged")}
        known["parameters"], known["notes"] = tuple(state["parameters"]), tuple(state["notes"])
        known["groups"] = {name: GroupSpectrum.from_dict(group) for name, group in state["groups"].items()}
        return Spectrum(
            **known,
            eigenvalues=to_matrix(state["eigenvalues"]),
            residuals=to_matrix(state["residuals"]),
            converged=torch.tensor(state["converged"], dtype=torch.bool, device="cpu"),
            eigenvectors=torch.zeros((0, 0), device="cpu"),
            density=None,
        )

    @property
    def sharpness(self) -> float:
        """λ_1, the largest eigenvalue in value: what the stability limit of gradient descent speaks of."""
        return self.eigenvalues[0].item()

    @property
    def largest_magnitude(self) -> float:
        """‖H‖_2 with its sign: the largest or the smallest eigenvalue, whichever is further from zero."""
        return max(self.sharpness, self.smallest, key=abs)

    def to_dict(self) -> dict[str, Any]:
        """Plain Python lists and numbers, without the eigenvectors."""
        return {
            "eigenvalues": self.eigenvalues.tolist(),
            "residuals": self.residuals.tolist(),
            "converged": self.converged.tolist(),
            "smallest": self.smallest,
            "smallest_converged": self.smallest_converged,
            "ggn_eigenvalue": self.ggn_eigenvalue,
            "ggn_error": self.ggn_error,
            "trace": self.trace,
            "trace_stderr": self.trace_stderr,
            "stability_limit": self.stability_limit,
            "stability_ratio": self.stability_ratio,
            "parameters": list(self.parameters),
            "groups": {name: group.to_dict() for name, group in self.groups.items()},
            "phi": self.phi,
            "phi_stderr": self.phi_stderr,
            "loss": self.loss,
            "hvps": self.hvps,
            "seconds": self.seconds,
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        values = [
            f"  λ_{i + 1:<6} {with_error(value, residual)}{'' if settled else '  not converged'}"
            for i, (value, residual, settled) in enumerate(
                zip(self.eigenvalues.tolist(), self.residuals.tolist(), self.converged.tolist())
            )
        ]
        return "\n".join(
            [
                f"Spectrum: loss {self.loss:.4g}, {self.hvps} products, {self.seconds:.1f} s",
                *values,
                f"  smallest {with_error(self.smallest, 0.0)}{'' if self.smallest_converged else '  not converged'}",
                f"  GGN λ_1  {with_error(self.ggn_eigenvalue, 0.0)}",
                f"  trace    {with_error(self.trace, self.trace_stderr)}",
                *([] if math.isnan(self.stability_ratio) else [f"  of the stability limit {self.stability_ratio:.3g}"]),
                *(f"  group {name}: λ_1 {with_error(g.eigenvalues[0].item(), 0.0)}" for name, g in self.groups.items()),
                *([] if math.isnan(self.phi) else [f"  Φ        {with_error(self.phi, self.phi_stderr)}"]),
                *(f"note: {note}" for note in self.notes),
            ]
        )

    __repr__ = __str__

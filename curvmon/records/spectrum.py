"""Eigenvalues, trace and density of the loss Hessian."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from curvmon.records import presentation
from curvmon.records.formatting import to_matrix, with_error


@dataclass(frozen=True, eq=False)
class Density:
    """φ(t) = Σ_i w_i δ(t - λ_i) with Σ w_i = 1, from stochastic Lanczos quadrature (Ubaru, Chen and Saad, 2017).

    Attributes:
        values: λ_i; float64 on the CPU.
        weights: w_i.
    """

    values: Tensor
    weights: Tensor

    def smoothed(self, points: int = 400, width: float = 0.01) -> tuple[Tensor, Tensor]:
        """A grid of `points` values and φ on it; every λ_i becomes a Gaussian, `width` times the range wide."""
        low, high = self.values.min().item(), self.values.max().item()
        sigma = width * ((high - low) or abs(high) or 1.0)
        grid = torch.linspace(low - 4 * sigma, high + 4 * sigma, points, dtype=torch.float64, device="cpu")
        curves = torch.exp(-0.5 * ((grid.unsqueeze(1) - self.values) / sigma) ** 2) / (sigma * math.sqrt(2 * math.pi))
        return grid, curves @ self.weights


@dataclass(frozen=True, eq=False)
class GroupSpectrum:
    """Extremal eigenvalues of a diagonal block H[v, v], v a group of parameters; as in `Spectrum`.

    Attributes:
        eigenvalues: the largest ones, in descending order.
        smallest: the smallest one.
        residuals: ‖Hv - λv‖ for each of `eigenvalues`.
        converged: whether each residual is below the tolerance.
        verified: a second search from another random vector returned the same eigenvalues.
        parameters: names of the parameters in the group.
        size: number of their entries.
    """

    eigenvalues: Tensor
    smallest: float
    residuals: Tensor
    converged: Tensor
    verified: bool
    parameters: tuple[str, ...]
    size: int

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
        return cls(
            smallest=state["smallest"],
            verified=state["verified"],
            size=state["size"],
            eigenvalues=to_matrix(state["eigenvalues"]),
            residuals=to_matrix(state["residuals"]),
            converged=torch.tensor(state["converged"], dtype=torch.bool, device="cpu"),
            parameters=tuple(state["parameters"]),
        )


@dataclass(frozen=True, eq=False, repr=False)
class Spectrum:
    """Extremal eigenvalues of H = d²L/dθ², θ the parameters that require gradients.

    An eigenvalue λ has converged if its residual ‖Hv - λv‖ is below the tolerance: H has an eigenvalue within that
    distance of λ.

    Attributes:
        eigenvalues: the k largest ones in value, in descending order, with multiplicity; float64 on the CPU.
        smallest: the smallest one.
        residuals: ‖Hv - λv‖ for each of `eigenvalues`.
        converged: whether each residual is below the tolerance.
        smallest_residual: ‖Hv - λv‖ for `smallest`.
        smallest_converged: whether it is below the tolerance.
        eigenvectors: unit columns for `eigenvalues`, (d, k), on the device of the parameters.
        smallest_eigenvector: the unit vector that belongs to `smallest`.
        ggn_eigenvalue: the largest one of the Gauss-Newton matrix J^T S J; NaN where the output of the network is not
            identified.
        ggn_error: |λ_1 - ggn_eigenvalue| / λ_1.
        trace: tr H.
        trace_stderr: its standard error.
        density: the density of the eigenvalues, if requested.
        stability_limit: largest stable sharpness of the optimizer; NaN without an optimizer or a formula for it.
        stability_ratio: λ_1 / stability_limit, λ_1 of the preconditioned Hessian where the optimizer has a
            preconditioner; above one, steps overshoot.
        parameters: names, in the order of the entries of θ.
        loss: the loss of the batch.
        gradient_norm: ‖dL/dθ‖.
        hvps: products with H or its Gauss-Newton part that were computed.
        seconds: wall-clock time.
        notes: what a reader of the numbers has to know.
        groups: diagonal blocks of the requested groups of parameters.
        phi: Φ = 1 - Σ_v ‖H[v, v]‖_F² / ‖H‖_F² over these groups: the share of curvature between them.
        phi_stderr: its standard error.
    """

    eigenvalues: Tensor
    smallest: float
    residuals: Tensor
    converged: Tensor
    smallest_residual: float
    smallest_converged: bool
    eigenvectors: Tensor
    smallest_eigenvector: Tensor
    ggn_eigenvalue: float
    ggn_error: float
    trace: float
    trace_stderr: float
    density: Density | None
    stability_limit: float
    stability_ratio: float
    parameters: tuple[str, ...]
    loss: float
    gradient_norm: float
    hvps: int
    seconds: float
    notes: tuple[str, ...] = ()
    groups: Mapping[str, GroupSpectrum] = field(default_factory=dict)
    phi: float = math.nan
    phi_stderr: float = math.nan

    def start_vectors(self) -> Tensor:
        """Warm start for a search at the same weights: the eigenvectors of both ends, (d, k + 1)."""
        return torch.cat([self.eigenvectors, self.smallest_eigenvector.unsqueeze(1)], dim=1)

    def start_vector(self) -> Tensor:
        """Warm start for a search at other weights: their sum, (d,)."""
        return self.eigenvectors.sum(1) + self.smallest_eigenvector

    def without_vectors(self) -> Spectrum:
        """A copy without the eigenvectors, which take k times the memory of the parameters."""
        none = self.eigenvectors.new_zeros((0,), device="cpu")
        return replace(self, eigenvectors=none.reshape(0, 0), smallest_eigenvector=none)

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Spectrum:
        """The inverse of `to_dict`, which has neither eigenvectors nor density."""
        tensors = ("eigenvalues", "residuals", "converged")
        fields = {name: value for name, value in state.items() if name not in tensors}
        fields["parameters"], fields["notes"] = tuple(state["parameters"]), tuple(state["notes"])
        fields["groups"] = {name: GroupSpectrum.from_dict(group) for name, group in state["groups"].items()}
        return cls(
            **fields,
            eigenvalues=to_matrix(state["eigenvalues"]),
            residuals=to_matrix(state["residuals"]),
            converged=torch.tensor(state["converged"], dtype=torch.bool, device="cpu"),
            eigenvectors=torch.zeros((0, 0), device="cpu"),
            smallest_eigenvector=torch.zeros((0,), device="cpu"),
            density=None,
        )

    @property
    def sharpness(self) -> float:
        """λ_1, the largest eigenvalue in value; gradient descent with learning rate lr is stable for λ_1 < 2 / lr."""
        return self.eigenvalues[0].item()

    @property
    def largest_magnitude(self) -> float:
        """±‖H‖_2: the largest or the smallest eigenvalue, whichever is larger in magnitude."""
        return max(self.sharpness, self.smallest, key=abs)

    def plot(self) -> tuple[Any, Any]:
        """`fig, ax` with the eigenvalues and their residuals, on the density where there is one. Needs matplotlib."""
        return presentation.plot(self)

    def to_pandas(self) -> Any:
        """A DataFrame, one row per eigenvalue: name, eigenvalue, residual, converged. Needs pandas."""
        return presentation.to_pandas(self)

    def _repr_html_(self) -> str:
        return presentation.to_html(self)

    def to_dict(self) -> dict[str, Any]:
        """Python lists, dicts, strings and numbers, without the eigenvectors and the density."""
        return {
            "eigenvalues": self.eigenvalues.tolist(),
            "residuals": self.residuals.tolist(),
            "converged": self.converged.tolist(),
            "smallest": self.smallest,
            "smallest_residual": self.smallest_residual,
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
            "gradient_norm": self.gradient_norm,
            "hvps": self.hvps,
            "seconds": self.seconds,
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        values = [
            f"  λ_{i + 1:<6} {with_error(value, residual)}{'' if converged else '  not converged'}"
            for i, (value, residual, converged) in enumerate(
                zip(self.eigenvalues.tolist(), self.residuals.tolist(), self.converged.tolist())
            )
        ]
        return "\n".join(
            [
                f"Spectrum: loss {self.loss:.4g}, {self.hvps} HVPs, {self.seconds:.1f} s",
                *values,
                f"  smallest {with_error(self.smallest, self.smallest_residual)}"
                + ("" if self.smallest_converged else "  not converged"),
                f"  GGN λ_1  {with_error(self.ggn_eigenvalue, 0.0)}",
                f"  trace    {with_error(self.trace, self.trace_stderr)}",
                *([] if math.isnan(self.stability_ratio) else [f"  of the stability limit {self.stability_ratio:.3g}"]),
                *(f"  group {name}: λ_1 {with_error(g.eigenvalues[0].item(), 0.0)}" for name, g in self.groups.items()),
                *([] if math.isnan(self.phi) else [f"  Φ        {with_error(self.phi, self.phi_stderr)}"]),
                *(f"note: {note}" for note in self.notes),
            ]
        )

    __repr__ = __str__

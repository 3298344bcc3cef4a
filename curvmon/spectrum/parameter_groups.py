"""Curvature of named groups of parameters: their own spectra, and what lies between them.

    Φ = 1 - Σ_v ‖H_vv‖_F² / ‖H‖_F²

H over the parameters of all groups: the share of curvature that a block-diagonal preconditioner cannot see.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from curvmon.errors import InputError
from curvmon.graph.nodes import clean_name, matches
from curvmon.numerics import gaussian, precise, small_sample_factor
from curvmon.operators.parameter_hessian import ParameterOperator, by_columns
from curvmon.operators.protocol import SymmetricOperator
from curvmon.records import GroupSpectrum
from curvmon.spectrum.eigenvalue_search import Found, Search

Groups = Sequence[str] | Mapping[str, str | Sequence[str]]
PHI_ROUNDS = 10
"""products per group for Φ"""


def resolve_groups(parameters: Sequence[str], groups: Groups) -> dict[str, list[int]]:
    """The indices of the parameters of every group.

    A group is a mapping's entry, or whatever a name or pattern in a sequence matches: modules with all that is in them,
    or single parameters. "layer*" stays within one level, as for nodes.
    """
    names = [clean_name(name) for name in parameters]
    # "a.b.weight" is in "a", in "a.b" and in itself
    inside: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        parts = name.split(".")
        for level in range(1, len(parts) + 1):
            inside.setdefault(".".join(parts[:level]), []).append(i)
    if isinstance(groups, str):
        groups = [groups]
    resolved: dict[str, list[int]] = {}
    if isinstance(groups, Mapping):
        for label, patterns in groups.items():
            patterns = [patterns] if isinstance(patterns, str) else patterns
            if not patterns:
                raise InputError(f"group {label!r} is empty; pass names or patterns of modules or parameters")
            members = {i for pattern in patterns for match in _matching(inside, pattern) for i in inside[match]}
            resolved[label] = sorted(members)
    else:
        for pattern in groups:
            resolved.update((match, inside[match]) for match in _matching(inside, pattern))
    if not resolved:
        raise InputError("groups is empty; pass names or patterns of modules or parameters")
    owner: dict[int, str] = {}
    for label, inner in resolved.items():
        for i in inner:
            if i in owner:
                raise InputError(f"parameter {names[i]!r} is in two groups, {owner[i]!r} and {label!r}")
            owner[i] = label
    return resolved


def _matching(inside: Mapping[str, list[int]], pattern: str) -> list[str]:
    if not isinstance(pattern, str):
        raise InputError(f"groups are names of modules or parameters, or patterns, not {type(pattern).__name__}")
    pattern = clean_name(pattern)
    found = [name for name in inside if name == pattern or matches(name, pattern)]
    if not found:
        near = difflib.get_close_matches(pattern, inside, n=5, cutoff=0.4)
        hint = f"did you mean {', '.join(map(repr, near))}?" if near else f"there are {', '.join(list(inside)[:12])}"
        raise InputError(f"group {pattern!r} has no parameter that requires gradients; {hint}")
    return found


class _Block(SymmetricOperator):
    """H[v, v] as an operator of its own."""

    def __init__(self, operator: ParameterOperator, members: list[int]) -> None:
        super().__init__(sum(operator.sizes[i] for i in members), operator.template)
        self._operator = operator
        self._members = members

    def _columns(self, z: Tensor) -> Tensor:
        self._count.total += z.shape[1]
        return by_columns(lambda column: self._operator.block(self._members, self._members, column), z)


def group_spectrum(
    operator: ParameterOperator,
    members: list[int],
    *,
    k: int,
    rtol: float,
    max_hvps: int,
    verify: bool,
    generator: torch.Generator,
) -> GroupSpectrum:
    """The ends of the spectrum of one diagonal block, at the price of as many (cheaper) products as for all of H."""
    block = _Block(operator, members)
    found, verified = Search(block, k, rtol, max_hvps, generator).found(None, verify)
    top = min(k, len(found.values))
    return GroupSpectrum(
        eigenvalues=found.values[:top],
        smallest=found.values[-1].item(),
        residuals=found.residuals[:top],
        converged=found.settled(rtol, k)[:top],
        verified=verified,
        parameters=tuple(operator.names[i] for i in members),
        size=block.size,
    )


def off_diagonal_share(
    operator: ParameterOperator, groups: Sequence[list[int]], found: Found, generator: torch.Generator
) -> tuple[float, float]:
    """Φ and its standard error, from one product per group and round.

    A probe z_v at group v gives H[w, v] z_v for all w: E‖H[w, v] z_v‖² = ‖H[w, v]‖_F². The known eigenpairs are a
    control variate: L = V Λ V^T has ‖L[w, v]‖_F² = tr(Λ G_w Λ G_v) exactly, G_v = V_v^T V_v, and only
    ‖H[w, v] z‖² - ‖L[w, v] z‖² is left to chance.
    """
    everything = sorted(i for members in groups for i in members)
    starts = _offsets(operator.sizes)
    own = dict(zip(everything, _offsets([operator.sizes[i] for i in everything])))
    values = found.values
    vectors = [
        torch.stack([torch.cat([_cut(v, starts[i], operator.sizes[i]) for i in members]) for v in found.vectors], 1)
        for members in groups
    ]
    grams = [(part.T @ part).cpu().double() for part in vectors]
    whole = torch.stack(grams).sum(0)
    weighted = [values.unsqueeze(1) * gram * values for gram in grams]  # Λ G_v Λ
    rounds = []
    for _ in range(PHI_ROUNDS):
        total = diagonal = 0.0
        for members, part, gram, known in zip(groups, vectors, grams, weighted):
            z = gaussian(part[:, 0], 1, generator).squeeze(1).sign()
            image = operator.block(everything, members, z)
            inner = torch.cat([_cut(image, own[i], operator.sizes[i]) for i in members])
            c = values * (part.T @ z).cpu().double()
            total += _square(image) - float(c @ whole @ c) + float((whole * known).sum())
            diagonal += _square(inner) - float(c @ gram @ c) + float((gram * known).sum())
        rounds.append((total, total - diagonal))
    samples = torch.tensor(rounds, dtype=torch.float64)
    total, off = samples.mean(0).tolist()
    if total <= 0:
        return math.nan, math.nan
    share = off / total
    spread = (samples[:, 1] - share * samples[:, 0]).std().item()
    return share, spread / total / math.sqrt(PHI_ROUNDS) * small_sample_factor(PHI_ROUNDS - 1)


def _offsets(sizes: Sequence[int]) -> list[int]:
    offsets = [0]
    for size in sizes[:-1]:
        offsets.append(offsets[-1] + size)
    return offsets


def _cut(flat: Tensor, start: int, size: int) -> Tensor:
    return flat[start : start + size]


def _square(x: Tensor) -> float:
    return precise(x).square().sum().item()

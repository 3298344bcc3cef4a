"""Curvature of named groups of parameters: the spectrum of each diagonal block, and the share outside of them.

    Φ = 1 - Σ_v ‖H_vv‖_F² / ‖H‖_F²

with H w.r.t. the parameters of all groups: the share of curvature that a block-diagonal preconditioner ignores.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from curvmon.errors import InputError
from curvmon.graph.nodes import clean_name, matches, name_hint
from curvmon.numerics import gaussian, precise, small_sample_factor
from curvmon.operators.parameter_hessian import ParameterOperator
from curvmon.operators.protocol import SymmetricProduct
from curvmon.records import GroupSpectrum
from curvmon.spectrum.eigenvalue_search import Accuracy, Eigenpairs, EigenvalueSearch

Groups = Sequence[str] | Mapping[str, str | Sequence[str]]
PHI_ROUNDS = 10
"""block products per group for Φ"""


def resolve_groups(parameters: Sequence[str], groups: Groups) -> dict[str, list[int]]:
    """The indices of the parameters of every group.

    Every entry of a mapping is a group, and so is every module or parameter that a name or pattern in a sequence
    matches; a module stands for all its parameters. "layer*" matches within one level, as for nodes.

    Raises:
        InputError: if a name matches nothing, a group is empty, or two groups share a parameter.
    """
    names = [clean_name(name) for name in parameters]
    # "a.b.weight" is a member of "a", of "a.b" and of itself
    members_of: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        parts = name.split(".")
        for level in range(1, len(parts) + 1):
            members_of.setdefault(".".join(parts[:level]), []).append(i)
    if isinstance(groups, str):
        groups = [groups]
    resolved: dict[str, list[int]] = {}
    if isinstance(groups, Mapping):
        for label, patterns in groups.items():
            patterns = [patterns] if isinstance(patterns, str) else patterns
            if not patterns:
                raise InputError(f"group {label!r} is empty; pass names or patterns of modules or parameters")
            matches = [match for pattern in patterns for match in _matches(members_of, pattern)]
            resolved[label] = sorted({i for match in matches for i in members_of[match]})
    else:
        for pattern in groups:
            resolved.update((match, members_of[match]) for match in _matches(members_of, pattern))
    if not resolved:
        raise InputError("groups is empty; pass names or patterns of modules or parameters")
    owner: dict[int, str] = {}
    for label, members in resolved.items():
        for i in members:
            if i in owner:
                raise InputError(f"parameter {names[i]!r} is in two groups, {owner[i]!r} and {label!r}")
            owner[i] = label
    return resolved


def _matches(members_of: Mapping[str, list[int]], pattern: str) -> list[str]:
    """The modules and parameters that a pattern matches."""
    if not isinstance(pattern, str):
        raise InputError(f"groups are names of modules or parameters, or patterns, not {type(pattern).__name__}")
    pattern = clean_name(pattern)
    names = [name for name in members_of if name == pattern or matches(name, pattern)]
    if not names:
        hint = name_hint(pattern, members_of, f"the model has {', '.join(list(members_of)[:12])}")
        raise InputError(f"group {pattern!r} has no parameter that requires gradients; {hint}")
    return names


def group_spectrum(
    operator: ParameterOperator,
    members: list[int],
    *,
    k: int,
    accuracy: Accuracy,
    max_hvps: int,
    verify: bool,
    generator: torch.Generator,
) -> GroupSpectrum:
    """Extremal eigenvalues of one diagonal block. Costs as many products as those of H, but cheaper ones."""
    block = SymmetricProduct(
        sum(operator.sizes[i] for i in members), operator.template, lambda z: operator.block(members, members, z)
    )
    pairs, verified = EigenvalueSearch(block, k, accuracy, max_hvps, generator).eigenpairs(None, verify)
    top = min(k, len(pairs.values))
    return GroupSpectrum(
        eigenvalues=pairs.values[:top],
        smallest=pairs.values[-1].item(),
        residuals=pairs.residuals[:top],
        converged=pairs.converged[:top],
        verified=verified,
        parameters=tuple(operator.names[i] for i in members),
        size=block.size,
    )


def off_diagonal_share(
    operator: ParameterOperator, groups: Sequence[list[int]], pairs: Eigenpairs, generator: torch.Generator
) -> tuple[float, float]:
    """Φ and its standard error, with E‖H[w, v] z‖² = ‖H[w, v]‖_F² for random signs z (Hutchinson 1989).

    One block product per group and round: a probe z at group v gives H[w, v] z for all w. The eigenpairs are a control
    variate: L = V Λ V^T has ‖L[w, v]‖_F² = tr(Λ G_w Λ G_v) exactly, with G_v = V_v^T V_v, so only
    ‖H[w, v] z‖² - ‖L[w, v] z‖² is estimated.
    """
    members_of_all = sorted(i for members in groups for i in members)
    starts = _offsets(operator.sizes)
    image_starts = dict(zip(members_of_all, _offsets([operator.sizes[i] for i in members_of_all])))
    values = pairs.values
    vectors = [
        torch.stack([torch.cat([_cut(v, starts[i], operator.sizes[i]) for i in members]) for v in pairs.vectors], 1)
        for members in groups
    ]
    grams = [(part.T @ part).cpu().double() for part in vectors]
    gram_of_all = torch.stack(grams).sum(0)
    weighted_grams = [values.unsqueeze(1) * gram * values for gram in grams]  # Λ G_v Λ
    rounds = []
    for _ in range(PHI_ROUNDS):
        total = diagonal = 0.0
        for members, part, gram, weighted in zip(groups, vectors, grams, weighted_grams):
            z = gaussian(part[:, 0], 1, generator).squeeze(1).sign()
            image = operator.block(members_of_all, members, z)
            inner = torch.cat([_cut(image, image_starts[i], operator.sizes[i]) for i in members])
            c = values * (part.T @ z).cpu().double()
            total += _square(image) - float(c @ gram_of_all @ c) + float((gram_of_all * weighted).sum())
            diagonal += _square(inner) - float(c @ gram @ c) + float((gram * weighted).sum())
        rounds.append((total, total - diagonal))
    samples = torch.tensor(rounds, dtype=torch.float64)
    total, off_diagonal = samples.mean(0).tolist()
    if total <= 0:
        return math.nan, math.nan
    share = off_diagonal / total
    # the error of a ratio of means, by linearisation
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

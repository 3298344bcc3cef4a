"""Exact Hessian spectra of small networks in closed form: test oracles, and an explanation of bulk and outliers.

    L = 1/(2n) Σ_i (f(x_i) - y_i)²,   H = d²L/dθ²,   θ: all weights

Each spectrum has a *bulk*, few values with high multiplicity, and a handful of *outliers*. The formulas are those of
"Cracking the Hessian: Closed-Form Hessian Spectra for Fundamental Neural Networks" (anonymous authors, under
double-blind review, no DOI), "the paper" below; in the tests, dense Hessians agree to rounding. Where the paper has a
polynomial, its roots are computed as the eigenvalues of a small symmetric matrix with that characteristic polynomial:
computed from the coefficients, a double root has half the digits only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from curvmon.errors import InputError

Phase = Literal["early", "late", "divergent"]
Kind = Literal["bulk", "outlier"]
Numbers: TypeAlias = Any
"""a tensor, an array, (nested) lists: whatever torch.as_tensor takes, converted to float64"""


@dataclass(frozen=True, eq=False)
class ClosedForm:
    """All eigenvalues of a loss Hessian, largest first, with multiplicity.

    Attributes:
        eigenvalues: float64, on the CPU.
        kinds: "bulk" or "outlier" for each eigenvalue.
        eigenvectors: unit columns for the outliers, in the order of `outliers`; None if the paper does not give them.
        phase: of training, "early", "late" or "divergent"; only for `linear_network`, which defines them.
    """

    eigenvalues: Tensor
    kinds: tuple[Kind, ...]
    eigenvectors: Tensor | None = None
    phase: Phase | None = None

    @property
    def outliers(self) -> Tensor:
        return self._of("outlier")

    @property
    def bulk(self) -> Tensor:
        return self._of("bulk")

    @property
    def trace(self) -> float:
        return float(self.eigenvalues.sum())

    def _of(self, kind: Kind) -> Tensor:
        return self.eigenvalues[torch.tensor([k == kind for k in self.kinds], dtype=torch.bool)]


def linear_network(w: Numbers, v: Numbers, x: Numbers, y: Numbers) -> ClosedForm:
    """f(x) = <w, v> x with w, v in R^m: 2m eigenvalues.

    With s² = mean x² and d = mean x (f - y), the bulk is +d and -d, each m - 1 times, and the two outliers

        L± = ½ s²(|w|²+|v|²) ± ½ sqrt((s²(|w|²+|v|²))² + 4(d² + 2 s² d <w,v>))

    add up to the trace. `eigenvectors` are those of L+ and L-, parameters in the order (v, w): with p = (w+v)/√2,
    r = (w-v)/√2, their unit vectors p̂, r̂ and 2θ the angle of the point (d + s²<w,v>, s²|p||r|),

        u+ = cos θ (p̂, p̂)/√2 + sin θ (r̂, -r̂)/√2,   u- = -sin θ (p̂, p̂)/√2 + cos θ (r̂, -r̂)/√2

    If p or r is zero, one of them belongs to a bulk eigenvalue, and any unit vector replaces p̂ or r̂.

    `phase` follows <w,v> on its way to t = mean(xy) / s², here for t > 0. L+ L- = s⁴ (t - <w,v>) (3<w,v> - t) gives the
    sign of L-; the bulk |d| = s² |t - <w,v>| shrinks to zero as <w,v> approaches t, and grows beyond:

        early       <w,v> <= t/3          L- <= 0, L+ >= trace
        late        t/3 < <w,v> <= t      L- >= 0, L+ <= trace; at the solution <w,v> = t, L+ = trace is all of H
        divergent   <w,v> > t             L- <= 0, L+ >= trace

    The paper counts the solution to both late and divergent; here it is late, and equality is up to rounding. With
    t < 0 the sign of <w,v> is reversed; without any x ≠ 0 the phase is None.

    Example:
        >>> import torch
        >>> from curvmon import closed_form
        >>> one = torch.ones(2)
        >>> closed_form.linear_network(one, one, torch.ones(3), 3 * torch.ones(3)).eigenvalues.tolist()
        [3.0, 1.0, 1.0, -1.0]
    """
    w, v, x, y = _vectors(w=w, v=v, x=x, y=y)
    _same_length(w=w, v=v)
    _same_length(x=x, y=y)
    power, residual = x.square().mean(), (x * (w.dot(v) * x - y)).mean()
    # H = s² (w, v)(w, v)^T + d [[0, 1], [1, 0]] is [[d + s²|p|², s²|p||r|], [s²|p||r|, -d + s²|r|²]] on the plane of
    # (p̂, p̂)/√2 and (r̂, -r̂)/√2; the paper's eigenvectors (L w + d v, d w + L v) are zero or parallel for w = ±v
    even, odd = _swap_parts(w, v)
    half = power * (w.square().sum() + v.square().sum()) / 2
    across, along = power * _norm(even) * _norm(odd), residual + power * w.dot(v)
    root = torch.hypot(along, across)  # the root in L± as a sum of squares: no cancellation where L+ = L-
    outliers = torch.stack([half + root, half - root])
    bulk = torch.cat([residual.expand(len(w) - 1), -residual.expand(len(w) - 1)])
    first, second = _unit(even, odd), _unit(odd, even)
    plane = torch.stack([torch.cat([first, first]), torch.cat([second, -second])], dim=1) / math.sqrt(2)
    angle = torch.atan2(across, along) / 2
    cos, sin = angle.cos(), angle.sin()
    vectors = plane @ torch.stack([torch.stack([cos, -sin]), torch.stack([sin, cos])])
    return _sorted(outliers, bulk, vectors, _phase(w, v, x, y))


def _swap_parts(w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """(w+v)/√2 and (w-v)/√2: the even and the odd part under a swap of w and v."""
    return (w + v) / math.sqrt(2), (w - v) / math.sqrt(2)


def _norm(vector: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(vector)
    return norm


def _unit(*candidates: Tensor) -> Tensor:
    """The direction of the first vector that is not zero; if all are, the first coordinate axis."""
    for vector in candidates:
        if vector.any():
            vector = vector / vector.abs().max()  # squares of 1e-200 would vanish
            return vector / _norm(vector)
    unit = torch.zeros_like(candidates[0])
    unit[0] = 1
    return unit


def _phase(w: Tensor, v: Tensor, x: Tensor, y: Tensor) -> Phase | None:
    power, covariance = x.square().mean(), (x * y).mean()
    if power == 0:
        return None
    target = covariance / power
    rounding = 10 * torch.finfo(x.dtype).eps * (w.abs().dot(v.abs()) + (x * y).abs().mean() / power)
    if (w.dot(v) - target).abs() <= rounding:
        return "late"  # the solution, whichever side rounding puts it on
    progress = w.dot(v) * target.sign()
    if progress <= target.abs() / 3:
        return "early"
    return "late" if progress < target.abs() else "divergent"


def relu_network(w: Numbers, v: Numbers, x: Numbers, y: Numbers) -> ClosedForm:
    """f(x) = <w, relu(v x)>: units with v_j > 0 are active on positive samples only, the others on negative ones.

    Each of the two cells contributes the spectrum of `linear_network` on its own units and samples, times its share of
    the samples. A cell without samples contributes zeros.
    """
    w, v, x, y = _vectors(w=w, v=v, x=x, y=y)
    _same_length(w=w, v=v)
    _same_length(x=x, y=y)
    if (v == 0).any():
        raise InputError("v has zeros: a ReLU network has no second derivative there")
    parts = []
    for sign in (1, -1):
        units, samples = v.sign() == sign, x.sign() == sign
        if units.any() and samples.any():
            cell = linear_network(w[units], v[units], x[samples], y[samples])
            parts.append(_scaled(cell, samples.sum().item() / len(x)))
        elif units.any():
            parts.append(_sorted(v.new_zeros(2), v.new_zeros(2 * (int(units.sum()) - 1))))
    return _union(parts)


def linear_network_with_bias(w: Numbers, v: Numbers, b: Numbers, x: Numbers, y: Numbers) -> ClosedForm:
    """f(x) = <w, v x + b>: 3m eigenvalues, five of them outliers, m - 1 zero.

    Assumes <v, b> = 0, |v| = |b|, mean x = 0, mean x² = 1, mean y = 0, mean xy = 0; InputError otherwise. With
    q = <w,v>² + <w,b>² and N = |v|² + |w|²: ½N ± ½ sqrt(N² + 12 q), the roots of l³ - N l² - q l + q|w|² = 0, and
    ±sqrt(q), each m - 2 times.
    """
    w, v, b, x, y = _vectors(w=w, v=v, b=b, x=x, y=y)
    _same_length(w=w, v=v, b=b)
    _same_length(x=x, y=y)
    if len(w) < 2:
        raise InputError("v and b can be orthogonal only from width 2 on")
    size = v.square().sum()
    _assume("<v, b> = 0", v.dot(b), size)
    _assume("|v| = |b|", size - b.square().sum(), size)
    _assume("mean x = 0", x.mean(), torch.ones(()))
    _assume("mean x² = 1", x.square().mean() - 1, torch.ones(()))
    spread = y.square().mean().sqrt()
    _assume("mean y = 0", y.mean(), spread)
    _assume("mean xy = 0", (x * y).mean(), spread)
    q, total = w.dot(v).square() + w.dot(b).square(), size + w.square().sum()
    root = (total.square() + 12 * q).sqrt()
    # the cubic is the characteristic polynomial of [[|w|², |w||v|, 0], [|w||v|, |v|², √q], [0, √q, 0]]
    across = _norm(w) * _norm(v)
    cubic = _eigenvalues([[w.square().sum(), across, 0], [across, size, q.sqrt()], [0, q.sqrt(), 0]])
    outliers = torch.cat([torch.stack([(total + root) / 2, (total - root) / 2]), cubic])
    copies = len(w) - 2
    bulk = torch.cat([q.sqrt().expand(copies), -q.sqrt().expand(copies), w.new_zeros(len(w) - 1)])
    return _sorted(outliers, bulk)


def linear_network_of_inputs(w: Numbers, v: Numbers, x: Numbers, y: Numbers) -> ClosedForm:
    """f(x) = Σ_d <w_d, v_d> x_d with decorrelated inputs: the union over input dimensions. w, v: D x m, x: n x D."""
    w, v, x = _matrices(w=w, v=v, x=x)
    (y,) = _vectors(y=y)
    if w.shape != v.shape or x.shape != (len(y), len(w)):
        raise InputError(f"w and v are D x m, x is n x D and y has n entries; got {_shapes(w=w, v=v, x=x, y=y)}")
    covariance = x.T @ x / len(y)
    _assume("mean x_d x_e = 0 for d ≠ e", (covariance - covariance.diag().diag()).abs().max(), covariance.diag().max())
    return _union([linear_network(w[d], v[d], x[:, d], y) for d in range(len(w))])


def linear_network_of_outputs(w: Numbers, v: Numbers, x: Numbers, y: Numbers) -> ClosedForm:
    """f_k(x) = <w_k, v_k> x, loss summed over outputs: the union over outputs. w, v: K x m, y: n x K."""
    w, v, y = _matrices(w=w, v=v, y=y)
    (x,) = _vectors(x=x)
    if w.shape != v.shape or y.shape != (len(x), len(w)):
        raise InputError(f"w and v are K x m, y is n x K and x has n entries; got {_shapes(w=w, v=v, x=x, y=y)}")
    return _union([linear_network(w[k], v[k], x, y[:, k]) for k in range(len(w))])


def self_attention(w_value: Numbers, w_query: Numbers, w_key: Numbers, x: Numbers, y: Numbers) -> ClosedForm:
    """f(x) = w_V A x with A = softmax of the rows of x <w_Q, w_K> x^T / sqrt(d_k), on one sequence x of n numbers.

    2 d_k + 1 eigenvalues: ±g, each d_k - 1 times, and three outliers, the roots of

        -l³ + (a + z(K+Q)) l² + ((b² - a z)(K+Q) + 2 g z P + g²) l + (2 g (b² - a z) P - a g²) = 0

    with K = |w_K|², Q = |w_Q|², P = <w_K, w_Q>, and a, b, g, z averages of the row-wise moments of x under A. `w_value`
    is a number, `w_query` and `w_key` have d_k entries, `x` and `y` n.
    """
    value = _number(w_value=w_value)
    q, k, x, y = _vectors(w_query=w_query, w_key=w_key, x=x, y=y)
    _same_length(w_query=q, w_key=k)
    _same_length(x=x, y=y)
    n, width = len(x), len(q)
    attention = (x.unsqueeze(1) * q.dot(k) * x.unsqueeze(0) / math.sqrt(width)).softmax(dim=1)
    mean = attention @ x
    central = x.unsqueeze(0) - mean.unsqueeze(1)
    second, third = ((attention * central**order).sum(1) for order in (2, 3))
    residual = value * mean - y
    slope = x * second  # of the softmax mean w.r.t. <w_Q, w_K>, times sqrt(d_k)
    a = mean.square().sum() / n
    b = (value * mean + residual).dot(slope) / (n * math.sqrt(width))
    g = value * residual.dot(slope) / (n * math.sqrt(width))
    z = (value.square() * slope.square().sum() + value * residual.dot(x * x * third)) / (n * width)
    # a, b, z and g are ∂²L/∂w_V², ∂²L/∂w_V∂P, ∂²L/∂P² and ∂L/∂P: the cubic is the characteristic polynomial of H on
    # w_V and the plane of `linear_network`, with g in place of d and z in place of s²
    even, odd = (_norm(part) for part in _swap_parts(k, q))
    outliers = _eigenvalues(
        [
            [a, b * even, b * odd],
            [b * even, z * even.square() + g, z * even * odd],
            [b * odd, z * even * odd, z * odd.square() - g],
        ]
    )
    return _sorted(outliers, torch.cat([g.expand(width - 1), -g.expand(width - 1)]))


def _eigenvalues(rows: Sequence[Sequence[Tensor | float]]) -> Tensor:
    """Of a symmetric matrix; NaN if it is not finite, as after training has diverged: eigvalsh would raise."""
    matrix = torch.tensor(rows, dtype=torch.float64, device="cpu")
    if not matrix.isfinite().all():
        return matrix.new_full((len(rows),), math.nan)
    values: Tensor = torch.linalg.eigvalsh(matrix)
    return values


def _sorted(outliers: Tensor, bulk: Tensor, vectors: Tensor | None = None, phase: Phase | None = None) -> ClosedForm:
    values = torch.cat([outliers, bulk])
    kinds: list[Kind] = [*["outlier"] * len(outliers), *["bulk"] * len(bulk)]  # type: ignore[list-item]
    order = values.argsort(descending=True, stable=True)
    if vectors is not None:
        vectors = vectors[:, outliers.argsort(descending=True, stable=True)]
    return ClosedForm(values[order], tuple(kinds[i] for i in order.tolist()), vectors, phase)


def _scaled(form: ClosedForm, factor: float) -> ClosedForm:
    return ClosedForm(factor * form.eigenvalues, form.kinds)


def _union(parts: Sequence[ClosedForm]) -> ClosedForm:
    return _sorted(torch.cat([part.outliers for part in parts]), torch.cat([part.bulk for part in parts]))


def _vectors(**named: Numbers) -> list[Tensor]:
    return [_tensor(name, given, "a vector", ndim=1) for name, given in named.items()]


def _matrices(**named: Numbers) -> list[Tensor]:
    return [_tensor(name, given, "a matrix", ndim=2) for name, given in named.items()]


def _number(**named: Numbers) -> Tensor:
    ((name, given),) = named.items()
    return _tensor(name, given, "one number", ndim=None).reshape(())


def _tensor(name: str, given: Numbers, what: str, ndim: int | None) -> Tensor:
    """float64 on the CPU, without gradient, and not empty; with `ndim` None one entry in any shape."""
    try:
        if torch.as_tensor(given).is_complex():
            raise TypeError("complex numbers")
        # not .to(float64) of the tensor above, which rounds lists to the default dtype
        tensor = torch.as_tensor(given, dtype=torch.float64, device="cpu").detach()
    except Exception as error:  # as_tensor raises whatever the methods of a foreign array raise
        raise InputError(
            f"{name} is {what}; {type(given).__name__} does not convert to a real tensor: {error}"
        ) from error
    fits = tensor.numel() == 1 if ndim is None else tensor.ndim == ndim and tensor.numel() > 0
    if not fits:
        raise InputError(f"{name} is {what}; got shape {tuple(tensor.shape)}")
    return tensor


def _same_length(**named: Tensor) -> None:
    if len({len(tensor) for tensor in named.values()}) > 1:
        raise InputError(f"{' and '.join(named)} have the same length; got {_shapes(**named)}")


def _shapes(**named: Tensor) -> str:
    return ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in named.items())


def _assume(what: str, off: Tensor, scale: Tensor) -> None:
    """Raise InputError if an assumption of the formula is violated by more than rounding."""
    if off.abs() > 1e-8 * scale.clamp_min(torch.finfo(torch.float64).tiny):
        raise InputError(f"the closed form assumes {what}; it is off by {off.abs().item():.2g}")

"""Efficient operations have the values and derivatives of torch's own, and are not used where they would not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import curvmon
from benchmarks.networks import Decoder, next_token_loss
from curvmon.graph import attention
from curvmon.graph.autograd import differentiate
from curvmon.graph.efficient_operations import EfficientOperations, is_efficient_operation
from curvmon.graph.linear_layers import used_once
from curvmon.operators.session import open_session

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "torch.tanh": torch.tanh,
    "method": lambda x: x.sigmoid(),
    "softplus": lambda x: F.softplus(x, 2.0, 15.0),
    "elu": lambda x: F.elu(x, alpha=0.7),
    "selu": F.selu,
    "celu": F.celu,
    "mish": F.mish,
    "hardswish": F.hardswish,
    "logsigmoid": F.logsigmoid,
    "softsign": F.softsign,
    "module": nn.SiLU(),
}
W = {n: torch.randn(6, 4, *[3] * n, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in (1, 2, 3)}
GROUPED = torch.randn(6, 2, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
BIAS = torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
STATISTICS = torch.rand(2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(7)) + 0.5
CONVOLUTIONS: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {
    "1d": (1, lambda x: F.conv1d(x, W[1], BIAS, 2, 1)),
    "2d": (2, lambda x: F.conv2d(x, W[2], padding=(1, 2), stride=(2, 1), dilation=2)),
    "3d": (3, lambda x: F.conv3d(x, W[3], BIAS, padding=1)),
    "same": (2, lambda x: F.conv2d(x, W[2], padding="same", dilation=2)),
    "valid": (2, lambda x: F.conv2d(x, W[2], padding="valid")),
    "groups": (2, lambda x: F.conv2d(x, GROUPED, BIAS, groups=2)),
    "transposed 1d": (1, lambda x: F.conv_transpose1d(x, W[1].transpose(0, 1), BIAS, stride=2, output_padding=1)),
    "transposed 2d": (2, lambda x: F.conv_transpose2d(x, W[2].transpose(0, 1), None, 2, 1, 1, 1, 2)),
    "keywords": (2, lambda x: F.conv2d(input=x, weight=W[2], padding=1)),
    "numpy": (2, lambda x: F.conv2d(x, W[2], stride=np.int64(2), padding=(np.int64(1), 0))),
    "batch norm": (2, lambda x: F.batch_norm(x, STATISTICS[0], STATISTICS[1], STATISTICS[0], STATISTICS[1])),
    "batch norm by keywords": (2, lambda x: F.batch_norm(x, running_var=STATISTICS[1], running_mean=STATISTICS[0])),
    "plain batch norm": (1, lambda x: F.batch_norm(x, STATISTICS[0], STATISTICS[1])),
}


def derivatives(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, ...]:
    """Value, g^T J, and the derivatives of <g^T J, z> w.r.t. x and g, for fixed g and z."""
    x = x.clone().requires_grad_()
    y = function(x * 1.0)  # not a leaf, as after a tap
    g = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(1)).requires_grad_()
    (first,) = torch.autograd.grad(y, x, g, create_graph=True)
    z = torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(2))
    second = torch.autograd.grad(first, [x, g], z, allow_unused=True, materialize_grads=True)
    return y.detach(), first.detach(), *second


def compare(function: Callable[[Tensor], Tensor], x: Tensor) -> bool:
    """Equal with and without; returns whether anything was replaced."""
    plain = derivatives(function, x)
    replaced = []

    def efficient(x: Tensor) -> Tensor:
        with EfficientOperations():
            y = function(x)
        replaced.append(y.grad_fn is not None and (is_efficient_operation(y.grad_fn) or "Add" in y.grad_fn.name()))
        return y

    for one, other in zip(derivatives(efficient, x), plain):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    return replaced[0]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name: str) -> None:
    x = 2 * torch.randn(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert compare(ACTIVATIONS[name], x)


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_and_batch_norm(name: str) -> None:
    dims, function = CONVOLUTIONS[name]
    x = torch.randn(3, 4, *[8] * dims, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert compare(function, x)


def test_unsupported_calls_are_not_replaced() -> None:
    x = torch.randn(3, 4, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    even = W[2][:, :, :2, :2]
    assert not compare(lambda x: F.conv2d(x, even, padding="same"), x)  # padded on one side only
    assert not compare(lambda x: F.conv2d(x[0], W[2]), x)  # no batch
    assert not compare(lambda x: F.batch_norm(x, None, None, training=True), x)
    assert not compare(lambda x: F.silu(x.clone(), inplace=True), x)
    assert not compare(lambda x: F.elu(x.clone(), 1.0, True), x)


def test_batch_norm_in_mixed_precision_is_not_replaced() -> None:
    """Half-precision activations with statistics in single precision stay in half precision."""
    x = torch.randn(3, 4, 5).bfloat16().requires_grad_()
    with EfficientOperations():
        y = F.batch_norm(x * 1.0, STATISTICS[0].float(), STATISTICS[1].float())
    assert y.dtype == torch.bfloat16


def parameters(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(8)
    return [torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_() for shape in shapes]


TRAINED: dict[str, tuple[tuple[int, ...], list[Tensor], Callable[..., Tensor]]] = {
    "linear": ((3, 5, 4), parameters((6, 4), (6,)), lambda x, w, b: F.linear(x, w, b)),
    "linear of a vector": ((4,), parameters((6, 4)), lambda x, w: F.linear(x, w)),
    "convolution": ((3, 4, 8, 8), parameters((6, 4, 3, 3), (6,)), lambda x, w, b: F.conv2d(x, w, b, 2, 1)),
    "groups": ((3, 4, 8), parameters((6, 2, 3)), lambda x, w: F.conv1d(x, w, dilation=2, groups=2)),
    "transposed": ((3, 4, 5), parameters((4, 6, 3), (6,)), lambda x, w, b: F.conv_transpose1d(x, w, b, 2, 1, 1)),
    "batch norm": ((3, 4, 5), parameters((4,), (4,)), lambda x, w, b: F.batch_norm(x, *STATISTICS, w, b)),
    "batch norm of rows": ((3, 4), parameters((4,)), lambda x, w: F.batch_norm(x, *STATISTICS, weight=w, eps=0.1)),
    "layer norm": ((3, 5, 4), parameters((4,), (4,)), lambda x, w, b: F.layer_norm(x, [4], w, b, 0.1)),
    "two dimensions": ((3, 5, 4), parameters((5, 4)), lambda x, w: F.layer_norm(x, (5, 4), weight=w)),
    "relu": ((3, 5), parameters((5,)), lambda x, w: torch.relu(x * w) * w),
    "relu in place": ((3, 5), parameters((5,)), lambda x, w: F.relu(x * w, inplace=True) * w),
}
"""the shape of the input, parameters, and the function of both"""


def products(
    function: Callable[..., Tensor], shape: tuple[int, ...], weights: list[Tensor], batched: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """Value, gradients and their derivatives; derivatives of these are needed by losses that take gradients."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()
    y = function(x * 1.0, *weights)
    g = torch.randn(y.shape, dtype=torch.float64, generator=generator).requires_grad_()
    variables = [x, *weights, g]
    first = torch.autograd.grad(y, variables[:-1], g, create_graph=True)
    vectors = [torch.randn((3, *f.shape), dtype=torch.float64, generator=generator) for f in first]
    images = [
        [t for t in differentiate(first, variables, z, batched=batched) if t is not None]
        for z in ([vectors] if batched else [[v[i] for v in vectors] for i in range(3)])
    ]
    stacked = images[0] if batched else [torch.stack(each) for each in zip(*images)]
    return [y, *first], stacked


@pytest.mark.parametrize("name", TRAINED)
def test_trained_parameters(name: str) -> None:
    """Also several products in one launch, in which no operation may run in a loop."""
    shape, weights, function = TRAINED[name]
    values, truth = products(function, shape, weights, batched=False)

    def efficient(*args: Tensor) -> Tensor:
        with EfficientOperations():
            return function(*args)

    for batched in (False, True):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found, images = products(efficient, shape, weights, batched)
        torch.testing.assert_close(found, values, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(images, truth, rtol=1e-10, atol=1e-12)


HIDDEN = torch.rand(3, 1, 5, 6, generator=torch.Generator().manual_seed(9)) > 0.4
HIDDEN[0, 0, 2] = False  # a row in which everything is masked
ADDED = torch.randn(2, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
ATTENTION: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "plain": ((3, 2), {}),
    "causal": ((3, 2), {"is_causal": True}),
    "boolean mask": ((3, 2), {"attn_mask": HIDDEN}),
    "additive mask": ((3, 2), {"attn_mask": ADDED, "scale": 0.3}),
    "additive infinity": ((3, 2), {"attn_mask": torch.zeros(5, 6).double().masked_fill(~HIDDEN[0, 0], -torch.inf)}),
    "one head": ((3,), {"dropout_p": 0.0}),
    "one head and sample": ((), {}),
}
"""leading dimensions and options"""


@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name: str) -> None:
    """Also several products in one launch, in which no operation may run in a loop."""
    leading, options = ATTENTION[name]
    tokens = parameters((*leading, 6, 4), (*leading, 6, 3))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, **options)

    def efficient(*args: Tensor) -> Tensor:
        with EfficientOperations():
            y = attend(*args)
        assert y.grad_fn is not None and is_efficient_operation(y.grad_fn)
        return y

    with sdpa_kernel(SDPBackend.MATH):
        values, truth = products(attend, (*leading, 5, 4), tokens, batched=False)
    for batched in (False, True):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found, images = products(efficient, (*leading, 5, 4), tokens, batched)
        torch.testing.assert_close(found, values, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(images, truth, rtol=1e-10, atol=1e-12)


def test_attention_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of them is smaller."""
    tokens = parameters((3, 3, 6, 4), (3, 3, 6, 3))

    def efficient(*args: Tensor) -> Tensor:
        with EfficientOperations():
            return F.scaled_dot_product_attention(*args, is_causal=True)

    whole = [products(efficient, (3, 3, 5, 4), tokens, batched) for batched in (False, True)]
    monkeypatch.setattr(attention, "PART_ON_CPU", 2 * 5 * 6)
    parts = [products(efficient, (3, 3, 5, 4), tokens, batched) for batched in (False, True)]
    torch.testing.assert_close(parts, whole, rtol=1e-10, atol=1e-12)


def test_first_derivative_of_attention_without_a_graph() -> None:
    tokens = parameters((3, 5, 4), (3, 6, 4), (3, 6, 2))
    expected = torch.autograd.grad(F.scaled_dot_product_attention(*tokens).square().sum(), tokens)
    with EfficientOperations():
        y = F.scaled_dot_product_attention(*tokens)
    torch.testing.assert_close(torch.autograd.grad(y.square().sum(), tokens), expected)


def test_unusual_attention_is_not_replaced() -> None:
    x = torch.randn(3, 2, 5, 4, dtype=torch.float64)
    learned = torch.zeros(5, 5, dtype=torch.float64, requires_grad=True)
    calls: list[tuple[Tensor, Tensor, dict[str, Any]]] = [
        (x, x, {"dropout_p": 0.5}),
        (x, x, {"attn_mask": learned}),
        (x, x[:, :1], {"enable_gqa": True}),
        (x.bfloat16(), x.bfloat16(), {}),
    ]
    for q, k, options in calls:
        q = q.clone().requires_grad_()
        with EfficientOperations():
            y = F.scaled_dot_product_attention(q, k, k, **options)
        assert y.grad_fn is not None and not is_efficient_operation(y.grad_fn)


def test_measurement_with_efficient_attention() -> None:
    """The numbers are those of torch's own operations, up to rounding."""
    torch.manual_seed(0)
    model, batch = Decoder(layers=2, width=8, heads=2, tokens=6, vocabulary=10), torch.randint(10, (4, 6))
    options: dict[str, Any] = {"loss": next_token_loss, "nodes": None, "output": None, "batch_dim": 0}
    found = []
    for efficient in (True, False):
        with open_session(model, batch, dtype=torch.float64, efficient=efficient, **options) as session:
            z = torch.randn(session.operator.templates[0].numel(), 3, generator=torch.Generator().manual_seed(1))
            products = session.operator.columns(0, z.double())
            found.append([*products.remainder, *(products.gauss_newton or [])])
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["linear", "convolution", "groups", "batch norm", "batch norm of rows", "relu"])
def test_third_derivatives(name: str) -> None:
    """Of operations that are linear in each argument there are derivatives of every order."""
    shape, weights, function = TRAINED[name]
    found = []
    for efficient in (False, True):
        x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
        with EfficientOperations() if efficient else nullcontext():
            y = function(x * 1.0, *weights)
        variables = [x, *weights]
        first = torch.autograd.grad(y.square().sum(), variables, create_graph=True)
        second = torch.autograd.grad(sum(t.square().sum() for t in first), variables, create_graph=True)
        found.append(torch.autograd.grad(sum(t.square().sum() for t in second), variables))
    torch.testing.assert_close(found[1], found[0], rtol=1e-10, atol=1e-12)


def test_gradient_of_layer_norm_in_the_loss_is_noticed() -> None:
    """A loss with gradients has third derivatives, and those of a layer norm are not known."""
    x = torch.randn(3, 4).requires_grad_()
    with EfficientOperations() as operations:
        y = F.layer_norm(x * 1.0, [4])
        assert not operations.loss_differentiates
        torch.autograd.grad(y.square().sum(), x, create_graph=True)
    assert operations.loss_differentiates


@pytest.mark.parametrize("name", TRAINED)
def test_parameters_are_used_once(name: str) -> None:
    """A layer whose parameters seem to be used twice would not count as linear in them."""
    shape, weights, function = TRAINED[name]
    weights = [w.detach().requires_grad_() for w in weights]
    x = torch.randn(shape, dtype=torch.float64)
    with EfficientOperations():
        loss = (function(x, *weights) if "relu" not in name else torch.relu(x * weights[0])).sum()
    assert used_once(loss, weights) == set(range(len(weights)))


class Smooth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.silu(self.second(torch.tanh(self.first(x)))))


def gradient_penalty(model: Any, x: Tensor) -> Tensor:
    """Takes a gradient itself: H then contains third derivatives of the activations."""
    x = x.clone().requires_grad_()
    y = model(x)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return F.mse_loss(y, torch.zeros_like(y)) + slope.square().mean()


def transformed(model: Any, x: Tensor) -> Tensor:
    return torch.func.vmap(lambda row: torch.tanh(row).square().sum())(model(x)).mean()


def forward_mode(model: Any, x: Tensor) -> Tensor:
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        return torch.autograd.forward_ad.unpack_dual(model(dual)).tangent.square().mean()


@pytest.mark.parametrize("loss", [gradient_penalty, transformed, forward_mode])
def test_losses_with_gradients_or_transforms_of_their_own(loss: Callable[[Any, Tensor], Tensor]) -> None:
    """Against torch's own Hessian of a network that is written out with explicit perturbations."""
    torch.manual_seed(0)
    model = Smooth().double()
    x = torch.randn(4, 3, dtype=torch.float64)
    result = curvmon.exact(model, x, loss=loss, nodes=["first", "second"])

    def perturbed(e: Tensor) -> Tensor:
        def forward(x: Tensor) -> Tensor:
            h = torch.tanh(model.first(x) + e[:5])
            return model.head(F.silu(model.second(h) + e[5:]))

        return loss(forward, x)

    truth = torch.autograd.functional.hessian(perturbed, torch.zeros(10, dtype=torch.float64))
    blocks = torch.cat([torch.cat([result.blocks[v, w] for w in result.nodes], 1) for v in result.nodes])
    torch.testing.assert_close(blocks, truth, rtol=1e-9, atol=1e-12)


def test_product_has_no_gradient_wrt_weights() -> None:
    """Two convolutions per layer and product, W u and W^T g; torch has a third, w.r.t. the weights."""
    counts = []
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.SiLU(), nn.Conv2d(4, 4, 3), nn.SiLU(), nn.Flatten(), nn.Linear(64, 2))
    batch = torch.randn(2, 3, 8, 8), torch.randn(2, 2)
    options: dict[str, Any] = {"nodes": ["0"], "output": None, "batch_dim": 0, "dtype": None}
    for efficient in (True, False):
        with open_session(
            model, batch, loss=lambda m, b: F.mse_loss(m(b[0]), b[1]), efficient=efficient, **options
        ) as session:
            z = torch.randn(session.operator.templates[0].numel(), 1)
            with Convolutions() as counter:
                session.operator.remainders_of({0: z})
            counts.append(counter.count)
    assert counts == [2, 3]


class Convolutions(torch.utils._python_dispatch.TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += "convolution" in func.name()
        return func(*args, **(kwargs or {}))


def test_efficient_operations_are_not_reported_as_custom_functions() -> None:
    """Efficient operations are autograd functions too, but their second derivatives need no check."""
    result = curvmon.measure(Smooth(), torch.randn(4, 3), loss=lambda m, x: m(x).square().mean(), output="")
    assert not any("custom autograd" in note for note in result.notes)


def test_hooks_on_activations() -> None:
    """They need a tensor that requires gradients, already in the pass that finds the layers."""

    class Hooked(Smooth):
        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.first(x))
            h.register_hook(lambda gradient: None)
            return self.head(F.silu(self.second(h)))

    torch.manual_seed(0)
    plain, hooked = Smooth(), Hooked()
    hooked.load_state_dict(plain.state_dict())
    x = torch.randn(4, 3)
    one, other = (curvmon.exact(m, x, loss=lambda m, x: m(x).square().mean(), output="") for m in (plain, hooked))
    torch.testing.assert_close(one.resonance, other.resonance)

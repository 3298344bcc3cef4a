"""The cross-entropy that is computed in parts has the values and derivatives of torch's own."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvmon.operators
from curvmon.graph import cross_entropy as module
from curvmon.graph.autograd import differentiate
from curvmon.graph.efficient_operations import EfficientOperations, is_efficient_operation
from tests.helpers.live_tensors import live_tensors

Loss = Callable[[Tensor], Tensor]
generator = torch.Generator().manual_seed(0)
CLASSES = 6
LABELS = torch.randint(CLASSES, (5,), generator=generator)
PIXELS = torch.randint(CLASSES, (2, 3, 4), generator=generator)
SOFT = torch.rand(5, CLASSES, dtype=torch.float64, generator=generator)
SOFT_PIXELS = torch.rand(2, CLASSES, 3, 4, dtype=torch.float64, generator=generator)
WEIGHT = torch.rand(CLASSES, dtype=torch.float64, generator=generator)
WEIGHT[1] = 0
IGNORED = LABELS.clone()
IGNORED[:2] = -100
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "weight": {"weight": WEIGHT},
    "smoothing": {"label_smoothing": 0.1},
    "weight, smoothing": {"weight": WEIGHT, "label_smoothing": 0.3},
    "weight, smoothing, none": {"weight": WEIGHT, "label_smoothing": 0.3, "reduction": "none"},
}
TARGETS = {
    "labels": (LABELS, (5, CLASSES)),
    "pixels": (PIXELS, (2, CLASSES, 3, 4)),
    "one sample": (LABELS[0], (CLASSES,)),
    "probabilities": (SOFT, (5, CLASSES)),
    "probabilities of pixels": (SOFT_PIXELS, (2, CLASSES, 3, 4)),
    "probabilities of one sample": (SOFT[0], (CLASSES,)),
}
CASES: dict[str, tuple[Loss, tuple[int, ...]]] = {
    f"{name}, {kind}": (lambda x, t=target, o=options: F.cross_entropy(x, t, **o), shape)  # type: ignore[misc]
    for name, options in OPTIONS.items()
    for kind, (target, shape) in TARGETS.items()
} | {
    f"ignored, {name}": (lambda x, o=options: F.cross_entropy(x, IGNORED, **o), (5, CLASSES))  # type: ignore[misc]
    for name, options in OPTIONS.items()
}
CASES |= {
    "another label ignored": (lambda x: F.cross_entropy(x, LABELS, ignore_index=int(LABELS[0])), (5, CLASSES)),
    "all ignored": (lambda x: F.cross_entropy(x, IGNORED.new_full((5,), -100), reduction="sum"), (5, CLASSES)),
    "by position": (lambda x: F.cross_entropy(x, IGNORED, WEIGHT, None, -100, None, "sum", 0.1), (5, CLASSES)),
    "module": (lambda x: nn.CrossEntropyLoss(WEIGHT, label_smoothing=0.1)(x, LABELS), (5, CLASSES)),
}
"""the loss of logits, and their shape"""


@pytest.fixture(params=["at once", "in parts"])
def parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "in parts":
        monkeypatch.setattr(module, "PART_ON_CPU", 2 * CLASSES)


def derivatives(loss: Loss, shape: tuple[int, ...], batched: bool = False) -> list[Tensor]:
    """The loss, its gradient c for a gradient g, and three products with the derivatives of c w.r.t. x and g."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    x = (3 * random(*shape)).requires_grad_()
    value = loss(x * 1.0)  # not a leaf, as after a layer
    g = random(*value.shape).requires_grad_()
    (c,) = torch.autograd.grad(value, x, g, create_graph=True)
    u = random(3, *shape)
    if batched:
        images = differentiate([c], [x, g], [u], batched=True)
    else:
        each = [torch.autograd.grad(c, [x, g], v, retain_graph=True, materialize_grads=True) for v in u]
        images = [torch.stack(image) for image in zip(*each)]
    return [value, c, *(image for image in images if image is not None)]


def efficient(loss: Loss) -> tuple[Loss, list[bool]]:
    """The loss with efficient operations, and a list of whether they were used."""
    used: list[bool] = []

    def run(x: Tensor) -> Tensor:
        with EfficientOperations():
            value = loss(x)
        used.append(value.grad_fn is not None and is_efficient_operation(value.grad_fn))
        return value

    return run, used


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("parts")
def test_value_and_derivatives(name: str) -> None:
    loss, shape = CASES[name]
    run, used = efficient(loss)
    truth = derivatives(loss, shape)
    torch.testing.assert_close(derivatives(run, shape), truth, rtol=1e-10, atol=1e-12)
    assert used == [True]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("parts")
def test_several_products_in_one_launch(name: str) -> None:
    """No operation runs in a loop under vmap: torch would warn."""
    loss, shape = CASES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batched = derivatives(efficient(loss)[0], shape, batched=True)
    torch.testing.assert_close(batched, derivatives(loss, shape), rtol=1e-10, atol=1e-12)


def test_single_precision() -> None:
    x = 10 * torch.randn(40, 1000, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(40)
    values, gradients = [], []
    for run in (lambda x: F.cross_entropy(x, labels), efficient(lambda x: F.cross_entropy(x, labels))[0]):
        at = x.clone().requires_grad_()
        values.append(run(at * 1.0))
        gradients.append(torch.autograd.grad(values[-1], at)[0])
    assert values[0] == values[1]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize(
    "loss",
    [
        lambda x: F.cross_entropy(x, LABELS, size_average=False),
        lambda x: F.cross_entropy(x, SOFT.clone().requires_grad_()),
        lambda x: F.cross_entropy(x.float(), LABELS.to(torch.uint8)),
        lambda x: F.cross_entropy(x.as_subclass(Logits), LABELS),
        lambda x: F.cross_entropy(x.bfloat16(), LABELS),
    ],
    ids=["size_average", "learned targets", "bytes as labels", "subclass", "low precision"],
)
@pytest.mark.filterwarnings("ignore:size_average")
def test_unsupported_calls_are_not_replaced(loss: Loss) -> None:
    x = torch.randn(5, CLASSES, dtype=torch.float64).requires_grad_()
    run, used = efficient(loss)
    torch.testing.assert_close(run(x * 1.0), loss(x * 1.0))
    assert used == [False]


class Logits(Tensor):
    pass


def test_errors_are_those_of_torch() -> None:
    x = torch.randn(5, CLASSES).requires_grad_()
    for wrong in (LABELS[:3], LABELS + CLASSES, torch.rand(5)):
        with pytest.raises(Exception) as plain:
            F.cross_entropy(x, wrong)
        with EfficientOperations(), pytest.raises(type(plain.value), match="^" + str(plain.value)[:20]):
            F.cross_entropy(x, wrong)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


def learned_scale(model: Any, x: Tensor) -> Tensor:
    """The gradient w.r.t. the cross-entropy has a gradient itself."""
    scale = model.second(torch.tanh(model.first(x))).square().mean()
    return torch.exp(-scale) * F.cross_entropy(model(x), LABELS) + scale


def focal(model: Any, x: Tensor) -> Tensor:
    """The gradient w.r.t. the cross-entropy depends on it."""
    each = F.cross_entropy(model(x), LABELS, reduction="none")
    return ((1 - torch.exp(-each)).square() * each).mean()


def changed_afterwards(model: Any, x: Tensor) -> Tensor:
    """As by a metric of the training step; torch needs the log-softmax alone for the derivatives."""
    logits = model(x)
    loss = F.cross_entropy(logits, LABELS)
    with torch.no_grad():
        logits.clamp_(0, 1)
    return loss


def gradient_penalty(model: Any, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    loss = F.cross_entropy(model(x), LABELS)
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + slope.square().mean()


def twice(model: Any, x: Tensor) -> Tensor:
    logits = model(x)
    return F.cross_entropy(logits, LABELS) + 0.1 * F.cross_entropy(logits / 2, SOFT)


@pytest.mark.parametrize("loss", [learned_scale, focal, changed_afterwards, gradient_penalty, twice])
@pytest.mark.usefixtures("parts")
def test_losses_around_it(loss: Callable[[Any, Tensor], Tensor]) -> None:
    """Against torch's own Hessian w.r.t. the parameters."""
    torch.manual_seed(0)
    model = Classifier().double()
    x = torch.randn(5, 3, dtype=torch.float64)
    names, values = zip(*model.named_parameters())
    flat = torch.cat([value.detach().flatten() for value in values])

    def of_parameters(theta: Tensor) -> Tensor:
        pieces = torch.split(theta, [value.numel() for value in values])
        own = {name: piece.reshape(value.shape) for name, piece, value in zip(names, pieces, values)}
        return torch.func.functional_call(_WithLoss(model, loss), {f"model.{name}": p for name, p in own.items()}, (x,))

    truth = torch.autograd.functional.hessian(of_parameters, flat)
    with curvmon.operators.hessian(model, x, loss=loss) as operator:
        dense = operator.matmat(torch.eye(len(flat), dtype=torch.float64))
    torch.testing.assert_close(dense, truth, rtol=1e-9, atol=1e-12)


class _WithLoss(nn.Module):
    def __init__(self, model: nn.Module, loss: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.model, x)


def test_two_tensors_of_the_size_of_the_logits() -> None:
    """The gradient and a product with its derivative; torch holds seven."""
    logits = torch.randn(256, 8192).requires_grad_()
    labels = torch.randint(8192, (256,))

    def second_derivative(loss: Loss) -> None:
        (c,) = torch.autograd.grad(loss(logits), logits, create_graph=True)
        torch.autograd.grad(c, logits, logits)

    size = logits.numel() * logits.element_size()
    plain, parts = (
        live_tensors(lambda run=run: second_derivative(run), size).most  # type: ignore[misc]
        for run in (lambda x: F.cross_entropy(x, labels), efficient(lambda x: F.cross_entropy(x, labels))[0])
    )
    assert (plain, parts) == (7, 2)

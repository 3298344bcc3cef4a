"""Wrong input gets an error that says what to do; undefined entries get a reason."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvmon

Batch = tuple[Tensor, Tensor]
both = pytest.mark.parametrize("run", [curvmon.measure, curvmon.exact])


@pytest.fixture
def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))


@pytest.fixture
def batch() -> Batch:
    g = torch.Generator().manual_seed(0)
    return torch.randn(8, 5, generator=g), torch.randint(3, (8,), generator=g)


def ce(m: Any, b: Batch) -> Tensor:
    return F.cross_entropy(m(b[0]), b[1])


def backward_inside(m: Any, b: Batch) -> Tensor:
    loss = ce(m, b)
    loss.backward()
    return loss


@both
@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="none"), r"shape \(8,\): reduce it"),
        (lambda m, b: ce(m, b).item(), r"not float: remove .item\(\)"),
        (lambda m, b: {"loss": ce(m, b)}, "not dict: return its loss entry"),
        (lambda m, b: None, "not NoneType: did you forget the return?"),
        (lambda m, b: F.cross_entropy(torch.randn(8, 3), b[1]), "did not call the model that was passed"),
        (backward_inside, "must not call backward"),
        (lambda m, b: m(b[0]).argmax().sum(), "must return a floating tensor"),
        (lambda m, b: ce(m, b).detach(), "does not depend on any of the nodes"),
        (lambda m, b: m(b[0]).sum() * 0 + float("nan"), "the loss is nan although"),
        (lambda m, b: ce(m, b) / 0, "the loss is inf"),
    ],
)
def test_unusable_loss(run: Any, loss: Any, message: str, model: nn.Module, batch: Batch) -> None:
    with pytest.raises(curvmon.LossError, match=message):
        run(model, batch, loss=loss, nodes=["0", "2"])
    with pytest.raises(curvmon.LossError):
        run(model, batch, loss=loss)


def test_loss_of_one_element_is_a_scalar(model: nn.Module, batch: Batch) -> None:
    measured = curvmon.exact(model, batch, loss=lambda m, b: ce(m, b).reshape(1, 1), nodes=["0"])
    torch.testing.assert_close(measured.resonance, curvmon.exact(model, batch, loss=ce, nodes=["0"]).resonance)


@both
def test_nan_in_the_input_is_named(run: Any, model: nn.Module, batch: Batch) -> None:
    x = batch[0].clone()
    x[3, 1] = float("nan")
    with pytest.raises(curvmon.LossError, match=r"batch\['image'\] contains NaN"):
        run(model, {"image": x, "label": batch[1]}, loss=lambda m, b: F.cross_entropy(m(b["image"]), b["label"]))


def test_nan_in_a_parameter_is_named(model: nn.Sequential, batch: Batch) -> None:
    with torch.no_grad():
        model[2].weight[0, 0] = float("nan")
    with pytest.raises(curvmon.LossError, match=r"parameter '2.weight' is not finite"):
        curvmon.measure(model, batch, loss=ce)


def test_infinite_masks_are_allowed(model: nn.Module, batch: Batch) -> None:
    mask = torch.zeros(8, 3)
    mask[:, 2] = -float("inf")
    labels = batch[1].clamp_max(1)
    measured = curvmon.measure(model, (batch[0], labels, mask), loss=lambda m, b: F.cross_entropy(m(b[0]) + b[2], b[1]))
    assert torch.isfinite(measured.resonance).all()


def test_non_finite_second_derivatives(model: nn.Module, batch: Batch) -> None:
    def loss(m: Any, b: Batch) -> Tensor:
        return (m(b[0]) - m(b[0]).detach()).pow(2).sum(-1).add(0.0).pow(0.75).sum()

    with pytest.raises(curvmon.NonFiniteError, match="product is not finite"):
        curvmon.measure(model, batch, loss=loss, nodes=["2.call1"])


@both
def test_empty_batch(run: Any, model: nn.Module) -> None:
    with pytest.raises(curvmon.InputError, match="the batch is empty"):
        run(model, (torch.zeros(0, 5), torch.zeros(0, dtype=torch.long)), loss=ce)


@both
def test_nonexistent_batch_dimension(run: Any, model: nn.Module, batch: Batch) -> None:
    with pytest.raises(curvmon.InputError, match=r"batch_dim=3 does not exist: batch\[0\] has shape \(8, 5\)"):
        run(model, batch, loss=ce, batch_dim=3)
    with pytest.raises(curvmon.InputError, match=r"batch_dim=2 does not exist at 0, which has shape \(8, 6\)"):
        run(
            model,
            (batch[0].unsqueeze(-1), batch[1]),
            loss=lambda m, b: ce(m, (b[0][..., 0], b[1])),
            nodes=["0"],
            batch_dim=2,
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nodes": []}, "nodes is empty"),
        ({"nodes": [nn.Linear(1, 1)]}, "nodes must be names of submodules or glob patterns, not Linear"),
        ({"nodes": nn.Linear(1, 1)}, "nodes must be names"),
        ({"nodes": [None]}, "nodes must be names"),
        ({"nodes": 5}, "nodes must be names"),
        ({"output": nn.Linear(1, 1)}, "output must be the name of a module, not Linear"),
        ({"output": "nowhere"}, "no module 'nowhere'"),
        ({"batch_dim": None}, "batch_dim must be an integer"),
        ({"batch_dim": 1.0}, "batch_dim must be an integer"),
        ({"rtol": "x"}, "rtol must be positive"),
        ({"rtol": -0.1}, "rtol must be positive"),
        ({"max_hvps": float("inf")}, "max_hvps must be an integer"),
        ({"max_hvps": 3}, "max_hvps=3 is too few: at least 12"),
        ({"seed": None}, "seed must be an integer"),
        ({"seed": 2**70}, "seed must be in"),
        ({"loss": 3}, "loss must be a callable"),
        ({"loss": nn.CrossEntropyLoss()}, "loss takes the model and the batch, not predictions and targets"),
        ({"loss": F.cross_entropy}, "loss takes the model and the batch"),
        ({"loss": lambda out, target: F.cross_entropy(out, target)}, "loss takes the model and the batch"),
    ],
)
def test_invalid_arguments(options: dict[str, Any], message: str, model: nn.Module, batch: Batch) -> None:
    with pytest.raises(curvmon.InputError, match=message):
        curvmon.measure(model, batch, **{"loss": ce, **options})


def test_model_that_is_no_module(batch: Batch) -> None:
    with pytest.raises(curvmon.InputError, match=r"model must be a torch.nn.Module, not function"):
        curvmon.measure(ce, batch, loss=ce)  # type: ignore[arg-type]


@pytest.mark.parametrize("layer", [nn.LazyLinear(6), nn.LazyBatchNorm1d(affine=False)])
def test_lazy_modules_must_have_run(layer: nn.Module, batch: Batch) -> None:
    model = nn.Sequential(layer, nn.Flatten())
    with pytest.raises(curvmon.InputError, match="run it once before measuring"):
        curvmon.measure(model, batch, loss=ce)


# Operations that cannot be differentiated twice


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0].exp()


@pytest.mark.parametrize("run", [partial(curvmon.measure, derivative="double"), curvmon.exact])
@pytest.mark.parametrize("residual", [False, True])
def test_function_differentiable_once(run: Any, residual: bool, model: nn.Sequential, batch: Batch) -> None:
    """autograd would call its second derivative zero."""

    def loss(m: Any, b: Batch) -> Tensor:
        h = m[0](b[0])
        return F.cross_entropy(m[4](Once.apply(h) + (h if residual else 0)), b[1])

    with pytest.raises(
        curvmon.DoubleBackwardError, match=r"Once between the nodes and the loss.*drop @once_differentiable"
    ):
        run(model, batch, loss=loss, nodes=["0"])
    after = run(model, batch, loss=loss, nodes=["4"])
    assert after.resonance.item() > 0


def test_ctc_has_no_double_backward(model: nn.Module) -> None:
    def loss(m: Any, b: Tensor) -> Tensor:
        log_probs = m(b).log_softmax(-1).unsqueeze(1)
        return F.ctc_loss(log_probs, torch.tensor([[1, 2]]), torch.tensor([8]), torch.tensor([2]))

    with pytest.raises(curvmon.DoubleBackwardError, match=r"ctc_loss.*cannot be differentiated twice.*`loss=`"):
        curvmon.measure(model, torch.randn(8, 5), loss=loss, nodes=["0"], derivative="double")


def test_embedding_bag_weights_after_a_node() -> None:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights, self.bag = nn.Linear(3, 3), nn.EmbeddingBag(10, 4, mode="sum")

        def forward(self, x: Tensor) -> Tensor:
            return self.bag(torch.arange(3).expand(len(x), 3), per_sample_weights=self.weights(x))

    with pytest.raises(curvmon.DoubleBackwardError, match=r"embedding_bag.*use nn.Embedding"):
        curvmon.exact(
            Bag(), torch.randn(8, 3), loss=lambda m, b: F.mse_loss(m(b), torch.zeros(8, 4)), nodes=["weights"]
        )


def test_tensors_that_cannot_be_converted(model: nn.Module, batch: Batch) -> None:
    weight = torch.ones(3)
    with pytest.raises(curvmon.InputError, match=r"class weights, say\) into the batch or a buffer"):
        curvmon.exact(model, batch, loss=lambda m, b: F.cross_entropy(m(b[0]), b[1], weight=weight))


def test_exact_refuses_blocks_that_do_not_fit() -> None:
    model = nn.Sequential(nn.Linear(4, 10_000), nn.Tanh(), nn.Linear(10_000, 10_000), nn.Tanh())
    with pytest.raises(curvmon.InputError, match=r"GiB; choose smaller nodes, or use curvmon.measure"):
        curvmon.exact(model, torch.ones(2, 4), loss=lambda m, b: F.mse_loss(m(b), torch.zeros(2, 10_000)))


# Entries that are not defined


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(5, 20), nn.Linear(5, 20)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(x).tanh(), self.right(x).tanh()


def separate(m: Any, b: Batch) -> Tensor:
    left, right = m(b[0])
    return F.mse_loss(left, torch.ones_like(left)) + F.mse_loss(right, torch.ones_like(right))


@both
def test_zero_blocks(run: Any, batch: Batch) -> None:
    measured = run(TwoTowers(), batch, loss=separate, nodes=["left", "right"])
    assert measured.resonance[0, 1] == measured.resonance[1, 0] == 0
    assert measured.stderr["resonance"][0, 1] == 0
    for metric in ("coupling", "stable_rank", "gn_gap"):
        assert torch.isnan(getattr(measured, metric)[0, 1])
        assert torch.isfinite(getattr(measured, metric).diagonal()).all()
    assert any(note.startswith("left--right: zero") for note in measured.notes)


@both
def test_loss_linear_in_the_nodes(run: Any, batch: Batch) -> None:
    measured = run(nn.Sequential(nn.Linear(5, 20)), batch, loss=lambda m, b: m(b[0]).sum(), nodes=["0"])
    assert measured.resonance.item() == 0 and torch.isnan(measured.coupling).all()


@both
def test_coupling_with_zero_diagonal_blocks_is_infinite(run: Any, batch: Batch) -> None:
    def loss(m: Any, b: Batch) -> Tensor:
        return (m.left(b[0]) * m.right(b[0])).mean()

    measured = run(TwoTowers(), batch, loss=loss, nodes=["left", "right"])
    assert measured.coupling[0, 1] == float("inf") and measured.resonance[0, 1] > 0
    assert any("C is infinite" in note for note in measured.notes)


@both
def test_curvature_without_gauss_newton_part(run: Any, batch: Batch) -> None:
    """l1_loss has no curvature at its input: all of H is T."""

    def loss(m: Any, b: Batch) -> Tensor:
        out = m.left(b[0]).tanh()
        return F.l1_loss(out, 2 * torch.ones_like(out))

    measured = run(TwoTowers(), batch, loss=loss, nodes=["left"])
    assert measured.resonance.item() > 0 and measured.gn_gap.item() == float("inf")
    assert any("the gap is infinite" in note for note in measured.notes)


def test_sparse_coupling_on_a_small_budget_does_not_crash(batch: Batch) -> None:
    """Directions that the basis misses altogether: a spectral norm comes from the probes then."""

    def loss(m: Any, b: Batch) -> Tensor:
        left, right = m.left(b[0]), m.right(b[0])
        return (5 * left[:, 0] ** 2 + 5 * right[:, 0] ** 2 + 0.1 * left[:, 10] * right[:, 15]).mean()

    for seed in range(10):
        measured = curvmon.measure(TwoTowers(), batch, loss=loss, nodes=["left", "right"], max_hvps=10, seed=seed)
        assert measured.hvps <= 10


def test_default_device_is_irrelevant(model: nn.Module, batch: Batch) -> None:
    plain = curvmon.measure(model, batch, loss=ce)
    with torch.device("meta"):
        assert torch.equal(curvmon.measure(model, batch, loss=ce).resonance, plain.resonance)

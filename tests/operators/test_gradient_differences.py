"""Products from differences of gradients against those from second derivatives, and where they are refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import curvmon
from curvmon.errors import DifferencesError, InputError
from curvmon.monitor.pairs_and_spectrum import ACCURACY, measure_spectrum
from curvmon.monitor.settings import Settings
from curvmon.operators import gradient_differences
from curvmon.operators.gradient_differences import SAME, TOLERATED, DifferenceOperator
from curvmon.operators.parameter_hessian import open_parameters
from curvmon.spectrum.findings import Findings
from tests.helpers.kernel_counts import KernelCounts
from tests.helpers.small_classifiers import BATCH, MODELS, attention, convolutions, loss
from tests.helpers.spectrum_cases import dense_hessian


def vectors(size: int, gradient: Tensor) -> Tensor:
    random = torch.randn(size, 2, generator=torch.Generator().manual_seed(1))
    return torch.cat([gradient.unsqueeze(1), random, torch.zeros(size, 1)], dim=1)


@pytest.mark.parametrize("scale", [1.0, 1e-9, 1e9])
@pytest.mark.parametrize("name", MODELS)
def test_agrees_with_second_derivatives(name: str, scale: float) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().eval()

    def scaled(model: nn.Module, batch: Any) -> Tensor:
        return scale * loss(model, batch)

    with open_parameters(model, [BATCH], loss=scaled) as operator:
        z = vectors(operator.size, operator.gradient)
        hessian, ggn = operator.matmat(z), operator.ggn(z)
    before = copy.deepcopy(model.state_dict())
    with open_parameters(model, [BATCH], loss=scaled, kind=DifferenceOperator) as operator:
        assert isinstance(operator, DifferenceOperator)
        found = operator.matmat(z)
        found_ggn = operator.ggn(z)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values()))
    norm = hessian[:, 0].norm() / z[:, 0].norm()
    assert operator.relative_error < TOLERATED
    for i in range(3):
        assert (found - hessian)[:, i].norm() <= SAME * norm * z[:, i].norm()
        assert (found_ggn - ggn)[:, i].norm() <= SAME * norm * z[:, i].norm()
    assert not found[:, 3].any()


def test_several_batches_are_weighted() -> None:
    torch.manual_seed(0)
    model = convolutions().eval()
    parts = [tuple(t[:4] for t in BATCH), tuple(t[4:] for t in BATCH)]
    with open_parameters(model, [BATCH], loss=loss, kind=DifferenceOperator) as whole:
        z = vectors(whole.size, whole.gradient)
        together, ggn = whole.matmat(z), whole.ggn(z)
    with open_parameters(model, parts, loss=loss, kind=DifferenceOperator) as operator:
        torch.testing.assert_close(operator.matmat(z), together, rtol=1e-2, atol=1e-2 * together.abs().max().item())
        torch.testing.assert_close(operator.ggn(z), ggn, rtol=1e-2, atol=1e-2 * ggn.abs().max().item())


def test_a_product_is_one_pass() -> None:
    torch.manual_seed(0)
    model = convolutions().eval()
    parameters = list(model.parameters())
    with KernelCounts() as one:
        torch.autograd.grad(loss(model, BATCH), parameters)
    with open_parameters(model, [BATCH], loss=loss, kind=DifferenceOperator) as operator:
        operator.hessian(operator.gradient)
        with KernelCounts() as counts:
            operator.hessian(operator.gradient)
    # a few more for the vectors, and copies of the batch
    assert counts.totals[0] <= one.totals[0] + 20
    assert counts.totals[1] <= 1, "the check for finite values alone may read a number"


class Cached(nn.Module):
    """Computes a function of its weight once, and keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.kept = nn.Linear(144, 3), {}

    def forward(self, x: Tensor) -> Tensor:
        value = self.kept.setdefault("tanh", torch.tanh(self.linear.weight))
        return F.linear(x.flatten(1), value + 0.1 * self.linear.weight**2)


class Kinked(nn.Module):
    """Kinks of its own making, close to each other, for which no piece is recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(144, 64), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x.flatten(1))
        return self.second(hidden * torch.sin(3000 * hidden.detach()).sign())


class Counting(nn.Module):
    """Another function in every pass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(144, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x.flatten(1)) ** (1 + self.calls % 3)


class Branching(nn.Module):
    """Calls another activation in every second pass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(144, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.linear(x.flatten(1))
        return F.relu(x) if self.calls % 2 else F.relu(F.relu(x))


@pytest.mark.parametrize("kind", [Cached, Kinked, Counting, Branching])
def test_a_model_that_is_no_smooth_function_is_refused(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = kind().eval()
    before = copy.deepcopy(model.state_dict())
    with (
        pytest.raises(DifferencesError),
        open_parameters(model, [BATCH], loss=loss, kind=DifferenceOperator) as operator,
    ):
        operator.hessian(operator.gradient)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values()))


def test_no_curvature_is_refused() -> None:
    model = nn.Linear(144, 1)
    with (
        pytest.raises(DifferencesError, match="error of"),
        open_parameters(
            model, [BATCH], loss=lambda m, b: m(b[0].flatten(1)).mean(), kind=DifferenceOperator
        ) as operator,
    ):
        operator.hessian(operator.gradient)


class Maxout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.slope = nn.Linear(144, 16), nn.Linear(144, 16), nn.PReLU()
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return self.head(self.slope(torch.maximum(self.one(x), self.two(x))))


class WrongTanh(torch.autograd.Function):
    """Keeps y where autograd does not see it: the second derivative misses a part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.y = x.tanh()
        return ctx.y.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * (1 - ctx.y**2)


class Custom(nn.Module):
    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.wrong = wrong
        self.first, self.second = nn.Linear(144, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x.flatten(1))
        return self.second(WrongTanh.apply(hidden) if self.wrong else hidden.tanh())


def test_kinks_of_two_tensors_and_trained_slopes() -> None:
    torch.manual_seed(0)
    model = Maxout()
    with open_parameters(model, [BATCH], loss=loss) as operator:
        z = vectors(operator.size, operator.gradient)[:, :1]
        expected = operator.matmat(z)
    with open_parameters(model, [BATCH], loss=loss, kind=DifferenceOperator) as operator:
        assert (operator.matmat(z) - expected).norm() <= SAME * expected.norm()


def test_a_wrong_second_derivative_of_the_user_does_not_count() -> None:
    """Differences need the first derivative alone; the other one is reported."""
    torch.manual_seed(0)
    right, wrong = Custom(False), Custom(True)
    wrong.load_state_dict(right.state_dict())
    with open_parameters(right, [BATCH], loss=loss) as operator:
        z = vectors(operator.size, operator.gradient)[:, :1]
        expected = operator.matmat(z)
    with open_parameters(wrong, [BATCH], loss=loss, kind=DifferenceOperator) as operator:
        assert isinstance(operator, DifferenceOperator)
        assert (operator.matmat(z) - expected).norm() <= SAME * expected.norm()
        assert operator.verdict is not None and operator.verdict.startswith("suspect: ")
        assert "WrongTanh" in operator.verdict
        found, _ = measure_spectrum(Settings(), wrong, [BATCH], loss)
    assert any(note.startswith("suspect: ") for note in found.notes)


def test_a_first_product_counts_its_gradients_and_the_comparison() -> None:
    torch.manual_seed(0)
    with open_parameters(attention(), [BATCH], loss=loss, kind=DifferenceOperator) as operator:
        operator.hessian(operator.gradient)
        first = operator.products
        operator.hessian(operator.gradient)
    assert 3 <= first <= 7 and operator.products == first + 1


def test_parameters_of_several_dtypes_are_refused() -> None:
    model = nn.Sequential(nn.Linear(144, 4), nn.Linear(4, 3).double())
    with (
        pytest.raises(DifferencesError, match="several dtypes"),
        open_parameters(
            model,
            [BATCH],
            loss=lambda m, b: F.cross_entropy(m[1](m[0](b[0].flatten(1)).double()), b[1]),
            kind=DifferenceOperator,
        ),
    ):
        pass


def test_a_sparse_gradient_is_an_error_that_says_what_to_do() -> None:
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Flatten(), nn.Linear(6, 3))
    batch = torch.zeros(16, 2, dtype=torch.long), BATCH[1]
    with (
        pytest.raises(InputError, match="set sparse=False"),
        open_parameters(model, [batch], loss=loss, kind=DifferenceOperator),
    ):
        pass


def test_the_monitor_falls_back_to_second_derivatives() -> None:
    """At once where differences can never work; after the second failure elsewhere."""
    torch.manual_seed(0)
    model, findings = Cached(), Findings()
    for _ in range(2):
        found, _ = measure_spectrum(Settings(), model, [BATCH], loss, findings=findings)
        assert any(note.startswith("HVPs from second derivatives: ") for note in found.notes)
        assert found.eigenvalues.isfinite().all()
    assert findings.no_differences is not None
    wanted = curvmon.spectrum(model, BATCH, loss=loss)
    assert ((found.eigenvalues - wanted.eigenvalues).abs() <= found.residuals + wanted.residuals + 1e-6).all()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", MODELS)
def test_residuals_include_the_error_of_differences(name: str, seed: int) -> None:
    torch.manual_seed(seed)
    model, findings = MODELS[name]().eval(), Findings()
    truth = torch.linalg.eigvalsh(dense_hessian(model, BATCH, lambda m, b: F.cross_entropy(m(b[0]), b[1])))
    for _ in range(2):
        found, _ = measure_spectrum(Settings(), model, [BATCH], loss, findings=findings)
        values = torch.tensor([*found.eigenvalues.tolist(), found.smallest])
        nearest = (values.unsqueeze(1) - truth).abs().min(1).values  # one may be missing
        bars = torch.tensor([*found.residuals.tolist(), found.smallest_residual])
        assert (nearest <= bars + 1e-4 * truth.abs().max()).all()
        tolerances = ACCURACY.tolerances(values.double(), 5)
        assert torch.equal(found.converged, (bars <= tolerances)[:5])


class OwnTarget(nn.Module):
    """Its own output is the target, as a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.weight = nn.Sequential(nn.Flatten(), nn.Linear(144, 4), nn.Tanh(), nn.Linear(4, 3)), 0.0

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, batch: Any, how: str) -> Tensor:
        out = self(batch[0])
        if how == "detach":
            target = self(batch[0]).detach()
        else:
            with torch.no_grad():
                target = self(batch[0])
        return F.cross_entropy(out, batch[1]) + self.weight * F.mse_loss(out, target)


@pytest.mark.parametrize("how", ["detach", "no_grad"])
def test_a_target_that_becomes_part_of_the_loss_later_is_noticed(how: str) -> None:
    """It is a constant for second derivatives, and moves with the parameters for differences."""
    torch.manual_seed(0)
    model, findings = OwnTarget(), Findings()

    def own(model: Any, batch: Any) -> Tensor:
        return model.loss(batch, how)

    for model.weight in (0.0, 1.0):
        found, _ = measure_spectrum(Settings(), model, [BATCH], own, findings=findings)
        wanted = curvmon.spectrum(model, BATCH, loss=own)
        assert abs(found.eigenvalues[0] - wanted.eigenvalues[0]) <= found.residuals[0] + wanted.residuals[0]
    assert any("differ by" in note for note in found.notes)


@pytest.mark.parametrize("name", MODELS)
def test_second_derivatives_are_compared_with_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at every measurement: a comparison takes three to four passes."""
    compared = 0
    compare = DifferenceOperator._compared_with_second_derivatives

    def counted(self: DifferenceOperator, unit: Tensor, image: Tensor) -> str:
        nonlocal compared
        compared += 1
        return compare(self, unit, image)

    monkeypatch.setattr(DifferenceOperator, "_compared_with_second_derivatives", counted)
    torch.manual_seed(0)
    model, findings = MODELS[name](), Findings()
    for _ in range(3):
        measure_spectrum(Settings(), model, [BATCH], loss, findings=findings)
    assert compared == 1


def test_gradients_in_the_loss_are_not_lost() -> None:
    """GGN's J z keeps no graph for a backward pass, but the loss needs one."""

    class Oscillator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.k, self.w, self.a = (nn.Parameter(torch.tensor([v])) for v in (0.3, 2.0, 1.2))

        def forward(self, t: Tensor) -> Tensor:
            return self.a * torch.exp(-self.k * t) * torch.cos(self.w * t)

    def physics(model: nn.Module, batch: Any) -> Tensor:
        t = batch[0].clone().requires_grad_()
        u = model(t)
        (v,) = torch.autograd.grad(u.sum(), t, create_graph=True)
        return F.mse_loss(u, batch[1]) + F.mse_loss(v, batch[2])

    t = torch.linspace(0, 3, 32).reshape(-1, 1)
    batch = t, torch.cos(2.2 * t), -2.2 * torch.sin(2.2 * t)
    found, _ = measure_spectrum(Settings(eigenvalues=2), Oscillator(), [batch], physics)
    wanted = curvmon.spectrum(Oscillator(), batch, loss=physics, k=2)
    assert found.ggn_eigenvalue == pytest.approx(wanted.ggn_eigenvalue, rel=0.02)


def test_scripted_modules_keep_their_storage() -> None:
    model = torch.jit.script(nn.Sequential(nn.Flatten(), nn.Linear(144, 4), nn.Tanh(), nn.Linear(4, 3)))
    before = [(p.data_ptr(), p.stride()) for p in model.parameters()]
    found, _ = measure_spectrum(Settings(), model, [BATCH], loss)
    assert before == [(p.data_ptr(), p.stride()) for p in model.parameters()]
    assert any("scripted module" in note for note in found.notes) and found.eigenvalues.isfinite().all()


class Spectrogram(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(144, 8), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.fft.rfft(self.first(x.flatten(1))).abs())


class Positive(nn.Module):
    """Does not run with shifted weights."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(144, 3)
        nn.init.zeros_(self.linear.weight)

    def forward(self, x: Tensor) -> Tensor:
        if (self.linear.weight < 0).any():
            raise ValueError("a negative weight")
        return self.linear(x.flatten(1))


class Transposed(nn.Module):
    """A parameter that is not contiguous, of which only the transposed one can be viewed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter((0.1 * torch.randn(144, 3)).t())

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1) @ self.weight.t().view(-1).view(144, 3)


class TokensInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 8), nn.Linear(96, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.relu(self.first(x.squeeze(1)), inplace=True).flatten(1))


@pytest.mark.parametrize("kind", [Spectrogram, Positive, Transposed, TokensInPlace])
def test_whatever_works_with_second_derivatives_is_measured(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = kind()
    found, _ = measure_spectrum(Settings(), model, [BATCH], loss)
    wanted = curvmon.spectrum(model, BATCH, loss=loss)
    assert abs(found.eigenvalues[0] - wanted.eigenvalues[0]) <= found.residuals[0] + wanted.residuals[0] + 1e-6


class Sine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.saved_tensors[0].cos()


def test_a_function_that_is_differentiable_once() -> None:
    class Model(nn.Module):
        def __init__(self, custom: bool) -> None:
            super().__init__()
            self.custom, self.first, self.second = custom, nn.Linear(144, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x.flatten(1))
            return self.second(Sine.apply(hidden) if self.custom else hidden.sin())

    torch.manual_seed(0)
    model, plain = Model(True), Model(False)
    plain.load_state_dict(model.state_dict())
    found, _ = measure_spectrum(Settings(), model, [BATCH], loss)
    wanted = curvmon.spectrum(plain, BATCH, loss=loss)
    assert abs(found.eigenvalues[0] - wanted.eigenvalues[0]) <= found.residuals[0] + wanted.residuals[0]
    assert any("not compared with second derivatives" in note for note in found.notes)


def test_the_step_is_chosen_from_few() -> None:
    """The error is a ε + b / ε: from two steps to the best one."""
    a, b = 40.0, 1e-7
    tried: dict[float, float] = {}
    step: float | None = 3e-3
    while step is not None:
        tried[step] = a * step + b / step
        step = gradient_differences._next_step(tried, 3e-3)
    assert len(tried) == 3
    assert min(tried.values()) == pytest.approx(2 * (a * b) ** 0.5)
    # that of the last measurement is not good any more: the usual first one is next
    assert gradient_differences._next_step({1e-4: 1e-2}, 3e-3) == 3e-3

"""`curvmon.operators` against dense matrices: products, adjoints, counts, dtypes, and scipy on top."""

from __future__ import annotations

import copy
import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import curvmon
from curvmon.errors import InputError
from curvmon.operators import LinearOperator, between_nodes, gauss_newton, hessian
from tests.helpers import cases

Batch = tuple[Tensor, Tensor]
NODES = ["0", "2", "3"]
GRAPHS = [
    case for case in cases.CASES if case.name in ("residual MLP", "diamond, cat", "conv + BN + pool", "attention")
]


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture
def model() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 7), nn.SiLU(), nn.Linear(7, 3)).double()


@pytest.fixture
def batch() -> Batch:
    return seeded(12, 5), torch.randint(3, (12,), generator=torch.Generator().manual_seed(1))


def loss(model: Any, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def dense_parts(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """H and GGN w.r.t. the parameters, by torch's own `hessian` and `jacobian`."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    sizes = [p.numel() for p in parameters.values()]

    def output(flat: Tensor) -> Tensor:
        parts = zip(parameters.items(), flat.split(sizes))
        return functional_call(model, {name: part.view_as(p) for (name, p), part in parts}, (batch[0],))

    flat = torch.cat([p.reshape(-1) for p in parameters.values()])
    out = output(flat)
    H = torch.autograd.functional.hessian(lambda x: F.cross_entropy(output(x), batch[1]), flat)
    J = torch.autograd.functional.jacobian(output, flat).reshape(out.numel(), -1)
    S = torch.autograd.functional.hessian(lambda x: F.cross_entropy(x.view_as(out), batch[1]), out.reshape(-1))
    return H, J.T @ S @ J


def close(one: Tensor, other: Tensor) -> bool:
    return bool(torch.linalg.norm(one - other) <= 1e-10 * torch.linalg.norm(other) + 1e-16)


def check_products(operator: LinearOperator, dense: Tensor, hvps_per_column: int = 1) -> None:
    """Columns, single vectors, the transpose and the inner product <u, A z> = <A^T u, z>; then their count."""
    assert operator.shape == tuple(dense.shape) and operator.T.shape == tuple(dense.T.shape)
    rows, columns = operator.shape
    z, u = seeded(columns, 3, seed=2), seeded(rows, 2, seed=3)
    assert close(operator.matmat(z), dense @ z)
    assert close(operator.matvec(z[:, 0]), dense @ z[:, 0])
    assert close(operator.T.matmat(u), dense.T @ u)
    assert u[:, 0].dot(operator.matvec(z[:, 0])).item() == pytest.approx(
        operator.T.matvec(u[:, 0]).dot(z[:, 0]).item(), rel=1e-9, abs=1e-15
    )
    assert operator.products == operator.T.products == (3 + 1 + 2 + 2) * hvps_per_column
    assert operator.matmat(z[:, :0]).shape == (rows, 0) and operator.products == 8 * hvps_per_column


def test_hessian_and_gauss_newton_w_r_t_the_parameters(model: nn.Sequential, batch: Batch) -> None:
    dense = dense_parts(model, batch)
    for build, matrix in zip((hessian, gauss_newton), dense):
        with build(model, batch, loss=loss) as operator:
            check_products(operator, matrix)
            assert operator.T is operator


@pytest.mark.parametrize("kind", ["cross_entropy", "mse"])
@pytest.mark.parametrize("case", GRAPHS, ids=[case.name for case in GRAPHS])
def test_blocks_between_nodes_are_those_of_exact(case: cases.Case, kind: str) -> None:
    module, (x, targets) = cases.make(case)
    module, x = module.double(), x.double()
    targets = {name: t.double() if t.is_floating_point() else t for name, t in targets.items()}
    options: dict[str, Any] = {"loss": cases.user_loss(kind), "nodes": case.nodes}
    truth = curvmon.exact(module, (x, targets), **options)
    with between_nodes(module, (x, targets), **options) as blocks:
        assert blocks.nodes == truth.nodes and set(blocks.hessian) == set(truth.blocks)
        for pair, block in truth.blocks.items():
            check_products(blocks.hessian[pair], block)
            check_products(blocks.gauss_newton[pair], truth.gauss_newton[pair])
            z, size = seeded(block.shape[1], 2), torch.linalg.norm(block)
            parts = [part[pair].matmat(z) for part in (blocks.hessian, blocks.gauss_newton, blocks.tensor)]
            assert torch.linalg.norm(parts[0] - parts[1] - parts[2]) <= 1e-10 * size


def test_tensor_part_is_zero_in_a_piecewise_linear_network(model: nn.Sequential, batch: Batch) -> None:
    model[1], model[3] = nn.ReLU(), nn.LeakyReLU()
    with between_nodes(model, batch, loss=loss, nodes=["0", "2"]) as blocks:
        assert (blocks.tensor["0", "2"].matmat(torch.eye(7)) == 0).all()
        assert (blocks.hessian["0", "2"].matmat(torch.eye(7)) != 0).any()


def test_a_loss_that_partly_bypasses_the_output_still_splits(model: nn.Sequential, batch: Batch) -> None:
    def penalised(m: Any, b: Batch) -> Tensor:
        h = m[:3](b[0])
        return F.cross_entropy(m[3:](h), b[1]) + 1e-4 * h.pow(4).mean()

    options: dict[str, Any] = {"loss": penalised, "nodes": ["0", "2"]}
    truth = curvmon.exact(model, batch, **options)
    with between_nodes(model, batch, **options) as blocks:
        for pair, block in truth.blocks.items():
            check_products(blocks.hessian[pair], block)
            check_products(blocks.gauss_newton[pair], truth.gauss_newton[pair])
            check_products(blocks.tensor[pair], block - truth.gauss_newton[pair], hvps_per_column=2)


def test_every_block_counts_its_own_products(model: nn.Sequential, batch: Batch) -> None:
    with between_nodes(model, batch, loss=loss, nodes=["0", "2"]) as blocks:
        blocks.hessian["0", "2"].matmat(torch.randn(7, 4))
        blocks.hessian["0", "2"].T.matvec(torch.randn(6))
        assert blocks.hessian["0", "2"].products == 5
        assert blocks.hessian["2", "0"].products == blocks.tensor["0", "2"].products == 0


def test_a_closed_operator_refuses_products(model: nn.Sequential, batch: Batch) -> None:
    with hessian(model, batch, loss=loss) as H, gauss_newton(model, batch, loss=loss) as GGN:
        H.matvec(torch.ones(109))
    with between_nodes(model, batch, loss=loss, nodes=["0"]) as blocks:
        transposed = blocks.hessian["0", "0"].T
    parts = [part["0", "0"] for part in (blocks.hessian, blocks.gauss_newton, blocks.tensor)]
    for operator in (H, GGN, transposed, *parts):
        before = operator.products
        with pytest.raises(curvmon.InputError, match="the operator is closed"):
            operator.matvec(torch.ones(operator.shape[1]))
        with pytest.raises(curvmon.InputError, match="the operator is closed"):
            operator.matmat(torch.ones(operator.shape[1], 0))
        assert operator.products == before


@pytest.mark.parametrize(
    ("given", "dtype"),
    [(torch.float64, torch.float64), (torch.float32, torch.float32), (torch.bfloat16, torch.float32)],
)
def test_dtype_and_device_follow_the_model(model: nn.Sequential, batch: Batch, given: Any, dtype: Any) -> None:
    model, batch = model.to(given), (batch[0].to(given), batch[1])
    with hessian(model, batch, loss=loss) as operator:
        assert (operator.dtype, operator.device) == (dtype, torch.device("cpu"))
        assert operator.matvec(torch.ones(operator.shape[0], dtype=torch.float64)).dtype == dtype
    with between_nodes(model, batch, loss=loss, nodes=["0"]) as blocks:
        block = blocks.hessian["0", "0"]
        assert (block.dtype, block.device) == (dtype, torch.device("cpu"))
        assert block.matvec(torch.ones(6, dtype=torch.float64)).dtype == dtype


def test_wrong_shapes_and_names_are_refused(model: nn.Sequential, batch: Batch) -> None:
    with hessian(model, batch, loss=loss) as operator:
        with pytest.raises(curvmon.InputError, match=r"matvec takes shape \(109,\), not \(3,\)"):
            operator.matvec(torch.ones(3))
        with pytest.raises(curvmon.InputError, match=r"matmat takes shape \(109, k\), not \(109,\)"):
            operator.matmat(torch.ones(109))
    with between_nodes(model, batch, loss=loss, nodes=["0", "2"]) as blocks:
        with pytest.raises(curvmon.NodeError, match=r"'02' is not among the nodes; did you mean '2', '0'\?"):
            blocks.hessian["02", "0"]
        with pytest.raises(curvmon.NodeError, match="named by two nodes"):
            blocks.hessian["0"]  # type: ignore[index]


def test_no_gauss_newton_part_without_an_output(model: nn.Sequential, batch: Batch) -> None:
    def by_hand(m: Any, b: Batch) -> Tensor:
        return m(b[0]).pow(4).mean()

    with pytest.raises(curvmon.InputError, match="no Gauss-Newton part"), gauss_newton(model, batch, loss=by_hand):
        pass
    truth = curvmon.exact(model, batch, loss=by_hand, nodes=["0"])
    with between_nodes(model, batch, loss=by_hand, nodes=["0"]) as blocks:
        check_products(blocks.hessian["0", "0"], truth.blocks["0", "0"])
        for part in ("gauss_newton", "tensor"):
            with pytest.raises(curvmon.InputError, match="no torch loss function"):
                getattr(blocks, part)


def between(model: nn.Module, batch: Batch) -> None:
    with between_nodes(model, batch, loss=loss, nodes=["0"]) as blocks:
        blocks.hessian["0", "0"].matmat(torch.randn(6, 3))


def of_parameters(model: nn.Module, batch: Batch) -> None:
    with hessian(model, batch, loss=loss) as operator:
        operator.matmat(torch.randn(operator.shape[0], 2))


def failing(model: nn.Module, batch: Batch) -> None:
    with pytest.raises(ZeroDivisionError), between_nodes(model, batch, loss=loss):
        raise ZeroDivisionError


@pytest.mark.parametrize("run", [between, of_parameters, failing])
def test_nothing_is_left_behind(run: Callable[..., None], model: nn.Sequential, batch: Batch) -> None:
    loss(model.train(), batch).backward()
    before, generator = copy.deepcopy(model), torch.get_rng_state()
    run(model, batch)
    assert torch.equal(generator, torch.get_rng_state())
    assert model.training and not any(module._forward_hooks for module in model.modules())
    for ours, theirs in zip(model.parameters(), before.parameters()):
        assert torch.equal(ours, theirs) and ours.requires_grad and ours.grad is not None


# ---- scipy -----------------------------------------------------------------------------------------------------------
@pytest.fixture
def linalg() -> Any:
    return pytest.importorskip("scipy.sparse.linalg", reason="scipy is no dependency of curvmon")


def test_eigsh_agrees_with_spectrum(linalg: Any, model: nn.Sequential, batch: Batch) -> None:
    ours = curvmon.spectrum(model, batch, loss=loss, k=3, rtol=1e-6)
    with hessian(model, batch, loss=loss) as operator:
        top = linalg.eigsh(operator.as_linear_operator(), k=3, which="LA", return_eigenvectors=False)
        smallest = linalg.eigsh(operator.as_linear_operator(), k=1, which="SA", return_eigenvectors=False)
        assert operator.products > 0
    assert sorted(top, reverse=True) == pytest.approx(ours.eigenvalues.tolist(), rel=1e-5)
    assert smallest[0] == pytest.approx(ours.smallest, rel=1e-5)


def test_svds_agrees_with_exact(linalg: Any, model: nn.Sequential, batch: Batch) -> None:
    truth = curvmon.exact(model, batch, loss=loss, nodes=NODES[:2])
    with between_nodes(model, batch, loss=loss, nodes=NODES[:2]) as blocks:
        block = blocks.hessian["0", "2"]
        values = linalg.svds(block.as_linear_operator(), k=2, return_singular_vectors=False)
        assert block.products > 0
    expected = torch.linalg.svdvals(truth.blocks["0", "2"])[:2].tolist()
    assert sorted(values, reverse=True) == pytest.approx(expected, rel=1e-8)


def test_scipy_sees_the_same_products_in_single_precision(linalg: Any, model: nn.Sequential, batch: Batch) -> None:
    model, batch = model.float(), (batch[0].float(), batch[1])
    with between_nodes(model, batch, loss=loss, nodes=NODES[:2]) as blocks:
        block = blocks.tensor["0", "2"]
        dense = block.matmat(torch.eye(7))
        wrapped = block.as_linear_operator()
        assert wrapped.shape == (6, 7) and wrapped.dtype == "float32"
        ours, adjoint = (
            torch.from_numpy(a) for a in (wrapped @ torch.eye(7).numpy(), wrapped.H @ torch.eye(6).numpy())
        )
    torch.testing.assert_close(ours, dense)
    torch.testing.assert_close(adjoint, dense.T)


def test_missing_scipy_is_named(monkeypatch: pytest.MonkeyPatch, model: nn.Sequential, batch: Batch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.sparse.linalg", None)
    with hessian(model, batch, loss=loss) as operator, pytest.raises(ImportError, match="pip install scipy"):
        operator.as_linear_operator()


def test_importing_curvmon_does_not_import_scipy() -> None:
    code = "import curvmon, sys; print('scipy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("vector", "message"),
    [
        ([1.0, 2.0], "takes a torch.Tensor, not list"),
        (torch.ones(3, dtype=torch.complex128), "real vectors"),
        (torch.tensor([1.0, math.nan, 0.0]), "NaN or infinite"),
    ],
)
def test_vectors_that_cannot_be_multiplied(vector: Any, message: str) -> None:
    net = nn.Linear(3, 1, bias=False)
    with (
        curvmon.operators.hessian(net, torch.ones(2, 3), loss=lambda net, x: net(x).square().mean()) as operator,
        pytest.raises(InputError, match=message),
    ):
        operator.matvec(vector)


def test_arrays_with_negative_strides() -> None:
    net = nn.Linear(3, 1, bias=False).double()
    with curvmon.operators.hessian(net, torch.eye(3).double(), loss=lambda net, x: net(x).square().mean()) as operator:
        image = operator.as_linear_operator() @ numpy.array([1.0, 2.0, 3.0])[::-1]
    assert image == pytest.approx([2.0, 4 / 3, 2 / 3])

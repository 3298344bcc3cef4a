"""Krylov spaces whose basis is stored in half precision: as exact as the search needs, in half of the memory."""

from __future__ import annotations

import torch
from torch import Tensor

from curvmon.spectrum.krylov_space import KrylovSpace
from curvmon.spectrum.stored_vectors import StoredVectors

SIZE = 200_000
HALF = torch.float16


def reflected(values: Tensor) -> tuple[Tensor, Tensor]:
    """v and D of H = (1 - 2 v v^T) D (1 - 2 v v^T): a full matrix whose eigenvalues are known."""
    v = torch.randn(len(values), 1, generator=torch.Generator().manual_seed(1))
    return v / v.norm(), values.unsqueeze(1)


def space_of(values: Tensor, storage: torch.dtype | None, products: int) -> KrylovSpace:
    v, d = reflected(values)

    def reflect(z: Tensor) -> Tensor:
        return z - 2 * v @ (v.T @ z)

    start = torch.randn(1, len(values), generator=torch.Generator().manual_seed(2))
    space = KrylovSpace(lambda z: reflect(d * reflect(z)), start, storage=storage)
    for _ in range(products):
        if len(space.basis) >= 16:
            space.restart(space.ritz_pairs().coefficients[:, -8:])
        space.expand()
    return space


def bulk_and_outliers() -> Tensor:
    values = torch.rand(SIZE, generator=torch.Generator().manual_seed(0)) - 0.5
    values[:3] = torch.tensor([50.0, 20.0, 10.0])
    return values


def test_eigenvalues_are_those_of_single_precision_and_within_the_error_of_rounding() -> None:
    values = bulk_and_outliers()
    for storage in (None, HALF):
        ritz = space_of(values, storage, products=30).ritz_pairs()
        torch.testing.assert_close(ritz.values[-3:], torch.tensor([10.0, 20.0, 50.0]).double(), rtol=1e-4, atol=0)


def test_residuals_are_true_up_to_the_error_of_rounding() -> None:
    values = bulk_and_outliers()
    space = space_of(values, HALF, products=12)
    ritz = space.ritz_pairs()
    v, d = reflected(values)
    for i in (-1, -2, -3):
        vector = torch.stack(space.basis.rows()).float().T @ ritz.coefficients[:, i : i + 1 or None].float()
        image = vector - 2 * v @ (v.T @ vector)
        image = d * image
        image = image - 2 * v @ (v.T @ image)
        true = (image - ritz.values[i] * vector).norm().item()
        assert abs(true - ritz.residuals[i].item()) <= torch.finfo(HALF).eps / 2 * 50


def test_the_basis_is_orthonormal_up_to_the_error_of_rounding() -> None:
    """Also where the eigenvectors have a single large entry, whose error does not average out."""
    space = space_of(bulk_and_outliers(), HALF, products=20)  # with a restart
    rows = torch.stack(space.basis.rows()).double()
    gram = rows @ rows.T
    torch.testing.assert_close(gram, torch.eye(len(gram), dtype=torch.float64), rtol=0, atol=torch.finfo(HALF).eps / 2)


def test_half_precision_takes_half_of_the_memory() -> None:
    def size(storage: torch.dtype | None) -> int:
        vectors = StoredVectors(torch.zeros(1, 1000), storage)
        vectors.append(torch.randn(8, 1000))
        return sum(block.untyped_storage().nbytes() for block in vectors.filled())

    assert size(HALF) == size(None) / 2 == 8 * 1000 * 2


def test_rounded_rows_are_what_is_stored() -> None:
    rows = torch.randn(3, 1000)
    vectors = StoredVectors(rows, HALF)
    vectors.round(rows)
    vectors.append(rows)
    assert all(torch.equal(row.float(), given) for row, given in zip(vectors.rows(), rows))

"""The protocol of every matrix that is known by its products alone.

    Y = A Z,   A is m x n and never stored, Z is n x k

One product per column of Z. Solvers (Lanczos, scipy's `eigsh` and `svds`) need nothing else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from curvmon.errors import InputError


class ProductCount:
    """Shared by an operator and its transpose."""

    def __init__(self) -> None:
        self.total = 0


class LinearOperator(ABC):
    """A matrix A (m x n), given by the products A z.

    Attributes:
        shape: (m, n).
        dtype, device: dtype and device of the vectors; arguments are converted.
        products: columns multiplied so far, by A or its transpose.
    """

    def __init__(self, shape: tuple[int, int], template: Tensor, count: ProductCount | None = None) -> None:
        self.shape = shape
        self.template = template.detach().new_zeros(())
        """a scalar with the dtype and the device of a vector"""
        self._count = count or ProductCount()

    @abstractmethod
    def _columns(self, z: Tensor) -> Tensor:
        """A Z for z (n x k), counted."""

    @property
    @abstractmethod
    def T(self) -> LinearOperator:
        """The transposed matrix A^T, n x m. It shares the count of products."""

    @property
    def dtype(self) -> torch.dtype:
        return self.template.dtype

    @property
    def device(self) -> torch.device:
        return self.template.device

    @property
    def products(self) -> int:
        return self._count.total

    def matmat(self, z: Tensor) -> Tensor:
        """A Z (m x k) for Z (n x k).

        Raises:
            InputError: Z is not a matrix with n rows.
        """
        if z.ndim != 2 or len(z) != self.shape[1]:
            raise InputError(f"matmat takes shape ({self.shape[1]}, k), not {tuple(z.shape)}")
        if not z.shape[1]:
            return self.template.new_zeros((self.shape[0], 0))
        return self._columns(z.detach().to(self.template))

    def matvec(self, z: Tensor) -> Tensor:
        """A z (m entries) for z (n entries).

        Raises:
            InputError: z is not a vector with n entries.
        """
        if z.shape != self.shape[1:]:
            raise InputError(f"matvec takes shape ({self.shape[1]},), not {tuple(z.shape)}")
        return self._columns(z.detach().to(self.template).unsqueeze(1)).squeeze(1)

    def as_linear_operator(self) -> Any:
        """A `scipy.sparse.linalg.LinearOperator` with the same products, for `eigsh`, `svds`, `lobpcg`, `cg` ...

        Raises:
            ImportError: scipy is not installed; curvmon itself does not depend on it.
        """
        try:
            linalg = import_module("scipy.sparse.linalg")
        except ImportError as error:
            raise ImportError(
                "as_linear_operator() needs scipy, no dependency of curvmon: pip install scipy"
            ) from error

        def forward(z: Any) -> Any:
            return _of_array(self, z)

        def adjoint(z: Any) -> Any:
            return _of_array(self.T, z)

        dtype = str(self.dtype).removeprefix("torch.")
        return linalg.LinearOperator(
            self.shape, dtype=dtype, matvec=forward, matmat=forward, rmatvec=adjoint, rmatmat=adjoint
        )

    def __repr__(self) -> str:
        rows, columns = self.shape
        return f"{type(self).__name__}({rows} x {columns}, {self.dtype}, {self.device}, products={self.products})"


def _of_array(operator: LinearOperator, z: Any) -> Any:
    """A Z for a numpy array of shape (n,) or (n, k)."""
    image = operator.matmat(torch.tensor(z).reshape(operator.shape[1], -1))
    return image.reshape(operator.shape[0], *z.shape[1:]).cpu().numpy()


class SymmetricOperator(LinearOperator):
    """A = A^T, n x n."""

    def __init__(self, size: int, template: Tensor) -> None:
        super().__init__((size, size), template)

    @property
    def size(self) -> int:
        """n"""
        return self.shape[0]

    @property
    def T(self) -> SymmetricOperator:
        return self


class SymmetricProduct(SymmetricOperator):
    """A symmetric matrix given by a function that computes A z for one vector z."""

    def __init__(self, size: int, template: Tensor, product: Callable[[Tensor], Tensor]) -> None:
        super().__init__(size, template)
        self._product = product

    def _columns(self, z: Tensor) -> Tensor:
        self._count.total += z.shape[1]
        return by_columns(self._product, z)


def by_columns(product: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    """The images of the columns of z, one at a time."""
    images = [product(column) for column in z.unbind(1)]
    return images[0].unsqueeze(1) if len(images) == 1 else torch.stack(images, dim=1)

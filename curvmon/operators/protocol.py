"""The protocol of public operators and solvers: a matrix that is known by its products alone.

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

from curvmon.errors import InputError, NonFiniteError


class OperatorState:
    """Shared by an operator and its transpose.

    Attributes:
        hvps: number of HVPs so far.
        is_open: False after the context of the operator has ended.
    """

    def __init__(self) -> None:
        self.hvps = 0
        self.is_open = True


class LinearOperator(ABC):
    """A matrix A (m x n), given by the products A z.

    Attributes:
        shape: (m, n).
        dtype, device: dtype and device of the vectors; arguments are converted.
        products: Hessian-vector products (HVPs) so far, with A or its transpose: one per column, and two where a column
            takes one with H and one with GN.
    """

    def __init__(
        self, shape: tuple[int, int], template: Tensor, state: OperatorState | None = None, hvps_per_column: int = 1
    ) -> None:
        self.shape = shape
        self.template = template.detach().new_zeros(())
        """a scalar with the dtype and the device of a vector"""
        self._state = state or OperatorState()
        self._hvps_per_column = hvps_per_column

    @abstractmethod
    def _columns(self, z: Tensor) -> Tensor:
        """A Z for z (n x k); `matmat` and `matvec` count it."""

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
        return self._state.hvps

    def matmat(self, z: Tensor) -> Tensor:
        """A Z (m x k) for Z (n x k).

        Raises:
            InputError: Z is not a real matrix with n rows, or the context of the operator has ended.
        """
        self._check(z)
        if z.ndim != 2 or len(z) != self.shape[1]:
            raise InputError(f"matmat takes shape ({self.shape[1]}, k), not {tuple(z.shape)}")
        if not z.shape[1]:
            return self.template.new_zeros((self.shape[0], 0))
        return self._counted(z)

    def unchecked(self, z: Tensor) -> Tensor:
        """`matmat` for a caller who finds out whether the image is finite, which needs a synchronisation."""
        return self.matmat(z)

    def matvec(self, z: Tensor) -> Tensor:
        """A z (m entries) for z (n entries).

        Raises:
            InputError: z is not a real vector with n entries, or the context of the operator has ended.
        """
        self._check(z)
        if z.shape != self.shape[1:]:
            raise InputError(f"matvec takes shape ({self.shape[1]},), not {tuple(z.shape)}")
        return self._counted(z.unsqueeze(1)).squeeze(1)

    def _counted(self, z: Tensor) -> Tensor:
        try:
            image = self._columns(z.detach().to(self.template))
        except NonFiniteError as error:  # not before: the check of z would be a synchronisation for every HVP
            if torch.isfinite(z).all():
                raise
            raise InputError("the vector has entries that are NaN or infinite") from error
        self._spend(z.shape[1] * self._hvps_per_column)
        return image

    def _spend(self, hvps: int) -> None:
        self._state.hvps += hvps

    def _close(self) -> None:
        self._state.is_open = False

    def _check(self, z: Tensor) -> None:
        if not isinstance(z, Tensor):
            raise InputError(f"an operator takes a torch.Tensor, not {type(z).__name__}")
        if z.is_complex():
            raise InputError("an operator takes real vectors; apply it to the real and to the imaginary part")
        if not self._state.is_open:
            raise InputError(
                "the operator is closed: it is valid only within its `with` block, while the model is isolated; "
                "compute the products there, or open it again"
            )

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
    image = operator.matmat(torch.tensor(z.copy()).reshape(operator.shape[1], -1))
    return image.reshape(operator.shape[0], *z.shape[1:]).cpu().numpy()


class SymmetricOperator(LinearOperator):
    """A = A^T, n x n."""

    relative_error = 0.0
    """of a product, beyond rounding"""

    def __init__(self, size: int, template: Tensor) -> None:
        super().__init__((size, size), template)

    @property
    def size(self) -> int:
        """n"""
        return self.shape[0]

    @property
    def T(self) -> SymmetricOperator:
        return self

    def matmat_of_random(self, z: Tensor) -> Tensor:
        """`matmat` for random vectors."""
        return self.matmat(z)


class SymmetricProduct(SymmetricOperator):
    """A symmetric matrix given by a function that computes A z for one vector z."""

    def __init__(self, size: int, template: Tensor, product: Callable[[Tensor], Tensor]) -> None:
        super().__init__(size, template)
        self._product = product

    def _columns(self, z: Tensor) -> Tensor:
        return by_columns(self._product, z)


def by_columns(product: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    """The images of the columns of z, one at a time."""
    images = [product(column) for column in z.unbind(1)]
    return images[0].unsqueeze(1) if len(images) == 1 else torch.stack(images, dim=1)

"""Hessians as linear operators: products with vectors, from the same graphs that `measure` and `spectrum` use.

`hessian` and `gauss_newton` act on the trainable parameters, `between_nodes` on the outputs of layers. Each of them is
a context manager; the operators inside have `matvec`, `matmat`, `.T` and `as_linear_operator()` for scipy.
"""

from curvmon.operators.protocol import LinearOperator, SymmetricOperator
from curvmon.operators.public import Blocks, NodeOperators, between_nodes, gauss_newton, hessian

__all__ = [
    "Blocks",
    "LinearOperator",
    "NodeOperators",
    "SymmetricOperator",
    "between_nodes",
    "gauss_newton",
    "hessian",
]

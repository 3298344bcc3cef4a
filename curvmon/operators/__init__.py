"""Hessians as linear operators: products with vectors, from the same graphs that `measure` and `spectrum` use.

`hessian` and `gauss_newton` act on the trainable parameters, `between_nodes` on the outputs of layers. Each of them is
a context manager. Its operators have `matvec`, `matmat`, `.T` and, for scipy, `as_linear_operator()`; they are valid
while the context is open.

Example:
    >>> import torch, curvmon
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
    >>> batch = torch.randn(32, 4), torch.randn(32, 2)
    >>> loss = lambda net, b: torch.nn.functional.mse_loss(net(b[0]), b[1])
    >>> with curvmon.operators.between_nodes(net, batch, loss=loss, nodes=["0", "2"]) as between:
    ...     z = torch.randn(8)
    ...     h, gn, t = (part["0", "2"].matvec(z) for part in (between.hessian, between.gauss_newton, between.tensor))
    ...     (between.hessian["0", "2"].shape, between.hessian["0", "2"].products)
    ((8, 8), 1)
    >>> torch.allclose(h, gn + t, atol=1e-6)
    True
"""

from curvmon.operators.linear_operators import Blocks, NodeOperators, between_nodes, gauss_newton, hessian
from curvmon.operators.protocol import LinearOperator, SymmetricOperator

__all__ = [
    "Blocks",
    "LinearOperator",
    "NodeOperators",
    "SymmetricOperator",
    "between_nodes",
    "gauss_newton",
    "hessian",
]

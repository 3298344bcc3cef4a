"""Eigenvalues, trace and density of the loss Hessian w.r.t. the parameters, and the stability limits of optimizers.

`curvmon.spectrum` is also the name of the function that this package provides, and that name wins as an attribute of
`curvmon`. So `from curvmon.spectrum.krylov_space import KrylovSpace` works, but
`import curvmon.spectrum.krylov_space as krylov_space` does not: it looks for `krylov_space` in the function.
"""

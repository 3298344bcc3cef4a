"""Eigenvalues, trace and density of the loss Hessian w.r.t. the parameters, and the stability limits of optimizers.

`curvmon.spectrum` is also the name of the function that this package provides, and that name wins as an attribute of
`curvmon`. So `from curvmon.spectrum.lanczos import Lanczos` works, but `import curvmon.spectrum.lanczos as lanczos`
does not: it looks for `lanczos` in the function.
"""

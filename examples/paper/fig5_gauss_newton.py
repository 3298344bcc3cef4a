"""Figure 5 of the paper on closed-form spectra: Gauss-Newton misses more of the sharpness where there is attention.

    python -m examples.paper.fig5_gauss_newton [--quick] [--figure gauss_newton.png]

The paper trains GPT2 (124 million parameters) on OpenWebText, which does not fit a CPU. This is the same comparison at
208 thousand parameters on characters of Python's documentation, by examples/gauss_newton_error.py: |λ_1 - λ_GGN| / λ_1
of a Transformer and of an MLP of equal size, at equal loss and at equal residual. Some minutes on one core.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from examples import gauss_newton_error
from examples.paper.report import Table, finish, options


def main(argv: Sequence[str] | None = None) -> Table:
    given = options(__doc__, argv, seeds=3, images=False)
    runs = gauss_newton_error.train_all(quick=given.quick, seeds=range(len(given.seeds)))
    table = Table(
        "Figure 5: error of the top Gauss-Newton eigenvalue", "characters of Python's documentation, not the paper's"
    )
    for by in ("residual", "loss"):
        share = gauss_newton_error.share_larger(runs, by)
        said = f"at {share:.0%} of the values"
        table.claim(f"at equal {by}: larger with attention", "at almost all values", said, share > 0.9)
    if given.figure:
        gauss_newton_error.plot(runs, Path(given.figure))
    return finish(table, given)


if __name__ == "__main__":
    main()

"""HVPs for the top eigenvalues and the trace, compared with PyHessian, eigsh, hessian-eigenthings and power iteration.

    make bench-spectrum                                                 installs the other packages, half an hour
    python -m benchmarks.spectra --data cifar10_subset.npz              real images (x_train, y_train, x_test, y_test)
    python -m benchmarks.spectra --parts cost --only gpt6 --starts 1    part of it
    python -m benchmarks.spectra --parts starts,best                    what warm starts could save, some hours

What "to one percent" costs: each method stops by its own rule, at the loosest tolerance with which all its eigenvalues
are within one percent of the truth from every start. The truth is a longer run of curvmon, which eigsh confirms.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

import torch

import curvmon
from benchmarks import search_cost
from benchmarks.eigensolvers import LADDER_NOTE, METHODS, all_loosest, truth, truth_note
from benchmarks.header import measured_on
from benchmarks.tolerances import Attempt
from benchmarks.trained import Setting, annealed_resnets, trained_decoders, trained_resnets
from benchmarks.warm_starts import TOLERANCE, best_combination, warm_starts
from curvmon.operators.parameter_hessian import open_parameters
from curvmon.spectrum.trace import trace_of_parts

STARTS = 2
REPETITIONS = 6
"""of the trace"""


def cells(attempt: Attempt) -> str:
    """`HVPs of every start (tolerance) | median, with start, with trace | error`, where the tolerance serves."""
    answers, last = attempt.answers, attempt.answers[-1]
    if attempt.serves:
        each = ", ".join(str(answer.products) for answer in answers)
        columns = [[a.products for a in answers], [a.started for a in answers], [a.counted for a in answers]]
        medians = ", ".join(f"{statistics.median(column):g}" for column in columns if any(column))
        return f"{each} ({attempt.tolerance:g}) | {medians} | {100 * attempt.error:.2g} %"
    if attempt.interrupted:
        return f"{attempt.failure} ({attempt.tolerance:g}) | | "
    values = ", ".join(f"{value:.3g}" for value in last.values)
    return f"never ({last.products} at {attempt.tolerance:g}: {values}) | | {100 * attempt.error:.2g} %"


def eigenvalues(setting: Setting, starts: Sequence[int]) -> Iterator[str]:
    true = truth(setting)
    yield f"### {setting.name}"
    yield ""
    yield "| | top-1: every start (tolerance) | median | error | top-5: every start (tolerance) | median | error |"
    yield "|---|---|---|---|---|---|---|"
    one, five = (all_loosest(METHODS, setting, k, true, starts) for k in (1, 5))
    for (name, first), (_, second) in zip(one, five):
        yield f"| {name} | {cells(first)} | {cells(second)} |"
    yield ""
    yield (
        f"HVPs of the search from each of {len(starts)} starting vectors, at the loosest tolerance that reaches one "
        "percent, and their median; then the medians with the cost of the starting vector, and with the trace. Error: "
        f"the largest relative error of any eigenvalue from any starting vector. {LADDER_NOTE} "
        f"{truth_note(true)}"
    )


def trace(setting: Setting, repetitions: int = REPETITIONS) -> Iterator[str]:
    """Standard error of the trace at equal products, all of Lanczos' counted, against plain Hutchinson."""
    found = [
        curvmon.spectrum(
            setting.model, setting.batch, loss=setting.loss, k=5, seed=seed, ggn=False, verify=False, rtol=TOLERANCE
        )
        for seed in range(repetitions)
    ]
    products = round(statistics.mean(s.hvps for s in found))
    generator = torch.Generator().manual_seed(0)
    plain, samples = [], []
    with open_parameters(setting.model, [setting.batch], loss=setting.loss) as operator:
        # the spread of a mean of independent probes is that of one over the root of their number
        began = time.process_time()
        for _ in range(repetitions * products):
            z = torch.randn(operator.size, generator=generator).sign()
            samples.append(z.dot(operator.hessian(z)).item())
        one = (time.process_time() - began) / (repetitions * products)
        plain = [statistics.mean(samples[i::repetitions]) for i in range(repetitions)]
        began = time.process_time()
        parts = trace_of_parts(operator.layered(), generator)
        took = time.process_time() - began
    assert parts is not None
    ours = [s.trace for s in found]
    spread, theirs = statistics.stdev(ours), statistics.stdev(samples)
    yield from [
        f"### Trace, {setting.name} ({repetitions} repetitions)",
        "",
        "| | HVPs | mean | standard deviation | reported standard error |",
        "|---|---|---|---|---|",
        f"| curvmon, search for the eigenvalues included | {products} | {statistics.mean(ours):.5g} | {spread:.2g} | "
        f"{statistics.mean(s.trace_stderr for s in found):.2g} |",
        f"| Hutchinson | {products} | {statistics.mean(plain):.4g} | {theirs / products**0.5:.2g} | |",
        f"| ratio | | | **{spread / theirs * products**0.5:.2g}** | |",
        f"| curvmon, without the search | {parts[2]} | | {spread:.2g} | |",
        f"| Hutchinson | {parts[2]} | | {theirs / parts[2] ** 0.5:.2g} | |",
        f"| ratio | | | **{spread / theirs * parts[2] ** 0.5:.2g}** | |",
        "",
        f"The trace alone counts as {parts[2]} HVPs; its computing time (one thread, with the forward pass and the "
        f"building of graphs) was that of {took / one:.1f}.",
    ]


def report(data: Path | None, only: list[str], parts: list[str], starts: Sequence[int]) -> Iterator[str]:
    """The tables line by line, as soon as they are known."""
    yield measured_on("spectra")
    yield "What the columns mean, what was tried and what does not help: [HVPs for eigenvalues](spectrum-cost.md)."
    yield ""
    late = "starts" in parts
    resnets = trained_resnets(data, late) if "resnet" in only else []
    decoders = trained_decoders(late) if "decoder" in only else []
    settings = [*resnets[:1], *decoders[:1]]
    for setting in settings if "eigenvalues" in parts else ():
        yield from eigenvalues(setting, starts)
        yield ""
    for setting in settings if "trace" in parts else ():
        yield from trace(setting)
        yield ""
    for network in search_cost.NETWORKS if "cost" in parts else ():
        if network in only:
            yield from search_cost.table(network, data, starts)
            yield ""
    if "starts" in parts:
        yield from warm_starts(chain(resnets, decoders, annealed_resnets(data) if resnets else ()))
        yield ""
    for setting in resnets[:1] if "best" in parts else ():
        few = {k: best_combination(setting, k, products) for k, products in ((1, 3), (5, 10))}
        yield (
            f"{setting.name}, an epoch later, from the best combination of old eigenvectors and gradient among those "
            f"tried: 3 HVPs leave a residual of {few[1]:.2g} for the first eigenvalue, 10 leave {few[5]:.2g} for "
            "the worst of five."
        )
        yield ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--only", default=f"{','.join(search_cost.NETWORKS)},resnet,decoder")
    parser.add_argument("--parts", default="eigenvalues,trace,cost", help="also starts, best (some hours)")
    parser.add_argument("--starts", type=int, default=STARTS, help="starting vectors of every search")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lines = ["# Hessian-vector products for the top eigenvalues", ""]
    parts = arguments.parts.split(",")
    for line in report(arguments.data, arguments.only.split(","), parts, range(arguments.starts)):
        print(line, flush=True)
        lines.append(line)
        if arguments.write:
            arguments.write.write_text("\n".join(lines).rstrip() + "\n")


if __name__ == "__main__":
    main()

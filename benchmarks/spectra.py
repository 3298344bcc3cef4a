"""How many Hessian-vector products the top eigenvalues and the trace take, beside PyHessian, eigsh and power iteration.

    make bench-spectrum                                          installs the other packages, about ten minutes
    python -m benchmarks.spectra --data cifar10_subset.npz       real images (x_train, y_train, x_test, y_test)

Products are counted, not timed: all methods pay the same for one. What "to one percent" costs: each method stops by
its own rule, at the loosest tolerance with which all its eigenvalues are within one percent of the truth from every
start. The truth is a long run of curvmon, itself checked with eigsh.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from curvlinops import HessianLinearOperator
from scipy.sparse.linalg import LinearOperator, eigsh
from torch import Tensor, nn

import curvmon
from benchmarks.networks import Decoder, classification_loss
from benchmarks.speed import machine
from curvmon.curvature.parameters import ParameterOperator
from tests.resnet import resnet18

# the package hides its module behind a class of the same name
pyhessian: Any = importlib.import_module("pyhessian.hessian")
LADDER = (1e-1, 5e-2, 3e-2, 1e-2, 3e-3, 1e-3, 3e-4, 1e-4)
"""tolerances, from loose to strict"""
WANTED = 1e-2
TOLERANCE = 1e-2
SEEDS = range(4)


class Setting(NamedTuple):
    """A trained network, the same one epoch later, and the batch on which both are looked at."""

    name: str
    model: nn.Module
    later: nn.Module
    batch: tuple[Tensor, Tensor]
    criterion: nn.Module

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self.criterion(model(batch[0]), batch[1])


class Answer(NamedTuple):
    values: list[float]
    products: int
    """of the search for eigenvalues"""
    counted: int = 0
    """with all that curvmon counts besides: the trace, and the start that comes from it; 0 without these"""


# ---- networks ----


def trained_resnets(data: Path | None, late: bool) -> list[Setting]:
    """ResNet-18 with the ImageNet stem after ten epochs, and one later; `late`: also at lower learning rates."""
    torch.manual_seed(0)
    if data is None:
        x, y = torch.randn(1024, 3, 32, 32), torch.randint(10, (1024,))
        x += 0.5 * torch.randn(10, 3, 32, 32)[y]
    else:
        arrays = np.load(data)
        mean, std = (torch.tensor(v).view(3, 1, 1) for v in ([0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]))
        x = (torch.tensor(arrays["x_train"]) / 255 - mean) / std
        y = torch.tensor(arrays["y_train"]).long()
    model = resnet18(seed=42)
    probe = x[:32].clone(), y[:32].clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    kept: dict[int, nn.Module] = {}
    for epoch in range(32 if late else 12):
        kept[epoch] = copy.deepcopy(model).eval() if epoch in (10, 11, 20, 21, 30, 31) else nn.Identity()
        for group in optimizer.param_groups:
            group["lr"] = 0.02 if epoch < 15 else 0.002 if epoch < 25 else 0.0002
        model.train()
        for chosen in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            classification_loss(model, (x[chosen], y[chosen])).backward()
            optimizer.step()
    rates = {10: "0.02", 20: "0.002", 30: "0.0002"}
    return [
        Setting(
            f"ResNet-18, 32 samples, after {epoch} epochs (learning rate {rates[epoch]})",
            kept[epoch],
            kept[epoch + 1],
            probe,
            nn.CrossEntropyLoss(),
        )
        for epoch in ((10, 20, 30) if late else (10,))
    ]


class FlatDecoder(nn.Module):
    """Logits as (tokens, vocabulary): what the other packages take."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.inner = Decoder(layers=4, width=64, heads=4, tokens=64, vocabulary=vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        return self.inner(ids).flatten(0, 1)


def trained_decoder() -> Setting:
    """Four layers of width 64 on characters of Python's own documentation, after 200 steps and after 300."""
    from pydoc_data.topics import topics

    torch.manual_seed(0)
    text = "".join(topics[key] for key in sorted(topics))[:200_000]
    characters = sorted(set(text))
    code = torch.tensor([characters.index(c) for c in text])
    model = FlatDecoder(len(characters))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def windows(count: int) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(code) - 65, (count,))
        ids = torch.stack([code[s : s + 65] for s in starts.tolist()])
        return ids[:, :-1], ids[:, 1:].flatten()

    probe = windows(8)
    for step in range(300):
        if step == 200:
            before = copy.deepcopy(model)
        ids, following = windows(32)
        optimizer.zero_grad()
        F.cross_entropy(model(ids), following).backward()
        optimizer.step()
    return Setting("decoder, 8 x 64 characters", before.eval(), model.eval(), probe, nn.CrossEntropyLoss())


# ---- methods ----


def by_curvmon(setting: Setting, k: int, seed: int, trace: bool = False, **options: Any) -> Answer:
    with counted_products() as count:
        found = curvmon.spectrum(
            setting.model,
            setting.batch,
            loss=setting.loss,
            k=k,
            seed=seed,
            ggn=False,
            trace=trace,
            smallest=False,
            **options,
        )
    return Answer(found.eigenvalues.tolist(), count[0], found.hvps if trace else 0)


@contextmanager
def counted_products() -> Iterator[list[int]]:
    """Products with H alone; `Spectrum.hvps` also counts what the trace and the start are worth."""
    original, count = ParameterOperator.hessian, [0]

    def counting(self: ParameterOperator, z: Tensor) -> Tensor:
        count[0] += 1
        return original(self, z)

    ParameterOperator.hessian = counting  # type: ignore[method-assign]
    try:
        yield count
    finally:
        ParameterOperator.hessian = original  # type: ignore[method-assign]


@contextmanager
def counted_pyhessian() -> Iterator[list[int]]:
    original, count = pyhessian.hessian_vector_product, [0]

    def counting(*args: Any) -> Any:
        count[0] += 1
        return original(*args)

    pyhessian.hessian_vector_product = counting
    try:
        yield count
    finally:
        pyhessian.hessian_vector_product = original


def by_pyhessian(setting: Setting, k: int, seed: int, tol: float) -> Answer:
    torch.manual_seed(seed)
    model = copy.deepcopy(setting.model)  # it leaves gradients behind
    with counted_pyhessian() as count, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        calculator = pyhessian.hessian(model, setting.criterion, data=setting.batch, cuda=False)
        values, _ = calculator.eigenvalues(maxIter=100, tol=tol, top_n=k)
    return Answer(sorted(values, reverse=True), count[0])


def by_eigsh(setting: Setting, k: int, seed: int, tol: float) -> Answer:
    parameters = [p for p in setting.model.parameters() if p.requires_grad]
    count = [0]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        hessian = HessianLinearOperator(
            setting.model, setting.criterion, parameters, [setting.batch], check_deterministic=False
        ).to_scipy()

        def counting(z: Any) -> Any:
            count[0] += 1
            return hessian @ z.astype(np.float32)

        size = hessian.shape[0]
        operator = LinearOperator((size, size), matvec=counting, dtype=np.float32)
        start = np.random.default_rng(seed).standard_normal(size).astype(np.float32)
        values = eigsh(operator, k=k, which="LA", tol=tol, v0=start, return_eigenvectors=False)
    return Answer(sorted(values.tolist(), reverse=True), count[0])


def by_power_iteration(setting: Setting, k: int, seed: int, tol: float) -> Answer:
    """With deflation, stopped when the residual is `tol` of the eigenvalue: the rule by which curvmon stops."""
    from curvmon.curvature.parameters import open_parameters

    values: list[float] = []
    vectors: list[Tensor] = []
    generator = torch.Generator().manual_seed(seed)
    with open_parameters(setting.model, [setting.batch], loss=setting.loss) as operator:
        for _ in range(k):
            z = torch.randn(operator.size, generator=generator)
            for _ in range(200):
                for known in vectors:
                    z = z - known.dot(z) * known
                z = z / torch.linalg.vector_norm(z)
                image = operator.hessian(z)
                value = z.dot(image).item()
                if torch.linalg.vector_norm(image - value * z).item() <= tol * abs(value):
                    break
                z = image
            values.append(value)
            vectors.append(z / torch.linalg.vector_norm(z))
        return Answer(sorted(values, reverse=True), operator.products)


METHODS: dict[str, Callable[[Setting, int, int, float], Answer]] = {
    "curvmon": lambda setting, k, seed, tol: by_curvmon(setting, k, seed, trace=True, rtol=tol, verify=False),
    "curvmon, verified": lambda setting, k, seed, tol: by_curvmon(setting, k, seed, trace=True, rtol=tol),
    "curvmon, trace=False": lambda setting, k, seed, tol: by_curvmon(setting, k, seed, rtol=tol, verify=False),
    "curvmon, trace=False, verified": lambda setting, k, seed, tol: by_curvmon(setting, k, seed, rtol=tol),
    "PyHessian": by_pyhessian,
    "eigsh on curvlinops": by_eigsh,
    "power iteration": by_power_iteration,
}


# ---- tables ----


def truth(setting: Setting) -> tuple[list[float], float]:
    """Eight eigenvalues from a long run, and how far eigsh at a tolerance of 1e-5 is from them, relatively."""
    long = by_curvmon(setting, 8, 0, rtol=1e-5, max_hvps=600).values
    other = by_eigsh(setting, 8, 1, tol=1e-5).values
    return long, max(abs(a - b) for a, b in zip(long, other)) / abs(long[0])


def _error(answer: Answer, true: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(answer.values, true))


def loosest(method: Callable[[Setting, int, int, float], Answer], setting: Setting, k: int, true: list[float]) -> str:
    """`products (tolerance), products with start and trace | error`, at the loosest tolerance that serves."""
    for tol in LADDER:
        answers: list[Answer] = []
        for seed in SEEDS:
            answers.append(method(setting, k, seed, tol))
            if _error(answers[-1], true) > WANTED:
                break
        worst = max(_error(answer, true) for answer in answers)
        if worst <= WANTED:
            counted = statistics.median(a.counted for a in answers)
            also = f", {counted:g} with trace and start" if counted else ""
            return f"{statistics.median(a.products for a in answers):g} ({tol:g}){also} | {100 * worst:.2g} %"
    found = ", ".join(f"{value:.3g}" for value in answers[-1].values)
    return f"never ({answers[-1].products} at {tol:g}: {found}) | {100 * worst:.2g} %"


def eigenvalues(setting: Setting) -> list[str]:
    true, disagreement = truth(setting)
    lines = [
        f"### {setting.name}",
        "",
        "| | top-1: products (tolerance) | error | top-5: products (tolerance) | error |",
        "|---|---|---|---|---|",
    ]
    for name, method in METHODS.items():
        lines.append(f"| {name} | {' | '.join(loosest(method, setting, k, true) for k in (1, 5))} |")
        print(lines[-1], flush=True)
    values = ", ".join(f"{value:.4g}" for value in true)
    return [
        *lines,
        "",
        f"Products: median of {len(SEEDS)} starts; error: the largest of any eigenvalue and start, relative to itself. "
        f"True eigenvalues {values}; eigsh at a tolerance of 1e-5 agrees to {disagreement:.0e} of the first.",
    ]


def warm_start(setting: Setting) -> str:
    """Products for the same model an epoch later: from a random vector, the gradient, Gauss-Newton, and warm.

    Those of the search alone. Gauss-Newton is the start with trace=True; the gradient again where outputs are many.
    """
    cells = []
    size = sum(p.numel() for p in setting.model.parameters() if p.requires_grad)
    for k in (1, 5):
        options: dict[str, Any] = {"loss": setting.loss, "k": k, "rtol": TOLERANCE, "verify": False}
        options |= {"ggn": False, "trace": False, "smallest": False}
        random, cold, warm, newton, overlaps = [], [], [], [], []
        for seed in SEEDS:
            before = curvmon.spectrum(setting.model, setting.batch, seed=seed, **options)
            options["seed"] = seed + 100
            vector = torch.randn(size, generator=torch.Generator().manual_seed(seed))
            random.append(curvmon.spectrum(setting.later, setting.batch, start=vector, **options))
            cold.append(curvmon.spectrum(setting.later, setting.batch, **options))
            warm.append(curvmon.spectrum(setting.later, setting.batch, start=before, **options))
            newton.append(
                by_curvmon(
                    setting._replace(model=setting.later),
                    trace=True,
                    k=k,
                    seed=seed + 100,
                    rtol=TOLERANCE,
                    verify=False,
                ).products
            )
            del options["seed"]
            overlaps.append((before.eigenvectors.T @ cold[-1].eigenvectors).square().sum(0).mean().item())
        counts = ([found.hvps for found in random], [found.hvps for found in cold], newton, [s.hvps for s in warm])
        spent = " | ".join(f"{statistics.median(each):g}" for each in counts)
        cells.append(f"{spent} | {statistics.mean(overlaps):.2f}")
    return f"| {setting.name} | {' | '.join(cells)} |"


def best_combination(setting: Setting, k: int, products: int, trials: int = 150) -> float:
    """The smallest residual that so many products could leave, from the best start among the old eigenvectors.

    The largest of the k residuals relative to their eigenvalues, smallest over all combinations of the k vectors of
    before and the new gradient: 2 * `trials` of them, half at random, half near the best so far. A block Krylov space
    of depth `products` + 1 holds the single-vector spaces of all combinations, so each takes no product of its own.
    """
    from curvmon.curvature.parameters import open_parameters

    options: dict[str, Any] = {"k": k, "rtol": TOLERANCE, "verify": False, "ggn": False, "trace": False}
    before = curvmon.spectrum(setting.model, setting.batch, loss=setting.loss, smallest=False, **options)
    basis: list[Tensor] = []
    images: list[Tensor] = []

    def add(vector: Tensor) -> None:
        for known in [*basis, *basis]:
            vector = vector - known.dot(vector) * known
        basis.append(vector / torch.linalg.vector_norm(vector))

    with open_parameters(setting.later, [setting.batch], loss=setting.loss) as operator:
        for start in (*before.eigenvectors.T, operator.gradient):
            add(start)
        for i in range((k + 1) * products):
            image = operator.hessian(basis[i])
            add(image)
            images.append(torch.stack([known.dot(image) for known in basis]).double())
    matrix = torch.zeros(len(basis), len(basis), dtype=torch.float64)
    for i, image in enumerate(images):
        matrix[: len(image), i] = matrix[i, : len(image)] = image

    def residual(weights: Tensor) -> float:
        following = F.pad(weights / torch.linalg.vector_norm(weights), (0, len(matrix) - len(weights)))
        krylov: list[Tensor] = []
        for _ in range(products):
            krylov.append(following)
            q = torch.stack(krylov)
            following = matrix @ following
            for _ in range(2):
                following = following - q.T @ (q @ following)
            beta = torch.linalg.vector_norm(following)
            following = following / beta
        values, vectors = torch.linalg.eigh(q @ matrix @ q.T)
        return (beta * vectors[-1, -k:].abs() / values[-k:].abs()).max().item()

    generator = torch.Generator().manual_seed(0)
    best, smallest = torch.ones(k + 1, dtype=torch.float64), float("inf")
    for trial in range(2 * trials):
        noise = torch.randn(k + 1, generator=generator, dtype=torch.float64)
        weights = noise if trial < trials else best + 0.2 * torch.linalg.vector_norm(best) * noise
        found = residual(weights)
        if found < smallest:
            best, smallest = weights, found
    return smallest


def trace(setting: Setting, repetitions: int = 12) -> list[str]:
    """Standard error of the trace at equal products, all of Lanczos' counted, against plain Hutchinson."""
    from curvmon.curvature.parameters import open_parameters
    from curvmon.curvature.traces import trace_of_parts

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
    return [
        f"### Trace, {setting.name} ({repetitions} repetitions)",
        "",
        "| | products | mean | spread | standard error stated |",
        "|---|---|---|---|---|",
        f"| curvmon, search for the eigenvalues included | {products} | {statistics.mean(ours):.5g} | {spread:.2g} | "
        f"{statistics.mean(s.trace_stderr for s in found):.2g} |",
        f"| Hutchinson | {products} | {statistics.mean(plain):.4g} | {theirs / products**0.5:.2g} | |",
        f"| ratio | | | **{spread / theirs * products**0.5:.2g}** | |",
        f"| curvmon, without the search | {parts[2]} | | {spread:.2g} | |",
        f"| Hutchinson | {parts[2]} | | {theirs / parts[2] ** 0.5:.2g} | |",
        f"| ratio | | | **{spread / theirs * parts[2] ** 0.5:.2g}** | |",
        "",
        f"Counted for the trace alone: {parts[2]} products; its computing time (one thread, forward pass and "
        f"derivation of graphs included) was that of {took / one:.1f}.",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--only", default="resnet,decoder")
    parser.add_argument("--parts", default="eigenvalues,warm,best,trace")
    arguments = parser.parse_args()
    parts = arguments.parts.split(",")
    resnets = trained_resnets(arguments.data, "warm" in parts) if "resnet" in arguments.only else []
    settings = [*resnets[:1], *([trained_decoder()] if "decoder" in arguments.only else [])]
    lines = [f"Measured on {machine()}, with `python -m benchmarks.spectra`.", ""]
    for setting in settings if "eigenvalues" in parts else ():
        lines += [*eigenvalues(setting), ""]
    if "warm" in parts:
        lines += [
            "### Warm start, one epoch (100 steps for the decoder) later",
            "",
            "| | top-1: random start | gradient | Gauss-Newton | warm | overlap "
            "| top-5: random start | gradient | Gauss-Newton | warm | overlap |",
            "|---|---|---|---|---|---|---|---|---|---|---|",
            *(warm_start(setting) for setting in [*settings, *resnets[1:]]),
            "",
        ]
    for setting in resnets[:1] if "best" in parts else ():
        few = {k: best_combination(setting, k, products) for k, products in ((1, 3), (5, 10))}
        lines += [f"{setting.name}, an epoch later: 3 products leave {few[1]:.2g}, 10 leave {few[5]:.2g} for five", ""]
    for setting in settings if "trace" in parts else ():
        lines += [*trace(setting), ""]
    print("\n".join(lines))
    if arguments.write:
        arguments.write.write_text("\n".join(lines))


if __name__ == "__main__":
    main()

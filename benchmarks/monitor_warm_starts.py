"""HVPs of the monitor's eigenvalues one epoch later, cold and warm, both extremes of the spectrum included.

    python -m benchmarks.monitor_warm_starts                                        about twenty minutes
    python -m benchmarks.monitor_warm_starts --only mlp,lstm                        some of the networks
    python -m benchmarks.monitor_warm_starts --data cifar10_subset.npz              real images for the ResNets
    python -m benchmarks.monitor_warm_starts --write docs/warm-start-table.md       keep the result

An epoch is 30 steps of 32 samples. Three measurements, an epoch apart: the second and the third begin with what the one
before has left, and are repeated without it. Both stop by the monitor's own tolerances.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import curvmon
from benchmarks.alert_runs import Network, digits
from benchmarks.counting import counted_products, replaced
from benchmarks.header import measured_on
from benchmarks.measurement import NETWORKS as LARGE
from benchmarks.measurement import SAMPLES, Training
from benchmarks.networks import classification_loss
from curvmon.monitor.pairs_and_spectrum import ACCURACY, measure_spectrum
from curvmon.monitor.settings import Settings
from curvmon.records import Spectrum
from curvmon.spectrum.eigenvalue_search import EigenvalueSearch

EPOCH = 30
"""steps"""
MEASUREMENTS = 3
AT_MOST = 0.6
"""HVPs of a warm search, relative to a cold one: what it is meant to stay below"""


class CharacterLSTM(nn.Module):
    """Logits as (tokens, vocabulary)."""

    def __init__(self, vocabulary: int, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(ids))[0]).flatten(0, 1)


def mlp() -> Training:
    torch.manual_seed(0)
    layers = nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
    return Training(
        nn.Sequential(nn.Flatten(), *layers),
        digits(0),
        classification_loss,
        lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    )


def cnn() -> Training:
    torch.manual_seed(0)
    return Training(
        Network(width=16),
        digits(0),
        classification_loss,
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    )


def lstm(tokens: int = 32, count: int = 1024) -> Training:
    """On characters of Python's own documentation."""
    text = "".join(topics[key] for key in sorted(topics))[:200_000]
    characters = sorted(set(text))
    code = torch.tensor([characters.index(c) for c in text])
    begins = torch.randint(len(code) - tokens - 1, (count,), generator=torch.Generator().manual_seed(0))
    ids = torch.stack([code[begin : begin + tokens + 1] for begin in begins.tolist()])
    torch.manual_seed(0)
    return Training(
        CharacterLSTM(len(characters)),
        (ids,),
        lambda model, batch: nn.functional.cross_entropy(model(batch[0][:, :-1]), batch[0][:, 1:].flatten()),
        lambda parameters: torch.optim.Adam(parameters, lr=3e-3),
    )


class Case(NamedTuple):
    title: str
    make: Callable[[Path | None], Training]
    epochs: int
    """before the first measurement"""


CASES = {
    **{name: Case(*LARGE[name], epochs=1) for name in ("relu", "silu", "gpt6")},
    "mlp": Case("MLP, ReLU, digits", lambda data: mlp(), 10),
    "cnn": Case("residual CNN with batch norm, digits", lambda data: cnn(), 10),
    "lstm": Case("LSTM on characters", lambda data: lstm(), 10),
}


class Outcome(NamedTuple):
    """Of one measurement of the spectrum.

    Attributes:
        search: HVPs of the search for eigenvalues.
        whole: with trace, Gauss-Newton eigenvalue and largest stable sharpness.
    """

    spectrum: Spectrum
    start: Tensor
    search: int
    whole: int


class Row(NamedTuple):
    cold: list[Outcome]
    warm: list[Outcome]
    errors: list[float]
    """of the last cold and the last warm measurement: the largest of any of the six values, relative to λ_1"""


@contextmanager
def counted_search() -> Iterator[list[int]]:
    """Products of the search alone: without those for the trace and for the stability limit, also products with H."""
    with counted_products() as count, ExitStack() as patches:

        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            def uncounted(*args: Any, **kwargs: Any) -> Any:
                before = count[0]
                result = original(*args, **kwargs)
                count[0] = before
                return result

            return uncounted

        for name in ("largest", "deflated_trace"):
            patches.enter_context(replaced(EigenvalueSearch, name, wrap))
        yield count


def epochs(training: Training) -> Iterator[torch.optim.Optimizer]:
    """The optimizer after every epoch; the first samples are the probe batch and are not trained on."""
    model, optimizer = training.model, training.optimizer(training.model.parameters())
    rest = [tensor[SAMPLES : SAMPLES * (EPOCH + 1)] for tensor in training.data]
    generator = torch.Generator().manual_seed(0)
    while True:
        model.train()
        for chosen in torch.randperm(len(rest[0]), generator=generator).split(SAMPLES):
            optimizer.zero_grad()
            training.loss(model, [tensor[chosen] for tensor in rest]).backward()
            optimizer.step()
        optimizer.zero_grad()
        yield optimizer


def row(case: Case, data: Path | None) -> Row:
    training = case.make(data)
    model, loss = training.model, training.loss
    probe = [tensor[:SAMPLES] for tensor in training.data]

    def measured(optimizer: torch.optim.Optimizer, start: Tensor | None) -> Outcome:
        with counted_search() as count:
            spectrum, following = measure_spectrum(Settings(), model, [probe], loss, optimizer=optimizer, start=start)
        return Outcome(spectrum, following, count[0], spectrum.hvps)

    trained = epochs(training)
    for _ in range(case.epochs - 1):
        next(trained)
    cold, warm = [], []
    start = None
    for i in range(MEASUREMENTS):
        optimizer = next(trained)
        if i:
            cold.append(measured(optimizer, None))
            warm.append(measured(optimizer, start))
            start = warm[-1].start
        else:
            start = measured(optimizer, None).start
    model = copy.deepcopy(model).eval()
    true = curvmon.spectrum(model, probe, loss=loss, k=5, rtol=1e-3, max_hvps=400, ggn=False, trace=False)
    return Row(cold, warm, [_error(outcomes[-1].spectrum, true) for outcomes in (cold, warm)])


def _error(spectrum: Spectrum, true: Spectrum) -> float:
    smallest = abs(spectrum.smallest - true.smallest)
    worst = max((spectrum.eigenvalues - true.eigenvalues).abs().max().item(), smallest)
    return worst / abs(true.eigenvalues[0].item())


def line(case: Case, found: Row) -> str:
    values = " → ".join(f"{o.spectrum.eigenvalues[0]:.3g}, {o.spectrum.smallest:.2g}" for o in found.cold)
    cells = []
    for part in ("search", "whole"):
        cold, warm = ([getattr(o, part) for o in outcomes] for outcomes in (found.cold, found.warm))
        share = sum(warm) / sum(cold)
        cells += [", ".join(map(str, cold)), ", ".join(map(str, warm)), f"**{100 * share:.0f} %**"]
    errors = ", ".join(f"{100 * error:.2g} %" for error in found.errors)
    return f"| {case.title} | {values} | {' | '.join(cells)} | {errors} |"


def table(networks: Sequence[str], data: Path | None) -> Iterator[str]:
    yield "# HVPs of the monitor's eigenvalues, cold and warm"
    yield ""
    yield measured_on("monitor_warm_starts")
    yield "Why the old eigenvectors do not help more: [HVPs for eigenvalues](spectrum-cost.md#warm-starts)."
    yield ""
    yield (
        "| network | λ_1, λ_min | search: cold | warm | warm / cold | whole spectrum: cold | warm | warm / cold "
        "| error: cold, warm |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    shares = []
    for name in networks:
        found = row(CASES[name], data)
        shares.append(sum(o.search for o in found.warm) / sum(o.search for o in found.cold))
        yield line(CASES[name], found)
    reached = sum(share <= AT_MOST for share in shares)
    few = ", ".join(f"{case.epochs} ({case.title})" for name in networks for case in [CASES[name]])
    tolerances = ", ".join(f"{100 * part:.0f} %" for part in (ACCURACY.first, ACCURACY.others, ACCURACY.smallest))
    yield ""
    yield (
        f"The five largest eigenvalues and the smallest one, to residuals of {tolerances} (λ_1, the others, the "
        f"smallest). Two measurements, each an epoch ({EPOCH} steps of {SAMPLES} samples) after the one before; the "
        f"first warm start comes from a cold one. Epochs before the first: {few}. Search: HVPs of the eigenvalues "
        "alone; whole: with the trace, its starting vector, the Gauss-Newton eigenvalue and, where the optimizer is "
        "adaptive, the eigenvalue of the preconditioned Hessian. Error: the largest of any of the six values at the "
        "last measurement, relative to λ_1, compared with a search at a tolerance of 0.001. Warm searches take at most "
        f"{100 * AT_MOST:.0f} % of the HVPs of cold ones on {reached} of {len(shares)} networks."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--only", default=",".join(CASES), help=f"of {', '.join(CASES)}")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lines = []
    for text in table(arguments.only.split(","), arguments.data):
        print(text, flush=True)
        lines.append(text)
        if arguments.write:
            arguments.write.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

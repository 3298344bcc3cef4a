"""What a whole measurement of `CurvatureMonitor()` takes in a fit: computing time, kernels, synchronisations, memory.

    make bench-measurement                                              about an hour on one core
    python -m benchmarks.measurement --only relu,gpt6 --warm 2          some of the networks, fewer measurements
    python -m benchmarks.measurement --data cifar10_subset.npz          real images for the ResNets
    python -m benchmarks.measurement --write docs/measurement-table.md  keep the result

A pass is one forward and backward pass of the probe batch. Times and memory are taken on the CPU, kernels and
synchronisations on a pretend accelerator; each in a process of its own.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import logging
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.header import measured_on
from benchmarks.memory import peak_beyond_now
from benchmarks.networks import Decoder, classification_loss, next_token_loss
from benchmarks.trained import images
from curvmon import CurvatureMonitor
from curvmon.recorder.recorder import Recorder
from curvmon.reporting.reporter import Report
from tests.helpers.kernel_counts import KernelCounts
from tests.helpers.pretend_accelerator import register, strategy, unavailable
from tests.helpers.resnet import resnet18

SAMPLES = 32
STEPS = 25
"""of training between two measurements"""
SENTENCES = 1024
TOKENS, VOCABULARY = 64, 512
Read = Callable[[], Sequence[float]]
"""of a clock, or of counters"""

PARTS: dict[str, tuple[Any, str]] = {
    "whole": (Recorder, "measure"),
    "pairs": (importlib.import_module("curvmon.monitor.measurement"), "measure_pairs"),
    "spectrum": (importlib.import_module("curvmon.monitor.measurement"), "measure_spectrum"),
    "trace": (importlib.import_module("curvmon.spectrum.spectrum"), "layerwise_trace"),
    "figures": (Recorder, "_draw"),
    "logging": (Report, "write"),
}
"""the functions whose calls are taken for a part; the trace is a part of the spectrum"""


class Training(NamedTuple):
    model: nn.Module
    data: tuple[Tensor, ...]
    """the probe batch, then what is trained on"""
    loss: Callable[[Any, Any], Tensor]
    optimizer: Callable[[Any], torch.optim.Optimizer]


def resnet(data: Path | None, activation: Callable[[Tensor], Tensor]) -> Training:
    return Training(
        resnet18(activation=activation, seed=42, cifar_stem=True),
        images(data),
        classification_loss,
        lambda parameters: torch.optim.SGD(parameters, lr=0.005, momentum=0.9),
    )


def language_model(layers: int) -> Training:
    torch.manual_seed(0)
    return Training(
        Decoder(layers=layers, width=64, heads=4, tokens=TOKENS, vocabulary=VOCABULARY),
        (markov_text(SENTENCES),),
        lambda model, batch: next_token_loss(model, batch[0]),
        lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
    )


def markov_text(count: int) -> Tensor:
    """Every token is followed by one of four."""
    generator = torch.Generator().manual_seed(1)
    followers = torch.randint(VOCABULARY, (VOCABULARY, 4), generator=generator)
    text = [torch.randint(VOCABULARY, (count,), generator=generator)]
    for choice in torch.randint(4, (TOKENS, count), generator=generator):
        text.append(followers[text[-1], choice])
    return torch.stack(text, dim=1)


NETWORKS: dict[str, tuple[str, Callable[[Path | None], Training]]] = {
    "relu": ("ResNet-18, ReLU", lambda data: resnet(data, F.relu)),
    "silu": ("ResNet-18, SiLU", lambda data: resnet(data, F.silu)),
    "gpt6": ("decoder, 6 blocks", lambda data: language_model(6)),
    "gpt12": ("decoder, 12 blocks", lambda data: language_model(12)),
}


class Lit(pl.LightningModule):
    def __init__(self, training: Training) -> None:
        super().__init__()
        self.model, self._training = training.model, training

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = self._training.loss(self.model, batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", self._training.loss(self.model, batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self._training.optimizer(self.parameters())


def fit(training: Training, steps: int, *callbacks: pl.Callback, on_device: bool = False) -> None:
    probe = TensorDataset(*(tensor[:SAMPLES] for tensor in training.data))
    rest = TensorDataset(*(tensor[SAMPLES:] for tensor in training.data))
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            max_steps=steps,
            val_check_interval=STEPS,
            check_val_every_n_epoch=None,
            callbacks=list(callbacks),
            default_root_dir=folder,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **({"strategy": strategy()} if on_device else {"accelerator": "cpu"}),
        )
        trainer.fit(Lit(training), DataLoader(rest, SAMPLES), DataLoader(probe, SAMPLES))


@contextmanager
def read_by_part(read: Read) -> Iterator[list[dict[str, list[float]]]]:
    """What every part of each measurement takes; the figures that are drawn when training ends belong to none."""
    found: list[dict[str, list[float]]] = []
    running = False

    def recorded(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal running
            if part == "whole":
                running = True
                found.append({name: [0.0] * len(read()) for name in PARTS})
            if not running:
                return function(*args, **kwargs)
            before = read()
            result = function(*args, **kwargs)
            found[-1][part] = [t + after - b for t, after, b in zip(found[-1][part], read(), before)]
            running = part != "whole"
            return result

        return run

    patches = [
        mock.patch.object(owner, name, recorded(part, getattr(owner, name))) for part, (owner, name) in PARTS.items()
    ]
    for patch in patches:
        patch.start()
    try:
        yield found
    finally:
        for patch in patches:
            patch.stop()


def measurements(
    training: Training, warm: int, read: Read, around: AbstractContextManager[Any], on_device: bool
) -> Any:
    monitor = CurvatureMonitor(max_overhead=None)
    with around, read_by_part(read) as found:
        fit(training, STEPS * warm, monitor, on_device=on_device)
    products = [[m.hvps, s.hvps] for m, s in zip(monitor.history, monitor.spectra, strict=True)]
    assert len(products) == 1 + warm, "a measurement failed, or was skipped"
    return {"parts": found, "products": products, "losses": [m.loss for m in monitor.history]}


def computing_time(training: Training, warm: int) -> Any:
    unit = passes_in_seconds(training)
    found = measurements(training, warm, lambda: (time.thread_time(),), nullcontext(), on_device=False)
    return found | {"unit": [statistics.median([*unit, *passes_in_seconds(training)])]}


def passes_in_seconds(training: Training) -> list[float]:
    model, batch = copy.deepcopy(training.model).eval(), [tensor[:SAMPLES] for tensor in training.data]
    times = []
    for _ in range(6):
        start = time.thread_time()
        training.loss(model, batch).backward()
        times.append(time.thread_time() - start)
    return times[1:]


def kernels(training: Training, warm: int) -> Any:
    """A pass is counted on the CPU: with one kernel for attention, as on a GPU."""
    device = register()
    with KernelCounts() as one:
        training.loss(copy.deepcopy(training.model).eval(), [tensor[:SAMPLES] for tensor in training.data]).backward()
    counts = KernelCounts(device)
    return measurements(training, warm, lambda: counts.totals, counts, on_device=True) | {"unit": [one.totals[0], 1]}


def step_memory(training: Training) -> float:
    """MiB of training steps on as many samples as the probe batch has."""
    model, batch = training.model, [tensor[:SAMPLES] for tensor in training.data]
    optimizer = training.optimizer(model.parameters())
    with peak_beyond_now() as found:
        for _ in range(2):
            optimizer.zero_grad()
            training.loss(model, batch).backward()
            optimizer.step()
    return found[0]


def measurement_memory(training: Training) -> list[float]:
    """MiB of the pairs and of the spectrum of the first measurement."""
    peaks: list[float] = []

    def peaked(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with peak_beyond_now() as found:
                result = function(*args, **kwargs)
            peaks.extend(found)
            return result

        return run

    owner = PARTS["pairs"][0]
    with (
        mock.patch.object(owner, "measure_pairs", peaked(owner.measure_pairs)),
        mock.patch.object(owner, "measure_spectrum", peaked(owner.measure_spectrum)),
    ):
        fit(training, 1, CurvatureMonitor(max_overhead=None))
    return peaks[:2]


WHAT: dict[str, Callable[[Training, int], Any]] = {
    "time": computing_time,
    "kernels": kernels,
    "step-memory": lambda training, warm: step_memory(training),
    "memory": lambda training, warm: measurement_memory(training),
}


def in_process(network: str, what: str, data: Path | None, warm: int) -> Any:
    command = [sys.executable, "-m", "benchmarks.measurement", "--only", network, "--what", what, "--warm", str(warm)]
    command += [] if data is None else ["--data", str(data)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def column(found: Any, part: str, index: int) -> list[float]:
    """Of a part, in passes where there are some: that of the first measurement, and the median of the later ones."""
    values = [one[part][index] / found["unit"][index] for one in found["parts"]]
    return [values[0], statistics.median(values[1:])]


def rows(network: str, data: Path | None, warm: int) -> tuple[list[str], list[str]]:
    """Of the summary, and of the table by part."""
    title, seen = NETWORKS[network][0], {what: in_process(network, what, data, warm) for what in WHAT}
    quantities = [
        ("computing time, passes", seen["time"], 0, ".1f"),
        ("kernels, passes", seen["kernels"], 0, ".0f"),
        ("synchronizations", seen["kernels"], 1, ".0f"),
    ]
    summary, by_part = [], []
    memory = ", ".join(f"{peak / seen['step-memory']:.1f}" for peak in seen["memory"])
    hvps = seen["time"]["products"]
    warm_hvps = [f"{statistics.median(each):g}" for each in zip(*hvps[1:])]
    for i, (when, products) in enumerate((("first", map(str, hvps[0])), ("warm", warm_hvps))):
        cells = [f"{column(found, 'whole', index)[i]:{form}}" for _, found, index, form in quantities]
        summary.append(f"| {title}, {when} | {' | '.join(cells)} | {' + '.join(products)} | {memory} |")
    for name, found, index, form in quantities:
        parts = {part: column(found, part, index)[1] for part in PARTS}
        parts["other"] = parts["whole"] - sum(parts[p] for p in ("pairs", "spectrum", "figures", "logging"))
        by_part.append(f"| {title} | {name} | {' | '.join(f'{value:{form}}' for value in parts.values())} |")
    return summary, by_part


def table(networks: Sequence[str], data: Path | None, warm: int) -> Iterator[list[str]]:
    """After every network, what is known so far."""
    head = [
        "# Cost of a whole measurement",
        "",
        measured_on("measurement"),
        "What the columns mean: [cost and tuning](cost.md#what-a-default-measurement-takes).",
        "",
        "| network, 32 samples | computing time, passes | kernels, passes | synchronizations | HVPs: pairs + spectrum "
        "| peak memory / training step: pairs, spectrum |",
        "|---|---|---|---|---|---|",
    ]
    parts_head = [
        "",
        f"By part, median of {warm} warm measurements:",
        "",
        "| network | | whole | pairs | spectrum | of which trace | figures | logging | other |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    summaries: list[str] = []
    parts: list[str] = []
    for network in networks:
        summary, by_part = rows(network, data, warm)
        summaries += summary
        parts += by_part
        yield [*head, *summaries, *parts_head, *parts, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--only", default=",".join(NETWORKS), help=f"of {', '.join(NETWORKS)}")
    parser.add_argument("--warm", type=int, default=4, help="measurements after the first one")
    parser.add_argument("--what", choices=list(WHAT), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.what:
        logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
        warnings.simplefilter("ignore")
        if arguments.what == "kernels":
            register()  # before the first backward pass
        print(json.dumps(WHAT[arguments.what](NETWORKS[arguments.only][1](arguments.data), arguments.warm)))
        return
    if (reason := unavailable()) is not None:
        parser.error(reason)
    for lines in table(arguments.only.split(","), arguments.data, arguments.warm):
        print("\n".join(lines), flush=True)
        if arguments.write:
            arguments.write.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
